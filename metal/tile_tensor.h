// What multiplies tiles in threadgroup memory on chips with matrix units, on the tensor operations
// of Metal 4. Only Metal reads this header.
//
// Operands have one type, bf16 or half. A product of two is exact in float32; in which order, and
// how precisely, the unit adds them up is not documented. Which lane holds which element is not
// either: sums are cleared and taken out by the coordinates that the library gives, and elements
// that stand for none are left alone.
#pragma once

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "unroll.h"

// Whether element i of a lane stands for one of the tensor's. The library's documentation calls
// the question get_mask, its headers is_valid_element.
template <class Tensor>
METAL_FUNC auto is_element(thread Tensor& sums, ushort i, int) -> decltype(sums.is_valid_element(i)) {
  return sums.is_valid_element(i);
}
template <class Tensor>
METAL_FUNC auto is_element(thread Tensor& sums, ushort i, long) -> decltype(sums.get_mask(i)) {
  return sums.get_mask(i);
}

// rows [M, STEP] · weights [32, STEP]ᵀ by one simdgroup; extents name the innermost first.
template <class T, int M, int STEP, int STRIDE>
struct TensorProduct {
  typedef tensor<threadgroup T, extents<int, STEP, M>, tensor_inline> Left;
  typedef tensor<threadgroup T, extents<int, STEP, 32>, tensor_inline> Right;
  typedef mpp::tensor_ops::matmul2d<
      mpp::tensor_ops::matmul2d_descriptor(
          M, 32, STEP, false, true, true,  // the right one transposed, at the unit's precision
          mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
      execution_simdgroup>
      Operation;
  typedef decltype(
      Operation().template get_destination_cooperative_tensor<Left, Right, float>()) Sums;

  Sums sums = Operation().template get_destination_cooperative_tensor<Left, Right, float>();

  METAL_FUNC void clear() thread {
    LILY_UNROLL for (ushort i = 0; i < sums.get_capacity(); i++)
      if (is_element(sums, i, 0)) sums[i] = 0.0f;
  }
  METAL_FUNC void add(threadgroup T* rows, threadgroup T* weights) thread {
    Left left(rows, extents<int, STEP, M>(), array<int, 2>{1, STRIDE});
    Right right(weights, extents<int, STEP, 32>(), array<int, 2>{1, STRIDE});
    Operation().run(left, right, sums);
  }
  // Rows first … first + 15.
  METAL_FUNC void store(uint first, threadgroup float* to, uint ld) thread {
    LILY_UNROLL for (ushort i = 0; i < sums.get_capacity(); i++) {
      if (!is_element(sums, i, 0)) continue;
      const auto at = sums.get_multidimensional_index(i);
      const uint row = uint(at[1]) - first;
      if (row < 16) to[row * ld + uint(at[0])] = sums[i];
    }
  }
};

// What one simdgroup of four makes of a tile of ROWS × 64, as in tile_mma.h: half of the outputs of
// half of the rows. A unit takes 16 rows at least, so of a tile of 16 two simdgroups make all.
template <class T, class, uint ROWS, uint STEP, uint STRIDE>
struct TileSums {
  enum : uint { own_rows = ROWS < 32 ? 16 : ROWS / 2 };
  enum : uint { pieces = own_rows / 16, piece_rows = 16, staged_rows = own_rows };
  TensorProduct<T, own_rows, STEP, STRIDE> product;

  static METAL_FUNC uint row(uint piece, uint group) { return own_rows * group + 16 * piece; }
  METAL_FUNC void clear() thread { product.clear(); }
  METAL_FUNC void add(threadgroup T* rows, threadgroup T* weights, uint group, uint half_,
                      uint n_rows) thread {
    if (own_rows * group < n_rows)
      product.add(rows + own_rows * group * STRIDE, weights + 32 * half_ * STRIDE);
  }
  METAL_FUNC void store(uint piece, threadgroup float* to, uint ld) thread {
    product.store(16 * piece, to, ld);
  }
};
