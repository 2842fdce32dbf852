// x += Σ_i shares_i · W_down[ids_i] · h_i + shares_TOP · W_shared_down · shared                   (E3)
//
// Threadgroups: ceil(D / (ROWS · SIMDGROUPS)). A simdgroup owns ROWS rows of every chosen expert
// and of the shared one, and so elements of x. It adds up all of them lane by lane and across lanes
// once.
#include "experts_down_add.h"

#include "expert_qmv.h"
#include "grids.h"

LILY_PACKED(ExpertsDownAdd, weight)
LILY_PACKED(ExpertsDownAdd, shared_weight)

[[max_total_threads_per_threadgroup(32 * EXPERTS_DOWN_ADD_SIMDGROUPS)]]
kernel void experts_down_add(LILY_ARGUMENTS(ExpertsDownAdd),
                             uint3 group [[threadgroup_position_in_grid]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(ExpertsDownAdd_ROWS, EXPERTS_DOWN_ADD_ROWS), top = ExpertsDownAdd_TOP;
  const uint first = (group.x * EXPERTS_DOWN_ADD_SIMDGROUPS + simdgroup) * R;

  RowProduct<ExpertsDownAdd_shared_weight, PlainInput, R> common;
  common.weight = shared_weight;
  common.lane = lane;
  common.input.u = shared;
  for (uint r = 0; r < R; r++) common.rows[r] = first + r;
  common.run();

  ExpertsProduct<ExpertsDownAdd_weight, top, R> routed;
  routed.weight = weight;
  routed.h = h;
  routed.ids = ids;
  routed.shares = shares;
  routed.lane = lane;
  routed.first = first;
  routed.run();

  float sums[R];
  for (uint r = 0; r < R; r++) sums[r] = routed.sums[r] + shares[top] * common.sums[r];
  const float y = sum_to_lanes<R>(sums, lane);
  if (lane < R && first + lane < ExpertsDownAdd_D) x[first + lane] += y;
}
