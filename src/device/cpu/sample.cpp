// Picking the next token. One thread does it: even a large vocabulary is a hundredth of a step.
#include <algorithm>
#include <bit>
#include <cmath>

#include "device/cpu/kernels.h"
#include "device/cpu/pack.h"
#include "device/cpu/packed.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"
#include "metal/sample.h"
#include "metal/sample_greedy.h"

namespace lily::cpu::LILY_ISA {

namespace {

constexpr uint32_t no_token = ~0u;

// Calls body(i, n) for pieces i…i+n-1 of 16 or, at the end, fewer.
template <class Body>
LILY_INLINE void for_lanes(uint32_t n, Body&& body) {
  const uint32_t whole = n / lanes * lanes;
  for (uint32_t i = 0; i < whole; i += lanes) body(i, lanes);
  if (whole < n) body(whole, static_cast<int>(n - whole));
}

LILY_INLINE F load_some(const float* p, int n, float rest) {
  if (n == lanes) return load(p);
  float padded[lanes];
  std::fill(std::copy_n(p, n, padded), padded + lanes, rest);
  return load(padded);
}
LILY_INLINE void store_some(float* p, F values, int n) {
  n == lanes ? store(p, values) : store_first(p, values, n);
}

// Writes the token and its row of the embedding; zeroes where there is no token.
void hand_on(const KernelCall& call, const std::byte* embedding, uint32_t token, uint32_t D,
             uint32_t* slot, float* x) {
  *slot = token;
  const PackedSegment& rows = packed_header(embedding).segments[0];
  if (token >= rows.rows) {
    std::fill_n(x, D, 0.0f);
    return;
  }
  unpack_row(embedding, 0, 0, token, x);
  call.count(rows.block_bytes());
}

// Philox4x32-10, first word of the block `counter`.
uint32_t philox(uint64_t key, uint64_t counter) {
  uint32_t x[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const uint64_t a = uint64_t{0xd2511f53u} * x[0], b = uint64_t{0xcd9e8d57u} * x[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1, static_cast<uint32_t>(a)};
    std::copy_n(next, 4, x);
  }
  return x[0];
}

// Logits after bias, masks and penalties; returns the largest. What is not a number counts as masked.
template <class ACT>
float adjust(const Sample::Host<ACT>& a, uint32_t n) {
  std::copy_n(a.logits, n, a.adjusted);
  for (uint32_t i = 0; i < a.p.n_bias; ++i)
    if (a.bias_ids[i] < n) a.adjusted[a.bias_ids[i]] += a.bias[i];
  for (uint32_t i = 0; a.c.PENALTIES && i < n; ++i) {
    if (a.counts[i] == 0) continue;
    const uint32_t generated = a.counts[i] & 0x7fffffffu;
    float& l = a.adjusted[i];
    l = l > 0 ? l / a.p.repetition : l * a.p.repetition;
    if (generated > 0) l -= a.p.presence + a.p.frequency * static_cast<float>(generated);
  }
  const F least = set1(-INFINITY);
  F top = least;
  for_lanes(n, [&](uint32_t i, int left) {
    const F l = max(load_some(a.adjusted + i, left, -INFINITY), least);  // NaN gives the other one
    store_some(a.adjusted + i, l, left);
    top = max(top, l);
  });
  return reduce_max(top);
}

// Logits → weights relative to the best, which has 1. What is e^-80 times less likely is masked.
// Returns their sum.
double weigh(float* logits, uint32_t n, float top, float temperature) {
  const F inverse = set1(std::min(1.0f / temperature, 1e30f)), tail = set1(1.8e-35f);
  double total = 0;
  for_lanes(n, [&](uint32_t i, int left) {
    const F z = (load_some(logits + i, left, -INFINITY) - set1(top)) * inverse;
    const F weight = max(exp(z) - tail, zero());
    store_some(logits + i, weight, left);
    total += reduce_add(weight);
  });
  return total;
}

struct Token {
  float weight;
  uint32_t id;
};

// Falling order of weight, lowest id first on ties.
LILY_INLINE bool before(const Token& x, const Token& y) {
  return x.weight > y.weight || (x.weight == y.weight && x.id < y.id);
}

// Some tokens with their mass.
struct Tokens {
  Token* first;
  uint32_t count = 0;
  double mass = 0;

  void add(Token t) {
    first[count++] = t;
    mass += t.weight;
  }
  // Those up to `most` of them or up to which their mass reaches `enough`.
  Tokens prefix(uint32_t most, double enough) const {
    Tokens kept{first};
    while (kept.count < std::min(most, count) && kept.mass < enough) kept.add(first[kept.count]);
    return kept;
  }
};

// Those of weight `least` or more, in order of id.
Tokens collect(const float* weights, uint32_t n, float least) {
  static thread_local Scratch scratch;
  Tokens found{scratch.room<Token>(n)};
  for_lanes(n, [&](uint32_t i, int left) {
    if (!(reduce_max(load_some(weights + i, left, 0)) >= least)) return;
    for (uint32_t id = i; id < i + static_cast<uint32_t>(left); ++id)
      if (weights[id] >= least) found.add({weights[id], id});
  });
  return found;
}

// Top-k and top-p keep a prefix of the tokens in falling order. It is found among the few tokens
// that are not much less likely than the best, if they suffice.
uint32_t draw(const float* weights, uint32_t n, double total, const Sample_Params& p) {
  const uint32_t top_k = p.top_k == 0 ? n : p.top_k;
  const double enough = p.top_p < 1 ? p.top_p * total : INFINITY;
  Tokens kept{};
  for (float least : {0x1p-12f, 0x1p-24f, 0x1p-120f}) {
    kept = collect(weights, n, least);
    if (p.top_k == 0 ? kept.mass >= enough : kept.count >= top_k) break;
  }
  if (top_k < kept.count) {
    std::nth_element(kept.first, kept.first + top_k, kept.first + kept.count, before);
    std::sort(kept.first, kept.first + top_k, before);
    kept = kept.prefix(top_k, INFINITY);
  }
  if (p.top_p < 1) {
    const double mass = p.top_k == 0 ? total : kept.mass;
    std::sort(kept.first, kept.first + kept.count, before);
    kept = kept.prefix(top_k, p.top_p * mass);
  }
  if (p.min_p > 0) {
    const Tokens all = kept;
    kept = {all.first};
    for (uint32_t i = 0; i < all.count; ++i)
      if (all.first[i].weight >= p.min_p) kept.add(all.first[i]);
  }
  const double uniform = philox(p.seed, p.step) * 0x1p-32;
  const uint32_t drawn = kept.prefix(kept.count, uniform * kept.mass).count;
  return kept.first[std::max(drawn, 1u) - 1].id;
}

}  // namespace

template <class ACT>
void sample_greedy(const KernelCall& call) {
  SampleGreedy::Host<ACT> a(call.slots, call.constants, call.params);
  float best = -INFINITY;
  uint32_t token = no_token;
  for (uint32_t i = 0; i < a.c.MAXIMA; ++i) {
    const float value = std::bit_cast<float>(a.maxima[2 * i]);
    const uint32_t index = a.maxima[2 * i + 1];
    if (value > best || (value == best && index < token)) {
      best = value;
      token = index;
    }
  }
  hand_on(call, a.embedding, token, a.c.D, a.tokens + a.p.slot, a.x);
}

template <class ACT>
void sample(const KernelCall& call) {
  Sample::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t n = std::min(a.c.VALID, a.c.V);
  const float top = adjust(a, n);
  uint32_t token = no_token;
  const bool greedy = a.p.temperature <= 0 || a.p.top_k == 1 || a.p.top_p <= 0;
  if (top > -INFINITY && (greedy || !std::isfinite(top)))
    token = static_cast<uint32_t>(std::find(a.adjusted, a.adjusted + n, top) - a.adjusted);
  else if (top > -INFINITY)
    token = draw(a.adjusted, n, weigh(a.adjusted, n, top, a.p.temperature), a.p);
  if (a.c.PENALTIES && token != no_token)
    a.counts[token] = (a.counts[token] & 0x80000000u) | ((a.counts[token] + 1) & 0x7fffffffu);
  hand_on(call, a.embedding, token, a.c.D, a.tokens + a.p.slot, a.x);
}

LILY_CPU_KERNEL(sample_greedy)
LILY_CPU_KERNEL(sample)

}  // namespace lily::cpu::LILY_ISA
