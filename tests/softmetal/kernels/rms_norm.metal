// out = x · weight / sqrt(mean(x²) + eps), one threadgroup a row; the weight is optional.
#include <metal_stdlib>
using namespace metal;

constant bool has_weight [[function_constant(0)]];

template <typename T>
kernel void rms_norm(
    constant uint& width [[buffer(0)]],
    constant float& eps [[buffer(1)]],
    const device T* x [[buffer(2)]],
    const device T* weight [[buffer(3)]],
    device T* out [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_in_group [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[32];
  const device T* from = x + row * width;
  float sum = 0.0f;
  for (uint i = 4 * thread_in_group; i < width; i += 4 * threads) {
    const float4 v = float4(*(const device vec<T, 4>*)(from + i));
    sum += dot(v, v);
  }
  sum = simd_sum(sum);
  if (lane == 0) sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = simd_sum(lane < (threads + 31) / 32 ? sums[lane] : 0.0f);
  const float factor = precise::rsqrt(sum / float(width) + eps);
  for (uint i = 4 * thread_in_group; i < width; i += 4 * threads) {
    float4 v = float4(*(const device vec<T, 4>*)(from + i)) * factor;
    if (has_weight) v *= float4(*(const device vec<T, 4>*)(weight + i));
    *(device vec<T, 4>*)(out + row * width + i) = vec<T, 4>(v);
  }
}

template [[host_name("rms_norm_float")]] [[kernel]] decltype(rms_norm<float>) rms_norm<float>;
template [[host_name("rms_norm_bfloat")]] [[kernel]] decltype(rms_norm<bfloat>) rms_norm<bfloat>;
