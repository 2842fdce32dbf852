// h_r = silu(W_gate[e] · y[src_r]) ⊙ W_up[e] · y[src_r] for the grouped rows r of each expert e
//
// Threadgroups: (most tiles of TILE_ROWS that T · TOP rows can make, ceil(F / 32)). Tiles are
// counted expert by expert, so those that read the same weights are neighbours; a threadgroup
// without a tile ends, and one that finds more tiles than there are threadgroups goes on. A tile
// holds 32 outputs of each projection, so a gate meets its up projection without leaving the
// simdgroup. Rows are gathered while they are brought in.
#include "prefill_experts_up.h"

#define LILY_TENSOR_TYPE half  // y is normed
#include "activations.h"
#include "grouped_tiles.h"
#include "tile_product.h"

LILY_PACKED(PrefillExpertsUp, weight)

constant constexpr uint D = PrefillExpertsUp_D, F = PrefillExpertsUp_F;
constant constexpr uint EXPERTS = PrefillExpertsUp_EXPERTS, ROWS = PrefillExpertsUp_TILE_ROWS;

struct GatheredRows {
  device const ACT* y;
  device const uint* src;
  METAL_FUNC device const ACT* row(uint r) const thread { return y + ulong(src[r]) * D; }
};

struct ExpertsUpSink {
  typedef GatedOutputs Outputs;
  device ACT* h;
  uint first_row, first;

  METAL_FUNC uint weight_row(uint n) const thread { return GatedOutputs::weight_row(n, first, F); }
  METAL_FUNC void put(uint r, uint n, float gate, float up) const thread {
    if (first + n < F) h[ulong(first_row + r) * F + first + n] = ACT(silu(gate) * up);
  }
};

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_experts_up(LILY_ARGUMENTS(PrefillExpertsUp),
                               uint3 group [[threadgroup_position_in_grid]],
                               uint3 groups [[threadgroups_per_grid]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  GroupedTile tile;
  uint i = group.x;
  for (; find_tile<EXPERTS, ROWS>(offsets, i, lane, tile); i += groups.x) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const GatheredRows rows = {y, src + tile.first};
    const ExpertsUpSink sink = {h, tile.first, group.y * (PREFILL_TILE_OUTPUTS / 2)};
    tile_product<ROWS, PrefillExpertsUp_weight>(
        me, PrefillExpertsUp_weight::expert(weight, tile.expert), rows, sink, tile.rows);
  }
}
