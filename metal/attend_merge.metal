// u = Σ_b e^(max_b - max) partial_b / Σ_b e^(max_b - max) sum_b ⊙ sigmoid(gate)              (A3)
//
// Threadgroups: HEADS × ceil(DH / COLS). COLS columns of a head; threads that differ by COLS share
// out the blocks.
#include "attend_merge.h"

#include "activations.h"
#include "grids.h"

[[max_total_threads_per_threadgroup(32 * ATTEND_MERGE_SIMDGROUPS)]]
kernel void attend_merge(LILY_ARGUMENTS(AttendMerge),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint cols = ATTEND_MERGE_COLS, shares = 32 * ATTEND_MERGE_SIMDGROUPS / cols;
  constexpr uint heads = AttendMerge_HEADS, dh = AttendMerge_DH;
  threadgroup float sums[shares * cols];
  const uint head = group.x, column = group.y * cols + index % cols, share = index / cols;

  float top = -INFINITY, total = 0.0f;
  for (uint b = lane; b < p.blocks; b += 32) top = max(top, extent[2 * (b * heads + head)]);
  top = simd_max(top);
  for (uint b = lane; b < p.blocks; b += 32) {
    device const float* e = extent + 2 * (b * heads + head);
    total += precise::exp(e[0] - top) * e[1];
  }
  total = simd_sum(total);

  float sum = 0.0f;
  for (uint b = share; b < p.blocks && column < dh; b += shares) {
    const uint row = b * heads + head;
    sum += precise::exp(extent[2 * row] - top) * partial[row * dh + column];
  }
  sums[index] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (share != 0 || column >= dh) return;
  sum = 0.0f;
  for (uint i = 0; i < shares; i++) sum += sums[i * cols + index];
  const float gate = float(qkv[(2 * head + 1) * dh + column]);
  u[head * dh + column] = ACT(sum / total * sigmoid(gate));
}
