// One token of the gated delta rule. A thread takes a key head with all its value heads, so that q
// and k are convolved once. Each row of the state is read, decayed, corrected, read out and written
// while it is in registers: the state crosses memory once in each direction.
#include "metal/delta_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "device/cpu/kernels.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

namespace {

constexpr uint32_t max_width = 256;  // of a head
constexpr float l2_eps = 1e-6f;

template <class ACT>
using Args = DeltaStep::Host<ACT>;

// out = silu(conv(ring)) for n channels.
template <class ACT>
void convolve(const Args<ACT>& a, uint32_t channel, uint32_t n, float* out) {
  const uint32_t channels = 2 * a.c.KEY_HEADS * a.c.DK + a.c.HEADS * a.c.DV;
  const ACT* inputs[4];  // oldest first
  for (uint32_t tap = 0; tap < 4; ++tap)
    inputs[tap] = a.ring + size_t{(a.p.position + 1 + tap) & 3} * channels + channel;
  const float* conv = a.conv + size_t{channel} * 4;
  for (uint32_t i = 0; i < n; i += lanes, conv += 4 * lanes) {
    float taps[4][lanes];
    for (int c = 0; c < lanes; ++c)
      for (int tap = 0; tap < 4; ++tap) taps[tap][c] = conv[4 * c + tap];
    F sum = zero();
    for (int tap = 0; tap < 4; ++tap) sum = fma(load(taps[tap]), load(inputs[tap] + i), sum);
    store(out + i, silu(sum));
  }
}

void l2_normalise(float* x, uint32_t n, float scale) {
  const F r = set1(scale / std::sqrt(sum_squares(x, n) + l2_eps));
  for (uint32_t i = 0; i < n; i += lanes) store(x + i, load(x + i) * r);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct Step {
  const float *q, *k, *v;
  float decay, beta;
};

// o = S q after S ← decay · S + β (v - decay · S k) kᵀ. `vectors` is DK / 16 where that is known.
template <int vectors>
LILY_INLINE void update(const Step& step, uint32_t DV, int n_vectors, const float* in, float* out,
                        float* o) {
  const int n = vectors > 0 ? vectors : n_vectors;
  constexpr int ahead = 16;  // rows to fetch early; the hardware alone does not keep up
  F row[vectors > 0 ? vectors : max_width / lanes];
  for (uint32_t i = 0; i < DV; ++i, in += n * lanes, out += n * lanes) {
    F along_k = zero(), along_q = zero();
    for (int j = 0; j < n; ++j) {
      __builtin_prefetch(in + (ahead * n + j) * lanes);
      row[j] = load(in + j * lanes) * set1(step.decay);
      along_k = fma(row[j], load(step.k + j * lanes), along_k);
    }
    const F correction = set1(step.beta * (step.v[i] - reduce_add(along_k)));
    for (int j = 0; j < n; ++j) {
      row[j] = fma(correction, load(step.k + j * lanes), row[j]);
      store(out + j * lanes, row[j]);
      along_q = fma(row[j], load(step.q + j * lanes), along_q);
    }
    o[i] = reduce_add(along_q);
  }
}

template <class ACT>
void value_head(const Args<ACT>& a, uint32_t h, const float* q, const float* k) {
  const uint32_t DK = a.c.DK, DV = a.c.DV;
  float v[max_width], o[max_width];
  convolve(a, 2 * a.c.KEY_HEADS * DK + h * DV, DV, v);
  const float b = a.gates[h], alpha = a.gates[a.c.HEADS + h];
  const float decay = std::exp(a.decay[h] * softplus(alpha + a.decay[a.c.HEADS + h]));
  const Step step{q, k, v, decay, 1.0f / (1.0f + std::exp(-b))};
  const size_t state = size_t{h} * DV * DK;
  if (DK == 128)
    update<8>(step, DV, 8, a.state_in + state, a.state_out + state, o);
  else
    update<0>(step, DV, static_cast<int>(DK / lanes), a.state_in + state, a.state_out + state, o);

  if (a.c.RAW) {
    std::copy_n(o, DV, a.o + size_t{h} * DV);
    return;
  }
  // Several parts are another device's choice, and may be shorter than a vector.
  const uint32_t part = DV / a.c.PARTIALS;
  float* squares = a.squares + size_t{h} * a.c.PARTIALS;
  if (a.c.PARTIALS == 1) squares[0] = sum_squares(o, DV);
  for (uint32_t i = 0; a.c.PARTIALS > 1 && i < a.c.PARTIALS; ++i)
    squares[i] = std::inner_product(o + i * part, o + (i + 1) * part, o + i * part, 0.0f);
  for (uint32_t i = 0; i < DV; i += lanes)
    store(a.u + h * DV + i, load(o + i) * load(a.gamma + i) * silu(load(a.z + h * DV + i)));
}

}  // namespace

template <class ACT>
void delta_step(const KernelCall& call) {
  Args<ACT> a(call.slots, call.constants, call.params);
  const uint32_t DK = a.c.DK, group = a.c.HEADS / a.c.KEY_HEADS;
  call.pool.parallel_for(a.c.KEY_HEADS, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t key_head = begin; key_head < end; ++key_head) {
      float q[max_width], k[max_width];
      convolve(a, key_head * DK, DK, q);
      convolve(a, (a.c.KEY_HEADS + key_head) * DK, DK, k);
      l2_normalise(q, DK, 1.0f / std::sqrt(static_cast<float>(DK)));
      l2_normalise(k, DK, 1.0f);
      for (uint32_t h = key_head * group; h < (key_head + 1) * group; ++h) value_head(a, h, q, k);
    }
  });
}

LILY_CPU_KERNEL(delta_step)

}  // namespace lily::cpu::LILY_ISA
