// The Metal device's form of a packed weight (metal/packed_weights.h reads it).
//
// Consecutive segments of equal width are one part: codes [rows, cols · bits / 32] uint32 in the
// checkpoint's order, then affine [rows, cols / 64] uint32, a group's scale in the low half and its
// bias in the high half. A part of 16 bits is bf16 [rows, cols]. Parts follow each other at
// multiples of 256 bytes, and so do experts.
#pragma once

#include "device/device.h"

namespace lily::metal {

struct Part {
  uint32_t bits, first_row, rows;
  size_t codes_offset, affine_offset;  // from the expert's start
};

struct Layout {
  explicit Layout(const PackSpec&);  // throws ArgumentError

  uint32_t cols;
  size_t expert_bytes = 0;
  std::vector<Part> parts;
};

size_t packed_bytes(const PackSpec&);
void pack_rows(const PackSpec&, std::byte* packed, uint32_t expert, uint32_t segment,
               uint32_t first_row, uint32_t n_rows, const RawRows&);
void unpack(const PackSpec&, const std::byte* packed, uint32_t expert, uint32_t segment,
            float* out);

}  // namespace lily::metal
