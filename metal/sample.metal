// Draw a token and embed it for the next step:                                                   (H2)
//   bias → ids from VALID on are masked → penalties → temperature → top-k → top-p → min-p → draw
//
// One threadgroup of 1024. Thread i looks after tokens i, i + 1024, …: two passes over the logits
// make weights of them. Then all cuts are searches in falling order of weight (token_mass.h):
// mostly among the few hundred tokens within a factor of 2^12 of the best, which fit into
// threadgroup memory, with no further pass than the one that collects them; in a flat distribution
// by halving the range of weights, a pass each. Tokens and their order are those of the CPU device,
// so are the random numbers.
#include "sample.h"

#include "embedding_row.h"
#include "grids.h"
#include "philox.h"
#include "token_mass.h"

LILY_PACKED(Sample, embedding)

#define SAMPLE_MIDDLE_BITS 0x33800000u  // 2^-24

// The logit of a token after penalties. `counted` is its entry in `counts`.
METAL_FUNC float penalised(float logit, uint counted, constant Sample_Params& p) {
  if (counted == 0) return logit;
  const uint generated = counted & 0x7fffffffu;
  logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
  if (generated > 0) logit -= p.presence + p.frequency * float(generated);
  return logit;
}

// The token drawn, when weights are made. `middle` is how many have 2^-24 or more.
template <uint THREADS>
METAL_FUNC uint draw(thread Picker<THREADS>& picker, uint middle, constant Sample_Params& p) {
  const uint random = philox(p.seed, p.step);
  const uint least = p.min_p > 0.0f ? as_type<uint>(min(p.min_p, 1.0f)) : 0u;

  // As on the CPU device, top-k among exactly k tokens sorts nothing, and they are drawn from in
  // order of id, like all tokens are without top-k and top-p.
  Cut cut = {LILY_LEAST_BITS, LILY_NO_INDEX, picker.all.mass};
  bool falling = p.top_p < 1.0f;
  if (p.top_k > 0) {
    uint found = picker.all.count;
    if (picker.likely.count >= p.top_k) {
      found = picker.likely.count;
      cut.bits = LILY_LIKELY_BITS;
    } else if (middle >= p.top_k) {
      found = middle;
      cut.bits = SAMPLE_MIDDLE_BITS;
    }
    if (found > p.top_k) {
      falling = true;
      cut = picker.find(true, p.top_k);
    } else {
      cut.mass = picker.measure(cut.bits, LILY_ONE_BITS + 1).mass;
    }
  }
  if (p.top_p < 1.0f)
    cut = picker.find(false, part_of(cut.mass, uint(p.top_p * 4294967296.0f)));
  if (least > cut.bits) {
    cut.bits = least;
    cut.mass = picker.measure(least, LILY_ONE_BITS + 1).mass;
  }
  const ulong target = part_of(cut.mass, random);
  return falling ? picker.find(false, target).id
                 : picker.find_by_id(cut.bits, LILY_ONE_BITS + 1, false, target);
}

[[max_total_threads_per_threadgroup(SAMPLE_THREADS)]]
kernel void sample(LILY_ARGUMENTS(Sample),
                   uint index [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint threads = SAMPLE_THREADS;
  constexpr uint n = Sample_VALID < Sample_V ? Sample_VALID : Sample_V;
  threadgroup uint words[3 * 32];
  threadgroup uint list_bits[threads];
  threadgroup uint list_ids[threads];
  threadgroup atomic_uint counter[1];

  Picker<threads> picker;
  picker.weights = adjusted;
  picker.n = n;
  picker.index = index;
  picker.simdgroup = simdgroup;
  picker.lane = lane;
  picker.words = words;
  picker.list_bits = list_bits;
  picker.list_ids = list_ids;
  picker.counter = counter;
  picker.list_count = 0;

  // A token may be in the list of biases twice.
  device const float* from = logits;
  if (p.n_bias > 0) {
    from = adjusted;
    for (uint i = index; i < n; i += threads) adjusted[i] = logits[i];
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = index; i < p.n_bias; i += threads)
      if (bias_ids[i] < n)
        atomic_fetch_add_explicit((device atomic_float*)(adjusted + bias_ids[i]), bias[i],
                                  memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_device);
  }
  Best best = {-INFINITY, LILY_NO_INDEX};
  for (uint begin = index; begin < n; begin += LILY_AHEAD * threads) {
    float some[LILY_AHEAD];
    load_ahead<threads>(from, begin, n, some);
    for (uint j = 0; j < LILY_AHEAD; j++) {
      const uint i = begin + j * threads;
      if (i >= n) continue;
      const float logit = Sample_PENALTIES ? penalised(some[j], counts[i], p) : some[j];
      adjusted[i] = isnan(logit) ? -INFINITY : logit;
      if (logit > best.value) best = {logit, i};
    }
  }
  best = picker.best_of(best);

  uint token = best.index;
  const bool greedy = p.temperature <= 0.0f || p.top_k == 1 || p.top_p <= 0.0f;
  if (!greedy && isfinite(best.value)) {
    // Weights relative to the best. What is e^-80 times less likely is masked.
    const float inverse = min(1.0f / p.temperature, 1e30f);
    Tally all = {0, 0}, likely = {0, 0}, middle = {0, 0};
    for (uint begin = index; begin < n; begin += LILY_AHEAD * threads) {
      float some[LILY_AHEAD];
      load_ahead<threads>(adjusted, begin, n, some);
      for (uint j = 0; j < LILY_AHEAD; j++) {
        if (begin + j * threads >= n) continue;
        const float z = (some[j] - best.value) * inverse;
        const float weight = max(precise::exp(z) - 1.8e-35f, 0.0f);
        adjusted[begin + j * threads] = weight;
        const uint bits = as_type<uint>(weight);
        if (bits >= LILY_LEAST_BITS) all.add(weight);
        if (bits >= SAMPLE_MIDDLE_BITS) middle.count += 1;
        if (bits >= LILY_LIKELY_BITS) likely.add(weight);
      }
    }
    threadgroup_barrier(mem_flags::mem_device);  // find_by_id reads what other threads wrote
    picker.all = picker.total_of(all);
    picker.likely = picker.total_of(likely);
    token = draw(picker, picker.total_of(middle).count, p);
  }

  // The thread that has read the token's count writes it.
  if (Sample_PENALTIES && token < n && token % threads == index)
    counts[token] = (counts[token] & 0x80000000u) | ((counts[token] + 1) & 0x7fffffffu);
  if (index == 0) tokens[p.slot] = token;
  EmbeddingRow<Sample_embedding> row;
  row.weight = embedding;
  row.x = x;
  row.token = token;
  row.thread_index = index;
  row.threads = threads;
  row.write();
}
