#include "checkpoint/table.h"

#include <sys/stat.h>

#include <algorithm>
#include <tuple>

#include "base/error.h"

namespace lily {

size_t file_type_bytes(FileType t) { return t == FileType::u32 || t == FileType::f32 ? 4 : 2; }

const char* file_type_name(FileType t) {
  switch (t) {
    case FileType::u32: return "U32";
    case FileType::bf16: return "BF16";
    case FileType::f16: return "F16";
    default: return "F32";
  }
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

namespace {

uint64_t file_bytes(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode))
    throw CheckpointError(path + ": expected a readable file, found none");
  return static_cast<uint64_t>(info.st_size);
}

uint64_t expected_bytes(const std::string& name, const TableEntry& e) {
  uint64_t bytes = file_type_bytes(e.type);
  for (uint64_t d : e.shape)
    if (__builtin_mul_overflow(bytes, d, &bytes))
      throw CheckpointError(name + ": shape " + shape_text(e.shape) + " overflows 64 bits");
  return bytes;
}

}  // namespace

void TensorTable::check() const {
  std::vector<uint64_t> sizes;
  for (const std::string& path : files) sizes.push_back(file_bytes(path));

  struct Range {
    uint32_t file;
    uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, e] : tensors) {
    if (e.file >= files.size())
      throw CheckpointError(name + ": file number " + std::to_string(e.file) + ", expected below " +
                            std::to_string(files.size()));
    const uint64_t bytes = expected_bytes(name, e);
    if (bytes != e.bytes)
      throw CheckpointError(name + ": " + std::to_string(e.bytes) + " bytes, expected " +
                            std::to_string(bytes) + " for " + file_type_name(e.type) + " " +
                            shape_text(e.shape));
    uint64_t end;
    if (__builtin_add_overflow(e.offset, e.bytes, &end) || end > sizes[e.file])
      throw CheckpointError(name + ": bytes " + std::to_string(e.offset) + " to " +
                            std::to_string(e.offset) + " + " + std::to_string(e.bytes) +
                            ", expected inside the " + std::to_string(sizes[e.file]) +
                            " bytes of " + files[e.file]);
    if (e.bytes) ranges.push_back({e.file, e.offset, end, &name});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.file, a.begin, a.end) < std::tie(b.file, b.begin, b.end);
  });
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].file == ranges[i - 1].file && ranges[i].begin < ranges[i - 1].end)
      throw CheckpointError(*ranges[i].name + ": shares bytes with " + *ranges[i - 1].name);
  for (const auto& [module, f] : formats)
    if (!(f.bits == 4 || f.bits == 8 || f.bits == 16) || f.group != 64)
      throw CheckpointError(module + ": " + std::to_string(f.bits) + " bits in groups of " +
                            std::to_string(f.group) + ", expected 4, 8 or 16 bits in groups of 64");
}

const TableEntry& TensorTable::at(const std::string& name) const {
  auto found = tensors.find(name);
  if (found == tensors.end()) throw CheckpointError(name + ": expected in the checkpoint, not found");
  return found->second;
}

Format TensorTable::format(const std::string& module) const {
  auto found = formats.find(module);
  return found == formats.end() ? Format{} : found->second;
}

}  // namespace lily
