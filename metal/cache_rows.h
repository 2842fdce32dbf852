// Rows of a cache slot: of ACT, or of int8 codes with a scale each. Only Metal reads this header.
#pragma once

#include "activations.h"

template <bool int8> struct CacheRow { typedef ACT Type; };
template <> struct CacheRow<true> { typedef char Type; };

// Scales stand behind all codes; rows of ACT have none.
METAL_FUNC device float* cache_scales(device char* rows, ulong n_codes) {
  return (device float*)(rows + n_codes);
}
METAL_FUNC device float* cache_scales(device ACT*, ulong) { return nullptr; }
METAL_FUNC device const float* cache_scales(device const char* rows, ulong n_codes) {
  return (device const float*)(rows + n_codes);
}
METAL_FUNC device const float* cache_scales(device const ACT*, ulong) { return nullptr; }

// N neighbouring codes as float; `from` is aligned to as many bytes as N allows, up to 4.
template <uint N>
METAL_FUNC void load_row(device const char* from, thread float* out) {
  if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) {
      const float4 v = float4(*(device const char4*)(from + i));
      for (uint j = 0; j < 4; j++) out[i + j] = v[j];
    }
  } else {
    for (uint i = 0; i < N; i++) out[i] = float(from[i]);
  }
}

// A simdgroup holds a row, N values a lane: they become codes -127 … 127, their scale is returned.
// Rows too small for a float scale become 0.
template <uint N>
METAL_FUNC float quantise(thread float* x) {
  float largest = 0.0f;
  for (uint i = 0; i < N; i++) largest = max(largest, fabs(x[i]));
  largest = simd_max(largest);
  const bool zero = largest < 1e-30f;
  const float steps = zero ? 0.0f : 127.0f / largest;
  for (uint i = 0; i < N; i++) x[i] = rint(x[i] * steps);
  return zero ? 0.0f : largest / 127.0f;
}
