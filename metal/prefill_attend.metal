// u = softmax(q · keys) · values ⊙ sigmoid(gate), row t over keys 0 … position + t
//
// Threadgroups: (HEADS / G, ceil(T · G / 32)) for the G = HEADS / KV_HEADS query heads that share a
// key/value head (G = 1 where APART = 1); the last rows, which have the most keys, come first. A
// threadgroup owns 32 query rows, (token, head) pairs in order, so keys and values are read once for
// G heads. It passes over the keys 16 at a time, at absolute positions.
//
// Simdgroups are 2 × 2: 16 query rows × half of the head's dimensions, so each fragment of keys or
// values in threadgroup memory is used for two products, and the sums of the output, 64 registers,
// and the queries, 32, fit. The halves' partial scores are added by whoever turns them into
// probabilities: every simdgroup does that for 8 rows, a row in four lanes.
//
// Softmax is kept in powers of two, and its reference only moves in steps of 2^8: the output is
// rescaled rarely, by powers of two, that is exactly. A key that a row must not see adds exactly 0.
// So a row's result does not depend on which rows are beside it. The scale is a diagonal matrix; a
// NaN goes into the row's sum only, as it would spread through the diagonal's zeros otherwise.
//
// The fast build stages queries, keys and values as the bf16 that they are; probabilities are
// float. Codes of an int8 cache are staged as they are: a key's scale goes into its scores, a
// value's into its probabilities. With LILY_HALF_TILES, for chips without bf16 arithmetic, tiles
// become half: exact up to 65504, where they stop, and to 3e-8 below 6e-5. With LILY_TENSOR, another
// kernel takes this one's place.
#include "prefill_attend.h"

#include "cache_rows.h"
#include "fours.h"
#include "grids.h"
#include "unroll.h"

constant constexpr uint HEADS = PrefillAttend_HEADS, KV_HEADS = PrefillAttend_KV_HEADS;
constant constexpr uint DH = PrefillAttend_DH, HALF = DH / 2;
constant constexpr uint SHARING = PrefillAttend_APART ? 1 : HEADS / KV_HEADS;
constant constexpr bool INT8 = PrefillAttend_KV_INT8 != 0;
typedef CacheRow<INT8>::Type Row;
constant constexpr uint ROWS = PREFILL_ATTEND_ROWS;
constant constexpr uint THREADS = 32 * PREFILL_ATTEND_SIMDGROUPS;
static_assert(ROWS == 32 && PREFILL_ATTEND_SIMDGROUPS == 4, "rows are shared out for these");

// Query rows of heads that share a key/value head.
struct Queries {
  uint total;  // T · SHARING
  uint group;
  METAL_FUNC uint clamped(uint row) const thread { return min(row, total - 1); }
  METAL_FUNC uint token(uint row) const thread { return clamped(row) / SHARING; }
  METAL_FUNC uint head(uint row) const thread { return group * SHARING + clamped(row) % SHARING; }
  METAL_FUNC ulong at(uint row) const thread {
    return (ulong(token(row)) * HEADS + head(row)) * DH;
  }
};

// Operands of tensor operations have one type, and simdgroups share a head by pieces of 32.
#if LILY_TENSOR && PrefillAttend_KV_INT8 == 0 && PrefillAttend_DH % 64 == 0
#include "prefill_attend_tensor.h"
#else
#include "tile_mma.h"

#if LILY_FLOAT32
typedef float Tile;
#elif LILY_HALF_TILES
typedef half Tile;
#else
typedef bfloat Tile;
#endif

constant constexpr uint KEYS = 16, FRAGMENTS = HALF / 8;
constant constexpr uint TILE_STRIDE = DH + 8, SCORE_STRIDE = KEYS + 4;
static_assert(4 * 128 <= ROWS * SCORE_STRIDE, "the diagonals take the place of one half's scores");

// Four values into a tile. Half's largest number stands for all beyond, so that a weight of 0 makes
// them 0.
METAL_FUNC void stage4(threadgroup float* to, float4 v) { put4(to, v); }
METAL_FUNC void stage4(threadgroup bfloat* to, float4 v) { put4(to, v); }
METAL_FUNC void stage4(threadgroup half* to, float4 v) {
  LILY_UNROLL for (uint j = 0; j < 4; j++)
    v[j] = v[j] > 65504.0f ? 65504.0f : v[j] < -65504.0f ? -65504.0f : v[j];  // a NaN stays one
  put4(to, v);
}

// Rows 0 … KEYS - 1 of a cache, of which n are there; the others become 0, whatever memory holds.
METAL_FUNC void stage_keys(device const Row* from, uint n, uint index, threadgroup Tile* to) {
  LILY_UNROLL for (uint i = 0; i < KEYS * DH / 4 / THREADS; i++) {
    const uint e = 4 * (index + i * THREADS), row = e / DH, d = e % DH;
    const float4 v =
        row < n ? float4(*(device const vec<Row, 4>*)(from + row * DH + d)) : float4(0.0f);
    stage4(to + row * TILE_STRIDE + d, v);
  }
}

[[max_total_threads_per_threadgroup(32 * PREFILL_ATTEND_SIMDGROUPS)]]
kernel void prefill_attend(LILY_ARGUMENTS(PrefillAttend),
                           uint3 group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  // Queries, keys and values in turn; scores of either half, then weights and diagonals. In fours,
  // for their alignment.
  threadgroup vec<Tile, 4> tiles[KEYS * TILE_STRIDE / 4];
  threadgroup float4 all_scores[2 * ROWS * SCORE_STRIDE / 4];
  threadgroup float factors[ROWS];  // 2^(old reference - new one); at the end 1 / sum
  threadgroup Tile* tile = (threadgroup Tile*)tiles;
  threadgroup float* scores = (threadgroup float*)all_scores;
  threadgroup float* diagonals = scores + ROWS * SCORE_STRIDE;
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
  const ulong n_codes = ulong(KV_HEADS) * p.capacity * DH;
  device const Row* own_keys = (device const Row*)keys + cache_row * DH;
  device const Row* own_values = (device const Row*)values + cache_row * DH;
  device const float* key_scales = cache_scales((device const Row*)keys, n_codes);
  device const float* value_scales = cache_scales((device const Row*)values, n_codes);

  simdgroup_matrix<Tile, 8, 8> query[2][FRAGMENTS];
  for (uint rows = 0; rows < ROWS; rows += 16) {
    LILY_UNROLL for (uint i = 0; i < 16 * DH / 4 / THREADS; i++) {
      const uint e = 4 * (index + i * THREADS), row = e / DH, d = e % DH;
      const ulong at = queries.at(first_row + rows + row) + d;
      stage4(tile + row * TILE_STRIDE + d, float4(*(device const vec<ACT, 4>*)(q + at)));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (rows == own_rows)
      LILY_UNROLL for (uint i = 0; i < 2; i++)
        LILY_UNROLL for (uint d = 0; d < FRAGMENTS; d++)
          simdgroup_load(query[i][d], tile + 8 * i * TILE_STRIDE + half_ * HALF + 8 * d,
                         TILE_STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  Sums<2, FRAGMENTS> output;
  output.fill(0.0f);
  float reference = -1e30f, sum = 0.0f;  // of soft_row, the sum in each of its four lanes
  for (uint first = 0; first < n_keys; first += KEYS) {
    const uint n = min(n_keys - first, KEYS);
    stage_keys(own_keys + ulong(first) * DH, n, index, tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Sums<2, 2> score;
    score.fill(0.0f);
    LILY_UNROLL for (uint d = 0; d < FRAGMENTS; d++)
      LILY_UNROLL for (uint j = 0; j < 2; j++) {
        simdgroup_matrix<Tile, 8, 8> key;
        simdgroup_load(key, tile + 8 * j * TILE_STRIDE + half_ * HALF + 8 * d, TILE_STRIDE,
                       ulong2(0, 0), true);
        LILY_UNROLL for (uint i = 0; i < 2; i++)
          simdgroup_multiply_accumulate(score.at[i][j], query[i][d], key, score.at[i][j]);
      }
    LILY_UNROLL for (uint i = 0; i < 2; i++)
      score.store_row(i, scores + (half_ * ROWS + own_rows + 8 * i) * SCORE_STRIDE, SCORE_STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    stage_keys(own_values + ulong(first) * DH, n, index, tile);
    {
      threadgroup float* at = scores + soft_row * SCORE_STRIDE + soft_key;
      const float4 s = *(threadgroup const float4*)at +
                       *(threadgroup const float4*)(at + ROWS * SCORE_STRIDE);
      float4 log2s = s * M_LOG2E_F;
      if (INT8)
        LILY_UNROLL for (uint j = 0; j < 4; j++)
          log2s[j] *= soft_key + j < n ? key_scales[cache_row + first + soft_key + j] : 0.0f;
      float largest = -1e30f;
      LILY_UNROLL for (uint j = 0; j < 4; j++)
        largest = max(largest, first + soft_key + j <= newest ? log2s[j] : -1e30f);
      largest = max(largest, simd_shuffle_xor(largest, 1));
      largest = max(largest, simd_shuffle_xor(largest, 2));
      const float now = max(reference, floor(largest * 0.125f) * 8.0f);
      const float factor = exp2(reference - now);
      float4 w;
      LILY_UNROLL for (uint j = 0; j < 4; j++) {
        // Scores so large that rounding exceeds a step give 2^8, like the largest.
        const float above = log2s[j] - now;
        const float e = above > 8.0f ? 256.0f : exp2(above);
        w[j] = first + soft_key + j <= newest ? e : 0.0f;
      }
      float added = (w.x + w.y) + (w.z + w.w);
      added += simd_shuffle_xor(added, 1);
      added += simd_shuffle_xor(added, 2);
      sum = fma(sum, factor, added);
      reference = now;
      // A NaN is in the sum.
      LILY_UNROLL for (uint j = 0; j < 4; j++) w[j] = w[j] >= 0.0f ? w[j] : 0.0f;
      if (INT8)
        LILY_UNROLL for (uint j = 0; j < 4; j++)
          w[j] *= soft_key + j < n ? value_scales[cache_row + first + soft_key + j] : 0.0f;
      put4(at, w);
      if (soft_key == 0) factors[soft_row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simd_any(factors[own_rows + lane % 16] != 1.0f)) {
      threadgroup float* diagonal = diagonals + simdgroup * 128;
      for (uint e = lane; e < 128; e += 32)
        diagonal[e] = e / 8 % 8 == e % 8 ? factors[own_rows + e / 8] : 0.0f;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      LILY_UNROLL for (uint i = 0; i < 2; i++) {
        simdgroup_float8x8 scale;
        simdgroup_load(scale, diagonal + 64 * i);
        LILY_UNROLL for (uint d = 0; d < FRAGMENTS; d++)
          simdgroup_multiply(output.at[i][d], scale, output.at[i][d]);
      }
    }
    LILY_UNROLL for (uint k = 0; k < KEYS; k += 8) {
      simdgroup_float8x8 weight[2];
      simdgroup_matrix<Tile, 8, 8> value;
      LILY_UNROLL for (uint i = 0; i < 2; i++)
        simdgroup_load(weight[i], scores + (own_rows + 8 * i) * SCORE_STRIDE + k, SCORE_STRIDE);
      LILY_UNROLL for (uint d = 0; d < FRAGMENTS; d++) {
        simdgroup_load(value, tile + k * TILE_STRIDE + half_ * HALF + 8 * d, TILE_STRIDE);
        LILY_UNROLL for (uint i = 0; i < 2; i++)
          simdgroup_multiply_accumulate(output.at[i][d], weight[i], value, output.at[i][d]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // 8 rows × 16 dimensions at a time go out through threadgroup memory.
  if (soft_key == 0) factors[soft_row] = 1.0f / sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* strip = scores + simdgroup * 8 * SCORE_STRIDE;
  LILY_UNROLL for (uint i = 0; i < 2; i++)
    LILY_UNROLL for (uint d = 0; d < FRAGMENTS; d += 2) {
      LILY_UNROLL for (uint j = 0; j < 2; j++)
        simdgroup_store(output.at[i][d + j], strip + 8 * j, SCORE_STRIDE);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const uint own = own_rows + 8 * i + lane / 4, row = first_row + own;
      if (row < queries.total) {
        const uint dim = half_ * HALF + 8 * d + soft_key;
        device const ACT* gates = qkv + ulong(queries.token(row)) * (2 * (HEADS + KV_HEADS) * DH) +
                                  (2 * queries.head(row) + 1) * DH + dim;
        const float4 gate = float4(*(device const vec<ACT, 4>*)gates);
        // Adding 0 turns -0 into 0, as one more tile of hidden keys would have done.
        float4 v = (*(threadgroup const float4*)(strip + lane / 4 * SCORE_STRIDE + soft_key) +
                    float4(0.0f)) * factors[own];
        LILY_UNROLL for (uint j = 0; j < 4; j++) v[j] *= sigmoid(gate[j]);
        *(device vec<ACT, 4>*)(u + queries.at(row) + dim) = vec<ACT, 4>(v);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
#endif
