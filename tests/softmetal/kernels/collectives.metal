// Every simdgroup and quad function once: out[f, i] for function f and lane i.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint LANES = 32;

template <typename T>
METAL_FUNC void all_functions(const device T* in, device T* out, uint i) {
  const T v = in[i];
  uint f = 0;
  out[LANES * f++ + i] = simd_sum(v);
  out[LANES * f++ + i] = simd_product(v);
  out[LANES * f++ + i] = simd_max(v);
  out[LANES * f++ + i] = simd_min(v);
  out[LANES * f++ + i] = simd_prefix_inclusive_sum(v);
  out[LANES * f++ + i] = simd_prefix_exclusive_sum(v);
  out[LANES * f++ + i] = simd_prefix_inclusive_product(v);
  out[LANES * f++ + i] = simd_prefix_exclusive_product(v);
  out[LANES * f++ + i] = simd_shuffle(v, ushort((i * 7) % 32));
  out[LANES * f++ + i] = simd_shuffle_xor(v, 5);
  out[LANES * f++ + i] = simd_shuffle_up(v, 3);
  out[LANES * f++ + i] = simd_shuffle_down(v, 3);
  out[LANES * f++ + i] = simd_shuffle_rotate_up(v, 3);
  out[LANES * f++ + i] = simd_shuffle_rotate_down(v, 3);
  out[LANES * f++ + i] = simd_broadcast(v, 9);
  out[LANES * f++ + i] = simd_broadcast_first(v);
  out[LANES * f++ + i] = quad_sum(v);
  out[LANES * f++ + i] = quad_max(v);
  out[LANES * f++ + i] = quad_min(v);
  out[LANES * f++ + i] = quad_shuffle_xor(v, 1);
  out[LANES * f++ + i] = quad_broadcast(v, 2);
  out[LANES * f++ + i] = quad_shuffle_up(v, 1);
  out[LANES * f++ + i] = quad_shuffle_down(v, 1);
}

kernel void floats(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_index_in_simdgroup]]) {
  all_functions(in, out, i);
}

kernel void integers(const device int* in [[buffer(0)]], device int* out [[buffer(1)]],
                     uint i [[thread_index_in_simdgroup]]) {
  all_functions(in, out, i);
}

kernel void votes(const device int* in [[buffer(0)]], device uint* out [[buffer(1)]],
                  uint i [[thread_index_in_simdgroup]]) {
  const bool vote = in[i] > 0;
  out[i] = uint(ulong(simd_ballot(vote)));
  out[32 + i] = uint(simd_any(vote)) + 2u * uint(simd_all(vote)) + 4u * uint(simd_is_first());
  out[64 + i] = simd_or(uint(in[i])) + simd_and(7u) + simd_xor(i);
}

kernel void vectors(const device float4* in [[buffer(0)]], device float4* out [[buffer(1)]],
                    uint i [[thread_index_in_simdgroup]]) {
  out[i] = simd_shuffle_xor(in[i], 1) + simd_sum(in[i]).wzyx;
}

// A product of matrices with a diagonal and a transposed factor: D = diag(2) · A · Bᵀ + A.
kernel void matrices(const device float* a [[buffer(0)]], const device float* b [[buffer(1)]],
                     device float* out [[buffer(2)]]) {
  simdgroup_float8x8 left, right, product, doubled;
  simdgroup_load(left, a);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply(doubled, simdgroup_float8x8(2.0f), left);
  simdgroup_multiply_accumulate(product, doubled, right, left);
  simdgroup_store(product, out);
}
