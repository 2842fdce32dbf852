#include "device/cpu/pack.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <type_traits>

#include "base/bf16.h"
#include "base/error.h"
#include "device/cpu/packed.h"

namespace lily::cpu {

namespace {

constexpr uint32_t row_words(uint32_t bits) { return group_cols * bits / 32; }  // of one record

void check(const Segment& s) {
  const std::string found = std::to_string(s.rows) + " x " + std::to_string(s.cols) + ", " +
                            std::to_string(s.bits) + " bits, groups of " + std::to_string(s.group);
  if (s.bits != 4 && s.bits != 8 && s.bits != 16)
    throw ArgumentError("cpu: weight segment of " + found + ", expected 4, 8 or 16 bits");
  if (s.rows == 0 || s.cols == 0 || s.cols % group_cols != 0)
    throw ArgumentError("cpu: weight segment of " + found + ", expected a multiple of 64 columns");
  if (s.bits != 16 && s.group != group_cols)
    throw ArgumentError("cpu: weight segment of " + found + ", expected groups of 64");
}

PackedHeader layout(const PackSpec& spec) {
  if (spec.segments.empty() || spec.segments.size() > max_segments || spec.experts == 0)
    throw ArgumentError("cpu: weight with " + std::to_string(spec.segments.size()) +
                        " segments and " + std::to_string(spec.experts) +
                        " experts, expected 1 to " + std::to_string(max_segments) +
                        " segments and an expert or more");
  PackedHeader h{};
  h.n_segments = static_cast<uint32_t>(spec.segments.size());
  h.experts = spec.experts;
  for (uint32_t i = 0; i < h.n_segments; ++i) {
    const Segment& s = spec.segments[i];
    check(s);
    h.segments[i] = {s.bits, s.rows, s.cols, (s.rows - 1) / block_rows + 1, h.expert_bytes};
    h.expert_bytes += h.segments[i].blocks * h.segments[i].block_bytes();
  }
  return h;
}

// Moves the codes of two words from the checkpoint's order to that of packed.h: even columns to
// the lower half word, odd ones to the upper.
template <uint32_t bits>
uint64_t pair_up(uint64_t words) {
  if constexpr (bits == 4) {
    uint64_t swap = (words ^ words >> 4) & 0x00f000f000f000f0u;
    words ^= swap ^ swap << 4;
  }
  if constexpr (bits != 16) {
    uint64_t swap = (words ^ words >> 8) & 0x0000ff000000ff00u;
    words ^= swap ^ swap << 8;
  }
  return words;
}

struct Rows {
  uint32_t first, end;  // within a block
};

// `raw` points at row `rows.first`. One record after the other, so that each stays in the cache
// while its rows, which arrive separately, fill it.
template <uint32_t bits>
void pack_block(std::byte* record, Rows rows, uint32_t groups, RawRows raw) {
  constexpr uint32_t words = row_words(bits);
  for (uint32_t g = 0; g < groups; ++g, record += record_bytes(bits)) {
    for (uint32_t r = rows.first; r < rows.end; ++r) {
      const size_t group = size_t{r - rows.first} * groups + g;
      const std::byte* from = raw.weight + group * words * 4;
      for (uint32_t j = 0; j < words; j += 2) {
        uint64_t pair;
        std::memcpy(&pair, from + 4 * j, 8);
        pair = pair_up<bits>(pair);
        const uint32_t low = static_cast<uint32_t>(pair), high = static_cast<uint32_t>(pair >> 32);
        std::memcpy(record + 4 * (j * block_rows + r), &low, 4);
        std::memcpy(record + 4 * ((j + 1) * block_rows + r), &high, 4);
      }
      if constexpr (bits != 16) {
        std::byte* scales = record + 4 * words * block_rows;
        std::memcpy(scales + 2 * r, raw.scales + 2 * group, 2);
        std::memcpy(scales + 2 * (block_rows + r), raw.biases + 2 * group, 2);
      }
    }
  }
}

template <uint32_t bits>
void unpack_record(const std::byte* record, uint32_t row, float* out) {
  constexpr uint32_t per_word = 32 / bits, mask = bits == 16 ? 0xffff : (1u << bits) - 1;
  const std::byte* scales = record + 4 * row_words(bits) * block_rows;
  bf16 scale, bias;
  if constexpr (bits != 16) {
    std::memcpy(&scale, scales + 2 * row, 2);
    std::memcpy(&bias, scales + 2 * (block_rows + row), 2);
  }
  for (uint32_t col = 0; col < group_cols; ++col) {
    uint32_t word;
    std::memcpy(&word, record + 4 * (col / per_word * block_rows + row), 4);
    const uint32_t i = col % per_word, code = word >> (16 * (i % 2) + i / 2 * bits) & mask;
    if constexpr (bits == 16)
      out[col] = std::bit_cast<float>(code << 16);
    else
      out[col] = static_cast<float>(scale) * static_cast<float>(code) + static_cast<float>(bias);
  }
}

// Calls body with the width as a compile-time constant.
template <class Body>
void with_bits(uint32_t bits, Body&& body) {
  if (bits == 4) body(std::integral_constant<uint32_t, 4>{});
  if (bits == 8) body(std::integral_constant<uint32_t, 8>{});
  if (bits == 16) body(std::integral_constant<uint32_t, 16>{});
}

}  // namespace

size_t packed_bytes(const PackSpec& spec) {
  const PackedHeader h = layout(spec);
  return sizeof(PackedHeader) + h.experts * h.expert_bytes;
}

void pack_begin(const PackSpec& spec, std::byte* packed) {
  const PackedHeader& h = *new (packed) PackedHeader(layout(spec));
  for (uint32_t expert = 0; expert < h.experts; ++expert)
    for (uint32_t i = 0; i < h.n_segments; ++i) {
      const PackedSegment& s = h.segments[i];
      if (s.rows % block_rows != 0)
        std::memset(const_cast<std::byte*>(h.block(expert, i, s.blocks - 1)), 0, s.block_bytes());
    }
}

void pack_rows(std::byte* packed, uint32_t expert, uint32_t segment, uint32_t first_row,
               uint32_t n_rows, const RawRows& raw) {
  const PackedHeader& h = packed_header(packed);
  LILY_CHECK(expert < h.experts && segment < h.n_segments);
  const PackedSegment& s = h.segments[segment];
  LILY_CHECK(first_row <= s.rows && n_rows <= s.rows - first_row);
  const uint32_t groups = s.groups(), end = first_row + n_rows;
  with_bits(s.bits, [&](auto bits) {
    for (uint32_t row = first_row; row < end;) {
      const uint32_t index = row / block_rows;
      const Rows rows{row % block_rows, std::min(end - index * block_rows, block_rows)};
      const size_t done = size_t{row - first_row} * groups;
      RawRows rest{raw.weight + done * row_words(bits) * 4};
      if (bits != 16) {
        rest.scales = raw.scales + 2 * done;
        rest.biases = raw.biases + 2 * done;
      }
      pack_block<bits>(const_cast<std::byte*>(h.block(expert, segment, index)), rows, groups, rest);
      row += rows.end - rows.first;
    }
  });
}

void unpack_row(const std::byte* packed, uint32_t expert, uint32_t segment, uint32_t row,
                float* out) {
  const PackedHeader& h = packed_header(packed);
  LILY_CHECK(expert < h.experts && segment < h.n_segments && row < h.segments[segment].rows);
  const PackedSegment& s = h.segments[segment];
  const std::byte* block = h.block(expert, segment, row / block_rows);
  with_bits(s.bits, [&](auto bits) {
    for (uint32_t g = 0; g < s.groups(); ++g)
      unpack_record<bits>(block + g * record_bytes(bits), row % block_rows, out + g * group_cols);
  });
}

void unpack(const std::byte* packed, uint32_t expert, uint32_t segment, float* out) {
  const PackedHeader& h = packed_header(packed);
  LILY_CHECK(expert < h.experts && segment < h.n_segments);
  const PackedSegment& s = h.segments[segment];
  for (uint32_t row = 0; row < s.rows; ++row)
    unpack_row(packed, expert, segment, row, out + size_t{row} * s.cols);
}

}  // namespace lily::cpu
