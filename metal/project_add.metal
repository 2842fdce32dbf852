// x += W · (u ⊙ r),  r = rsqrt(Σ squares / (K / HEADS) + EPS) per head; r = 1 when HEADS = 0    (G3, A4)
//
// Threadgroups: ceil(N / (ROWS · SIMDGROUPS)). A simdgroup owns ROWS rows, and so elements of x.
// Lane h computes the factor of head h, from which the product fetches it.
#include "project_add.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(ProjectAdd, weight)

[[max_total_threads_per_threadgroup(32 * PROJECT_ADD_SIMDGROUPS)]]
kernel void project_add(LILY_ARGUMENTS(ProjectAdd),
                        uint3 group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(ProjectAdd_ROWS, PROJECT_ADD_ROWS);
  typedef HeadsInput<ProjectAdd_K, ProjectAdd_HEADS, ProjectAdd_PARTIALS> Input;

  RowProduct<ProjectAdd_weight, Input, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.u = u;
  product.input.squares = squares;
  product.input.lane = lane;
  product.input.eps = ProjectAdd_EPS;
  const uint first = (group.x * PROJECT_ADD_SIMDGROUPS + simdgroup) * R;
  for (uint r = 0; r < R; r++) product.rows[r] = first + r;
  product.run();
  const float y = sum_to_lanes<R>(product.sums, lane);
  if (lane < R && first + lane < ProjectAdd_N) x[first + lane] += y;
}
