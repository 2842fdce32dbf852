// out_r = W_down[e] · h_r for the grouped rows r of each expert e
// shared_out = W_shared_down · shared
//
// Threadgroups: (ceil(T / TILE_ROWS) + most tiles that T · TOP rows can make,
// ceil(D / TILE_OUTPUTS)). The shared expert, which has all rows, comes first. Then tiles are counted
// expert by expert, so those that read the same weights are neighbours; a threadgroup without a tile
// ends, and one that finds more tiles than there are threadgroups goes on.
#include "prefill_experts_down.h"

#include "dense_sinks.h"
#include "grouped_tiles.h"

LILY_PACKED(PrefillExpertsDown, weight)
LILY_PACKED(PrefillExpertsDown, shared_weight)

constant constexpr uint D = PrefillExpertsDown_D, F = PrefillExpertsDown_F;
constant constexpr uint EXPERTS = PrefillExpertsDown_EXPERTS, SHARED = PrefillExpertsDown_SHARED;
constant constexpr uint ROWS = PrefillExpertsDown_TILE_ROWS;

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_experts_down(LILY_ARGUMENTS(PrefillExpertsDown),
                                 uint3 group [[threadgroup_position_in_grid]],
                                 uint3 groups [[threadgroups_per_grid]],
                                 uint simdgroup [[simdgroup_index_in_threadgroup]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint first = group.y * PREFILL_TILE_OUTPUTS, shared_tiles = tiles_of<ROWS>(p.rows);
  if (group.x < shared_tiles) {
    const uint row = group.x * ROWS;
    const Rows rows = {shared + ulong(row) * SHARED, SHARED};
    const StoreSink<ACT, D> sink = {shared_out, row, first};
    tile_product<ROWS, PrefillExpertsDown_shared_weight>(me, shared_weight, rows, sink,
                                                         min(p.rows - row, ROWS));
    return;
  }
  GroupedTile tile;
  uint i = group.x - shared_tiles;
  for (; find_tile<EXPERTS, ROWS>(offsets, i, lane, tile);
       i += groups.x - shared_tiles) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Rows rows = {h + ulong(tile.first) * F, F};
    const StoreSink<ACT, D> sink = {out, tile.first, first};
    tile_product<ROWS, PrefillExpertsDown_weight>(
        me, PrefillExpertsDown_weight::expert(weight, tile.expert), rows, sink, tile.rows);
  }
}
