// Products of packed weights with one vector: what decode spends its time on.
//
// A block of 16 rows is one run of memory, so a thread reads long runs and each lane sums its own
// row; nothing is added across lanes. Per group of 64 columns, Σ w·x = scale · Σ c·x + bias · Σ x,
// with Σ x made once for all rows. A row's sum has one order, whoever computes it.
//
// The float32 build multiplies in float32. On x86 the fast build gives each group of the vector a
// scale and 16-bit whole numbers, to 1/65000 of the largest (nearer than bf16 comes to it), and
// sums them with the codes exactly, as nibbles.h says: three times as fast, so that memory is the
// limit.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "device/cpu/kernels.h"
#include "device/cpu/nibbles.h"
#include "device/cpu/packed.h"
#include "device/cpu/runs.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

template <class ACT>
#if defined(__AVX2__)
constexpr bool whole = std::is_same_v<ACT, bf16>;
#else
constexpr bool whole = false;
struct GroupBytes {};
#endif

// A vector to multiply with; its length is a multiple of 64.
struct Vector {
  const float* values;
  const float* sums;        // of each group of 64
  const float* steps;       // the groups' scales; these two only where products are `whole`
  const GroupBytes* bytes;  // values / steps, rounded

  Vector from(uint32_t col) const {
    const uint32_t g = col / group_cols;
    return {values + col, sums + g, steps + g, bytes + g};
  }
};

// Gives a group its scale and whole numbers, and returns their sum. A value that is not finite
// makes the scale NaN.
#if defined(__AVX2__)
LILY_INLINE float split_group(const F v[4], GroupBytes& bytes, float& step) {
  F largest = zero(), check = zero(), sum = zero();
  for (int i = 0; i < 4; ++i) {
    largest = max(largest, max(v[i], zero() - v[i]));
    check = fma(v[i], zero(), check);
  }
  const float top = reduce_max(largest);
  const float inverse = top > 1e-30f ? largest_split / top : 0.0f;
  step = (top > 1e-30f ? top / largest_split : 0.0f) + reduce_add(check);
  for (int i = 0; i < 4; ++i) {
    const F numbers = round(v[i] * set1(inverse));
    store_split(bytes, i * lanes, numbers);
    sum = sum + numbers;
  }
  return reduce_add(sum) * step;
}
#endif

// Makes a vector of element(i), the values i…i+15 as F; asks for them in order.
template <class ACT, class Element>
Vector prepare(Scratch& scratch, uint32_t cols, Element element) {
  const size_t groups = cols / group_cols, padded = (groups + lanes - 1) / lanes * lanes;
  std::byte* memory =
      scratch.room<std::byte>((cols + 2 * padded) * sizeof(float) + groups * sizeof(GroupBytes));
  float* values = reinterpret_cast<float*>(memory);
  float* sums = values + cols;
  float* steps = sums + padded;
  GroupBytes* bytes = reinterpret_cast<GroupBytes*>(steps + padded);
  for (uint32_t g = 0; g < groups; ++g) {
    F v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = element(g * group_cols + i * lanes);
      store(values + g * group_cols + i * lanes, v[i]);
    }
#if defined(__AVX2__)
    if constexpr (whole<ACT>) {
      sums[g] = split_group(v, bytes[g], steps[g]);
      continue;
    }
#endif
    sums[g] = reduce_add((v[0] + v[1]) + (v[2] + v[3]));
  }
  return {values, sums, steps, bytes};
}

// norm(x) as a vector to multiply with.
template <class ACT>
Vector prepare_normed(Scratch& scratch, const float* x, const float* gamma, uint32_t cols,
                      float eps) {
  const F r = set1(1.0f / std::sqrt(sum_squares(x, cols) / static_cast<float>(cols) + eps));
  return prepare<ACT>(scratch, cols, [=](uint32_t i) { return load(x + i) * r * load(gamma + i); });
}

// Σ codes · x over a record's 64 columns, for each of its 16 rows. Four running sums hide the
// latency of the multiplications.
template <uint32_t bits>
LILY_INLINE F float_sum(const std::byte* record, const float* x) {
  F a[4] = {zero(), zero(), zero(), zero()};
  for (int j = 0; j < static_cast<int>(2 * bits); ++j) {
    const U w = load_words(record + 64 * j);
    if constexpr (bits == 4) {
      for (int i = 0; i < 4; ++i) {
        a[i] = fma(code4(w, 4 * i), set1(x[8 * j + 2 * i]), a[i]);
        a[i] = fma(code4(w, 4 * i + 16), set1(x[8 * j + 2 * i + 1]), a[i]);
      }
    } else if constexpr (bits == 8) {
      for (int i = 0; i < 4; ++i)
        a[i] = fma(code8(w, i % 2 * 16 + i / 2 * 8), set1(x[4 * j + i]), a[i]);
    } else {
      const int i = j % 2 * 2;
      a[i] = fma(low_half(w), set1(x[2 * j]), a[i]);
      a[i + 1] = fma(high_half(w), set1(x[2 * j + 1]), a[i + 1]);
    }
  }
  return (a[0] + a[1]) + (a[2] + a[3]);
}

template <class ACT, uint32_t bits>
LILY_INLINE F scaled_sum(const std::byte* record, const Vector& x, uint32_t g) {
#if defined(__AVX2__)
  if constexpr (whole<ACT> && bits == 4)
    return whole_sum_4(record, x.bytes[g]) * set1(x.steps[g]);
  if constexpr (whole<ACT> && bits == 8)
    return whole_sum_8(record, x.bytes[g]) * set1(x.steps[g]);
#endif
  return float_sum<bits>(record, x.values + g * group_cols);
}

template <class ACT, uint32_t bits>
LILY_INLINE F add_record(const std::byte* record, const Vector& x, uint32_t g, F result) {
  const F sum = scaled_sum<ACT, bits>(record, x, g);
  if constexpr (bits == 16) return result + sum;
  const bf16* biases = reinterpret_cast<const bf16*>(record + record_bytes(bits)) - block_rows;
  result = fma(load(biases - block_rows), sum, result);
  return fma(load(biases), set1(x.sums[g]), result);
}

// A block of 16 rows to multiply with x.from(col), and what to fetch meanwhile.
struct Block {
  const PackedSegment* segment;
  const std::byte* data;
  uint32_t col = 0;
  const std::byte* ahead = nullptr;
};

template <class ACT, uint32_t bits, int n>
LILY_INLINE void multiply_of(const Block (&blocks)[n], const Vector& x, F (&results)[n]) {
  constexpr size_t bytes = record_bytes(bits);
  for (F& result : results) result = zero();
  for (uint32_t g = 0; g < blocks[0].segment->groups(); ++g) {
    for (const Block& block : blocks)
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block.ahead + g * bytes + i, 0, 2);
    for (int k = 0; k < n; ++k)
      results[k] = add_record<ACT, bits>(blocks[k].data + g * bytes, x.from(blocks[k].col), g,
                                         results[k]);
  }
}

// results = W · x for the rows of blocks of one form.
template <class ACT, int n>
void multiply(const Block (&blocks)[n], const Vector& x, F (&results)[n]) {
  if (blocks[0].segment->bits == 4) return multiply_of<ACT, 4>(blocks, x, results);
  if (blocks[0].segment->bits == 8) return multiply_of<ACT, 8>(blocks, x, results);
  return multiply_of<ACT, 16>(blocks, x, results);
}

// How many blocks make 18 KB.
LILY_INLINE uint32_t spread(const PackedSegment& s) {
  return static_cast<uint32_t>(std::max<size_t>(1, 18432 / s.block_bytes()));
}

// Calls use(i, W_i · x) for blocks begin…end-1, which find(i) locates; i rises by turns in the two
// halves of windows of 2 · `half` blocks.
//
// A thread reads at two places, 18 KB apart, and fetches the next window meanwhile. Of the rate of
// a core that only reads, one that also sums has 57 % if the fetching is left to the hardware, 90 %
// in one place, 97 % in two.
template <class ACT, class Find, class Use>
LILY_INLINE void product_run(uint32_t begin, uint32_t end, uint32_t half, const Vector& x,
                             Find&& find, Use&& use) {
  auto block_of = [&](uint32_t i) {
    Block block = find(i);
    block.ahead = i + 2 * half < end ? find(i + 2 * half).data : block.data;
    return block;
  };
  auto run_one = [&](uint32_t i, const Block& block) {
    F result[1];
    multiply<ACT>({block}, x, result);
    use(i, result[0]);
  };
  for (size_t i = 0; i < 36864; i += 64) __builtin_prefetch(find(begin).data + i, 0, 2);
  for (uint32_t window = begin; window < end; window += 2 * half) {
    const uint32_t apart = std::min(half, (end - window + 1) / 2);
    for (uint32_t i = window; i < window + apart; ++i) {
      const uint32_t other = i + apart;
      const Block first = block_of(i), second = other < end ? block_of(other) : first;
      const bool alike = first.segment->bits == second.segment->bits &&
                         first.segment->cols == second.segment->cols;
      if (other < end && alike) {
        F results[2];
        multiply<ACT>({first, second}, x, results);
        use(i, results[0]);
        use(other, results[1]);
        continue;
      }
      run_one(i, first);
      if (other < end) run_one(other, second);
    }
  }
}

// Block i of an expert, counted through its segments; `segment` and `index` say where that is.
struct Place {
  uint32_t segment, index;
};
LILY_INLINE Place place_of(const PackedHeader& weight, uint32_t i) {
  uint32_t s = 0;
  while (i >= weight.segments[s].blocks) i -= weight.segments[s++].blocks;
  return {s, i};
}

LILY_INLINE Block block_at(const PackedHeader& weight, uint32_t expert, Place p) {
  return {&weight.segments[p.segment], weight.block(expert, p.segment, p.index)};
}

LILY_INLINE uint32_t count_blocks(const PackedHeader& weight) {
  uint32_t blocks = 0;
  for (uint32_t s = 0; s < weight.n_segments; ++s) blocks += weight.segments[s].blocks;
  return blocks;
}

// Stores what belongs to rows that exist; `row` is the block's first in a segment of `rows`.
template <class T>
LILY_INLINE void store_rows(T* out, F values, uint32_t row, uint32_t rows) {
  if (row + block_rows <= rows)
    store(out + row, values);
  else
    store_first(out + row, values, static_cast<int>(rows - row));
}
LILY_INLINE void add_rows(float* x, F values, uint32_t row, uint32_t rows) {
  const uint32_t n = std::min(block_rows, rows - row);
  store_rows(x, load_first(x + row, static_cast<int>(n)) + values, row, rows);
}

}  // namespace lily::cpu::LILY_ISA
