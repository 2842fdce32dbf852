// logits = W_head · y for every row
//
// Threadgroups: (ceil(T / TILE_ROWS), ceil(V / TILE_OUTPUTS)): those that share a part of the
// weight are neighbours.
#include "prefill_head.h"

#define LILY_TENSOR_TYPE half  // y is normed
#include "dense_sinks.h"

LILY_PACKED(PrefillHead, weight)

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_head(LILY_ARGUMENTS(PrefillHead),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(PREFILL_TILE_ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint row = group.x * PREFILL_TILE_ROWS;
  if (row >= p.rows) return;
  const Rows rows = {y + ulong(row) * PrefillHead_D, PrefillHead_D};
  const StoreSink<float, PrefillHead_V> sink = {logits, row, group.y * PREFILL_TILE_OUTPUTS};
  tile_product<PREFILL_TILE_ROWS, PrefillHead_weight>(me, weight, rows, sink,
                                   min(p.rows - row, uint(PREFILL_TILE_ROWS)));
}
