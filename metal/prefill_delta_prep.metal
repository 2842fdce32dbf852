// q, k, v = silu(conv(qkv)); q, k l2-normalised per head, q scaled by DK^-1/2
// steps = exp(decay · softplus(a + dt_bias)), sigmoid(b)
//
// Threadgroups: (2 · KEY_HEADS + HEADS + 1, ceil(T / (TOKENS · SIMDGROUPS))). A simdgroup owns one
// head of TOKENS tokens in a run: the taps stay in registers and the last three inputs move on, so
// an input is read once. The last column of threadgroups makes the steps.
#include "prefill_delta_prep.h"

#include "grids.h"
#include "lane_values.h"

constant constexpr uint KEY_HEADS = PrefillDeltaPrep_KEY_HEADS, HEADS = PrefillDeltaPrep_HEADS;
constant constexpr uint DK = PrefillDeltaPrep_DK, DV = PrefillDeltaPrep_DV;
constant constexpr uint CHANNELS = 2 * KEY_HEADS * DK + HEADS * DV;

// Where the input of row t stands; a row before the first is in the ring.
METAL_FUNC device const ACT* input_row(device const ACT* qkv, device const ACT* ring, uint position,
                                       int t) {
  return t < 0 ? ring + ((position + uint(t)) & 3u) * CHANNELS : qkv + ulong(t) * CHANNELS;
}

// N channels in each lane, from `channel` on, of the tokens first … end - 1. Token t goes to
// out + t · stride, divided by its length and multiplied by `length` unless that is 0.
template <uint N>
METAL_FUNC void convolve(device const ACT* qkv, device const ACT* ring, device const float* conv,
                         uint position, uint channel, uint first, uint end, float length,
                         device ACT* out, uint stride) {
  float4 taps[N];
  LILY_UNROLL for (uint i = 0; i < N; i++) taps[i] = ((device const float4*)conv)[channel + i];
  float x0[N], x1[N], x2[N], x3[N], y[N];
  load_row<N>(input_row(qkv, ring, position, int(first) - 3) + channel, x0);
  load_row<N>(input_row(qkv, ring, position, int(first) - 2) + channel, x1);
  load_row<N>(input_row(qkv, ring, position, int(first) - 1) + channel, x2);
  for (uint t = first; t < end; t++) {
    load_row<N>(qkv + ulong(t) * CHANNELS + channel, x3);
    LILY_UNROLL for (uint i = 0; i < N; i++) {
      const float sum = fma(taps[i].w, x3[i], fma(taps[i].z, x2[i], fma(taps[i].y, x1[i],
                                                                          taps[i].x * x0[i])));
      y[i] = silu(sum);
      x0[i] = x1[i];
      x1[i] = x2[i];
      x2[i] = x3[i];
    }
    if (length != 0.0f) {
      const float r = precise::rsqrt(squares_of<N>(y) + 1e-6f) * length;
      LILY_UNROLL for (uint i = 0; i < N; i++) y[i] *= r;
    }
    store_row<N>(out + ulong(t) * stride, y);
  }
}

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_delta_prep(LILY_ARGUMENTS(PrefillDeltaPrep),
                               uint3 group [[threadgroup_position_in_grid]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const uint head = group.x;
  const uint first = (group.y * PREFILL_SIMDGROUPS + simdgroup) * PREFILL_DELTA_PREP_TOKENS;
  if (first >= p.rows) return;
  const uint end = min(first + PREFILL_DELTA_PREP_TOKENS, p.rows);

  if (head < 2 * KEY_HEADS) {
    constexpr uint N = DK / 32;
    const bool is_key = head >= KEY_HEADS;
    const uint own = (is_key ? head - KEY_HEADS : head) * DK + N * lane;
    device ACT* out = (is_key ? k : q) + own;
    const float length = is_key ? 1.0f : precise::rsqrt(float(DK));
    convolve<N>(qkv, ring, conv, p.position, head * DK + N * lane, first, end, length, out,
                KEY_HEADS * DK);
  } else if (head < 2 * KEY_HEADS + HEADS) {
    constexpr uint N = DV / 32;
    const uint own = (head - 2 * KEY_HEADS) * DV + N * lane;
    convolve<N>(qkv, ring, conv, p.position, 2 * KEY_HEADS * DK + own, first, end, 0.0f, v + own,
                HEADS * DV);
  } else {
    for (uint t = first; t < end; t++)
      for (uint h = lane; h < HEADS; h += 32) {
        const ulong at = ulong(t) * 2 * HEADS + h;
        steps[at] = exp(decay[h] * softplus(gates[at + HEADS] + decay[HEADS + h]));
        steps[at + HEADS] = sigmoid(gates[at]);
      }
  }
}
