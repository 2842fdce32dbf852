// x += W · u
//
// Threadgroups: (ceil(T / TILE_ROWS), ceil(N / TILE_OUTPUTS)): those that share a part of the
// weight are neighbours.
#include "prefill_project_add.h"

#include "dense_sinks.h"

LILY_PACKED(PrefillProjectAdd, weight)

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_project_add(LILY_ARGUMENTS(PrefillProjectAdd),
                                uint3 group [[threadgroup_position_in_grid]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(PREFILL_TILE_ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint row = group.x * PREFILL_TILE_ROWS;
  if (row >= p.rows) return;
  const Rows rows = {u + ulong(row) * PrefillProjectAdd_K, PrefillProjectAdd_K};
  const AddSink<PrefillProjectAdd_N> sink = {x, row, group.y * PREFILL_TILE_OUTPUTS};
  tile_product<PREFILL_TILE_ROWS, PrefillProjectAdd_weight>(me, weight, rows, sink,
                                         min(p.rows - row, uint(PREFILL_TILE_ROWS)));
}
