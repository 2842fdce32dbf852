// qkv | z | b | a = W_in · y
//
// Threadgroups: (ceil(T / TILE_ROWS), ceil(N / TILE_OUTPUTS)) for the N rows of all four
// projections: those that share a part of the weight are neighbours.
#include "prefill_delta_project.h"

#define LILY_TENSOR_TYPE half  // y is normed
#include "tile_product.h"

LILY_PACKED(PrefillDeltaProject, weight)

constant constexpr uint CHANNELS = PrefillDeltaProject_CHANNELS;
constant constexpr uint VALUES = PrefillDeltaProject_VALUES;
constant constexpr uint GATES = 2 * PrefillDeltaProject_HEADS;

struct DeltaInputsSink {
  typedef PlainOutputs Outputs;
  device ACT* qkv;
  device ACT* z;
  device float* gates;
  uint first_row, first;

  METAL_FUNC uint weight_row(uint n) const thread {
    return min(first + n, CHANNELS + VALUES + GATES - 1);
  }
  METAL_FUNC void put(uint r, uint n, float sum) const thread {
    const ulong row = first_row + r;
    const uint out = first + n;
    if (out < CHANNELS)
      qkv[row * CHANNELS + out] = ACT(sum);
    else if (out < CHANNELS + VALUES)
      z[row * VALUES + (out - CHANNELS)] = ACT(sum);
    else if (out < CHANNELS + VALUES + GATES)
      gates[row * GATES + (out - CHANNELS - VALUES)] = sum;
  }
};

[[max_total_threads_per_threadgroup(32 * PREFILL_TILE_SIMDGROUPS)]]
kernel void prefill_delta_project(LILY_ARGUMENTS(PrefillDeltaProject),
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]]) {
  LILY_TILE_MEMORY(PREFILL_TILE_ROWS)
  const TileThread me = LILY_TILE_THREAD(simdgroup, lane);
  const uint row = group.x * PREFILL_TILE_ROWS;
  if (row >= p.rows) return;
  const Rows rows = {y + ulong(row) * PrefillDeltaProject_D, PrefillDeltaProject_D};
  const DeltaInputsSink sink = {qkv, z, gates, row, group.y * PREFILL_TILE_OUTPUTS};
  tile_product<PREFILL_TILE_ROWS, PrefillDeltaProject_weight>(me, weight, rows, sink,
                                           min(p.rows - row, uint(PREFILL_TILE_ROWS)));
}
