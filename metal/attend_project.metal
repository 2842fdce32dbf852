// q | gate, k, v = W_in · norm(x)                                                          (A1)
//
// Threadgroups: ceil(N / (ROWS · SIMDGROUPS)). A simdgroup owns ROWS rows.
#include "attend_project.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(AttendProject, weight)

[[max_total_threads_per_threadgroup(32 * ATTEND_PROJECT_SIMDGROUPS)]]
kernel void attend_project(LILY_ARGUMENTS(AttendProject),
                           uint3 group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(AttendProject_ROWS, ATTEND_PROJECT_ROWS);

  RowProduct<AttendProject_weight, NormedInput, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.x = x;
  product.input.gamma = gamma;
  const uint first = (group.x * ATTEND_PROJECT_SIMDGROUPS + simdgroup) * R;
  for (uint r = 0; r < R; r++) product.rows[r] = first + r;
  product.run();
  const float factor = product.input.factor(AttendProject_D, AttendProject_EPS);
  const float y = sum_to_lanes<R>(product.sums, lane) * factor;
  if (lane < R && first + lane < AttendProject_N) qkv[first + lane] = ACT(y);
}
