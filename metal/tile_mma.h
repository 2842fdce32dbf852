// What multiplies tiles in threadgroup memory, on `simdgroup_matrix`: 8×8 fragments that a
// simdgroup holds together. Only Metal reads this header.
//
// Which lane holds which element of a fragment is not documented, so fragments are only filled,
// loaded, multiplied and stored. An element of a product is a sum over k in rising order, by one
// simdgroup: it does not depend on where in a tile its row stands or what else the tile holds.
#pragma once

#include <metal_simdgroup_matrix>

#include "unroll.h"

// Four neighbours into a tile.
METAL_FUNC void put4(threadgroup float* to, float4 v) { *(threadgroup float4*)to = v; }
METAL_FUNC void put4(threadgroup half* to, float4 v) { *(threadgroup half4*)to = half4(v); }
METAL_FUNC void put4(threadgroup bfloat* to, float4 v) { *(threadgroup bfloat4*)to = bfloat4(v); }

// M × N fragments of sums, in float32.
template <uint M, uint N>
struct Sums {
  simdgroup_float8x8 at[M][N];

  METAL_FUNC void fill(float value) thread {
    LILY_UNROLL for (uint i = 0; i < M; i++)
      LILY_UNROLL for (uint j = 0; j < N; j++)
        at[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(value);
  }

  // += A · Bᵀ over K columns. A's rows of fragment i stand at a + i · a_step, those of column j of
  // the result at b + 8 j · ldb. Only the first `active` rows of fragments are computed.
  template <uint K, class TA, class TB>
  METAL_FUNC void add_transposed(threadgroup const TA* a, uint a_step, uint lda,
                                 threadgroup const TB* b, uint ldb, uint active) thread {
    LILY_UNROLL for (uint k = 0; k < K; k += 8) {
      simdgroup_matrix<TB, 8, 8> right[N];
      LILY_UNROLL for (uint j = 0; j < N; j++)
        simdgroup_load(right[j], b + 8 * j * ldb + k, ldb, ulong2(0, 0), true);
      LILY_UNROLL for (uint i = 0; i < M; i++) {
        if (i >= active) continue;
        simdgroup_matrix<TA, 8, 8> left;
        simdgroup_load(left, a + i * a_step + k, lda);
        LILY_UNROLL for (uint j = 0; j < N; j++)
          simdgroup_multiply_accumulate(at[i][j], left, right[j], at[i][j]);
      }
    }
  }

  // The fragments of row i side by side.
  METAL_FUNC void store_row(uint i, threadgroup float* to, uint ld) const thread {
    LILY_UNROLL for (uint j = 0; j < N; j++) simdgroup_store(at[i][j], to + 8 * j, ld);
  }
};
