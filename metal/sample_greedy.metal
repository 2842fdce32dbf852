// token = index of the largest maximum, lowest on ties;  x = E[token] for the next step          (H2)
//
// One threadgroup. All of its threads learn the token and write pieces of x.
#include "sample_greedy.h"

#include "argmax.h"
#include "embedding_row.h"
#include "grids.h"

LILY_PACKED(SampleGreedy, embedding)

[[max_total_threads_per_threadgroup(SAMPLE_GREEDY_THREADS)]]
kernel void sample_greedy(LILY_ARGUMENTS(SampleGreedy),
                          uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint threads = SAMPLE_GREEDY_THREADS, simdgroups = threads / 32;
  threadgroup float values[simdgroups];
  threadgroup uint indices[simdgroups];

  Best best = {-INFINITY, LILY_NO_INDEX};
  for (uint i = index; i < SampleGreedy_MAXIMA; i += threads) {
    const Best other = {as_type<float>(maxima[2 * i]), maxima[2 * i + 1]};
    if (other.before(best)) best = other;
  }
  best = simd_best(best);
  if (lane == 0) {
    values[simdgroup] = best.value;
    indices[simdgroup] = best.index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint other = min(lane, simdgroups - 1);
  best = {values[other], indices[other]};
  best = simd_best(best);

  if (index == 0) tokens[p.slot] = best.index;
  EmbeddingRow<SampleGreedy_embedding> row;
  row.weight = embedding;
  row.x = x;
  row.token = best.index;
  row.thread_index = index;
  row.threads = threads;
  row.write();
}
