// Which columns of a result a kernel of gemm.h makes, and where their sums go.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "device/cpu/packed.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t strip_columns = 2 * block_rows;

// Sixteen rows of a weight: sixteen columns of the result, fewer at a segment's end.
struct Block {
  const std::byte* records;
  uint32_t bits, column, count;  // count 0: no block
};

// Two blocks that the inner loops make side by side: neighbours in a segment or, for
// silu(gate) ⊙ up, the same block of two segments.
struct Strip {
  Block left, right;
  bool paired;
};

// All strips of a weight, in order.
class Strips {
 public:
  // The first `plain` segments, one below the other, are columns 0, 1, … of the result. Two more,
  // if there are, make a pair with columns 0, 1, … of its own. Segments whose columns all lie before
  // `first` are left out.
  Strips(const std::byte* packed, uint32_t plain, uint32_t first = 0)
      : header_(packed_header(packed)) {
    for (uint32_t i = 0; i < plain; ++i) {
      const PackedSegment& s = header_.segments[i];
      if (columns_ + s.rows > first)
        add({i, i, columns_, 0, (s.blocks + 1) / 2});
      else
        left_out_bytes_ += s.blocks * s.block_bytes();
      columns_ += s.rows;
    }
    if (header_.n_segments == plain) return;
    if (header_.n_segments != plain + 2) refuse();
    paired_columns_ = header_.segments[plain].rows;
    add({plain, plain + 1, 0, 0, header_.segments[plain].blocks});
  }

  static Strips all_plain(const std::byte* packed, uint32_t first = 0) {
    return {packed, packed_header(packed).n_segments, first};
  }

  // Throws unless the weight is what the kernel's constants say.
  void expect(uint32_t experts, uint32_t K, uint32_t columns, uint32_t paired_columns = 0) const {
    bool same = header_.experts == experts;
    same &= columns_ == columns && paired_columns_ == paired_columns;
    if (paired_columns) same &= header_.segments[header_.n_segments - 1].rows == paired_columns;
    for (uint32_t i = 0; i < header_.n_segments; ++i) same &= header_.segments[i].cols == K;
    if (!same) refuse();
  }

  uint32_t size() const { return size_; }
  uint32_t K() const { return header_.segments[0].cols; }
  uint32_t experts() const { return header_.experts; }
  uint64_t expert_bytes() const { return header_.expert_bytes - left_out_bytes_; }

  Strip at(uint32_t expert, uint32_t index) const {
    const Range* r = ranges_;
    while (index >= r->first + r->count) ++r;
    const uint32_t i = index - r->first;
    if (r->left != r->right)
      return {block(expert, *r, r->left, i), block(expert, *r, r->right, i), true};
    return {block(expert, *r, r->left, 2 * i), block(expert, *r, r->left, 2 * i + 1), false};
  }

 private:
  [[noreturn]] static void refuse() {
    throw std::logic_error("the weight has other dimensions than the kernel");
  }

  struct Range {
    uint32_t left, right;   // segments
    uint32_t column;        // of the segment's first row
    uint32_t first, count;  // strips
  };

  void add(Range r) {
    r.first = size_;
    size_ += r.count;
    ranges_[n_ranges_++] = r;
  }

  Block block(uint32_t expert, const Range& r, uint32_t segment, uint32_t i) const {
    const PackedSegment& s = header_.segments[segment];
    if (i >= s.blocks) return {nullptr, 0, 0, 0};
    const uint32_t row = i * block_rows;
    return {header_.block(expert, segment, i), s.bits, r.column + row,
            std::min(block_rows, s.rows - row)};
  }

  const PackedHeader& header_;
  Range ranges_[max_segments];
  uint32_t n_ranges_ = 0, size_ = 0, columns_ = 0, paired_columns_ = 0;
  uint64_t left_out_bytes_ = 0;
};

// Sinks take a strip and its sums [rows][32] for rows `row` … of the result.

template <class T>
LILY_INLINE F get(const T* p, uint32_t n) {
  return n == lanes ? load(p) : load_first(p, static_cast<int>(n));
}
template <class T>
LILY_INLINE void put(T* p, F a, uint32_t n) {
  if (n == lanes) return store(p, a);
  store_first(p, a, static_cast<int>(n));
}

// Columns first … end - 1 of a result, in an array of their own.
template <class T>
struct Columns {
  T* out;
  uint64_t stride;
  uint32_t first, end;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    const Part left = part(strip.left), right = part(strip.right);
    T* to = out + row * stride;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns) {
      if (left.n) put(to + left.to, load(sums + left.from), left.n);
      if (right.n) put(to + right.to, load(sums + block_rows + right.from), right.n);
    }
  }

 private:
  struct Part {
    uint32_t from, to, n;  // lanes from … of a block are columns to … of the array
  };
  Part part(const Block& b) const {
    const uint32_t low = std::max(b.column, first), high = std::min(b.column + b.count, end);
    if (low >= high) return {0, 0, 0};
    return {low - b.column, low - first, high - low};
  }
};

// x += the sums.
struct AddTo {
  float* x;
  uint64_t stride;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    float* to = x + row * stride;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns) {
      add(to + strip.left.column, sums, strip.left.count);
      if (strip.right.count) add(to + strip.right.column, sums + block_rows, strip.right.count);
    }
  }

 private:
  static void add(float* to, const float* sums, uint32_t n) { put(to, get(to, n) + load(sums), n); }
};

// silu(left) ⊙ right of paired strips.
template <class T>
struct Gated {
  T* out;
  uint64_t stride;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    T* to = out + row * stride + strip.left.column;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns)
      put(to, silu(load(sums)) * load(sums + block_rows), strip.left.count);
  }
};

}  // namespace lily::cpu::LILY_ISA
