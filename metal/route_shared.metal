// logits = W_router | w_shared_gate · norm(x);  shared = silu(W_gate · norm(x)) ⊙ W_up · norm(x)   (E1)
//
// Simdgroups: first ceil((EXPERTS + 1) / ROWS) with ROWS logits each, then ceil(SHARED / PAIRS)
// with PAIRS = ROWS / 2 rows of gate and the same ones of up, so that the gate is applied in
// registers.
#include "route_shared.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(RouteShared, weight)

[[max_total_threads_per_threadgroup(32 * ROUTE_SHARED_SIMDGROUPS)]]
kernel void route_shared(LILY_ARGUMENTS(RouteShared),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(RouteShared_ROWS, ROUTE_SHARED_ROWS), pairs = R / 2;
  constexpr uint n_logits = RouteShared_EXPERTS + 1, n_shared = RouteShared_SHARED;
  constexpr uint logit_simdgroups = (n_logits + R - 1) / R;

  const uint index = group.x * ROUTE_SHARED_SIMDGROUPS + simdgroup;
  const bool gated = index >= logit_simdgroups;
  const uint first = gated ? (index - logit_simdgroups) * pairs : index * R;
  const uint end = gated ? n_shared : n_logits;

  RowProduct<RouteShared_weight, NormedInput, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.x = x;
  product.input.gamma = gamma;
  for (uint r = 0; r < R; r++) {
    const uint row = gated ? first + r % pairs : first + r;
    const uint above = gated ? n_logits + r / pairs * n_shared : 0u;
    product.rows[r] = row < end ? above + row : LILY_NO_ROW;
  }
  product.run();
  const float factor = product.input.factor(RouteShared_D, RouteShared_EPS);
  const float y = sum_to_lanes<R>(product.sums, lane) * factor;
  const float up = simd_shuffle_down(y, ushort(pairs));
  if (!gated && lane < R && first + lane < n_logits) logits[first + lane] = y;
  if (gated && lane < pairs && first + lane < n_shared) shared[first + lane] = ACT(silu(y) * up);
}
