// What multiplies tiles on chips with matrix units, on the tensor operations of Metal 4. Only Metal
// reads this header.
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

// The sums of a product of Left and Right, which one simdgroup makes.
template <class Operation, class Left, class Right>
struct TensorSums {
  typedef decltype(
      Operation().template get_destination_cooperative_tensor<Left, Right, float>()) Held;

  Held held = Operation().template get_destination_cooperative_tensor<Left, Right, float>();

  METAL_FUNC void clear() thread {
    LILY_UNROLL for (ushort i = 0; i < held.get_capacity(); i++)
      if (is_element(held, i, 0)) held[i] = 0.0f;
  }
  METAL_FUNC void add(thread Left& left, thread Right& right) thread {
    Operation().run(left, right, held);
  }
  // Row r times factors[r].
  METAL_FUNC void scale(threadgroup const float* factors) thread {
    LILY_UNROLL for (ushort i = 0; i < held.get_capacity(); i++)
      if (is_element(held, i, 0)) {
        const auto at = held.get_multidimensional_index(i);
        held[i] *= factors[at[1]];
      }
  }
  // Rows first … first + ROWS - 1.
  template <uint ROWS>
  METAL_FUNC void store(uint first, threadgroup float* to, uint ld) thread {
    LILY_UNROLL for (ushort i = 0; i < held.get_capacity(); i++) {
      if (!is_element(held, i, 0)) continue;
      const auto at = held.get_multidimensional_index(i);
      const uint row = uint(at[1]) - first;
      if (row < ROWS) to[row * ld + uint(at[0])] = held[i];
    }
  }
};

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
  TensorSums<Operation, Left, Right> sums;

  METAL_FUNC void clear() thread { sums.clear(); }
  METAL_FUNC void add(threadgroup T* rows, threadgroup T* weights) thread {
    Left left(rows, extents<int, STEP, M>(), array<int, 2>{1, STRIDE});
    Right right(weights, extents<int, STEP, 32>(), array<int, 2>{1, STRIDE});
    sums.add(left, right);
  }
  // Rows first … first + 15.
  METAL_FUNC void store(uint first, threadgroup float* to, uint ld) thread {
    sums.template store<16>(first, to, ld);
  }
};

// Products of 16 rows in threadgroup memory with a matrix in device memory of which `n` rows are
// there: nothing behind them is read. The type is not const, which the library's examples avoid.
typedef tensor<device bfloat, dextents<int, 2>, tensor_inline> DeviceRows;

// rows [16, STEP] · (matrix [n ≤ 32, STEP])ᵀ. Sums with rows that are not there may be anything.
template <uint STEP>
struct TensorRows {
  typedef tensor<threadgroup bfloat, extents<int, STEP, 16>, tensor_inline> Left;
  typedef mpp::tensor_ops::matmul2d<
      mpp::tensor_ops::matmul2d_descriptor(
          16, 32, STEP, false, true, true,
          mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
      execution_simdgroup>
      Operation;
  TensorSums<Operation, Left, DeviceRows> sums;

  METAL_FUNC void add(threadgroup bfloat* rows, uint row_stride, device const bfloat* matrix,
                      uint stride, uint n) thread {
    Left left(rows, extents<int, STEP, 16>(), array<int, 2>{1, int(row_stride)});
    DeviceRows right((device bfloat*)matrix, dextents<int, 2>(int(STEP), int(n)),
                     array<int, 2>{1, int(stride)});
    sums.add(left, right);
  }
};

// rows [16, n] · matrix [n, 32], for any n.
struct TensorColumns {
  typedef tensor<threadgroup bfloat, dextents<int, 2>, tensor_inline> Left;
  typedef mpp::tensor_ops::matmul2d<
      mpp::tensor_ops::matmul2d_descriptor(
          16, 32, static_cast<int>(dynamic_extent), false, false, true,
          mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
      execution_simdgroup>
      Operation;
  TensorSums<Operation, Left, DeviceRows> sums;

  METAL_FUNC void add(threadgroup bfloat* rows, uint row_stride, device const bfloat* matrix,
                      uint stride, uint n) thread {
    Left left(rows, dextents<int, 2>(int(n), 16), array<int, 2>{1, int(row_stride)});
    DeviceRows right((device bfloat*)matrix, dextents<int, 2>(32, int(n)),
                     array<int, 2>{1, int(stride)});
    sums.add(left, right);
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
