// u = (o / sqrt(mean(o²) + EPS) ⊙ gamma) ⊙ silu(z), per head
//
// Threadgroups: ceil(T · HEADS / SIMDGROUPS). A simdgroup owns one head of one row, DV / 32
// neighbouring values in each lane.
#include "prefill_gated_norm.h"

#include "grids.h"
#include "lane_values.h"

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_gated_norm(LILY_ARGUMENTS(PrefillGatedNorm),
                               uint3 group [[threadgroup_position_in_grid]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint DV = PrefillGatedNorm_DV, N = DV / 32;
  const uint head = group.x * PREFILL_SIMDGROUPS + simdgroup;  // of all rows
  if (head >= p.rows * PrefillGatedNorm_HEADS) return;
  const ulong at = ulong(head) * DV + lane * N;

  float v[N], gate[N], weights[N];
  load_row<N>(o + at, v);
  load_row<N>(z + at, gate);
  load_row<N>(gamma + lane * N, weights);
  const float r = precise::rsqrt(squares_of<N>(v) / float(DV) + PrefillGatedNorm_EPS);
  LILY_UNROLL for (uint i = 0; i < N; i++) v[i] = v[i] * r * weights[i] * silu(gate[i]);
  store_row<N>(u + at, v);
}
