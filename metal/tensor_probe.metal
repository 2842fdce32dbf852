// What products on tensor operations rest on, with numbers that their types and sums have exactly: by
// one simdgroup, from a [16, 32] and b [32, 32],
//
//   out[0], out[1] = a · bᵀ with operands in bf16 and in half, in two steps of 16 columns, both from
//                    threadgroup memory
//   out[2] = a · (the first SOME rows of b)ᵀ, further columns 0: b in device memory, where the
//            tensor over it ends
//   out[3] = (the first SOME columns of a) · (the first SOME rows of b), b as before
#include "contract.h"

#include "fours.h"
#include "tile_tensor.h"

constant constexpr uint STRIDE = 24;  // padded, as tiles are
constant constexpr uint SOME = 21, LONG = 40;

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

// The first `columns` of the sums, then zeros.
template <class Product>
METAL_FUNC void multiply_some(device const bfloat* a, device const bfloat* b, device float* out,
                              threadgroup float4* memory, uint columns, uint lane) {
  threadgroup bfloat* rows = (threadgroup bfloat*)memory;
  for (uint e = lane; e < 16 * 32; e += 32) rows[e / 32 * LONG + e % 32] = a[e];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  Product product;
  product.sums.clear();
  product.add(rows, LONG, b, 32, SOME);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* sums = (threadgroup float*)memory;
  product.sums.template store<16>(0, sums, 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = lane; e < 16 * 32; e += 32) out[e] = e % 32 < columns ? sums[e] : 0.0f;
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

[[max_total_threads_per_threadgroup(32)]]
kernel void tensor_probe(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
                         device float* out [[buffer(2)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 memory[(16 + 32) * STRIDE * 2 / 16];
  multiply<bfloat>(a, b, out, memory, lane);
  multiply<half>(a, b, out + 16 * 32, memory, lane);
  multiply_some<TensorRows<32>>(a, b, out + 2 * 16 * 32, memory, SOME, lane);
  multiply_some<TensorColumns>(a, b, out + 3 * 16 * 32, memory, 32, lane);
}
