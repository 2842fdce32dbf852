// y = x / sqrt(mean(x²) + EPS) ⊙ gamma, rounded once
//
// Threadgroups: ceil(T / SIMDGROUPS). A simdgroup owns a row, so no barrier is needed. It reads the
// row twice, 512 bytes at a time, the second time from the cache.
#include "prefill_norm.h"

#include "grids.h"

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_norm(LILY_ARGUMENTS(PrefillNorm),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint D = PrefillNorm_D;
  const uint row = group.x * PREFILL_SIMDGROUPS + simdgroup;
  if (row >= p.rows) return;
  device const float* from = x + ulong(row) * D;
  device ACT* to = y + ulong(row) * D;

  float4 squares = float4(0.0f);
  for (uint i = 4 * lane; i < D; i += 128) {
    const float4 v = *(device const float4*)(from + i);
    squares = fma(v, v, squares);
  }
  const float sum = simd_sum(squares.x + squares.y + squares.z + squares.w);
  const float r = precise::rsqrt(sum / float(D) + PrefillNorm_EPS);
  for (uint i = 4 * lane; i < D; i += 128) {
    const float4 v = *(device const float4*)(from + i) * r * *(device const float4*)(gamma + i);
    *(device vec<ACT, 4>*)(to + i) = vec<ACT, 4>(v);
  }
}
