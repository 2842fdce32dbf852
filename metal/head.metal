// logits = W_head · norm(x[row]), and the largest of the first VALID with its lowest index      (H1)
//
// Threadgroups: one for each `span` rows, span = ceil(V / MAXIMA) rounded up to what its simdgroups
// do at a time, so at most MAXIMA. Each leaves one maximum; those beyond the last threadgroup are
// filled by it. A simdgroup takes ROWS rows at a time.
#include "head.h"

#include "argmax.h"
#include "grids.h"
#include "qmv.h"

LILY_PACKED(Head, weight)

[[max_total_threads_per_threadgroup(32 * HEAD_SIMDGROUPS)]]
kernel void head(LILY_ARGUMENTS(Head),
                 uint3 group [[threadgroup_position_in_grid]],
                 uint3 groups [[threadgroups_per_grid]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[HEAD_SIMDGROUPS];
  threadgroup uint indices[HEAD_SIMDGROUPS];
  constexpr uint R = LILY_ROWS(Head_ROWS, HEAD_ROWS), step = R * HEAD_SIMDGROUPS;
  constexpr uint valid = Head_VALID < Head_V ? Head_VALID : Head_V;
  constexpr uint span = HEAD_SPAN(Head_V, Head_MAXIMA);

  RowProduct<Head_weight, NormedInput, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.x = x + ulong(p.row) * Head_D;
  product.input.gamma = gamma;
  Best best = {-INFINITY, LILY_NO_INDEX};  // only a number above -inf comes before it
  for (uint done = 0; done < span; done += step) {
    const uint first = group.x * span + done + simdgroup * R;
    if (first >= Head_V) break;
    for (uint r = 0; r < R; r++) product.rows[r] = first + r;
    product.run();
    const float factor = product.input.factor(Head_D, Head_EPS);
    const float y = sum_to_lanes<R>(product.sums, lane) * factor;
    const uint row = first + lane;
    if (lane < R && row < Head_V) {
      if (Head_STORE) logits[row] = y;
      if (row < valid && y > best.value) best = {y, row};
    }
  }

  best = simd_best(best);
  if (lane == 0) {
    values[simdgroup] = best.value;
    indices[simdgroup] = best.index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0) return;
  const uint other = min(lane, HEAD_SIMDGROUPS - 1u);
  best = {values[other], indices[other]};
  best = simd_best(best);
  const uint end = group.x + 1 == groups.x ? Head_MAXIMA : group.x + 1;
  for (uint i = group.x + lane; i < end; i += 32) {
    maxima[2 * i] = as_type<uint>(i == group.x ? best.value : -INFINITY);
    maxima[2 * i + 1] = i == group.x ? best.index : LILY_NO_INDEX;
  }
}
