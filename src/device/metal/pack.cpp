#include "device/metal/pack.h"

#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lily::metal {

namespace {

constexpr uint32_t group_cols = 64;
constexpr size_t alignment = 256;

size_t aligned(size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

void check(const Segment& s, uint32_t cols) {
  const std::string found = std::to_string(s.rows) + " x " + std::to_string(s.cols) + ", " +
                            std::to_string(s.bits) + " bits, groups of " + std::to_string(s.group);
  if (s.bits != 4 && s.bits != 8 && s.bits != 16)
    throw ArgumentError("metal: weight segment of " + found + ", expected 4, 8 or 16 bits");
  if (s.rows == 0 || s.cols == 0 || s.cols % group_cols != 0)
    throw ArgumentError("metal: weight segment of " + found + ", expected a multiple of 64 columns");
  if (s.bits != 16 && s.group != group_cols)
    throw ArgumentError("metal: weight segment of " + found + ", expected groups of 64");
  if (s.cols != cols)
    throw ArgumentError("metal: weight segment of " + found + ", expected " + std::to_string(cols) +
                        " columns like the first");
}

// The part that holds a segment, and the segment's first row in it.
std::pair<const Part*, size_t> find(const PackSpec& spec, const Layout& layout, uint32_t segment) {
  size_t row = 0;
  for (uint32_t i = 0; i < segment; ++i) row += spec.segments[i].rows;
  const Part* part = layout.parts.data();
  while (row >= size_t{part->first_row} + part->rows) ++part;
  return {part, row - part->first_row};
}

}  // namespace

Layout::Layout(const PackSpec& spec) {
  if (spec.segments.empty() || spec.experts == 0)
    throw ArgumentError("metal: weight with " + std::to_string(spec.segments.size()) +
                        " segments and " + std::to_string(spec.experts) +
                        " experts, expected at least one of each");
  cols = spec.segments[0].cols;
  uint32_t row = 0;
  for (const Segment& s : spec.segments) {
    check(s, cols);
    if (parts.empty() || parts.back().bits != s.bits) parts.push_back({s.bits, row, 0, 0, 0});
    parts.back().rows += s.rows;
    row += s.rows;
  }
  for (Part& p : parts) {
    p.codes_offset = expert_bytes;
    expert_bytes += aligned(size_t{p.rows} * cols * p.bits / 8);
    p.affine_offset = expert_bytes;
    if (p.bits != 16) expert_bytes += aligned(size_t{p.rows} * cols / group_cols * 4);
  }
}

size_t packed_bytes(const PackSpec& spec) { return spec.experts * Layout(spec).expert_bytes; }

void pack_rows(const PackSpec& spec, std::byte* packed, uint32_t expert, uint32_t segment,
               uint32_t first_row, uint32_t n_rows, const RawRows& raw) {
  const Layout layout(spec);
  const auto [part, segment_row] = find(spec, layout, segment);
  std::byte* base = packed + expert * layout.expert_bytes;
  const size_t row = segment_row + first_row, row_bytes = size_t{layout.cols} * part->bits / 8;
  std::memcpy(base + part->codes_offset + row * row_bytes, raw.weight, n_rows * row_bytes);
  if (part->bits == 16) return;
  const size_t groups = layout.cols / group_cols;
  std::byte* affine = base + part->affine_offset + row * groups * 4;
  for (size_t i = 0; i < n_rows * groups; ++i) {
    std::memcpy(affine + 4 * i, raw.scales + 2 * i, 2);
    std::memcpy(affine + 4 * i + 2, raw.biases + 2 * i, 2);
  }
}

void unpack(const PackSpec& spec, const std::byte* packed, uint32_t expert, uint32_t segment,
            float* out) {
  const Layout layout(spec);
  const auto [part, first_row] = find(spec, layout, segment);
  const std::byte* base = packed + expert * layout.expert_bytes;
  const uint32_t cols = layout.cols, bits = part->bits;
  for (size_t row = first_row; row < first_row + spec.segments[segment].rows; ++row)
    for (uint32_t col = 0; col < cols; ++col) {
      const size_t bit = (row * cols + col) * bits;
      uint32_t word, affine;
      std::memcpy(&word, base + part->codes_offset + bit / 32 * 4, 4);
      const uint32_t code = word >> bit % 32 & (bits == 16 ? 0xffffu : (1u << bits) - 1);
      if (bits == 16) {
        *out++ = std::bit_cast<float>(code << 16);
        continue;
      }
      std::memcpy(&affine, base + part->affine_offset + (row * cols + col) / group_cols * 4, 4);
      *out++ = std::bit_cast<float>(affine << 16) * static_cast<float>(code) +
               std::bit_cast<float>(affine & 0xffff0000u);
    }
}

}  // namespace lily::metal
