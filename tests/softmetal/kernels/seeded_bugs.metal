// One bug a kernel. A comment `BUG kind` stands on the line that the report has to name; `CONTROL`
// marks a kernel that looks alike and is correct. Every kernel runs in two threadgroups of 64 lanes
// with out[128] (buffer 0, read and written) and in[128] (buffer 1, read).
#include <metal_stdlib>
using namespace metal;

#define ARGUMENTS                                       \
  device float* out [[buffer(0)]], const device float* in [[buffer(1)]], \
  uint i [[thread_position_in_grid]], uint lane [[thread_position_in_threadgroup]], \
  uint group [[threadgroup_position_in_grid]]

constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};

METAL_FUNC float helper_read(const device float* p, uint at) {
  return p[at];  // BUG helper_out_of_bounds: out of bounds
}

// CONTROL
kernel void exchange(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[63 - lane] + table[lane & 3];
}

kernel void barrier_without_memory(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_none);
  out[i] = shared[63 - lane];  // BUG barrier_without_memory: race
}

kernel void barrier_for_other_memory(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = shared[63 - lane];  // BUG barrier_for_other_memory: race
}

kernel void missing_barrier(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  out[i] = shared[lane ^ 1];  // BUG missing_barrier: uninitialised read | race
}

kernel void missing_second_barrier(ARGUMENTS) {
  threadgroup float shared[64];
  float sum = 0.0f;
  for (uint k = 0; k < 2; k++) {
    shared[lane] = in[i] + float(k);  // BUG missing_second_barrier: race
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += shared[63 - lane];
  }
  out[i] = sum;
}

// CONTROL
kernel void simdgroup_exchange(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[lane ^ 31];
}

kernel void simdgroup_barrier_too_narrow(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[lane ^ 63];  // BUG simdgroup_barrier_too_narrow: race | uninitialised read
}

kernel void reliance_on_lockstep(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  const float one = simd_max(1.0f);
  out[i] = one * shared[lane ^ 31];  // BUG reliance_on_lockstep: race
}

kernel void halves_of_a_word(ARGUMENTS) {  // CONTROL: neighbours write halves of one word
  threadgroup half shared[64];
  shared[lane] = half(in[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = float(shared[lane ^ 1]);
}

kernel void threadgroup_out_of_bounds(ARGUMENTS) {
  threadgroup float shared[64], other[64];
  shared[lane] = other[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[lane + 1] + other[lane];  // BUG threadgroup_out_of_bounds: out of bounds
}

kernel void threadgroup_uninitialised(ARGUMENTS) {
  threadgroup float shared[64];
  if (lane < 32) shared[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[lane];  // BUG threadgroup_uninitialised: uninitialised read
}

kernel void divergent_collective(ARGUMENTS) {
  float v = in[i];
  if (lane < 20)
    v = simd_sum(v);  // BUG divergent_collective: divergence | early return
  out[i] = v;
}

kernel void two_collectives(ARGUMENTS) {
  float v = in[i];
  if (lane & 1)
    v = simd_sum(v);  // BUG two_collectives: divergence
  else
    v = simd_max(v);  // BUG two_collectives: divergence
  out[i] = v;
}

kernel void collective_against_barrier(ARGUMENTS) {
  float v = in[i];
  if (lane < 20)
    v = simd_sum(v);  // BUG collective_against_barrier: divergence
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = v;
}

kernel void two_barriers(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  if (lane < 32)
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BUG two_barriers: divergence
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BUG two_barriers: divergence
  out[i] = shared[63 - lane];
}

// CONTROL
kernel void uniform_branches(ARGUMENTS) {
  float v = in[i];
  if (lane < 32)
    v = simd_sum(v);
  else
    v = simd_max(v);
  if (group == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = v;
}

kernel void return_before_barrier(ARGUMENTS) {
  threadgroup float shared[64];
  shared[lane] = in[i];
  if (lane >= 48) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // BUG return_before_barrier: early return
  out[i] = shared[lane];
}

kernel void return_before_collective(ARGUMENTS) {
  if (lane == 3) return;
  out[i] = simd_sum(in[i]);  // BUG return_before_collective: early return
}

// CONTROL
kernel void groups_return(ARGUMENTS) {
  threadgroup float shared[64];
  if (group == 1) return;
  shared[lane] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[63 - lane];
}

kernel void race_of_threadgroups(ARGUMENTS) {
  out[lane] = in[i];  // BUG race_of_threadgroups: race
}

kernel void read_of_another_group(ARGUMENTS) {
  out[i] = in[i];  // BUG read_of_another_group: race
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = out[i ^ 64] * 2.0f;  // BUG read_of_another_group: race
}

// CONTROL
kernel void device_exchange(ARGUMENTS) {
  out[i] = in[i];
  threadgroup_barrier(mem_flags::mem_device);
  const float v = out[i ^ 63];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = v;
}

kernel void device_exchange_one_barrier(ARGUMENTS) {
  out[i] = in[i];
  threadgroup_barrier(mem_flags::mem_device);
  const float v = out[i ^ 63];  // BUG device_exchange_one_barrier: race
  out[i] = v;  // BUG device_exchange_one_barrier: race
}

kernel void device_out_of_bounds(ARGUMENTS) {
  out[i + 1] = in[i];  // BUG device_out_of_bounds: out of bounds | race
}

kernel void negative_index(ARGUMENTS) {
  out[i] = in[int(i) - 1];  // BUG negative_index: out of bounds
}

kernel void helper_out_of_bounds(ARGUMENTS) {
  out[i] = helper_read(in, i + 100000);
}

kernel void write_to_input(ARGUMENTS) {
  device float* alias = (device float*)(in);
  alias[i] = out[i];  // BUG write_to_input: undeclared access
}

kernel void misaligned(ARGUMENTS) {
  const device float2* pairs = (const device float2*)(in + 1);
  out[i] = pairs[0].x;  // BUG misaligned: misaligned access
}

kernel void atomic_and_plain(ARGUMENTS) {
  threadgroup atomic_uint count;
  if (lane == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);  // BUG atomic_and_plain: race
  out[i] = float(*(threadgroup uint*)&count);  // BUG atomic_and_plain: race
}

kernel void early_store(ARGUMENTS) {
  threadgroup atomic_uint count;
  if (lane == 0)
    atomic_store_explicit(&count, 0u, memory_order_relaxed);  // BUG early_store: race
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);  // BUG early_store: race
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = float(atomic_load_explicit(&count, memory_order_relaxed));
}

// CONTROL
kernel void atomic_count(ARGUMENTS) {
  threadgroup atomic_uint count;
  if (lane == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = float(*(threadgroup uint*)&count);
}

kernel void shuffle_from_nowhere(ARGUMENTS) {
  out[i] = simd_shuffle(in[i], ushort(32));  // BUG shuffle_from_nowhere: bad lane
}

// CONTROL
kernel void shuffle_beyond_the_end(ARGUMENTS) {
  out[i] = simd_shuffle_down(in[i], 4) + simd_shuffle_up(in[i], 4);
}
