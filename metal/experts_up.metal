// ids = the TOP largest logits, lowest index first on ties;  shares = softmax over them          (E2)
// h_i = silu(W_gate[ids_i] · norm(x)) ⊙ W_up[ids_i] · norm(x)
//
// Threadgroups: ceil(F / (PAIRS · SIMDGROUPS)) × TOP, PAIRS = ROWS / 2. A threadgroup of (_, i)
// works for choice i, and finds out itself which expert that is: i + 1 rounds of a maximum over
// logits in registers, instead of a stage in between. A simdgroup owns PAIRS rows of gate and the
// same of up. The first one of the last choice has seen all winners and writes ids and shares.
#include "experts_up.h"

#include "argmax.h"
#include "grids.h"
#include "qmv.h"

LILY_PACKED(ExpertsUp, weight)

[[max_total_threads_per_threadgroup(32 * EXPERTS_UP_SIMDGROUPS)]]
kernel void experts_up(LILY_ARGUMENTS(ExpertsUp),
                       uint3 group [[threadgroup_position_in_grid]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint R = LILY_ROWS(ExpertsUp_ROWS, EXPERTS_UP_ROWS), pairs = R / 2;
  constexpr uint experts = ExpertsUp_EXPERTS;
  constexpr uint top = ExpertsUp_TOP, per_lane = (experts + 31) / 32, kept = (top + 31) / 32;

  float mine[per_lane];
  for (uint i = 0; i < per_lane; i++) {
    const float logit = logits[min(32 * i + lane, experts - 1)];
    mine[i] = isnan(logit) ? -INFINITY : logit;
  }
  Best winner = {INFINITY, 0};
  float largest = 0.0f;
  Best chosen[kept];  // lane l keeps the winners l, l + 32
  for (uint i = 0; i < kept; i++) chosen[i] = {-INFINITY, 0};
  for (uint round = 0; round <= group.y; round++) {
    Best best = {-INFINITY, LILY_NO_INDEX};
    for (uint i = 0; i < per_lane; i++) {
      const Best other = {mine[i], 32 * i + lane};
      const bool left = round == 0 || winner.before(other);
      if (other.index < experts && left && other.before(best)) best = other;
    }
    winner = simd_best(best);
    if (round == 0) largest = winner.value;
    for (uint i = 0; i < kept; i++)
      if (round == 32 * i + lane) chosen[i] = winner;
  }

  if (group.x == 0 && group.y == top - 1 && simdgroup == 0) {
    float weights[kept], sum = 0.0f;
    for (uint i = 0; i < kept; i++) {
      weights[i] = 32 * i + lane < top ? precise::exp(chosen[i].value - largest) : 0.0f;
      sum += weights[i];
    }
    sum = simd_sum(sum);
    for (uint i = 0; i < kept; i++) {
      if (32 * i + lane >= top) continue;
      ids[32 * i + lane] = chosen[i].index;
      shares[32 * i + lane] = weights[i] / sum;
    }
    if (lane == 0) shares[top] = sigmoid(logits[experts]);
  }

  RowProduct<ExpertsUp_weight, NormedInput, R> product;
  product.weight = ExpertsUp_weight::expert(weight, winner.index);
  product.lane = lane;
  product.input.x = x;
  product.input.gamma = gamma;
  const uint first = (group.x * EXPERTS_UP_SIMDGROUPS + simdgroup) * pairs;
  for (uint r = 0; r < R; r++) {
    const uint row = first + r % pairs;
    product.rows[r] = row < ExpertsUp_F ? r / pairs * ExpertsUp_F + row : LILY_NO_ROW;
  }
  product.run();
  const float factor = product.input.factor(ExpertsUp_D, ExpertsUp_EPS);
  const float y = sum_to_lanes<R>(product.sums, lane) * factor;
  const float up = simd_shuffle_down(y, ushort(pairs));
  if (lane < pairs && first + lane < ExpertsUp_F)
    h[group.y * ExpertsUp_F + first + lane] = ACT(silu(y) * up);
}
