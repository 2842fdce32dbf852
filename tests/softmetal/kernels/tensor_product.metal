// out [16, 32] = a [16, 64] · b [32, 64]ᵀ by one simdgroup, in two steps, on tensor operations. Each
// define is a bug.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
#include <metal_tensor>
using namespace metal;
using namespace mpp::tensor_ops;

#ifndef RIGHT_TYPE
#define RIGHT_TYPE bfloat
#endif
#ifndef M
#define M 16
#endif
#ifndef RIGHT_COLUMNS
#define RIGHT_COLUMNS 32
#endif
#ifdef OVERWRITES
#define MODE multiply
#else
#define MODE multiply_accumulate
#endif

kernel void tensor_product(device const bfloat* a [[buffer(0)]],
                           device const bfloat* b [[buffer(1)]], device float* out [[buffer(2)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat rows[16 * 40];
  threadgroup RIGHT_TYPE columns[32 * 40];
  constexpr auto descriptor =
      matmul2d_descriptor(M, 32, 32, false, true, true, matmul2d_descriptor::mode::MODE);
  matmul2d<descriptor, execution_simdgroup> operation;
  typedef tensor<threadgroup bfloat, extents<int, 32, M>, tensor_inline> Left;
  typedef tensor<threadgroup RIGHT_TYPE, extents<int, RIGHT_COLUMNS, 32>, tensor_inline> Right;
  Left left(rows, extents<int, 32, M>(), array<int, 2>{1, 40});
  Right right(columns, extents<int, RIGHT_COLUMNS, 32>(), array<int, 2>{1, 40});
  auto sums = operation.get_destination_cooperative_tensor<Left, Right, float>();
#ifndef NOT_CLEARED
  for (ushort i = 0; i < sums.get_capacity(); i++)
    if (sums.is_valid_element(i)) sums[i] = 0.0f;
#endif
  for (uint k = 0; k < 64; k += 32) {
    for (uint e = lane; e < 16 * 32; e += 32) rows[e / 32 * 40 + e % 32] = a[e / 32 * 64 + k + e % 32];
    for (uint e = lane; e < 32 * 32; e += 32)
      columns[e / 32 * 40 + e % 32] = RIGHT_TYPE(float(b[e / 32 * 64 + k + e % 32]));
#ifndef NO_BARRIER
    simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
    operation.run(left, right, sums);
#ifndef NO_BARRIER_BEHIND
    simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  }
#ifdef OWN_LAYOUT
  for (ushort i = 0; i < 16; i++) out[32 * i + lane] = sums[i];
#else
  for (ushort i = 0; i < sums.get_capacity(); i++) {
#ifndef EVERY_ELEMENT
    if (!sums.is_valid_element(i)) continue;
#endif
    const auto at = sums.get_multidimensional_index(i);
#ifdef ROWS_FIRST
    out[at[0] * 16 + at[1]] = sums[i];
#else
    out[at[1] * 32 + at[0]] = sums[i];
#endif
  }
#endif
}
