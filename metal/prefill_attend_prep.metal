// q ← rope(norm(q)) / sqrt(DH); rope(norm(k)) and v enter the cache at their positions
//
// Threadgroups: (ceil((HEADS + 2 · KV_HEADS) / SIMDGROUPS), T). A simdgroup owns one head of
// queries, keys or values of one row; lanes have every 32nd element. Rotation joins values half a
// rotary width apart, which may belong to different lanes: they meet in threadgroup memory.
#include "prefill_attend_prep.h"

#include "cache_rows.h"
#include "grids.h"
#include "rope_msl.h"
#include "unroll.h"

constant constexpr uint HEADS = PrefillAttendPrep_HEADS, KV_HEADS = PrefillAttendPrep_KV_HEADS;
constant constexpr uint DH = PrefillAttendPrep_DH, ROTARY = PrefillAttendPrep_ROTARY;
constant constexpr uint SKIPPED = PrefillAttendPrep_CACHE_ONLY ? HEADS : 0;
constant constexpr bool INT8 = PrefillAttendPrep_KV_INT8 != 0;
typedef CacheRow<INT8>::Type Row;

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_attend_prep(LILY_ARGUMENTS(PrefillAttendPrep),
                                uint3 group [[threadgroup_position_in_grid]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float rows[PREFILL_SIMDGROUPS * DH];
  const uint head = SKIPPED + group.x * PREFILL_SIMDGROUPS + simdgroup, t = group.y;
  if (head >= HEADS + 2 * KV_HEADS || t >= p.rows) return;
  const uint position = p.position + t;
  const bool is_query = head < HEADS, is_key = !is_query && head < HEADS + KV_HEADS;
  // In front of keys and values, each query has a gate beside it.
  device const ACT* from = qkv + ulong(t) * (2 * (HEADS + KV_HEADS) * DH) +
                           (is_query ? 2 * head : HEADS + head) * DH;

  float y[DH / 32];
  if (is_query || is_key)
    norm_rotate<DH, ROTARY>(from, is_query ? q_norm : k_norm, frequencies, position,
                            PrefillAttendPrep_EPS, lane, rows + simdgroup * DH, y);
  else
    LILY_UNROLL for (uint i = 0; i < DH / 32; i++) y[i] = float(from[32 * i + lane]);
  if (is_query) {
    device ACT* to = q + (ulong(t) * HEADS + head) * DH;
    const float scale = precise::rsqrt(float(DH));
    LILY_UNROLL for (uint i = 0; i < DH / 32; i++) to[32 * i + lane] = ACT(y[i] * scale);
    return;
  }
  device Row* to = (device Row*)(is_key ? keys : values);
  const ulong row = ulong((head - HEADS) % KV_HEADS) * p.capacity + position;
  const float scale = INT8 ? quantise<DH / 32>(y) : 1.0f;
  LILY_UNROLL for (uint i = 0; i < DH / 32; i++) to[row * DH + 32 * i + lane] = Row(y[i]);
  if (INT8 && lane == 0) cache_scales(to, ulong(KV_HEADS) * p.capacity * DH)[row] = scale;
}
