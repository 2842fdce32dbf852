// ids = the TOP largest logits of a row, lowest index first on ties;  shares = softmax over them
//
// Threadgroups: ceil(T / SIMDGROUPS). A simdgroup owns a row, every 32nd logit in a lane. It takes
// the winners one by one: each is the largest of those that come after the last winner, in the
// order of falling logit, then rising index. So nothing is marked as taken, and ids are different
// and in range whatever the logits hold; a NaN comes last.
#include "prefill_topk.h"

#include "activations.h"
#include "grids.h"
#include "unroll.h"

[[max_total_threads_per_threadgroup(32 * PREFILL_SIMDGROUPS)]]
kernel void prefill_topk(LILY_ARGUMENTS(PrefillTopk),
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint E = PrefillTopk_EXPERTS, TOP = PrefillTopk_TOP, N = (E + 31) / 32;
  static_assert(TOP <= 64, "a lane keeps two winners");
  constexpr uint nobody = 0xffffffffu;
  const uint row = group.x * PREFILL_SIMDGROUPS + simdgroup;
  if (row >= p.rows) return;
  device const float* from = logits + ulong(row) * (E + 1);

  float v[N];
  LILY_UNROLL for (uint i = 0; i < N; i++) {
    const uint e = 32 * i + lane;
    v[i] = e < E ? from[e] : -INFINITY;
    if (isnan(v[i])) v[i] = -INFINITY;
  }

  float last = INFINITY, largest = 0.0f, won[2] = {-INFINITY, -INFINITY};
  uint last_id = nobody, won_id[2] = {nobody, nobody};
  for (uint k = 0; k < TOP; k++) {
    float best = -INFINITY;
    uint best_id = nobody;
    LILY_UNROLL for (uint i = 0; i < N; i++) {
      const uint e = 32 * i + lane;
      const bool left = v[i] < last || (v[i] == last && (last_id == nobody || e > last_id));
      if (e < E && left && (v[i] > best || best_id == nobody)) {
        best = v[i];
        best_id = e;
      }
    }
    last = simd_max(best);
    last_id = simd_min(best == last ? best_id : nobody);
    if (k == 0) largest = last;
    LILY_UNROLL for (uint j = 0; j < 2; j++)
      if (k == 32 * j + lane) {
        won[j] = last;
        won_id[j] = last_id;
      }
  }

  float share[2];
  LILY_UNROLL for (uint j = 0; j < 2; j++)
    share[j] = 32 * j + lane < TOP ? exp(won[j] - largest) : 0.0f;
  const float sum = simd_sum(share[0] + share[1]);
  device uint* to_ids = ids + ulong(row) * TOP;
  device float* to_shares = shares + ulong(row) * (TOP + 1);
  LILY_UNROLL for (uint j = 0; j < 2; j++) {
    const uint k = 32 * j + lane;
    if (k < TOP) {
      to_ids[k] = won_id[j];
      to_shares[k] = share[j] / sum;
    }
  }
  if (lane == 0) to_shares[TOP] = sigmoid(from[E]);
}
