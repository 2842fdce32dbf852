// The gated delta rule over T tokens in order, per value head h; key head h / (HEADS / KEY_HEADS):
//   S ← g_t S;  S ← S + β_t (v_t - S k_t) k_tᵀ;  o_t = S q_t
//
// Threadgroups: (DV / (ROWS · SIMDGROUPS), HEADS). A simdgroup owns ROWS = 8 rows of a head's state
// for all tokens: four lanes a row, DK / 4 keys in registers in each. Four lanes, because a sum
// over the keys then takes two exchanges; they read 16 neighbouring keys together. A token waits
// for the one before, so what the next token reads is loaded while this one is computed, and kept
// as it comes, in half the registers.
//
// IN_MEMORY, to measure what the registers are worth: the state is read and written for each token.
// `o` is stored in between and might be the same memory, so no compiler keeps it in registers.
//
// A lane's keys are members of a nest of structs instead of an array: no compiler option decides
// whether they stay in registers.
#include "prefill_delta_scan.h"

#include "grids.h"

typedef vec<ACT, 4> Four;

// N times four keys, 16 apart, of q or k.
template <uint N>
struct Keys {
  Four head;
  Keys<N - 1> tail;
  METAL_FUNC void load(device const ACT* from) thread {
    head = *(device const Four*)from;
    tail.load(from + 16);
  }
};
template <>
struct Keys<0> {
  METAL_FUNC void load(device const ACT*) thread {}
};

// The same part of a row of the state.
template <uint N>
struct Row {
  float4 head;
  Row<N - 1> tail;
  METAL_FUNC void load(device const float* from) thread {
    head = *(device const float4*)from;
    tail.load(from + 16);
  }
  METAL_FUNC void store(device float* to) const thread {
    *(device float4*)to = head;
    tail.store(to + 16);
  }
  METAL_FUNC float4 dot(thread const Keys<N>& keys, float4 sum) const thread {
    return tail.dot(keys.tail, fma(head, float4(keys.head), sum));
  }
  METAL_FUNC void advance(float g, float delta, thread const Keys<N>& keys) thread {
    head = fma(float4(delta), float4(keys.head), g * head);
    tail.advance(g, delta, keys.tail);
  }
};
template <>
struct Row<0> {
  METAL_FUNC void load(device const float*) thread {}
  METAL_FUNC void store(device float*) const thread {}
  METAL_FUNC float4 dot(thread const Keys<0>&, float4 sum) const thread { return sum; }
  METAL_FUNC void advance(float, float, thread const Keys<0>&) thread {}
};

// The sum over the four lanes of a row.
METAL_FUNC float over_lanes(float4 v) {
  float sum = (v.x + v.y) + (v.z + v.w);
  sum += simd_shuffle_xor(sum, 1);
  return sum + simd_shuffle_xor(sum, 2);
}

// What a token brings.
struct Token {
  Keys<PrefillDeltaScan_DK / 16> q, k;
  float v, g, beta;
};

[[max_total_threads_per_threadgroup(32 * PREFILL_DELTA_SCAN_SIMDGROUPS)]]
kernel void prefill_delta_scan(LILY_ARGUMENTS(PrefillDeltaScan),
                               uint3 group [[threadgroup_position_in_grid]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint KEY_HEADS = PrefillDeltaScan_KEY_HEADS, HEADS = PrefillDeltaScan_HEADS;
  constexpr uint DK = PrefillDeltaScan_DK, DV = PrefillDeltaScan_DV;
  const uint head = group.y, share = lane % 4;
  const uint slice = group.x * PREFILL_DELTA_SCAN_SIMDGROUPS + simdgroup;
  const uint row = slice * PREFILL_DELTA_SCAN_ROWS + lane / 4;
  const ulong at = (ulong(head) * DV + row) * DK + 4 * share;

  q += head / (HEADS / KEY_HEADS) * DK + 4 * share;
  k += head / (HEADS / KEY_HEADS) * DK + 4 * share;
  v += head * DV + row;
  o += head * DV + row;
  steps += head;

  Row<DK / 16> state;
  state.load(state_in + at);
  if (PrefillDeltaScan_IN_MEMORY) state.store(state_out + at);
  Token now, next;
  for (uint t = 0; t <= p.rows; t++) {
    if (t < p.rows) {
      next.q.load(q + ulong(t) * (KEY_HEADS * DK));
      next.k.load(k + ulong(t) * (KEY_HEADS * DK));
      next.v = float(v[ulong(t) * (HEADS * DV)]);
      next.g = steps[ulong(t) * (2 * HEADS)];
      next.beta = steps[ulong(t) * (2 * HEADS) + HEADS];
    }
    if (t > 0) {
      if (PrefillDeltaScan_IN_MEMORY) state.load(state_out + at);
      const float known = over_lanes(state.dot(now.k, float4(0.0f)));
      const float delta = now.beta * (now.v - now.g * known);
      state.advance(now.g, delta, now.k);
      if (PrefillDeltaScan_IN_MEMORY) state.store(state_out + at);
      const float read = over_lanes(state.dot(now.q, float4(0.0f)));
      if (share == 0) o[ulong(t - 1) * (HEADS * DV)] = read;
    }
    now = next;
  }
  if (!PrefillDeltaScan_IN_MEMORY) state.store(state_out + at);
}
