// out [2, 16, 32] by one simdgroup on tensor operations, from a [16, 32] and the first 21 rows of
// b [32, 32] in device memory: a · bᵀ, of which 21 columns are there, and a's first 21 columns · b.
// Each define is a bug.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
#include <metal_tensor>
using namespace metal;
using namespace mpp::tensor_ops;

#ifdef TERMS_ARE_STATED  // though not all of them are there
#define TERMS 32
#else
#define TERMS static_cast<int>(dynamic_extent)
#endif
#ifdef ENDS_LATE
#define SOME 33
#else
#define SOME 21
#endif

typedef tensor<threadgroup bfloat, dextents<int, 2>, tensor_inline> Left;
typedef tensor<device bfloat, dextents<int, 2>, tensor_inline> Right;

template <class Sums>
METAL_FUNC void store(thread Sums& sums, device float* out, int columns) {
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (!sums.is_valid_element(i)) continue;
    const auto at = sums.get_multidimensional_index(i);
    if (at[0] < columns) out[at[1] * 32 + at[0]] = sums[i];
  }
}

kernel void tensor_edges(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
                         device float* out [[buffer(2)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat rows[16 * 40];
  for (uint e = lane; e < 16 * 32; e += 32) rows[e / 32 * 40 + e % 32] = a[e];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  Right right((device bfloat*)b, dextents<int, 2>(32, SOME), array<int, 2>{1, 32});
  {
    constexpr auto descriptor = matmul2d_descriptor(16, 32, 32, false, true, true);
    matmul2d<descriptor, execution_simdgroup> operation;
    Left left(rows, dextents<int, 2>(32, 16), array<int, 2>{1, 40});
    auto sums = operation.get_destination_cooperative_tensor<Left, Right, float>();
    operation.run(left, right, sums);
#ifdef EVERY_COLUMN
    store(sums, out, 32);
#else
    store(sums, out, 21);
#endif
  }
  constexpr auto descriptor = matmul2d_descriptor(16, 32, TERMS, false, false, true);
  matmul2d<descriptor, execution_simdgroup> operation;
  Left left(rows, dextents<int, 2>(SOME, 16), array<int, 2>{1, 40});
  auto sums = operation.get_destination_cooperative_tensor<Left, Right, float>();
  operation.run(left, right, sums);
  store(sums, out + 16 * 32, 32);
}
