// Reads byte ranges of a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lily {

class File {
 public:
  explicit File(const std::string& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // All of [offset, offset + bytes), or CheckpointError. Safe from several threads.
  void read(uint64_t offset, std::byte* out, size_t bytes) const;

 private:
  std::string path_;
  int handle_;
};

}  // namespace lily
