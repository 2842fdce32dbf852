// Attention of one token over the cache.
#include "metal/attend.h"

#include <algorithm>

#include "device/cpu/kernels.h"
#include "device/cpu/rope.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"
#include "metal/attend_merge.h"

namespace lily::cpu::LILY_ISA {

namespace {

constexpr uint32_t tile_heads = 4, tile_keys = 4;  // 16 running sums

template <class ACT>
using Args = Attend::Host<ACT>;

// 32 values of a cache row in the order that is cheapest: for bf16 the even ones, then the odd ones.
LILY_INLINE void load_32(const bf16* p, F& a, F& b) {
  const U words = load_words(p);
  a = low_half(words);
  b = high_half(words);
}
LILY_INLINE void load_32(const float* p, F& a, F& b) {
  a = load(p);
  b = load(p + lanes);
}

// Between the order of load_32 and the usual one.
template <class ACT>
void to_cache_order(const float* x, uint32_t n, float* out) {
  constexpr bool halves = std::is_same_v<ACT, bf16>;
  for (uint32_t i = 0; i < n; i += 2 * lanes)
    for (uint32_t j = 0; j < 2 * lanes; ++j)
      out[i + j] = halves ? x[i + j % lanes * 2 + j / lanes] : x[i + j];
}
template <class ACT>
void from_cache_order(const float* x, uint32_t n, float* out) {
  constexpr bool halves = std::is_same_v<ACT, bf16>;
  for (uint32_t i = 0; i < n; i += 2 * lanes)
    for (uint32_t j = 0; j < 2 * lanes; ++j)
      out[halves ? i + j % lanes * 2 + j / lanes : i + j] = x[i + j];
}

// Keys [begin, end) of one key/value head.
template <class ACT>
struct Span {
  const ACT *keys, *values;  // the head's rows
  uint32_t begin, end, DH;
};

// scores[head][key - begin] = q[head] · key. Values are fetched on the way: they come next.
template <class ACT, uint32_t heads>
void score(const Span<ACT>& s, const float* q, float* scores, uint32_t stride) {
  for (uint32_t key = s.begin; key < s.end; key += tile_keys) {
    const ACT* rows[tile_keys];
    for (uint32_t k = 0; k < tile_keys; ++k) {
      const size_t row = size_t{std::min(key + k, s.end - 1)} * s.DH;
      rows[k] = s.keys + row;
      for (uint32_t d = 0; d < s.DH; d += 64 / sizeof(ACT)) __builtin_prefetch(s.values + row + d);
    }
    F sums[heads][tile_keys];
    for (auto& of_head : sums)
      for (F& sum : of_head) sum = zero();
    for (uint32_t d = 0; d < s.DH; d += 2 * lanes) {
      for (uint32_t k = 0; k < tile_keys; ++k) {
        F a, b;
        load_32(rows[k] + d, a, b);
        for (uint32_t h = 0; h < heads; ++h) {
          sums[h][k] = fma(a, load(q + h * s.DH + d), sums[h][k]);
          sums[h][k] = fma(b, load(q + h * s.DH + d + lanes), sums[h][k]);
        }
      }
    }
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t k = 0; k < tile_keys && key + k < s.end; ++k)
        scores[h * stride + key + k - s.begin] = reduce_add(sums[h][k]);
  }
}

// out[head] = Σ weights[head][key - begin] · value, in cache order.
template <class ACT, uint32_t heads>
void gather(const Span<ACT>& s, const float* weights, uint32_t stride, float* out) {
  for (uint32_t d = 0; d < s.DH; d += 2 * lanes) {
    F low[heads], high[heads];
    for (uint32_t h = 0; h < heads; ++h) low[h] = high[h] = zero();
    for (uint32_t key = s.begin; key < s.end; ++key) {
      F a, b;
      load_32(s.values + size_t{key} * s.DH + d, a, b);
      for (uint32_t h = 0; h < heads; ++h) {
        const F w = set1(weights[h * stride + key - s.begin]);
        low[h] = fma(a, w, low[h]);
        high[h] = fma(b, w, high[h]);
      }
    }
    for (uint32_t h = 0; h < heads; ++h) {
      store(out + h * s.DH + d, low[h]);
      store(out + h * s.DH + d + lanes, high[h]);
    }
  }
}

struct Extent {
  float max, sum;
};

// Scores → e^(score - max).
Extent exponents(float* scores, uint32_t n) {
  const uint32_t padded = (n + lanes - 1) / lanes * lanes;
  std::fill(scores + n, scores + padded, -INFINITY);
  F top = load(scores), sum = zero();
  for (uint32_t i = lanes; i < padded; i += lanes) top = max(top, load(scores + i));
  const float largest = reduce_max(top);
  for (uint32_t i = 0; i < padded; i += lanes) {
    const F e = exp(load(scores + i) - set1(largest));
    store(scores + i, e);
    sum = sum + e;
  }
  return {largest, reduce_add(sum)};
}

// All of a block for a few query heads of one key/value head.
template <class ACT, uint32_t heads>
void attend_heads(const Span<ACT>& s, const float* q, float* out, Extent* extents) {
  static thread_local Scratch scratch;
  const uint32_t n = s.end - s.begin, stride = (n + lanes - 1) / lanes * lanes;
  float* scores = scratch.room<float>(size_t{heads} * stride);
  score<ACT, heads>(s, q, scores, stride);
  for (uint32_t h = 0; h < heads; ++h) extents[h] = exponents(scores + h * stride, n);
  float gathered[heads * max_head];
  gather<ACT, heads>(s, scores, stride, gathered);
  for (uint32_t h = 0; h < heads; ++h)
    from_cache_order<ACT>(gathered + h * s.DH, s.DH, out + h * s.DH);
}

template <class ACT>
void attend_group(const Span<ACT>& s, uint32_t heads, const float* q, float* out,
                  Extent* extents) {
  static_assert(tile_heads == 4);
  for (uint32_t h = 0; h < heads; h += tile_heads) {
    const uint32_t at = h * s.DH, n = std::min(tile_heads, heads - h);
    if (n == 1) attend_heads<ACT, 1>(s, q + at, out + at, extents + h);
    if (n == 2) attend_heads<ACT, 2>(s, q + at, out + at, extents + h);
    if (n == 3) attend_heads<ACT, 3>(s, q + at, out + at, extents + h);
    if (n == 4) attend_heads<ACT, 4>(s, q + at, out + at, extents + h);
  }
}

// u = sum · scale ⊙ sigmoid(gate) for one head.
template <class ACT>
void write_gated(const float* sum, float scale, const ACT* gate, uint32_t DH, ACT* u) {
  for (uint32_t d = 0; d < DH; d += lanes)
    store(u + d, load(sum + d) * set1(scale) * sigmoid(load(gate + d)));
}

// Queries to scratch, in cache order and scaled; the new key and value to the cache.
template <class ACT>
const float* prepare(const Args<ACT>& a) {
  static thread_local Scratch scratch;
  const uint32_t H = a.c.HEADS, HKV = a.c.KV_HEADS, DH = a.c.DH;
  const Rotation rotation(a.p.position, a.frequencies, a.c.ROTARY / 2);
  const float scale = 1.0f / std::sqrt(static_cast<float>(DH));
  float* q = scratch.room<float>(size_t{H} * DH);
  float y[max_head];
  for (uint32_t h = 0; h < H; ++h) {
    norm_rotate(a.qkv + 2 * h * DH, a.q_norm, DH, a.c.EPS, rotation, a.c.ROTARY, scale, y);
    to_cache_order<ACT>(y, DH, q + h * DH);
  }
  const ACT *k = a.qkv + 2 * H * DH, *v = k + HKV * DH;
  for (uint32_t h = 0; h < HKV; ++h) {
    const size_t entry = (size_t{h} * a.p.capacity + a.p.position) * DH;
    norm_rotate(k + h * DH, a.k_norm, DH, a.c.EPS, rotation, a.c.ROTARY, 1.0f, a.keys + entry);
    std::copy_n(v + h * DH, DH, a.values + entry);
  }
  return q;
}

}  // namespace

// The calling thread norms and rotates; then threads share pairs of a key/value head and a block of
// keys. Four query heads at a time take a block, so that a cache row is read for several heads.
template <class ACT>
void attend(const KernelCall& call) {
  Args<ACT> a(call.slots, call.constants, call.params);
  const float* q = prepare(a);
  const uint32_t H = a.c.HEADS, DH = a.c.DH, group = H / a.c.KV_HEADS, n = a.p.position + 1;
  const uint32_t blocks = a.c.MERGE ? a.p.blocks : 1, block = a.c.MERGE ? a.p.block : n;
  call.pool.parallel_for(a.c.KV_HEADS * blocks, 1, [&](uint32_t i, uint32_t end, uint32_t) {
    for (; i < end; ++i) {
      const uint32_t kv = i / blocks, b = i % blocks, first = kv * group;
      const size_t rows = size_t{kv} * a.p.capacity * DH;
      const Span<ACT> span{a.keys + rows, a.values + rows, b * block, std::min(n, (b + 1) * block),
                           DH};
      const size_t at = size_t{b} * H + first;
      if (a.c.MERGE) {
        attend_group(span, group, q + first * DH, a.partial + at * DH,
                     reinterpret_cast<Extent*>(a.extent) + at);
        continue;
      }
      static thread_local Scratch scratch;
      float* sums = scratch.room<float>(size_t{group} * (DH + 2));
      Extent* extents = reinterpret_cast<Extent*>(sums + group * DH);
      attend_group(span, group, q + first * DH, sums, extents);
      for (uint32_t h = 0; h < group; ++h)
        write_gated(sums + h * DH, 1.0f / extents[h].sum, a.qkv + (2 * (first + h) + 1) * DH, DH,
                    a.u + (first + h) * DH);
    }
  });
}

// A thread takes a few heads.
template <class ACT>
void attend_merge(const KernelCall& call) {
  AttendMerge::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t H = a.c.HEADS, DH = a.c.DH;
  const Extent* extents = reinterpret_cast<const Extent*>(a.extent);
  auto merge = [&](uint32_t h) {
    float largest = -INFINITY, total = 0, sum[max_head] = {};
    for (uint32_t b = 0; b < a.p.blocks; ++b) largest = std::max(largest, extents[b * H + h].max);
    for (uint32_t b = 0; b < a.p.blocks; ++b) {
      const Extent& e = extents[b * H + h];
      const float weight = std::exp(e.max - largest);
      total += weight * e.sum;
      const float* partial = a.partial + (size_t{b} * H + h) * DH;
      for (uint32_t d = 0; d < DH; d += lanes)
        store(sum + d, fma(load(partial + d), set1(weight), load(sum + d)));
    }
    write_gated(sum, 1.0f / total, a.qkv + (2 * h + 1) * DH, DH, a.u + h * DH);
  };
  call.pool.parallel_for(H, 2, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t h = begin; h < end; ++h) merge(h);
  });
}

LILY_CPU_KERNEL(attend)
LILY_CPU_KERNEL(attend_merge)

}  // namespace lily::cpu::LILY_ISA
