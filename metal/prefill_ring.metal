// The last min(T, 4) rows of qkv enter the conv ring: position p goes to slot p & 3.
//
// Threadgroups: ceil(CHANNELS / THREADS). A thread owns a channel, so four slots at most.
#include "prefill_ring.h"

#include "grids.h"

[[max_total_threads_per_threadgroup(PREFILL_RING_THREADS)]]
kernel void prefill_ring(LILY_ARGUMENTS(PrefillRing), uint3 thread_ [[thread_position_in_grid]]) {
  constexpr uint channels = PrefillRing_CHANNELS;
  const uint channel = thread_.x;
  if (channel >= channels) return;
  for (uint t = p.rows - min(p.rows, 4u); t < p.rows; t++)
    ring[((p.position + t) & 3u) * channels + channel] = qkv[ulong(t) * channels + channel];
}
