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

// Logits after bias, masks and penalties. What is not a number counts as masked.
template <class ACT>
void adjust(const Sample::Host<ACT>& a, uint32_t n) {
  const F least = set1(-INFINITY);
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
  const uint32_t whole = n / lanes * lanes;
  for (uint32_t i = 0; i < whole; i += lanes)
    store(a.adjusted + i, max(load(a.adjusted + i), least));  // a NaN gives the other operand
  for (uint32_t i = whole; i < n; ++i)
    if (std::isnan(a.adjusted[i])) a.adjusted[i] = -INFINITY;
}

// A distribution over n tokens: weights relative to the best, which has 1, and a histogram of them.
// Buckets are floats that share exponent and three bits of mantissa, so they fall into order.
class Distribution {
 public:
  // Replaces adjusted logits by weights. What is e^-80 times less likely than the best is masked.
  Distribution(float* logits, uint32_t n, float top, float temperature) : weights_(logits), n_(n) {
    const float inverse = std::min(1.0f / temperature, 1e30f);
    const F tail = set1(1.8e-35f);
    auto weight = [=](F logit) {
      return max(exp((logit - set1(top)) * set1(inverse)) - tail, zero());
    };
    const uint32_t whole = n / lanes * lanes;
    const int rest = static_cast<int>(n - whole);
    for (uint32_t i = 0; i < whole; i += lanes) store(logits + i, weight(load(logits + i)));
    store_first(logits + whole, weight(load_first(logits + whole, rest)), rest);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t b = bucket(weights_[i]);
      ++counts_[b];
      masses_[b] += weights_[i];
    }
    counts_[0] = 0;  // masked
  }

  struct Prefix {
    uint32_t count = 0;
    double mass = 0;
    uint32_t last = no_token;
  };

  // The tokens in falling order of weight, lowest id first on ties, until there are `count` of them
  // or their mass reaches `mass`; those below `weight` are left out.
  Prefix take(uint32_t count, double mass, float weight) const {
    Prefix taken;
    uint32_t b = n_buckets - 1;
    for (; b > 0; --b) {
      if (counts_[b] == 0) continue;
      if (taken.count + counts_[b] >= count || taken.mass + masses_[b] >= mass ||
          std::bit_cast<float>(b << shift) < weight)
        break;
      taken.count += counts_[b];
      taken.mass += masses_[b];
    }
    if (b == 0) return taken;
    const Token* tokens = sorted(b);
    for (uint32_t i = 0; i < counts_[b] && tokens[i].weight >= weight; ++i) {
      taken = {taken.count + 1, taken.mass + tokens[i].weight, tokens[i].id};
      if (taken.count >= count || taken.mass >= mass) break;
    }
    return taken;
  }

 private:
  static constexpr uint32_t shift = 20, n_buckets = 1024;
  struct Token {
    float weight;
    uint32_t id;
  };

  static uint32_t bucket(float weight) { return std::bit_cast<uint32_t>(weight) >> shift; }

  const Token* sorted(uint32_t b) const {
    static thread_local Scratch scratch;
    Token* tokens = scratch.room<Token>(counts_[b]);
    uint32_t found = 0;
    for (uint32_t i = 0; found < counts_[b]; ++i)
      if (bucket(weights_[i]) == b) tokens[found++] = {weights_[i], i};
    std::sort(tokens, tokens + found, [](const Token& x, const Token& y) {
      return x.weight > y.weight || (x.weight == y.weight && x.id < y.id);
    });
    return tokens;
  }

  const float* weights_;
  uint32_t n_;
  uint32_t counts_[n_buckets] = {};
  double masses_[n_buckets] = {};
};

// Top-k, top-p and min-p each keep a prefix of the tokens in falling order, and the draw takes the
// prefix whose mass a uniform number says: its last token is the one.
uint32_t draw(const Distribution& tokens, const Sample_Params& p) {
  using Prefix = Distribution::Prefix;
  const uint32_t top_k = p.top_k == 0 ? no_token : p.top_k;
  Prefix kept = tokens.take(top_k, INFINITY, 0);
  if (p.top_p < 1 || p.min_p > 0)
    kept = tokens.take(top_k, p.top_p < 1 ? p.top_p * kept.mass : INFINITY, p.min_p);
  const double uniform = philox(p.seed, p.step) * 0x1p-32;
  return tokens.take(kept.count, uniform * kept.mass, 0).last;
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
  adjust(a, n);
  uint32_t best = 0;
  for (uint32_t i = 1; i < n; ++i)
    if (a.adjusted[i] > a.adjusted[best]) best = i;
  const float top = a.adjusted[best];
  uint32_t token = top > -INFINITY ? best : no_token;
  const bool greedy = a.p.temperature <= 0 || a.p.top_k == 1 || a.p.top_p <= 0;
  if (!greedy && std::isfinite(top))
    token = draw(Distribution(a.adjusted, n, top, a.p.temperature), a.p);
  if (a.c.PENALTIES && token != no_token)
    a.counts[token] = (a.counts[token] & 0x80000000u) | ((a.counts[token] + 1) & 0x7fffffffu);
  hand_on(call, a.embedding, token, a.c.D, a.tokens + a.p.slot, a.x);
}

LILY_CPU_KERNEL(sample_greedy)
LILY_CPU_KERNEL(sample)

}  // namespace lily::cpu::LILY_ISA
