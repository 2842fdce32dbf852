// Loops over one operation each, for costs.py.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#define ARGUMENTS                                              \
  device float* out [[buffer(0)]], constant uint& n [[buffer(1)]], \
  uint i [[thread_position_in_grid]], uint lane [[thread_position_in_threadgroup]]

kernel void nothing(ARGUMENTS) { out[i] = float(n); }

kernel void barrier(ARGUMENTS) {
  for (uint k = 0; k < n; k++) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = 1.0f;
}

kernel void shuffle(ARGUMENTS) {
  float v = float(i);
  for (uint k = 0; k < n; k++) v = simd_shuffle_xor(v, 1) + 1.0f;
  out[i] = v;
}

kernel void sum(ARGUMENTS) {
  float v = float(i);
  for (uint k = 0; k < n; k++) v = simd_sum(v) * 0.03f;
  out[i] = v;
}

kernel void multiply(ARGUMENTS) {
  simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);
  for (uint k = 0; k < n; k++) simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, out + i / 32 * 64);
}

kernel void load_threadgroup(ARGUMENTS) {
  threadgroup float shared[256];
  shared[lane] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = 0.0f;
  for (uint k = 0; k < n; k++) v += shared[(lane + k) & 255];
  out[i] = v;
}

kernel void load_device(ARGUMENTS, const device float* in [[buffer(2)]]) {
  float v = 0.0f;
  for (uint k = 0; k < n; k++) v += in[(i + k) & 255];
  out[i] = v;
}

kernel void load_device_16(ARGUMENTS, const device float4* in [[buffer(2)]]) {
  float4 v = float4(0.0f);
  for (uint k = 0; k < n; k++) v += in[(i + k) & 63];
  out[i] = v.x + v.y + v.z + v.w;
}

kernel void update_device(ARGUMENTS) {
  out[i] = 0.0f;
  for (uint k = 0; k < n; k++) *(volatile device float*)(out + i) += 1.0f;
}
