// Causal attention over many tokens: queries and cache entries, then the softmax.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/cpu/attend_products.h"
#include "device/cpu/cache_rows.h"
#include "device/cpu/kernels.h"
#include "device/cpu/rope.h"
#include "device/cpu/scratch.h"
#include "metal/prefill_attend.h"
#include "metal/prefill_attend_prep.h"

namespace lily::cpu::LILY_ISA {

namespace {

// A thread takes a few tokens with all their heads: sines and cosines are computed once per token.
template <class ACT, class Row>
void prepare_rows(const KernelCall& call, const PrefillAttendPrep::Host<ACT>& a) {
  const CacheRows<Row> keys(a.keys, a.c.KV_HEADS, a.p.capacity, a.c.DH);
  const CacheRows<Row> values(a.values, a.c.KV_HEADS, a.p.capacity, a.c.DH);
  const uint32_t H = a.c.HEADS, HKV = a.c.KV_HEADS, DH = a.c.DH, R = a.c.ROTARY;
  const size_t row_size = size_t{2} * (H + HKV) * DH;
  const float scale = 1.0f / std::sqrt(static_cast<float>(DH));
  call.pool.parallel_for(a.p.rows, 2, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (size_t t = begin; t < end; ++t) {
      const uint32_t position = a.p.position + static_cast<uint32_t>(t);
      const Rotation rotation(position, a.frequencies, R / 2);
      const ACT *q = a.qkv + t * row_size, *k = q + 2 * H * DH, *v = k + HKV * DH;
      for (uint32_t h = 0; h < H && !a.c.CACHE_ONLY; ++h)
        norm_rotate(q + 2 * h * DH, a.q_norm, DH, a.c.EPS, rotation, R, scale,
                    a.q + (t * H + h) * DH);
      for (uint32_t h = 0; h < HKV; ++h) {
        float key[max_head];
        norm_rotate(k + h * DH, a.k_norm, DH, a.c.EPS, rotation, R, 1.0f, key);
        keys.put(keys.index(h, position), key);
        values.put(values.index(h, position), v + h * DH);
      }
    }
  });
}

constexpr uint32_t task_rows = 512;  // their queries and outputs fill half of a 2 MB cache

// The running softmax of a group of 16 rows.
struct alignas(64) Softmax {
  float largest[lanes], sum[lanes];

  void start() {
    store(largest, set1(-3e38f));
    store(sum, zero());
  }

  // Turns the scores of n keys into e^(score - largest), in `p`, by `factors` if there are any. What
  // was summed so far follows a change of `largest`; it moves in steps of 8, so that it rarely does,
  // and the numbers stay below e^4. A NaN leaves it alone, for the sake of the other rows.
  template <class P>
  void take(const float* s, uint32_t n, uint32_t group, const float* factors,
            typename P::Cell* p, float* o, uint32_t DH) {
    const F old = load(largest);
    const F now = max(round(top(s, n) * set1(0.125f)) * set1(8.0f), old);
    if (reduce_max(now - old) > 0) rescale(exp(old - now) - exp(set1(-100.0f)), now, o, DH);
    const typename P::Weigh weigh{now};
    F added = zero();
    for (uint32_t key = 0; key < n; key += 2) {
      const F even = load(s + key * lanes), odd = load(s + (key + 1) * lanes);
      P::put(p, group, key, weigh(even), weigh(odd), factors, added);
    }
    store(sum, load(sum) + added);
  }

 private:
  static F top(const float* s, uint32_t n) {
    F m[4];
    for (uint32_t i = 0; i < 4; ++i) m[i] = load(s + i * lanes);
    for (uint32_t key = 4; key < n; key += 4)
      for (uint32_t i = 0; i < 4; ++i) m[i] = max(m[i], load(s + (key + i) * lanes));
    return max(max(m[0], m[1]), max(m[2], m[3]));
  }
  void rescale(F scale, F now, float* o, uint32_t DH) {
    for (uint32_t d = 0; d < DH; ++d) store(o + d * lanes, load(o + d * lanes) * scale);
    store(sum, load(sum) * scale);
    store(largest, now);
  }
};

// The query rows of some tokens that share a key/value head, in order of token, then head.
template <class ACT, class Row>
class Task {
 public:
  Task(const PrefillAttend::Host<ACT>& a, uint32_t kv, uint32_t first_token, uint32_t n_tokens)
      : a_(a), DH_(a.c.DH), heads_(a.c.HEADS / a.c.KV_HEADS), kv_(kv), first_token_(first_token),
        n_rows_(n_tokens * heads_), n_blocks_((n_rows_ + row_block - 1) / row_block),
        products_(DH_, memory().tile.template room<std::byte>(P::tile_bytes(DH_))),
        queries_(memory().queries.template room<Cell>(n_blocks_ * P::query_cells(DH_))),
        probabilities_(memory().probabilities.template room<Cell>(P::probability_cells())),
        scores_(memory().scores.template room<float>(tile_keys * row_block)),
        output_(memory().output.template room<float>(size_t{n_blocks_} * row_block * DH_)),
        softmax_(memory().softmax.template room<Softmax>(n_blocks_ * groups)) {}

  void run() {
    start();
    const uint32_t n_keys = position(n_rows_ - 1) + 1;
    const CacheRows<Row> all_keys(a_.keys, a_.c.KV_HEADS, a_.p.capacity, DH_);
    const CacheRows<Row> all_values(a_.values, a_.c.KV_HEADS, a_.p.capacity, DH_);
    const size_t base = all_keys.index(kv_, 0);
    const Row *keys = all_keys.row(base), *values = all_values.row(base);
    for (uint32_t first = 0; first < n_keys; first += tile_keys) {
      const uint32_t n = std::min(tile_keys, n_keys - first);
      products_.read_tile(
          activations(all_keys, base + first, n, memory().wide_keys, key_scales_),
          activations(all_values, base + first, n, memory().wide_values, value_scales_), n);
      const uint32_t share = (tile_keys + n_blocks_ - 1) / n_blocks_;
      for (uint32_t block = 0; block < n_blocks_; ++block) {
        const uint32_t next = first + tile_keys + block * share;
        fetch(keys, next, std::min(next + share, n_keys));
        fetch(values, next, std::min(next + share, n_keys));
        meet(first, block);
      }
    }
    finish();
  }

 private:
  using P = Products<ACT>;
  using Cell = typename P::Cell;
  static constexpr bool scaled = CacheRows<Row>::scaled;

  struct Memory {
    Scratch tile, queries, probabilities, scores, output, softmax, wide_keys, wide_values;
  };
  static Memory& memory() {
    static thread_local Memory m;
    return m;
  }

  // Rows beyond the last one repeat it.
  uint32_t row_of(uint32_t group, uint32_t lane) const {
    return std::min(group * lanes + lane, n_rows_ - 1);
  }
  uint32_t token(uint32_t row) const { return first_token_ + row / heads_; }
  uint32_t position(uint32_t row) const { return a_.p.position + token(row); }
  uint32_t head(uint32_t row) const { return kv_ * heads_ + row % heads_; }
  size_t offset(uint32_t row) const {
    return (size_t{token(row)} * a_.c.HEADS + head(row)) * DH_;
  }
  float* output(uint32_t group) { return output_ + size_t{group} * lanes * DH_; }

  // Into the L2 cache. (Inline: g++ drops calls of functions that only prefetch.)
  LILY_INLINE void fetch(const Row* rows, uint32_t begin, uint32_t end) const {
    for (size_t i = size_t{begin} * DH_; i < size_t{end} * DH_; i += 64 / sizeof(Row))
      __builtin_prefetch(rows + i, 0, 2);
  }

  // n rows as they are, or codes, which are exact as activations, and their scales: scores and
  // probabilities take those.
  const ACT* activations(const CacheRows<Row>& cache, size_t first, uint32_t n, Scratch& scratch,
                         float* scales) const {
    if constexpr (scaled) {
      ACT* codes = scratch.room<ACT>(size_t{n} * DH_);
      for (size_t i = 0; i < size_t{n} * DH_; i += lanes)
        store(codes + i, load(cache.row(first) + i));
      std::copy_n(cache.scale(first), n, scales);
      std::fill(scales + n, scales + tile_keys, 0.0f);
      return codes;
    } else {
      return cache.row(first);
    }
  }

  void start() {
    for (uint32_t g = 0; g < n_blocks_ * groups; ++g) {
      const ACT* rows[lanes];
      for (uint32_t i = 0; i < lanes; ++i) rows[i] = a_.q + offset(row_of(g, i));
      products_.read_queries(rows, g % groups, queries_ + g / groups * P::query_cells(DH_));
      softmax_[g].start();
    }
    std::memset(output_, 0, size_t{n_blocks_} * row_block * DH_ * sizeof(float));
  }

  // The tile of keys from `first` on and a block of rows.
  void meet(uint32_t first, uint32_t block) {
    const uint32_t last = position(std::min((block + 1) * row_block, n_rows_) - 1);
    if (first > last) return;
    const uint32_t n = std::min(tile_keys, (last - first) / key_step * key_step + key_step);
    products_.score(queries_ + block * P::query_cells(DH_), n, scores_);
    for (uint32_t g = 0; g < groups; ++g) {
      const uint32_t group = block * groups + g;
      float* s = scores_ + g * tile_keys * lanes;
      for (uint32_t key = 0; scaled && key < n; ++key)
        store(s + key * lanes, load(s + key * lanes) * set1(key_scales_[key]));
      if (first + n - 1 > position(row_of(group, 0))) hide_later(first, n, group, s);
      softmax_[group].template take<P>(s, n, g, scaled ? value_scales_ : nullptr, probabilities_,
                                       output(group), DH_);
    }
    products_.accumulate(probabilities_, n, output(block * groups));
  }

  // Scores of keys after a row's position become so small that their probability is 0.
  void hide_later(uint32_t first, uint32_t n, uint32_t group, float* s) const {
    float newest[lanes];  // within the tile
    for (uint32_t i = 0; i < lanes; ++i)
      newest[i] = static_cast<float>(position(row_of(group, i))) - static_cast<float>(first);
    for (uint32_t key = 0; key < n; ++key) {
      const F beyond = min(load(newest) - set1(static_cast<float>(key)), zero());
      store(s + key * lanes, fma(beyond, set1(1e30f), load(s + key * lanes)));
    }
  }

  // u = output / sum ⊙ sigmoid(gate)
  void finish() {
    const size_t row_size = size_t{2} * (a_.c.HEADS + a_.c.KV_HEADS) * DH_;
    for (uint32_t first = 0; first < n_rows_; first += lanes) {
      const uint32_t group = first / lanes, n = std::min<uint32_t>(lanes, n_rows_ - first);
      const F scale = set1(1.0f) / load(softmax_[group].sum);
      for (uint32_t d = 0; d < DH_; d += lanes) {
        F m[lanes];
        // Adding zero turns -0 into 0, as one more tile of hidden keys would have done.
        for (uint32_t i = 0; i < lanes; ++i)
          m[i] = (load(output(group) + (d + i) * lanes) + zero()) * scale;
        transpose(m);
        for (uint32_t i = 0; i < n; ++i) {
          const ACT* qkv = a_.qkv + token(first + i) * row_size;
          const F gate = load(qkv + (2 * head(first + i) + 1) * DH_ + d);
          store(a_.u + offset(first + i) + d, m[i] * sigmoid(gate));
        }
      }
    }
  }

  const PrefillAttend::Host<ACT>& a_;
  const uint32_t DH_, heads_, kv_, first_token_, n_rows_, n_blocks_;
  P products_;
  Cell *const queries_, *const probabilities_;
  float *const scores_, *const output_;
  Softmax* const softmax_;
  float key_scales_[tile_keys], value_scales_[tile_keys];  // of a tile's int8 rows
};

}  // namespace

template <class ACT>
void prefill_attend_prep(const KernelCall& call) {
  const PrefillAttendPrep::Host<ACT> a(call.slots, call.constants, call.params);
  if (a.c.KV_INT8)
    prepare_rows<ACT, int8_t>(call, a);
  else
    prepare_rows<ACT, ACT>(call, a);
}

// A thread takes some tokens with the query heads of one key/value head, up to 512 rows. It goes
// through the keys once, tile by tile: a tile is brought into the form that the products want and
// then meets all blocks of 32 rows, while the next one is fetched. Tiles begin at multiples of
// their size, and a row's sums run over the keys in order. A key that a row must not see adds
// exactly 0 to them, so it does not matter which rows share a block, or how many tiles it meets.
// The last tokens have the most keys and go first.
template <class ACT>
void prefill_attend(const KernelCall& call) {
  PrefillAttend::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t HKV = a.c.KV_HEADS, heads = a.c.HEADS / HKV;
  const uint32_t fair = a.p.rows * HKV / (2 * call.pool.size());  // two tasks for each thread
  const uint32_t tokens = std::max(
      1u, std::min(std::max(fair, row_block / heads), task_rows / heads));
  const uint32_t n = (a.p.rows + tokens - 1) / tokens;
  call.pool.parallel_for(n * HKV, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t first = (n - 1 - i / HKV) * tokens, count = std::min(tokens, a.p.rows - first);
      if (a.c.KV_INT8)
        Task<ACT, int8_t>(a, i % HKV, first, count).run();
      else
        Task<ACT, ACT>(a, i % HKV, first, count).run();
    }
  });
}

LILY_CPU_KERNEL(prefill_attend_prep)
LILY_CPU_KERNEL(prefill_attend)

}  // namespace lily::cpu::LILY_ISA
