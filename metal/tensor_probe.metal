// out [16, 32] = a [16, 32] · b [32, 32]ᵀ, in two steps of 16 columns, by one simdgroup: what
// products of tiles on tensor operations rest on, with numbers that a sum has exactly.
#include "contract.h"

#include "fours.h"
#include "tile_tensor.h"

[[max_total_threads_per_threadgroup(32)]]
kernel void tensor_probe(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
                         device float* out [[buffer(2)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint STRIDE = 24;  // padded, as tiles are
  threadgroup float4 memory[(16 + 32) * STRIDE * 2 / 16];
  threadgroup bfloat* rows = (threadgroup bfloat*)memory;
  threadgroup bfloat* weights = rows + 16 * STRIDE;
  TensorProduct<16, 16, STRIDE> product;
  product.clear();
  for (uint step = 0; step < 2; step++) {
    for (uint e = lane; e < 16 * 16; e += 32)
      rows[e / 16 * STRIDE + e % 16] = a[e / 16 * 32 + 16 * step + e % 16];
    for (uint e = lane; e < 32 * 16; e += 32)
      weights[e / 16 * STRIDE + e % 16] = b[e / 16 * 32 + 16 * step + e % 16];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    product.add(rows, weights);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup float* sums = (threadgroup float*)memory;
  product.store(0, sums, 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = lane; e < 16 * 32; e += 32) out[e] = sums[e];
}
