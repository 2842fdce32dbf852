// out_i = W_down[ids_i] · h_i;  shared_out = W_shared_down · shared
//
// Threadgroups: ceil(D / (ROWS · SIMDGROUPS)) × (TOP + 1), the numbers of experts_down_add, whose
// sum over the experts this kernel leaves to another. A simdgroup owns ROWS rows of one expert; the
// last is the shared one.
#include "experts_down.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(ExpertsDown, weight)
LILY_PACKED(ExpertsDown, shared_weight)

// `to` = rows first … of a weight · u.
template <class Form>
METAL_FUNC void rows_of(device const uchar* weight, device const ACT* u, device ACT* to, uint first,
                        uint lane) {
  constexpr uint R = LILY_ROWS(ExpertsDown_ROWS, EXPERTS_DOWN_ADD_ROWS);
  RowProduct<Form, PlainInput, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.u = u;
  for (uint r = 0; r < R; r++) product.rows[r] = first + r;
  product.run();
  const float y = sum_to_lanes<R>(product.sums, lane);
  if (lane < R && first + lane < ExpertsDown_D) to[first + lane] = ACT(y);
}

[[max_total_threads_per_threadgroup(32 * EXPERTS_DOWN_ADD_SIMDGROUPS)]]
kernel void experts_down(LILY_ARGUMENTS(ExpertsDown),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  const uint choice = group.y;
  const uint first = (group.x * EXPERTS_DOWN_ADD_SIMDGROUPS + simdgroup) *
                     LILY_ROWS(ExpertsDown_ROWS, EXPERTS_DOWN_ADD_ROWS);
  if (choice == ExpertsDown_TOP)
    rows_of<ExpertsDown_shared_weight>(shared_weight, shared, shared_out, first, lane);
  else
    rows_of<ExpertsDown_weight>(ExpertsDown_weight::expert(weight, ids[choice]),
                                h + choice * ExpertsDown_F, out + choice * ExpertsDown_D, first,
                                lane);
}
