// y[n] = Σ_k x[k] · (scale[n, k/64] · q[n, k] + bias[n, k/64]): one simdgroup, ROWS rows.
#include <metal_stdlib>
using namespace metal;

// 16 activations of a lane, divided by what the masks below leave in front of each nibble.
template <typename T>
METAL_FUNC float load_x(const device T* x, thread float* out) {
  float sum = 0.0f;
  for (int i = 0; i < 16; i += 4) {
    const float4 v = float4(*(const device vec<T, 4>*)(x + i));
    sum += v.x + v.y + v.z + v.w;
    out[i] = v.x;
    out[i + 1] = v.y / 16.0f;
    out[i + 2] = v.z / 256.0f;
    out[i + 3] = v.w / 4096.0f;
  }
  return sum;
}

METAL_FUNC float dot16(const device uint2* words, const thread float* x) {
  const ushort4 w = as_type<ushort4>(*words);
  float sum = 0.0f;
  for (int i = 0; i < 4; i++)
    sum += x[4 * i] * float(w[i] & 0x000f) + x[4 * i + 1] * float(w[i] & 0x00f0) +
           x[4 * i + 2] * float(w[i] & 0x0f00) + x[4 * i + 3] * float(w[i] & 0xf000);
  return sum;
}

template <typename T, int ROWS, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void row_product(
    const device uint* weight [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device T* x [[buffer(4)]],
    device T* y [[buffer(5)]],
    constant uint2& size [[buffer(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint K = size.x, N = size.y;
  const uint first = (group.x * SIMDGROUPS + simdgroup) * ROWS;
  float sums[ROWS] = {0.0f};
  float xs[16];
  for (uint k = lane * 16; k < K; k += 512) {
    const float sum = load_x(x + k, xs);
    for (int r = 0; r < ROWS; r++) {
      const uint row = min(first + uint(r), N - 1);
      const float dot = dot16((const device uint2*)(weight + (row * K + k) / 8), xs);
      sums[r] += float(scales[(row * K + k) / 64]) * dot + float(biases[(row * K + k) / 64]) * sum;
    }
  }
  for (int r = 0; r < ROWS; r++) {
    const float total = simd_sum(sums[r]);
    if (lane == 0 && first + uint(r) < N) y[first + r] = T(total);
  }
}

#define INSTANTIATE(T)                                         \
  template [[host_name("row_product_" #T)]] [[kernel]]         \
  decltype(row_product<T, 4, 2>) row_product<T, 4, 2>;
INSTANTIATE(float)
INSTANTIATE(bfloat)
