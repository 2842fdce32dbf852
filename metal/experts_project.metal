// GATED: out_i = silu(W_gate[ids_i] · norm(x)) ⊙ W_up[ids_i] · norm(x); else one of both products
//
// Threadgroups: ceil(F / (OUTPUTS · SIMDGROUPS)) × TOP with the numbers of experts_up; OUTPUTS is
// ROWS, or ROWS / 2 pairs of gate and up. A simdgroup owns OUTPUTS outputs of one choice.
#include "experts_project.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(ExpertsProject, weight)

[[max_total_threads_per_threadgroup(32 * EXPERTS_UP_SIMDGROUPS)]]
kernel void experts_project(LILY_ARGUMENTS(ExpertsProject),
                            uint3 group [[threadgroup_position_in_grid]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(ExpertsProject_ROWS, EXPERTS_UP_ROWS);
  constexpr uint outputs = ExpertsProject_GATED ? R / 2 : R;
  constexpr uint f = ExpertsProject_F;

  RowProduct<ExpertsProject_weight, NormedInput, R> product;
  product.weight = ExpertsProject_weight::expert(weight, ids[group.y]);
  product.lane = lane;
  product.input.x = x;
  product.input.gamma = gamma;
  const uint first = (group.x * EXPERTS_UP_SIMDGROUPS + simdgroup) * outputs;
  for (uint r = 0; r < R; r++) {
    const uint row = first + r % outputs, above = ExpertsProject_GATED ? r / outputs : p.up;
    product.rows[r] = row < f ? above * f + row : LILY_NO_ROW;
  }
  product.run();
  const float factor = product.input.factor(ExpertsProject_D, ExpertsProject_EPS);
  const float y = sum_to_lanes<R>(product.sums, lane) * factor;
  const float up = simd_shuffle_down(y, ushort(R / 2));
  if (lane < outputs && first + lane < f)
    out[group.y * f + first + lane] = ACT(ExpertsProject_GATED ? silu(y) * up : y);
}
