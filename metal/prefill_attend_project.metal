// q | gate (interleaved by head), k, v = W_in · y
//
// Threadgroups: (ceil(T / TILE_ROWS), tiles of TILE_OUTPUTS from that of FIRST to the last): those
// that share a part of the weight are neighbours.
#include "prefill_attend_project.h"

#define LILY_TENSOR_TYPE half  // y is normed
#include "dense_sinks.h"

LILY_PACKED(PrefillAttendProject, weight)

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_attend_project(LILY_ARGUMENTS(PrefillAttendProject),
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(PREFILL_TILE_ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint row = group.x * PREFILL_TILE_ROWS;
  if (row >= p.rows) return;
  const Rows rows = {y + ulong(row) * PrefillAttendProject_D, PrefillAttendProject_D};
  const uint tile = PrefillAttendProject_FIRST / PREFILL_TILE_OUTPUTS + group.y;
  const StoreSink<ACT, PrefillAttendProject_N> sink = {qkv, row, tile * PREFILL_TILE_OUTPUTS};
  tile_product<PREFILL_TILE_ROWS, PrefillAttendProject_weight>(me, weight, rows, sink,
                                            min(p.rows - row, uint(PREFILL_TILE_ROWS)));
}
