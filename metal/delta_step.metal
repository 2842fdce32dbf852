// One step of the gated delta rule, per value head h with key head h / (HEADS / KEY_HEADS):   (G2)
//   q, k, v = silu(conv(ring)); q, k l2-normalised, q scaled by DK^-1/2
//   g = exp(decay · softplus(a + dt_bias)), β = sigmoid(b)
//   with the old S:  δ = β (v - g S k);  o = g S q + δ (k · q);  S' = g S + δ kᵀ
//   u = o ⊙ gamma ⊙ silu(z);  squares = Σ o² over the threadgroup's rows; or only o, if RAW
//
// Threadgroups: HEADS × PARTIALS, each with DV / PARTIALS rows of a head's state, shared out among
// its simdgroups. The state is nearly all that is read and written, once each: a lane holds DK / 32
// of a row, both products are taken of the old row, and four rows are loaded before the first is
// used. The convolution of a key head's q and k is repeated in every threadgroup that needs it.
#include "delta_step.h"

#include "activations.h"
#include "grids.h"

// Where a lane's element i of a row of DK lies: four neighbours where the width allows it.
constexpr METAL_FUNC uint delta_key(uint i, uint lane) {
  return DeltaStep_DK % 128 == 0 ? i / 4 * 128 + 4 * lane + i % 4 : 32 * i + lane;
}

METAL_FUNC float delta_conv(device const ACT* ring, device const float* conv, uint position,
                            uint channel) {
  constexpr uint channels =
      2 * DeltaStep_KEY_HEADS * DeltaStep_DK + DeltaStep_HEADS * DeltaStep_DV;
  const float4 taps = *(device const float4*)(conv + 4 * channel);
  float sum = 0.0f;
  for (uint tap = 0; tap < 4; tap++)
    sum += taps[tap] * float(ring[(position + 1 + tap) % 4 * channels + channel]);
  return silu(sum);
}

template <uint PER_LANE>
METAL_FUNC void load_state(device const float* row, uint lane, thread float* out) {
  if (DeltaStep_DK % 128 == 0) {
    for (uint i = 0; i < PER_LANE; i += 4) {
      const float4 v = *(device const float4*)(row + delta_key(i, lane));
      for (uint j = 0; j < 4; j++) out[i + j] = v[j];
    }
  } else {
    for (uint i = 0; i < PER_LANE; i++) out[i] = row[delta_key(i, lane)];
  }
}

template <uint PER_LANE>
METAL_FUNC void store_state(device float* row, uint lane, thread const float* values) {
  if (DeltaStep_DK % 128 == 0) {
    for (uint i = 0; i < PER_LANE; i += 4)
      *(device float4*)(row + delta_key(i, lane)) =
          float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  } else {
    for (uint i = 0; i < PER_LANE; i++) row[delta_key(i, lane)] = values[i];
  }
}

[[max_total_threads_per_threadgroup(32 * DELTA_STEP_SIMDGROUPS)]]
kernel void delta_step(LILY_ARGUMENTS(DeltaStep),
                       uint3 group [[threadgroup_position_in_grid]],
                       uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint simdgroups = DELTA_STEP_SIMDGROUPS, batch = 4;
  constexpr uint heads = DeltaStep_HEADS, dk = DeltaStep_DK, dv = DeltaStep_DV;
  constexpr uint keys = DeltaStep_KEY_HEADS * dk, per_lane = dk / 32;
  constexpr uint rows = dv / DeltaStep_PARTIALS;                    // of the threadgroup
  constexpr uint share = (rows + simdgroups - 1) / simdgroups;      // of a simdgroup, at most 32
  threadgroup float mixed[2 * dk];  // q, k after the convolution
  threadgroup float sums[simdgroups];
  const uint head = group.x, key_head = head / (heads / DeltaStep_KEY_HEADS);

  for (uint i = index; i < 2 * dk; i += 32 * simdgroups) {
    const uint channel = i < dk ? key_head * dk + i : keys + key_head * dk + i - dk;
    mixed[i] = delta_conv(ring, conv, p.position, channel);
  }
  // Lane r keeps what belongs to its simdgroup's row r: v, and o below.
  const uint begin = simdgroup * share, end = min(begin + share, rows);
  const uint first = group.y * rows;
  const bool own = begin + lane < end;
  const uint mine = head * dv + first + (own ? begin + lane : 0u);
  const float v = delta_conv(ring, conv, p.position, 2 * keys + mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float q[per_lane], k[per_lane];
  float qq = 0.0f, kk = 0.0f, kq = 0.0f;
  for (uint i = 0; i < per_lane; i++) {
    q[i] = mixed[delta_key(i, lane)];
    k[i] = mixed[dk + delta_key(i, lane)];
    qq += q[i] * q[i];
    kk += k[i] * k[i];
    kq += k[i] * q[i];
  }
  const float q_scale = precise::rsqrt(simd_sum(qq) + 1e-6f) * precise::rsqrt(float(dk));
  const float k_scale = precise::rsqrt(simd_sum(kk) + 1e-6f);
  for (uint i = 0; i < per_lane; i++) {
    q[i] *= q_scale;
    k[i] *= k_scale;
  }
  kq = simd_sum(kq) * q_scale * k_scale;
  const float g = precise::exp(decay[head] * softplus(gates[heads + head] + decay[heads + head]));
  const float beta = sigmoid(gates[head]);

  float result = 0.0f;
  for (uint row = begin; row < end; row += batch) {
    const ulong at = ulong(head * dv + first) * dk;
    float state[batch][per_lane];
    for (uint b = 0; b < batch; b++)
      load_state<per_lane>(state_in + at + min(row + b, end - 1) * dk, lane, state[b]);
    for (uint b = 0; b < batch; b++) {
      float along_k = 0.0f, along_q = 0.0f;
      for (uint i = 0; i < per_lane; i++) {
        along_k += state[b][i] * k[i];
        along_q += state[b][i] * q[i];
      }
      along_k = simd_sum(along_k);
      along_q = simd_sum(along_q);
      const float wanted = simd_shuffle(v, ushort(min(row + b, end - 1) - begin));
      const float delta = beta * (wanted - g * along_k);
      for (uint i = 0; i < per_lane; i++) state[b][i] = g * state[b][i] + delta * k[i];
      if (row + b - begin == lane) result = g * along_q + delta * kq;
    }
    for (uint b = 0; b < batch; b++)
      if (row + b < end) store_state<per_lane>(state_out + at + (row + b) * dk, lane, state[b]);
  }
  if (DeltaStep_RAW) {
    if (own) o[mine] = result;
    return;
  }
  if (!own) result = 0.0f;
  if (own) u[mine] = ACT(result * gamma[mine - head * dv] * silu(float(z[mine])));

  const float square = simd_sum(result * result);
  if (lane == 0) sums[simdgroup] = square;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) {
    float sum = 0.0f;
    for (uint i = 0; i < simdgroups; i++) sum += sums[i];
    squares[head * DeltaStep_PARTIALS + group.y] = sum;
  }
}
