// counts[v] = how often v is in values; total = Σ values. Threadgroup counts, then device atomics.
#include <metal_stdlib>
using namespace metal;

struct Params {
  uint n;
};

kernel void histogram(
    constant Params& p [[buffer(0)]],
    const device uchar* values [[buffer(1)]],
    device atomic_uint* counts [[buffer(2)]],
    device atomic_float* total [[buffer(3)]],
    threadgroup float* scratch [[threadgroup(0)]],
    uint3 position [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]],
    uint thread_in_group [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup atomic_uint local[256];
  for (uint i = thread_in_group; i < 256; i += threads.x)
    atomic_store_explicit(&local[i], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = 0;
  for (uint i = position.x; i < p.n; i += size.x) {
    atomic_fetch_add_explicit(&local[values[i]], 1u, memory_order_relaxed);
    sum += values[i];
  }
  scratch[thread_in_group] = float(sum);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_ = threads.x / 2; half_ > 0; half_ /= 2) {
    if (thread_in_group < half_) scratch[thread_in_group] += scratch[thread_in_group + half_];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = thread_in_group; i < 256; i += threads.x)
    atomic_fetch_add_explicit(&counts[i], atomic_load_explicit(&local[i], memory_order_relaxed),
                              memory_order_relaxed);
  if (thread_in_group == 0) atomic_fetch_add_explicit(total, scratch[0], memory_order_relaxed);
}
