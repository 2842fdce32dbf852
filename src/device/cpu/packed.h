// The CPU device's form of a packed weight.
//
// A header, then for each expert its segments. A segment is cut into blocks of 16 rows (the last
// one padded with zero rows); a block is a run of records, one per 64 input columns:
//
//   4 bits:  8 × [16 rows] uint32: word j of a row holds columns 8j…8j+7. Its lower half word has
//            the even ones, its upper half word the odd ones, four bits each, lowest first. So
//            `word >> 4i & 0x000f000f` is the pair of columns 8j+2i, 8j+2i+1 of each row.
//   8 bits: 16 × [16 rows] uint32: word j holds columns 4j…4j+3, in half words likewise
//            (bytes 0, 1 of the lower half word are columns 4j, 4j+2; of the upper, 4j+1, 4j+3).
//   then for both: [16] bf16 scales, [16] bf16 biases.
//  16 bits: 32 × [16 rows] pairs of bf16: columns 2j, 2j+1.
//
// One vector lane is one output row, so a product needs no sum across lanes; a row of pairs is what
// a bf16 dot product takes, and a run of 16 pair rows is a matrix-unit tile.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::cpu {

constexpr uint32_t block_rows = 16;
constexpr uint32_t group_cols = 64;
constexpr uint32_t max_segments = 6;

constexpr size_t record_bytes(uint32_t bits) {
  return block_rows * group_cols * bits / 8 + (bits == 16 ? 0 : 2 * block_rows * 2);
}

struct PackedSegment {
  uint32_t bits, rows, cols, blocks;
  uint64_t offset;  // from the expert's start

  uint32_t groups() const { return cols / group_cols; }
  size_t block_bytes() const { return groups() * record_bytes(bits); }
};

struct PackedHeader {
  uint32_t n_segments, experts;
  uint64_t expert_bytes;
  PackedSegment segments[max_segments];
  uint8_t padding[256 - 16 - max_segments * sizeof(PackedSegment)];

  // First record of a block of 16 rows.
  const std::byte* block(uint32_t expert, uint32_t segment, uint32_t index) const {
    const PackedSegment& s = segments[segment];
    return reinterpret_cast<const std::byte*>(this + 1) + expert * expert_bytes + s.offset +
           index * s.block_bytes();
  }
};
static_assert(sizeof(PackedHeader) == 256);

inline const PackedHeader& packed_header(const std::byte* packed) {
  return *reinterpret_cast<const PackedHeader*>(packed);
}

}  // namespace lily::cpu
