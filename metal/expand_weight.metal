// out = the weight with all its codes as numbers, rounded to bf16
//
// Threadgroups: ceil(N · K / 16 / THREADS) × EXPERTS. A thread owns 16 neighbouring columns of a
// row: one load of codes, 32 bytes of bf16.
#include "expand_weight.h"

#include "grids.h"
#include "packed_weights.h"

LILY_PACKED(ExpandWeight, weight)
LILY_PACKED(ExpandWeight, out)

static_assert(ExpandWeight_out_N_PARTS == 1, "segments of 16 bits are one part");

// 16 columns of a row, wherever its part is.
struct Sixteen {
  device const uchar* weight;  // of one expert
  uint row, column;
  float values[16];

  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    if (row < FIRST || row >= FIRST + ROWS) return;
    constexpr uint cols = ExpandWeight_K;
    const uint at = row - FIRST;
    Codes<BITS> codes;
    codes.load(weight + CODES + ulong(at) * code_bytes<BITS>(cols) + code_bytes<BITS>(column));
    codes.expand(values);
    if (BITS == 16) return;
    const uint affine =
        ((device const uint*)(weight + AFFINE))[at * affine_words(cols) + column / LILY_GROUP];
    for (uint i = 0; i < 16; i++)
      values[i] = fma(affine_scale(affine), values[i], affine_bias(affine));
  }
};

// Where the only part of `out` starts.
struct Start {
  ulong offset;
  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    offset = CODES;
  }
};

[[max_total_threads_per_threadgroup(EXPAND_WEIGHT_THREADS)]]
kernel void expand_weight(LILY_ARGUMENTS(ExpandWeight),
                          uint3 group [[threadgroup_position_in_grid]],
                          uint3 within [[thread_position_in_threadgroup]]) {
  const uint first = 16 * (group.x * EXPAND_WEIGHT_THREADS + within.x);
  if (first >= ExpandWeight_N * ExpandWeight_K) return;
  Sixteen sixteen;
  sixteen.weight = ExpandWeight_weight::expert(weight, group.y);
  sixteen.row = first / ExpandWeight_K;
  sixteen.column = first % ExpandWeight_K;
  ExpandWeight_weight::for_parts(sixteen);
  Start start;
  ExpandWeight_out::for_parts(start);
  device bfloat* to =
      (device bfloat*)(out + ulong(group.y) * ExpandWeight_out_EXPERT_BYTES + start.offset) + first;
  for (uint i = 0; i < 16; i++) to[i] = bfloat(sixteen.values[i]);
}
