// logits = W_router | w_shared_gate · y;  shared = silu(W_gate · y) ⊙ W_up · y
//
// Threadgroups: (ceil(T / TILE_ROWS), ceil((EXPERTS + 1) / TILE_OUTPUTS) + ceil(SHARED / 32)):
// first the logits, then the shared expert, whose tiles hold 32 outputs of each projection.
#include "prefill_route.h"

#define LILY_TENSOR_TYPE half  // y is normed
#include "activations.h"
#include "dense_sinks.h"

LILY_PACKED(PrefillRoute, weight)

constant constexpr uint LOGITS = PrefillRoute_EXPERTS + 1, SHARED = PrefillRoute_SHARED;

struct SharedSink {
  typedef GatedOutputs Outputs;
  device ACT* shared;
  uint first_row, first;

  METAL_FUNC uint weight_row(uint n) const thread {
    return LOGITS + GatedOutputs::weight_row(n, first, SHARED);
  }
  METAL_FUNC void put(uint r, uint n, float gate, float up) const thread {
    if (first + n < SHARED)
      shared[ulong(first_row + r) * SHARED + first + n] = ACT(silu(gate) * up);
  }
};

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_route(LILY_ARGUMENTS(PrefillRoute),
                          uint3 group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(PREFILL_TILE_ROWS)
  constexpr uint tiles = (LOGITS + PREFILL_TILE_OUTPUTS - 1) / PREFILL_TILE_OUTPUTS;
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint row = group.x * PREFILL_TILE_ROWS;
  if (row >= p.rows) return;
  const Rows rows = {y + ulong(row) * PrefillRoute_D, PrefillRoute_D};
  const uint n_rows = min(p.rows - row, uint(PREFILL_TILE_ROWS));
  if (group.y < tiles) {
    const StoreSink<float, LOGITS> sink = {logits, row, group.y * PREFILL_TILE_OUTPUTS};
    tile_product<PREFILL_TILE_ROWS, PrefillRoute_weight>(me, weight, rows, sink, n_rows);
  } else {
    const SharedSink sink = {shared, row, (group.y - tiles) * (PREFILL_TILE_OUTPUTS / 2)};
    tile_product<PREFILL_TILE_ROWS, PrefillRoute_weight>(me, weight, rows, sink, n_rows);
  }
}
