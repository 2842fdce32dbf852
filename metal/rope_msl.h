// Norm and rotation of one head by one simdgroup. Only Metal reads this header.
#pragma once

// y = rope(x / rms(x) ⊙ gamma): pairs (i, i + ROTARY / 2). A lane has elements lane, lane + 32, …
// before and after; pairs meet in `row`, which is the simdgroup's own until it has returned.
template <uint DH, uint ROTARY>
METAL_FUNC void norm_rotate(device const ACT* x, device const float* gamma,
                            device const float* frequencies, uint position, float eps, uint lane,
                            threadgroup float* row, thread float* y) {
  constexpr uint n = DH / 32, half_width = ROTARY / 2;
  float sum = 0.0f;
  for (uint i = 0; i < n; i++) {
    y[i] = float(x[32 * i + lane]);
    sum += y[i] * y[i];
  }
  const float scale = precise::rsqrt(simd_sum(sum) / float(DH) + eps);
  for (uint i = 0; i < n; i++) {
    y[i] *= scale * gamma[32 * i + lane];
    row[32 * i + lane] = y[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < n; i++) {
    const uint d = 32 * i + lane;
    if (d >= ROTARY) continue;
    const bool low = d < half_width;
    const float other = row[low ? d + half_width : d - half_width];
    // The angle is a float32 product, as references have it.
    const float angle = float(position) * frequencies[low ? d : d - half_width];
    const float sine = precise::sin(angle);
    y[i] = y[i] * precise::cos(angle) + (low ? -other : other) * sine;
  }
}
