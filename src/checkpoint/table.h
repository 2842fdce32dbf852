// The tensors of a checkpoint: where their bytes are, checked before any of them is read.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lily {

enum class FileType : uint8_t { u32, bf16, f16, f32 };

struct TableEntry {
  uint32_t file = 0;
  uint64_t offset = 0, bytes = 0;  // offset from the file's start
  FileType type = FileType::bf16;
  std::vector<uint64_t> shape;
};

// How a module's matrix is stored: 4 or 8 bits in groups, or 16 for unquantised.
struct Format {
  uint32_t bits = 16, group = 64;
};

struct TensorTable {
  std::vector<std::string> files;
  std::map<std::string, TableEntry> tensors;  // by name, without the checkpoint's prefix
  std::map<std::string, Format> formats;      // by module
  bool published = false;  // zero-centred norms, [C, 1, K] convolutions, fused experts

  // Opens nothing but asks each file's size. Throws CheckpointError if a tensor reaches outside its
  // file, shares bytes with another, or has a size that its shape does not explain.
  void check() const;

  const TableEntry& at(const std::string& name) const;
  Format format(const std::string& module) const;
};

size_t file_type_bytes(FileType);
const char* file_type_name(FileType);
std::string shape_text(const std::vector<uint64_t>&);

}  // namespace lily
