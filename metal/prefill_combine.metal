// x_t += Σ_i shares_ti · out[inv_ti] + shares_t,TOP · shared_out_t, i in order
//
// Threadgroups: (ceil(D / 4 / THREADS), T). A thread owns four neighbouring columns of a row; the
// reads of a token's TOP + 1 rows do not depend on one another.
#include "prefill_combine.h"

#include "grids.h"

METAL_FUNC float4 columns(device const ACT* rows, uint row, uint column) {
  return float4(*(device const vec<ACT, 4>*)(rows + ulong(row) * PrefillCombine_D + column));
}

[[max_total_threads_per_threadgroup(PREFILL_COMBINE_THREADS)]]
kernel void prefill_combine(LILY_ARGUMENTS(PrefillCombine),
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 within [[thread_position_in_threadgroup]]) {
  constexpr uint D = PrefillCombine_D, TOP = PrefillCombine_TOP;
  const uint column = 4 * (group.x * PREFILL_COMBINE_THREADS + within.x), row = group.y;
  if (column >= D || row >= p.rows) return;
  device const float* weights = shares + ulong(row) * (TOP + 1);

  float4 sum = float4(0.0f);
  for (uint i = 0; i < TOP; i++)
    sum = fma(float4(weights[i]),
              columns(out, PrefillCombine_GROUPED ? inv[ulong(row) * TOP + i] : row * TOP + i, column),
              sum);
  sum = fma(float4(weights[TOP]), columns(shared_out, row, column), sum);
  device float4* to = (device float4*)(x + ulong(row) * D + column);
  *to = *to + sum;
}
