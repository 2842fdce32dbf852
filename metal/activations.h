// Loads of activations, and functions of them. Only Metal reads this header.
#pragma once

// N neighbours as float; 16 and 8 bytes at a time where N and so the alignment allow it.
template <uint N>
METAL_FUNC void load_row(device const float* from, thread float* out) {
  if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) {
      const float4 v = *(device const float4*)(from + i);
      for (uint j = 0; j < 4; j++) out[i + j] = v[j];
    }
  } else {
    for (uint i = 0; i < N; i++) out[i] = from[i];
  }
}
METAL_FUNC void widen(uint pair, thread float* out) {  // two bf16
  out[0] = as_type<float>(pair << 16);
  out[1] = as_type<float>(pair & 0xffff0000u);
}
template <uint N>
METAL_FUNC void load_row(device const bfloat* from, thread float* out) {
  if (N % 8 == 0) {
    for (uint i = 0; i < N; i += 8) {
      const uint4 words = *(device const uint4*)(from + i);
      for (uint j = 0; j < 4; j++) widen(words[j], out + i + 2 * j);
    }
  } else if (N % 4 == 0) {
    for (uint i = 0; i < N; i += 4) {
      const uint2 words = *(device const uint2*)(from + i);
      for (uint j = 0; j < 2; j++) widen(words[j], out + i + 2 * j);
    }
  } else {
    for (uint i = 0; i < N; i++) out[i] = float(from[i]);
  }
}

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
METAL_FUNC float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// log(1 + e^x), also where e^x vanishes beside 1: the rounding of 1 + e is divided out.
METAL_FUNC float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = precise::exp(x), sum = 1.0f + e;
  return sum == 1.0f ? e : precise::log(sum) * (e / (sum - 1.0f));
}
