#include "checkpoint/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace lily {

File::File(const std::string& path) : path_(path), handle_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (handle_ < 0) throw CheckpointError(path + ": " + std::strerror(errno));
}

File::~File() { close(handle_); }

void File::read(uint64_t offset, std::byte* out, size_t bytes) const {
  while (bytes) {
    const ssize_t n = pread(handle_, out, std::min<size_t>(bytes, 1u << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw CheckpointError(path_ + ": " + std::strerror(errno));
    if (n == 0)
      throw CheckpointError(path_ + ": ends at byte " + std::to_string(offset) + ", expected " +
                            std::to_string(bytes) + " more");
    out += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace lily
