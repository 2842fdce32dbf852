// Rows of a cache slot: of activations, or of int8 codes with a scale each (see metal/attend.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/cpu/rope.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

// Codes -127 … 127; returns their scale. Rows too small for a float scale become 0.
inline float quantise(const float* x, uint32_t n, int8_t* codes) {
  F largest = zero();
  for (uint32_t i = 0; i < n; i += lanes)
    largest = max(largest, max(load(x + i), zero() - load(x + i)));
  const float top = reduce_max(largest), steps = top < 1e-30f ? 0.0f : 127.0f / top;
  for (uint32_t i = 0; i < n; i += lanes) {
    float whole[lanes];
    store(whole, round(load(x + i) * set1(steps)));
    for (int j = 0; j < lanes; ++j) codes[i + j] = static_cast<int8_t>(whole[j]);
  }
  return top < 1e-30f ? 0.0f : top / 127.0f;
}

// Row is ACT or int8_t.
template <class Row>
struct CacheRows {
  static constexpr bool scaled = std::is_same_v<Row, int8_t>;
  Row* rows;
  float* scales;  // behind all codes
  uint32_t capacity, DH;

  CacheRows(const std::byte* slot, uint32_t heads, uint32_t capacity, uint32_t DH)
      : rows(reinterpret_cast<Row*>(const_cast<std::byte*>(slot))),
        scales(scaled ? reinterpret_cast<float*>(rows + size_t{heads} * capacity * DH) : nullptr),
        capacity(capacity),
        DH(DH) {}

  size_t index(uint32_t head, uint32_t position) const { return size_t{head} * capacity + position; }
  Row* row(size_t index) const { return rows + index * DH; }
  const float* scale(size_t index) const { return scaled ? scales + index : nullptr; }

  template <class T>
  void put(size_t index, const T* x) const {
    if constexpr (scaled) {
      float wide[max_head];
      for (uint32_t i = 0; i < DH; i += lanes) store(wide + i, load(x + i));
      scales[index] = quantise(wide, DH, row(index));
    } else {
      for (uint32_t i = 0; i < DH; i += lanes) store(row(index) + i, load(x + i));
    }
  }
};

}  // namespace lily::cpu::LILY_ISA
