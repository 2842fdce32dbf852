// out [2, 16, 32] = a [16, 32] · b [32, 32]ᵀ with operands in bf16 and in half, in two steps of 16
// columns, by one simdgroup: what products of tiles on tensor operations rest on, with numbers that
// both types and their sums have exactly.
#include "contract.h"

#include "fours.h"
#include "tile_tensor.h"

constant constexpr uint STRIDE = 24;  // padded, as tiles are

template <class T>
METAL_FUNC void multiply(device const bfloat* a, device const bfloat* b, device float* out,
                         threadgroup float4* memory, uint lane) {
  threadgroup T* rows = (threadgroup T*)memory;
  threadgroup T* weights = rows + 16 * STRIDE;
  TensorProduct<T, 16, 16, STRIDE> product;
  product.clear();
  for (uint step = 0; step < 2; step++) {
    for (uint e = lane; e < 16 * 16; e += 32)
      rows[e / 16 * STRIDE + e % 16] = T(float(a[e / 16 * 32 + 16 * step + e % 16]));
    for (uint e = lane; e < 32 * 16; e += 32)
      weights[e / 16 * STRIDE + e % 16] = T(float(b[e / 16 * 32 + 16 * step + e % 16]));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    product.add(rows, weights);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup float* sums = (threadgroup float*)memory;
  product.store(0, sums, 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = lane; e < 16 * 32; e += 32) out[e] = sums[e];
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

[[max_total_threads_per_threadgroup(32)]]
kernel void tensor_probe(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
                         device float* out [[buffer(2)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[(16 + 32) * STRIDE * 2 / 16];
  multiply<bfloat>(a, b, out, memory, lane);
  multiply<half>(a, b, out + 16 * 32, memory, lane);
}
