// Pieces of the language, each checked against a number in the test.
#include <metal_stdlib>
using namespace metal;

struct Pair {
  uint low;
  float high;
};
static_assert(sizeof(Pair) == 8 && sizeof(float3) == 16 && sizeof(half) == 2, "layout");

constant float4 weights = float4(1.0f, 2.0f, 3.0f, 4.0f);
constant uint switch_value [[function_constant(7)]];
constant bool is_on [[function_constant(2)]];

namespace inner {

// A functor whose methods carry an address space.
struct Scale {
  float by;
  explicit Scale(float factor) thread : by(factor) {}
  float operator()(float x) const thread { return by * x; }
};

template <typename T, int N>
METAL_FUNC T sum_of(const thread T (&values)[N]) {
  T sum = T(0);
  for (int i = 0; i < N; i++) sum += values[i];
  return sum;
}

template <int N>
[[host_name("in_namespace")]] [[kernel]] void never(device float* out [[buffer(0)]]) {
  out[0] = float(N);
}

kernel void language(constant Pair& pair [[buffer(0)]], device float* out [[buffer(1)]],
                     const device uchar4& bytes [[buffer(2)]],
                     uint2 size [[threads_per_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  if (lane != 0) return;
  float4 v(1.0f, float2(2.0f, 3.0f), 4.0f);
  v.xy = v.yx;
  out[0] = dot(v, weights);
  out[1] = float(as_type<uint>(1.0f) >> 23);
  out[2] = float(pair.low) + pair.high;
  out[3] = Scale(3.0f)(2.0f);
  const float values[3] = {1.0f, 2.0f, 4.0f};
  out[4] = sum_of(values);
  out[5] = float(uint4(bytes).z);
  out[6] = float(bfloat(1.00390625f));  // halfway: to even
  out[7] = float(1.5h + half(0.25f)) + float(bfloat(float(0.5bf)));
  out[8] = select(1.0f, 2.0f, size.x == 32u) + float(size.y);
  out[9] = float(popcount(0xf0u)) + float(clz(1u)) + float(ctz(8u)) + float(mulhi(0x80000000u, 6u));
  out[10] = clamp(5.0f, 0.0f, 3.0f) + max(1.0f, 2.0f) + float(min(3u, 4u)) + fma(2.0f, 3.0f, 4.0f);
  out[11] = fast::exp2(3.0f) + precise::rsqrt(4.0f) + floor(-1.5f) + abs(-2.0f);
  out[12] = float(all(int2(1, 2) == int2(1, 2))) + float(any(int2(0, 0) > int2(1, 1)));
  out[13] = is_function_constant_defined(switch_value) ? float(switch_value) : -1.0f;
  out[14] = is_on ? 1.0f : 0.0f;
  out[15] = max(as_type<float>(0x7fc00000u), 1.0f) + 1.0 / 2.0;
  out[16] = float(vec<int, 3>(1, 2, 3).z) + float(char(-3));
}

}  // namespace inner

// Every built-in value of a thread: a row of 24 numbers, at its place in the grid.
kernel void positions(device uint* out [[buffer(0)]],
                      uint3 in_grid [[thread_position_in_grid]],
                      uint3 grid [[threads_per_grid]],
                      ushort3 in_group [[thread_position_in_threadgroup]],
                      uint3 group_size [[threads_per_threadgroup]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint3 groups [[threadgroups_per_grid]],
                      uint index [[thread_index_in_threadgroup]],
                      ushort lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]],
                      uint width [[threads_per_simdgroup]],
                      uint quad_lane [[thread_index_in_quadgroup]]) {
  device uint* row = out + 24 * (in_grid.x + grid.x * (in_grid.y + grid.y * in_grid.z));
  const uint3 vectors[6] = {in_grid, grid, uint3(in_group), group_size, group, groups};
  for (uint i = 0; i < 18; i++) row[i] = vectors[i / 3][i % 3];
  const uint numbers[6] = {index, lane, simdgroup, simdgroups, width, quad_lane};
  for (uint i = 0; i < 6; i++) row[18 + i] = numbers[i];
}

// Through a whole threadgroup of 1024.
kernel void reverse(device uint* out [[buffer(0)]], uint lane [[thread_index_in_threadgroup]]) {
  threadgroup uint shared[1024];
  shared[lane] = lane;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = shared[1023 - lane];
}
