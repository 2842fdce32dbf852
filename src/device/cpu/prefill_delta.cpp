// The gated delta rule over many tokens: inputs, the convolution's ring, the recurrence.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/cpu/kernels.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"
#include "metal/prefill_delta_prep.h"
#include "metal/prefill_delta_scan.h"
#include "metal/prefill_ring.h"

namespace lily::cpu::LILY_ISA {

namespace {

constexpr uint32_t max_head = 256;
constexpr uint32_t prep_tokens = 32;
constexpr float l2_epsilon = 1e-6f;  // added to the sum of squares

// silu(conv(qkv)) of one head's channels for up to prep_tokens tokens from first_token on.
template <class ACT>
void convolve(const PrefillDeltaPrep::Host<ACT>& a, uint32_t channels, uint32_t first_channel,
              uint32_t width, uint32_t first_token, uint32_t n_tokens, float* out) {
  auto input = [&](int64_t t, uint32_t channel) {
    const ACT* row = t < 0 ? a.ring + ((a.p.position + t) & 3) * channels
                           : a.qkv + static_cast<size_t>(t) * channels;
    return load(row + channel);
  };
  for (uint32_t i = 0; i < width; i += lanes) {
    const uint32_t channel = first_channel + i;
    float taps[4][lanes];
    for (uint32_t j = 0; j < 4 * lanes; ++j) taps[j % 4][j / 4] = a.conv[size_t{channel} * 4 + j];
    const F w0 = load(taps[0]), w1 = load(taps[1]), w2 = load(taps[2]), w3 = load(taps[3]);
    const int64_t t = first_token;
    F x0 = input(t - 3, channel), x1 = input(t - 2, channel), x2 = input(t - 1, channel);
    for (uint32_t n = 0; n < n_tokens; ++n) {
      F x3 = input(t + n, channel);
      F y = fma(w3, x3, fma(w2, x2, fma(w1, x1, w0 * x0)));
      store(out + n * width + i, silu(y));
      x0 = x1, x1 = x2, x2 = x3;
    }
  }
}

template <class ACT>
void scale_row(const float* x, uint32_t n, float scale, ACT* out) {
  for (uint32_t i = 0; i < n; i += lanes) store(out + i, load(x + i) * set1(scale));
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class ACT>
void step_sizes(const PrefillDeltaPrep::Host<ACT>& a, size_t t) {
  const uint32_t H = a.c.HEADS;
  const float *b = a.gates + t * 2 * H, *alpha = b + H;
  const float *rate = a.decay, *bias = a.decay + H;
  float *g = a.steps + t * 2 * H, *beta = g + H;
  for (uint32_t h = 0; h < H; ++h) {
    g[h] = std::exp(rate[h] * softplus(alpha[h] + bias[h]));
    beta[h] = 1.0f / (1.0f + std::exp(-b[h]));
  }
}

}  // namespace

// A thread takes one head for a block of tokens: the taps stay in registers while the last inputs
// shift through them, and the head's rows wait in L1 for their norms. One more piece of work per
// block makes the step sizes.
template <class ACT>
void prefill_delta_prep(const KernelCall& call) {
  PrefillDeltaPrep::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t HK = a.c.KEY_HEADS, HV = a.c.HEADS, DK = a.c.DK, DV = a.c.DV;
  const uint32_t channels = 2 * HK * DK + HV * DV;
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(DK));

  auto head_block = [&](uint32_t head, uint32_t first, uint32_t n) {
    alignas(64) float rows[prep_tokens * max_head];
    if (head < 2 * HK) {
      const bool is_key = head >= HK;
      ACT* out = is_key ? a.k + (head - HK) * DK : a.q + head * DK;
      convolve(a, channels, head * DK, DK, first, n, rows);
      for (uint32_t i = 0; i < n; ++i) {
        const float* row = rows + i * DK;
        float r = 1.0f / std::sqrt(sum_squares(row, DK) + l2_epsilon);
        scale_row(row, DK, is_key ? r : r * q_scale, out + size_t{first + i} * HK * DK);
      }
    } else {
      head -= 2 * HK;
      convolve(a, channels, 2 * HK * DK + head * DV, DV, first, n, rows);
      for (uint32_t i = 0; i < n; ++i)
        scale_row(rows + i * DV, DV, 1.0f, a.v + (size_t{first + i} * HV + head) * DV);
    }
  };

  const uint32_t pieces = 2 * HK + HV + 1, blocks = (a.p.rows + prep_tokens - 1) / prep_tokens;
  call.pool.parallel_for(blocks * pieces, 4, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t first = i / pieces * prep_tokens, head = i % pieces;
      const uint32_t n = std::min(prep_tokens, a.p.rows - first);
      if (head + 1 < pieces) {
        head_block(head, first, n);
      } else {
        for (uint32_t t = first; t < first + n; ++t) step_sizes(a, t);
      }
    }
  });
}

// At most four rows: one thread copies them.
template <class ACT>
void prefill_ring(const KernelCall& call) {
  PrefillRing::Host<ACT> a(call.slots, call.constants, call.params);
  const size_t channels = a.c.CHANNELS;
  for (uint32_t t = a.p.rows - std::min(a.p.rows, 4u); t < a.p.rows; ++t)
    std::memcpy(a.ring + ((a.p.position + t) & 3) * channels, a.qkv + t * channels,
                channels * sizeof(ACT));
}

namespace {

// Vectors per column of a slice, and chains that a sum over columns runs in: enough independent
// work to hide the latency of a fused multiply-add, and few enough registers.
#if defined(__AVX512F__)
constexpr uint32_t slice_vectors = 2;
#else
constexpr uint32_t slice_vectors = 1;
#endif
constexpr uint32_t slice_rows = slice_vectors * lanes, chains = 2;
constexpr uint32_t scan_tokens = 16;  // their q and k fit into the L1 cache beside a slice

struct alignas(64) Column {
  float rows[slice_rows];
};

// slice_rows rows of S, transposed, so that S k needs no sum across lanes.
void read_slice(const float* s, uint32_t n_columns, Column* slice) {
  F m[lanes];
  for (uint32_t r = 0; r < slice_rows; r += lanes)
    for (uint32_t c = 0; c < n_columns; c += lanes) {
      for (uint32_t i = 0; i < lanes; ++i) m[i] = load(s + (r + i) * n_columns + c);
      transpose(m);
      for (uint32_t i = 0; i < lanes; ++i) store(slice[c + i].rows + r, m[i]);
    }
}
void write_slice(const Column* slice, uint32_t n_columns, float* s) {
  F m[lanes];
  for (uint32_t r = 0; r < slice_rows; r += lanes)
    for (uint32_t c = 0; c < n_columns; c += lanes) {
      for (uint32_t i = 0; i < lanes; ++i) m[i] = load(slice[c + i].rows + r);
      transpose(m);
      for (uint32_t i = 0; i < lanes; ++i) store(s + (r + i) * n_columns + c, m[i]);
    }
}

// S x, one number for each row of a slice.
struct Product {
  F chain[chains][slice_vectors];

  Product() {
    for (auto& c : chain)
      for (F& v : c) v = zero();
  }
  LILY_INLINE void add(uint32_t c, uint32_t v, F column, F x) {
    chain[c][v] = fma(column, x, chain[c][v]);
  }
  LILY_INLINE void finish(float* out) const {
    for (uint32_t v = 0; v < slice_vectors; ++v) store(out + v * lanes, chain[0][v] + chain[1][v]);
  }
};

LILY_INLINE void multiply(const Column* s, size_t n_columns, const float* x, float* out) {
  Product product;
  for (size_t c = 0; c < n_columns; c += chains)
    for (uint32_t i = 0; i < chains; ++i)
      for (uint32_t v = 0; v < slice_vectors; ++v)
        product.add(i, v, load(s[c + i].rows + v * lanes), set1(x[c + i]));
  product.finish(out);
}

// S ← g S + d kᵀ and, in the same pass, o = S q for this token and `next` = S k_next.
LILY_INLINE void advance(Column* s, size_t n_columns, F g, const F (&d)[slice_vectors],
                         const float* k, const float* q, const float* k_next, float* o,
                         float* next) {
  Product s_q, s_k;
  for (size_t c = 0; c < n_columns; c += chains)
    for (uint32_t i = 0; i < chains; ++i) {
      const F kc = set1(k[c + i]), qc = set1(q[c + i]), nc = set1(k_next[c + i]);
      for (uint32_t v = 0; v < slice_vectors; ++v) {
        float* p = s[c + i].rows + v * lanes;
        F x = fma(d[v], kc, load(p) * g);
        store(p, x);
        s_q.add(i, v, x, qc);
        s_k.add(i, v, x, nc);
      }
    }
  s_q.finish(o);
  s_k.finish(next);
}

// Some rows of one head through all tokens.
template <class ACT>
class HeadScan {
 public:
  HeadScan(const PrefillDeltaScan::Host<ACT>& a, uint32_t head, uint32_t first_row, uint32_t n_rows)
      : a_(a), DK_(a.c.DK), head_(head), row_(size_t{head} * a.c.DV + first_row), n_rows_(n_rows),
        keys_(a.c.KEY_HEADS * DK_), values_(a.c.HEADS * a.c.DV),
        key_column_(head / (a.c.HEADS / a.c.KEY_HEADS) * DK_),
        key_share_(slice_rows * DK_ / n_rows) {}

  void run() {
    static thread_local Scratch scratch;
    const uint32_t n_slices = n_rows_ / slice_rows;
    Column* state = scratch.room<Column>(n_slices * DK_);
    for (uint32_t i = 0; i < n_slices; ++i)
      read_slice(a_.state_in + (row_ + i * slice_rows) * DK_, DK_, state + i * DK_);
    for (uint32_t first = 0; first < a_.p.rows; first += scan_tokens) {
      gather(first, std::min(scan_tokens, a_.p.rows - first));
      for (uint32_t i = 0; i < n_slices; ++i) scan(state + i * DK_, i * slice_rows);
    }
    for (uint32_t i = 0; i < n_slices; ++i)
      write_slice(state + i * DK_, DK_, a_.state_out + (row_ + i * slice_rows) * DK_);
  }

 private:
  // Rows of a head are pages apart: copied, they are contiguous and float32, for all slices.
  void gather(uint32_t first, uint32_t n) {
    first_ = first;
    n_ = n;
    const uint32_t last_key = std::min(first + n, a_.p.rows - 1);
    for (uint32_t t = first; t < first + n; ++t)
      widen(a_.q + t * keys_ + key_column_, q_ + (t - first) * DK_);
    for (uint32_t t = first; t <= last_key; ++t)
      widen(a_.k + t * keys_ + key_column_, k_ + (t - first) * DK_);
  }
  void widen(const ACT* row, float* out) {
    for (uint32_t i = 0; i < DK_; i += lanes) store(out + i, load(row + i));
  }

  // A slice's share of what token t will need. Without it the caches would miss all of it, reads
  // and writes, since the hardware does not look pages ahead. (Inline: g++ drops calls of functions
  // that only prefetch.)
  LILY_INLINE void fetch_share(size_t t, size_t row) {
    constexpr size_t line = 64;
    const size_t key = t * keys_ + key_column_ + row / slice_rows * key_share_;
    const size_t value = t * values_ + row_ + row;
    for (size_t i = 0; i < key_share_; i += line / sizeof(ACT)) {
      __builtin_prefetch(a_.q + key + i);
      __builtin_prefetch(a_.k + key + i);
    }
    for (size_t i = 0; i < slice_rows; i += line / sizeof(float)) {
      __builtin_prefetch(a_.v + value + i);
      __builtin_prefetch(a_.o + value + i, 1);
    }
  }

  void scan(Column* s, uint32_t row) {
    float* pending = pending_ + row;  // S k of the coming token
    if (first_ == 0) multiply(s, DK_, k_, pending);
    for (uint32_t i = 0; i < n_; ++i) {
      const size_t t = first_ + i, at = t * values_ + row_ + row;
      if (t + scan_tokens < a_.p.rows) fetch_share(t + scan_tokens, row);
      const float* steps = a_.steps + t * 2 * a_.c.HEADS;
      const F g = set1(steps[head_]), beta = set1(steps[a_.c.HEADS + head_]);
      F d[slice_vectors];
      for (uint32_t v = 0; v < slice_vectors; ++v)
        d[v] = beta * (load(a_.v + at + v * lanes) - g * load(pending + v * lanes));
      // After the last token, S k_next is not used: any row will do.
      advance(s, DK_, g, d, k_ + i * DK_, q_ + i * DK_, k_ + (i + 1) * DK_, a_.o + at, pending);
    }
  }

  const PrefillDeltaScan::Host<ACT>& a_;
  const uint32_t DK_, head_;
  const size_t row_, n_rows_, keys_, values_, key_column_, key_share_;
  uint32_t first_ = 0, n_ = 0;
  alignas(64) float q_[scan_tokens * max_head];
  alignas(64) float k_[(scan_tokens + 1) * max_head] = {};
  alignas(64) float pending_[max_head];
};

}  // namespace

// A thread takes one head, or some of its rows where threads outnumber heads, and sixteen tokens at
// a time. A slice of so few rows of S stays in the L1 cache for sixteen tokens, and each of its
// numbers is loaded and stored once per token: S k of the next token is summed while S is updated,
// and g is applied to it afterwards. Sums run over the columns in order, for each row alone.
template <class ACT>
void prefill_delta_scan(const KernelCall& call) {
  PrefillDeltaScan::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t rows = a.c.HEADS < 2 * call.pool.size() ? slice_rows : a.c.DV;
  const uint32_t parts = a.c.DV / rows;
  call.pool.parallel_for(a.c.HEADS * parts, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t i = begin; i < end; ++i)
      HeadScan<ACT>(a, i / parts, i % parts * rows, rows).run();
  });
}

LILY_CPU_KERNEL(prefill_delta_prep)
LILY_CPU_KERNEL(prefill_ring)
LILY_CPU_KERNEL(prefill_delta_scan)

}  // namespace lily::cpu::LILY_ISA
