// One query row per head against the cache, which first receives the new key and value.     (A2)
//   q, k ← rope(norm(q)), rope(norm(k)); scores = q · k / sqrt(DH) over keys 0…position
// MERGE = 0: u = softmax · V ⊙ sigmoid(gate). MERGE = 1: each block leaves its sums for
// attend_merge.
//
// Threadgroups: (KV_HEADS · parts) × blocks. A threadgroup takes up to ATTEND_HEADS query heads of
// one key/value head over one block of keys, so a cache row is fetched once for all of them. Its
// simdgroups take quads of keys in turn: eight row loads first, then 16 scores (4 heads × 4 keys)
// by one butterfly, one exponent a lane, and one rescaling of the running sums. Simdgroups join at
// the end through threadgroup memory, half of them at a time.
//
// Every threadgroup prepares its queries itself. The new key is used where it is made: threadgroups
// of the last block compute it, the first one of each key/value head stores it, and none reads it
// back. Codes of an int8 cache are multiplied as they are: a key's scale goes into its scores, a
// value's into its weights.
#include "attend.h"

#include "attend_by_key.h"
#include "cache_rows.h"
#include "grids.h"
#include "rope_msl.h"

// Half of 2 N values stays, half goes to the lane that differs in bit 2 N.
template <uint N>
METAL_FUNC void fold(thread float* values, uint lane) {
  const bool high = (lane & 2 * N) != 0;
  for (uint i = 0; i < N; i++) {
    const float keep = high ? values[i + N] : values[i];
    const float give = high ? values[i] : values[i + N];
    values[i] = keep + simd_shuffle_xor(give, ushort(2 * N));
  }
}

// Sums over the lanes of 16 values; that of value i is in lanes 2 i and 2 i + 1.
METAL_FUNC float sum16(thread float* values, uint lane) {
  fold<8>(values, lane);
  fold<4>(values, lane);
  fold<2>(values, lane);
  fold<1>(values, lane);
  return values[0] + simd_shuffle_xor(values[0], ushort(1));
}

[[max_total_threads_per_threadgroup(32 * ATTEND_SIMDGROUPS)]]
kernel void attend(LILY_ARGUMENTS(Attend),
                   uint3 group [[threadgroup_position_in_grid]],
                   uint index [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint simdgroups = ATTEND_SIMDGROUPS, threads = 32 * simdgroups, quad = 4;
  constexpr uint dh = Attend_DH, per_lane = dh / 32, all = Attend_HEADS / Attend_KV_HEADS;
  constexpr uint most = Attend_APART ? 1 : ATTEND_HEADS, heads = all < most ? all : most;
  constexpr uint parts = (all + heads - 1) / heads;
  constexpr bool int8 = Attend_KV_INT8 != 0;
  typedef CacheRow<int8>::Type Row;
  constexpr uint joined = simdgroups / 2, outputs = (heads * dh + threads - 1) / threads;
  threadgroup float exchange[joined * heads * dh];  // first queries and the new key, later sums
  threadgroup float maxima[simdgroups * heads];
  threadgroup float totals[simdgroups * heads];
  threadgroup float* new_key = exchange + heads * dh;

  const uint kv_head = group.x / parts, part = group.x % parts, block = group.y;
  const uint begin = Attend_MERGE ? block * p.block : 0u;
  const uint stop = Attend_MERGE ? min(begin + p.block, p.position + 1) : p.position + 1;
  const bool newest = !Attend_PREPARED && stop == p.position + 1;
  const uint cached = newest ? p.position : stop;
  const uint first_head = kv_head * all + part * heads;
  const uint n_heads = min(heads, all - part * heads);
  const ulong first_row = ulong(kv_head) * p.capacity, rows = ulong(Attend_KV_HEADS) * p.capacity;
  device Row* key_rows = (device Row*)keys;
  device Row* value_rows = (device Row*)values;
  device float* key_scales = cache_scales(key_rows, rows * dh);
  device float* value_scales = cache_scales(value_rows, rows * dh);
  device const ACT* key_in = qkv + 2 * Attend_HEADS * dh + kv_head * dh;
  device const ACT* value_in = key_in + Attend_KV_HEADS * dh;

  for (uint row = simdgroup; row < heads + 1; row += simdgroups) {
    const bool is_key = row == heads;
    if (is_key && !newest) continue;
    const uint head = first_head + min(row, n_heads - 1);
    if (Attend_PREPARED) {
      for (uint d = lane; d < dh; d += 32) exchange[row * dh + d] = float(q[head * dh + d]);
      continue;
    }
    float y[per_lane];
    norm_rotate<dh, Attend_ROTARY>(is_key ? key_in : qkv + 2 * head * dh, is_key ? k_norm : q_norm,
                                   frequencies, p.position, Attend_EPS, lane, exchange + row * dh,
                                   y);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (!is_key) {
      for (uint i = 0; i < per_lane; i++)
        exchange[row * dh + 32 * i + lane] = y[i] * precise::rsqrt(float(dh));
      continue;
    }
    const ulong new_row = first_row + p.position;
    const float scale = int8 ? quantise<per_lane>(y) : 1.0f;
    for (uint i = 0; i < per_lane; i++) {
      const uint d = 32 * i + lane;
      const Row stored = Row(y[i]);  // scores see the key as the cache keeps it
      exchange[row * dh + d] = float(stored) * scale;
      if (part == 0) key_rows[new_row * dh + d] = stored;
    }
    if (part != 0) continue;
    for (uint i = 0; i < per_lane; i++) y[i] = float(value_in[32 * i + lane]);
    const float value_scale = int8 ? quantise<per_lane>(y) : 1.0f;
    for (uint i = 0; i < per_lane; i++) value_rows[new_row * dh + 32 * i + lane] = Row(y[i]);
    if (int8 && lane == 0) {
      key_scales[new_row] = scale;
      value_scales[new_row] = value_scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // From here on a lane has elements lane · per_lane … of a head.
  const uint column = lane * per_lane;
  float query[heads][per_lane], o[heads][per_lane];
  for (uint h = 0; h < heads; h++) {
    for (uint i = 0; i < per_lane; i++) {
      query[h][i] = exchange[h * dh + column + i];
      o[h][i] = 0.0f;
    }
  }
  float largest = -INFINITY, total = 0.0f;  // of head lane / 8; total of its key lane / 2 % 4
  if (Attend_BY_KEY) {
    float tops[heads], sums[heads];
    for (uint h = 0; h < heads; h++) {
      tops[h] = -INFINITY;
      sums[h] = 0.0f;
    }
    attend_by_key<heads, per_lane>(key_rows + first_row * dh, value_rows + first_row * dh,
                                   key_scales + first_row, value_scales + first_row, int8, exchange,
                                   begin + 32 * simdgroup, cached, threads, lane, o, tops, sums);
    for (uint h = 0; h < heads; h++) {
      if (lane / 8 != h) continue;
      largest = tops[h];
      total = lane % 8 < 2 ? sums[h] : 0.0f;
    }
  }
  const uint quads = Attend_BY_KEY ? 0 : (cached - begin + quad - 1) / quad;
  for (uint i = simdgroup; i < quads + (newest ? 1 : 0); i += simdgroups) {
    float k[quad][per_lane], v[quad][per_lane];
    float key_scale = 1.0f, value_scale = 1.0f;  // of the key of this lane's score
    uint n_keys = 1;
    if (i < quads) {
      const uint key = begin + i * quad;
      n_keys = min(quad, cached - key);
      for (uint j = 0; j < quad; j++) {
        const ulong at = (first_row + key + min(j, n_keys - 1)) * dh + column;
        load_row<per_lane>(key_rows + at, k[j]);
        load_row<per_lane>(value_rows + at, v[j]);
      }
      if (int8) {
        const ulong at = first_row + key + min(lane / 2 % quad, n_keys - 1);
        key_scale = key_scales[at];
        value_scale = value_scales[at];
      }
    } else {
      for (uint j = 0; j < quad; j++) {
        for (uint e = 0; e < per_lane; e++) k[j][e] = new_key[column + e];
        load_row<per_lane>(value_in + column, v[j]);
        if (int8) value_scale = quantise<per_lane>(v[j]);
      }
    }
    float scores[16];
    for (uint h = 0; h < 4; h++) {
      for (uint j = 0; j < quad; j++) {
        float sum = 0.0f;
        if (h < heads)
          for (uint e = 0; e < per_lane; e++) sum += query[h % heads][e] * k[j][e];
        scores[4 * h + j] = sum;
      }
    }
    float score = sum16(scores, lane) * key_scale;
    if (lane / 2 % quad >= n_keys) score = -INFINITY;
    float top = max(score, simd_shuffle_xor(score, ushort(2)));
    top = max(top, simd_shuffle_xor(top, ushort(4)));
    top = max(top, largest);
    const float weight = precise::exp(score - top), rescale = precise::exp(largest - top);
    largest = top;
    total = total * rescale + weight;
    const float share = weight * value_scale;
    for (uint h = 0; h < heads; h++) {
      const float scale = simd_shuffle(rescale, ushort(8 * h));
      for (uint e = 0; e < per_lane; e++) o[h][e] *= scale;
      for (uint j = 0; j < quad; j++) {
        const float w = simd_shuffle(share, ushort(8 * h + 2 * j));
        for (uint e = 0; e < per_lane; e++) o[h][e] += w * v[j][e];
      }
    }
  }

  total += simd_shuffle_xor(total, ushort(2));
  total += simd_shuffle_xor(total, ushort(4));
  if (lane % 8 == 0 && lane / 8 < heads) {
    maxima[simdgroup * heads + lane / 8] = largest;
    totals[simdgroup * heads + lane / 8] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // All sums relative to the threadgroup's largest score; then they only have to be added up.
  for (uint h = 0; h < heads; h++) {
    float top = -INFINITY;
    for (uint s = 0; s < simdgroups; s++) top = max(top, maxima[s * heads + h]);
    const float scale = precise::exp(maxima[simdgroup * heads + h] - top);
    for (uint e = 0; e < per_lane; e++) o[h][e] *= scale;
  }
  float result[outputs];
  for (uint i = 0; i < outputs; i++) result[i] = 0.0f;
  for (uint turn = 0; turn < 2; turn++) {
    if (simdgroup / joined == turn) {
      threadgroup float* to = exchange + simdgroup % joined * heads * dh + column;
      for (uint h = 0; h < heads; h++)
        for (uint e = 0; e < per_lane; e++) to[h * dh + e] = o[h][e];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < outputs; i++) {
      const uint at = min(i * threads + index, heads * dh - 1);
      for (uint s = 0; s < joined; s++) result[i] += exchange[s * heads * dh + at];
    }
    if (turn == 0) threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (uint i = 0; i < outputs; i++) {
    const uint at = i * threads + index, h = at / dh, d = at % dh;
    if (h >= n_heads) continue;
    float top = -INFINITY, sum = 0.0f;
    for (uint s = 0; s < simdgroups; s++) top = max(top, maxima[s * heads + h]);
    for (uint s = 0; s < simdgroups; s++)
      sum += totals[s * heads + h] * precise::exp(maxima[s * heads + h] - top);
    const uint head = first_head + h;
    if (Attend_MERGE) {
      const uint row = block * Attend_HEADS + head;
      partial[row * dh + d] = result[i];
      if (d == 0) {
        extent[2 * row] = top;
        extent[2 * row + 1] = sum;
      }
    } else {
      u[head * dh + d] = ACT(result[i] / sum * sigmoid(float(qkv[(2 * head + 1) * dh + d])));
    }
  }
}
