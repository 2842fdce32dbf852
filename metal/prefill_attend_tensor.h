// prefill_attend on the tensor operations of Metal 4: the same rows for a threadgroup and the same
// softmax, in tiles of 64 keys. Only prefill_attend.metal reads this header.
//
// Queries lie in threadgroup memory. Keys and values, which would not fit beside them, are
// multiplied where they are, in device memory: caches serve the simdgroups that read the same. A
// tensor over the last tile ends with the keys that are there, so nothing behind them is read.
//
// Simdgroups are 2 × 2: of 16 query rows each makes the scores with half of a tile's keys, and the
// output in half of the dimensions. Probabilities go from the ones to the others as bf16, which is
// what the values are. A row's sum is that of the rounded ones, so they still add up to 1: an output
// of n keys alike is off by 1e-3 / √n of a value's rms.
#pragma once

#include "tile_tensor.h"

constant constexpr uint KEYS = 64, STEP = 32, PIECES = HALF / 32;
// Padded, so that neighbouring rows lie in different banks.
constant constexpr uint QUERY_STRIDE = DH + 8, WEIGHT_STRIDE = KEYS + 8, SCORE_STRIDE = KEYS + 4;
constant constexpr uint STRIP_STRIDE = 36;
static_assert(PIECES * 64 == DH, "a simdgroup's dimensions come in pieces of 32");
static_assert(4 * 8 * STRIP_STRIDE <= ROWS * SCORE_STRIDE, "strips take the place of scores");

[[max_total_threads_per_threadgroup(32 * PREFILL_ATTEND_SIMDGROUPS)]]
kernel void prefill_attend(LILY_ARGUMENTS(PrefillAttend),
                           uint3 group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  // In fours, for their alignment.
  threadgroup vec<bfloat, 4> query_memory[ROWS * QUERY_STRIDE / 4];
  threadgroup vec<bfloat, 4> weight_memory[ROWS * WEIGHT_STRIDE / 4];
  threadgroup float4 score_memory[ROWS * SCORE_STRIDE / 4];  // strips of the output at the end
  threadgroup float factors[ROWS];  // 2^(old reference - new one); at the end 1 / sum
  threadgroup bfloat* own_queries = (threadgroup bfloat*)query_memory;
  threadgroup bfloat* weights = (threadgroup bfloat*)weight_memory;
  threadgroup float* scores = (threadgroup float*)score_memory;
  const uint index = 32 * simdgroup + lane;
  const Queries queries = {p.rows * SHARING, group.x};
  const uint blocks = (queries.total + ROWS - 1) / ROWS;
  if (group.y >= blocks) return;
  const uint first_row = (blocks - 1 - group.y) * ROWS;
  const uint half_ = simdgroup % 2, own_rows = simdgroup / 2 * 16;  // of the products
  const uint soft_row = own_rows + half_ * 8 + lane / 4, soft_key = lane % 4 * 4;  // of the softmax
  const uint newest = p.position + queries.token(first_row + soft_row);
  const uint n_keys = p.position + queries.token(first_row + ROWS - 1) + 1;
  const ulong cache_row = ulong(group.x * SHARING / (HEADS / KV_HEADS)) * p.capacity;
  device const Row* own_keys = (device const Row*)keys + cache_row * DH;
  device const Row* own_values = (device const Row*)values + cache_row * DH + half_ * HALF;

  LILY_UNROLL for (uint i = 0; i < ROWS * DH / 4 / THREADS; i++) {
    const uint e = 4 * (index + i * THREADS), row = e / DH, d = e % DH;
    *(threadgroup vec<ACT, 4>*)(own_queries + row * QUERY_STRIDE + d) =
        *(device const vec<ACT, 4>*)(q + queries.at(first_row + row) + d);
  }
  own_queries += own_rows * QUERY_STRIDE;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  TensorColumns output[PIECES];
  LILY_UNROLL for (uint i = 0; i < PIECES; i++) output[i].sums.clear();
  float reference = -1e30f, sum = 0.0f;  // of soft_row, the sum in each of its four lanes
  for (uint first = 0; first < n_keys; first += KEYS) {
    const uint n = min(n_keys - first, KEYS);
    {
      TensorRows<STEP> score;
      score.sums.clear();
      const uint skipped = half_ * 32;
      if (skipped < n)
        LILY_UNROLL for (uint d = 0; d < DH; d += STEP)
          score.add(own_queries + d, QUERY_STRIDE, own_keys + ulong(first + skipped) * DH + d, DH,
                    min(n - skipped, 32u));
      score.sums.template store<16>(0, scores + own_rows * SCORE_STRIDE + skipped, SCORE_STRIDE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    {
      threadgroup const float* from = scores + soft_row * SCORE_STRIDE + soft_key;
      threadgroup bfloat* to = weights + soft_row * WEIGHT_STRIDE + soft_key;
      float4 log2s[KEYS / 16];
      float largest = -1e30f;
      LILY_UNROLL for (uint i = 0; i < KEYS / 16; i++) {
        log2s[i] = *(threadgroup const float4*)(from + 16 * i) * M_LOG2E_F;
        LILY_UNROLL for (uint j = 0; j < 4; j++)
          largest = max(largest, first + 16 * i + soft_key + j <= newest ? log2s[i][j] : -1e30f);
      }
      largest = max(largest, simd_shuffle_xor(largest, 1));
      largest = max(largest, simd_shuffle_xor(largest, 2));
      const float now = max(reference, floor(largest * 0.125f) * 8.0f);
      const float factor = exp2(reference - now);
      float added = 0.0f;
      LILY_UNROLL for (uint i = 0; i < KEYS / 16; i++) {
        float4 w;
        LILY_UNROLL for (uint j = 0; j < 4; j++) {
          // Scores so large that rounding exceeds a step give 2^8, like the largest.
          const float above = log2s[i][j] - now;
          const float e = above > 8.0f ? 256.0f : exp2(above);
          w[j] = first + 16 * i + soft_key + j <= newest ? float(bfloat(e)) : 0.0f;
          added += w[j];
          w[j] = w[j] >= 0.0f ? w[j] : 0.0f;  // a NaN is in the sum
        }
        put4(to + 16 * i, w);
      }
      added += simd_shuffle_xor(added, 1);
      added += simd_shuffle_xor(added, 2);
      sum = fma(sum, factor, added);
      reference = now;
      if (soft_key == 0) factors[soft_row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simd_any(factors[own_rows + lane % 16] != 1.0f))
      LILY_UNROLL for (uint i = 0; i < PIECES; i++) output[i].sums.scale(factors + own_rows);
    LILY_UNROLL for (uint i = 0; i < PIECES; i++)
      output[i].add(weights + own_rows * WEIGHT_STRIDE, WEIGHT_STRIDE,
                    own_values + ulong(first) * DH + 32 * i, DH, n);
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (soft_key == 0) factors[soft_row] = 1.0f / sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // 8 rows × 32 dimensions at a time go out through threadgroup memory.
  threadgroup float* strip = scores + simdgroup * 8 * STRIP_STRIDE;
  LILY_UNROLL for (uint rows = 0; rows < 16; rows += 8)
    LILY_UNROLL for (uint i = 0; i < PIECES; i++) {
      output[i].sums.template store<8>(rows, strip, STRIP_STRIDE);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const uint own = own_rows + rows + lane / 4, row = first_row + own;
      if (row < queries.total)
        LILY_UNROLL for (uint j = 0; j < 32; j += 16) {
          const uint dim = half_ * HALF + 32 * i + j + soft_key;
          device const ACT* gates = qkv + ulong(queries.token(row)) * (2 * (HEADS + KV_HEADS) * DH) +
                                    (2 * queries.head(row) + 1) * DH + dim;
          const float4 gate = float4(*(device const vec<ACT, 4>*)gates);
          float4 v = *(threadgroup const float4*)(strip + lane / 4 * STRIP_STRIDE + j + soft_key) *
                     factors[own];
          LILY_UNROLL for (uint k = 0; k < 4; k++) v[k] *= sigmoid(gate[k]);
          *(device vec<ACT, 4>*)(u + queries.at(row) + dim) = vec<ACT, 4>(v);
        }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
