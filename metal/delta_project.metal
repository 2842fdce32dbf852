// qkv | z | b | a = W_in · norm(x), qkv into slot position & 3 of the conv ring             (G1)
//
// Threadgroups: ceil(N / (ROWS · SIMDGROUPS)) for the N rows of all four projections, which lie one
// below the other in one weight. A simdgroup owns ROWS rows and writes each result where it
// belongs.
#include "delta_project.h"

#include "grids.h"
#include "qmv.h"

LILY_PACKED(DeltaProject, weight)

[[max_total_threads_per_threadgroup(32 * DELTA_PROJECT_SIMDGROUPS)]]
kernel void delta_project(LILY_ARGUMENTS(DeltaProject),
                          uint3 group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(DeltaProject_ROWS, DELTA_PROJECT_ROWS);
  constexpr uint channels = DeltaProject_CHANNELS, values = DeltaProject_VALUES;
  constexpr uint n = channels + values + 2 * DeltaProject_HEADS;

  RowProduct<DeltaProject_weight, NormedInput, R> product;
  product.weight = weight;
  product.lane = lane;
  product.input.x = x;
  product.input.gamma = gamma;
  const uint first = (group.x * DELTA_PROJECT_SIMDGROUPS + simdgroup) * R;
  for (uint r = 0; r < R; r++) product.rows[r] = first + r;
  product.run();
  const float factor = product.input.factor(DeltaProject_D, DeltaProject_EPS);
  const float y = sum_to_lanes<R>(product.sums, lane) * factor;

  const uint row = first + lane;
  if (lane >= R || row >= n) return;
  if (row < channels)
    ring[(p.position & 3u) * channels + row] = ACT(y);
  else if (row < channels + values)
    z[row - channels] = ACT(y);
  else
    gates[row - channels - values] = y;
}
