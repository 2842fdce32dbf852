// Rows of a few hundred values held by a simdgroup, N neighbouring ones in each lane: load_row of
// activations.h brings them. Only Metal reads this header.
#pragma once

#include "activations.h"
#include "unroll.h"

// The widest stores that the alignment allows: a row begins at a multiple of 32 elements.
template <uint N, class T>
METAL_FUNC void store_row(device T* to, thread const float* v) {
  if (N % 4 == 0) {
    LILY_UNROLL for (uint i = 0; i < N; i += 4)
      *(device vec<T, 4>*)(to + i) = vec<T, 4>(float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
  } else if (N % 2 == 0) {
    LILY_UNROLL for (uint i = 0; i < N; i += 2)
      *(device vec<T, 2>*)(to + i) = vec<T, 2>(float2(v[i], v[i + 1]));
  } else {
    LILY_UNROLL for (uint i = 0; i < N; i++) to[i] = T(v[i]);
  }
}

// Σ v² over the simdgroup.
template <uint N>
METAL_FUNC float squares_of(thread const float* v) {
  float sum = 0.0f;
  LILY_UNROLL for (uint i = 0; i < N; i++) sum = fma(v[i], v[i], sum);
  return simd_sum(sum);
}
