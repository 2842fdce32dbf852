// What multiplies tiles in threadgroup memory, on `simdgroup_matrix`: 8×8 fragments that a
// simdgroup holds together. Only Metal reads this header.
//
// Which lane holds which element of a fragment is not documented, so fragments are only filled,
// loaded, multiplied and stored. An element of a product is a sum over k in rising order, by one
// simdgroup: it does not depend on where in a tile its row stands or what else the tile holds.
#pragma once

#include <metal_simdgroup_matrix>

#include "fours.h"
#include "unroll.h"

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

// What one simdgroup of four makes of a tile of ROWS × 64 (see tile_product.h): half of the outputs
// of every other eight rows. `group` is which of the two shares of rows, `half_` which outputs.
// Where a tile has few rows, fragments without a row are skipped and the rest is still shared.
template <class TA, class TB, uint ROWS, uint STEP, uint STRIDE>
struct TileSums {
  enum : uint { pieces = ROWS / 16, piece_rows = 8, staged_rows = 8 };
  Sums<pieces, 4> sums;

  // Its pieces are rows row(i, group) … + piece_rows - 1 of the tile.
  static METAL_FUNC uint row(uint piece, uint group) { return 8 * (2 * piece + group); }
  METAL_FUNC void clear() thread { sums.fill(0.0f); }

  // += rows · weightsᵀ over STEP columns. Rows are there up to a multiple of staged_rows.
  METAL_FUNC void add(threadgroup TA* rows, threadgroup TB* weights, uint group, uint half_,
                      uint n_rows) thread {
    const uint active = ((n_rows + 7) / 8 + 1 - group) / 2;
    sums.template add_transposed<STEP>(rows + 8 * group * STRIDE, 16 * STRIDE, STRIDE,
                                       weights + 32 * half_ * STRIDE, STRIDE, active);
  }
  // The 32 outputs of a piece's rows.
  METAL_FUNC void store(uint piece, threadgroup float* to, uint ld) thread {
    sums.store_row(piece, to, ld);
  }
};
