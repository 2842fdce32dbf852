// attend's way over the keys without coalesced reads, for comparison: a lane has a key to itself, so
// a load touches 32 rows. Values are summed by column. Only Metal reads this header.
#pragma once

#include "cache_rows.h"

// Row i of `keys` and `values` has scale i. Adds keys first, first + step … (32 at a time) below
// `end` to o, and leaves each head's largest score and sum of weights.
template <uint heads, uint per_lane, class Row>
METAL_FUNC void attend_by_key(device const Row* keys, device const Row* values,
                              device const float* key_scales, device const float* value_scales,
                              bool int8, threadgroup const float* queries, uint first, uint end,
                              uint step, uint lane, thread float (&o)[heads][per_lane],
                              thread float* largest, thread float* total) {
  constexpr uint dh = 32 * per_lane;
  for (; first < end; first += step) {
    const uint n = min(end - first, 32u), own = first + min(lane, n - 1);
    float scores[heads], shares[heads];
    for (uint h = 0; h < heads; h++) scores[h] = 0.0f;
    for (uint d = 0; d < dh; d += 4) {
      float k[4];
      load_row<4>(keys + ulong(own) * dh + d, k);
      for (uint h = 0; h < heads; h++)
        for (uint e = 0; e < 4; e++) scores[h] += queries[h * dh + d + e] * k[e];
    }
    for (uint h = 0; h < heads; h++) {
      const float score = lane < n ? scores[h] * (int8 ? key_scales[own] : 1.0f) : -INFINITY;
      const float top = max(largest[h], simd_max(score));
      const float weight = precise::exp(score - top), rescale = precise::exp(largest[h] - top);
      largest[h] = top;
      total[h] = total[h] * rescale + simd_sum(weight);
      for (uint e = 0; e < per_lane; e++) o[h][e] *= rescale;
      shares[h] = weight * (int8 ? value_scales[own] : 1.0f);
    }
    for (uint j = 0; j < n; j++) {
      float v[per_lane];
      load_row<per_lane>(values + ulong(first + j) * dh + lane * per_lane, v);
      for (uint h = 0; h < heads; h++) {
        const float w = simd_shuffle(shares[h], ushort(j));
        for (uint e = 0; e < per_lane; e++) o[h][e] += w * v[e];
      }
    }
  }
}
