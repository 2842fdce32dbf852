// Group the T · TOP (token, expert) pairs by expert, in each expert in the order of the tokens.
//
// Threadgroups: ceil((EXPERTS + 1) / SIMDGROUPS). A simdgroup owns an expert and reads all ids
// twice, 512 bytes at a time: first it counts those of lower experts, which gives its first row,
// then it gives its own the rows from there on. The ids are few and stay in the cache; in return
// there are no atomics, so the rows are the same every time. One more simdgroup counts all pairs.
#include "prefill_scatter.h"

#include "grids.h"

// Four ids from i on; those that are not there belong to nobody.
METAL_FUNC uint4 ids_from(device const uint* ids, uint i, uint n) {
  if (i + 4 <= n) return *(device const uint4*)(ids + i);
  uint4 v = uint4(0xffffffffu);
  for (uint j = 0; j < 4; j++)
    if (i + j < n) v[j] = ids[i + j];
  return v;
}

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_scatter(LILY_ARGUMENTS(PrefillScatter),
                            uint3 group [[threadgroup_position_in_grid]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint E = PrefillScatter_EXPERTS, TOP = PrefillScatter_TOP;
  const uint expert = group.x * PREFILL_SIMDGROUPS + simdgroup, n = p.rows * TOP;
  if (expert > E) return;

  uint lower = 0;
  for (uint i = 4 * lane; i < n; i += 128) {
    const uint4 v = ids_from(ids, i, n);
    for (uint j = 0; j < 4; j++) lower += v[j] < expert ? 1u : 0u;
  }
  uint next = simd_sum(lower);
  if (lane == 0) offsets[expert] = next;
  if (expert == E) return;

  for (uint first = 0; first < n; first += 128) {
    const uint i = first + 4 * lane;
    const uint4 v = ids_from(ids, i, n);
    uint mine = 0;
    for (uint j = 0; j < 4; j++) mine += v[j] == expert ? 1u : 0u;
    uint row = next + simd_prefix_exclusive_sum(mine);
    next += simd_sum(mine);
    for (uint j = 0; j < 4; j++)
      if (v[j] == expert) {
        src[row] = (i + j) / TOP;
        inv[i + j] = row;
        row++;
      }
  }
}
