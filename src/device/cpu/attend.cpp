// Attention of one token over the cache.
#include "metal/attend.h"

#include <algorithm>
#include <type_traits>

#include "device/cpu/cache_rows.h"
#include "device/cpu/kernels.h"
#include "device/cpu/rope.h"
#include "device/cpu/runs.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"
#include "metal/attend_merge.h"

namespace lily::cpu::LILY_ISA {

namespace {

template <class ACT>
using Args = Attend::Host<ACT>;

// Scores of a block lie as [key][8 heads], so two keys make a vector and all of the softmax is
// lane by lane.
constexpr uint32_t octet = 8;

// Heads that pass over the cache together; each has two running sums in registers.
#if defined(__AVX512F__)
constexpr uint32_t tile_heads = 8;
#else
constexpr uint32_t tile_heads = 2;
#endif

// A block of keys and values of one key/value head. Memory is never idle: while keys are multiplied,
// the block's values are fetched, and while those are, the keys of the thread's next block.
template <class Row>
struct Span {
  const Row *keys, *values, *next_keys;
  const float *key_scales, *value_scales;  // of int8 rows
  uint32_t size, DH;
};

template <class Row>
LILY_INLINE void fetch(const Row* values, uint32_t n) {
  for (uint32_t i = 0; i < n; i += 64 / sizeof(Row)) __builtin_prefetch(values + i, 0, 2);
}

// scores[key][head] = q[head] · key
template <class Row, uint32_t heads>
void score(const Span<Row>& s, const float* q, float* scores) {
  for (uint32_t key = 0; key < s.size; key += 2) {
    const uint32_t other = std::min(key + 1, s.size - 1);
    const Row *row_a = s.keys + key * s.DH, *row_b = s.keys + other * s.DH;
    fetch(s.values + key * s.DH, 2 * s.DH);
    F sums[2 * octet];
    for (F& sum : sums) sum = zero();
    for (uint32_t d = 0; d < s.DH; d += lanes) {
      const F a = load(row_a + d), b = load(row_b + d);
      for (uint32_t h = 0; h < heads; ++h) {
        const F query = load(q + h * s.DH + d);
        sums[h] = fma(query, a, sums[h]);
        sums[octet + h] = fma(query, b, sums[octet + h]);
      }
    }
    float* out = scores + key * octet;
    if constexpr (tile_heads == octet) {
      store(out, reduce_add_each(sums));
    } else {
      for (uint32_t h = 0; h < heads; ++h) {
        out[h] = reduce_add(sums[h]);
        out[octet + h] = reduce_add(sums[octet + h]);
      }
    }
  }
}

// out[head] = Σ weights[key][head] · value
template <class Row, uint32_t heads>
void gather(const Span<Row>& s, const float* weights, float* out) {
  for (uint32_t d = 0; d < s.DH; d += 2 * lanes) {
    F low[heads], high[heads];
    for (uint32_t h = 0; h < heads; ++h) low[h] = high[h] = zero();
    const float* w = weights;
    const Row *value = s.values + d, *next = s.next_keys + d * s.size;
    for (uint32_t n = s.size; n > 0; --n, w += octet, value += s.DH, next += 2 * lanes) {
      const F a = load(value), b = load(value + lanes);
      fetch(next, 2 * lanes);
      for (uint32_t h = 0; h < heads; ++h) {
        low[h] = fma(a, set1(w[h]), low[h]);
        high[h] = fma(b, set1(w[h]), high[h]);
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

// Scores of n keys → e^(score - max).
void exponents(float* scores, uint32_t n, uint32_t heads, Extent* extents) {
  const uint32_t end = (n + 1) / 2 * 2 * octet;
  std::fill(scores + n * octet, scores + end, -INFINITY);
  F top = load(scores);
  for (uint32_t i = lanes; i < end; i += lanes) top = max(top, load(scores + i));
  float largest[lanes], sums[lanes];
  store(largest, top);
  for (uint32_t h = 0; h < octet; ++h)
    largest[h] = largest[octet + h] = std::max(largest[h], largest[octet + h]);
  top = load(largest);
  F sum = zero();
  for (uint32_t i = 0; i < end; i += lanes) {
    const F e = exp(load(scores + i) - top);
    store(scores + i, e);
    sum = sum + e;
  }
  store(sums, sum);
  for (uint32_t h = 0; h < heads; ++h) extents[h] = {largest[h], sums[h] + sums[octet + h]};
}

// Numbers of n keys, each by its key's scale.
inline void scale_keys(float* numbers, const float* scales, uint32_t n) {
  for (uint32_t key = 0; key < n; ++key)
    for (uint32_t h = 0; h < octet; ++h) numbers[key * octet + h] *= scales[key];
}

// Calls body with `heads`, at most `most`, as a compile-time constant.
template <uint32_t most, class Body>
LILY_INLINE void with_heads(uint32_t heads, Body&& body) {
  if (heads == most) return body(std::integral_constant<uint32_t, most>{});
  if constexpr (most > 1) with_heads<most - 1>(heads, body);
}

// All of a block for the query heads of one key/value head.
template <class Row>
void attend_group(const Span<Row>& s, uint32_t group, const float* q, float* out,
                  Extent* extents) {
  static thread_local Scratch scratch;
  float* scores = scratch.room<float>(size_t{s.size + 1} * octet);
  for (uint32_t first = 0; first < group; first += octet) {
    const uint32_t heads = std::min(octet, group - first), at = first * s.DH;
    if (heads < octet) std::fill_n(scores, (s.size + 1) * octet, 0.0f);
    auto for_tiles = [&](auto&& body) {
      for (uint32_t h = 0; h < heads; h += tile_heads)
        with_heads<tile_heads>(std::min(tile_heads, heads - h), [&](auto n) { body(h, n); });
    };
    for_tiles([&](uint32_t h, auto n) { score<Row, n>(s, q + at + h * s.DH, scores + h); });
    if (s.key_scales) scale_keys(scores, s.key_scales, s.size);
    exponents(scores, s.size, heads, extents + first);
    if (s.value_scales) scale_keys(scores, s.value_scales, s.size);
    for_tiles([&](uint32_t h, auto n) { gather<Row, n>(s, scores + h, out + at + h * s.DH); });
  }
}

// u = sum · scale ⊙ sigmoid(gate) for one head.
template <class ACT>
void write_gated(const float* sum, float scale, const ACT* gate, uint32_t DH, ACT* u) {
  for (uint32_t d = 0; d < DH; d += lanes)
    store(u + d, load(sum + d) * set1(scale) * sigmoid(load(gate + d)));
}

// Queries to scratch, scaled; the new key and value to the cache.
template <class ACT, class Row>
const float* prepare(const Args<ACT>& a, const CacheRows<Row>& keys, const CacheRows<Row>& values) {
  static thread_local Scratch scratch;
  const uint32_t H = a.c.HEADS, HKV = a.c.KV_HEADS, DH = a.c.DH;
  float* q = scratch.room<float>(size_t{H} * DH);
  if (a.c.PREPARED) {
    for (uint32_t i = 0; i < H * DH; i += lanes) store(q + i, load(a.q + i));
    return q;
  }
  const Rotation rotation(a.p.position, a.frequencies, a.c.ROTARY / 2);
  const float scale = 1.0f / std::sqrt(static_cast<float>(DH));
  for (uint32_t h = 0; h < H; ++h)
    norm_rotate(a.qkv + 2 * h * DH, a.q_norm, DH, a.c.EPS, rotation, a.c.ROTARY, scale,
                q + h * DH);
  const ACT *k = a.qkv + 2 * H * DH, *v = k + HKV * DH;
  for (uint32_t h = 0; h < HKV; ++h) {
    float key[max_head];
    norm_rotate(k + h * DH, a.k_norm, DH, a.c.EPS, rotation, a.c.ROTARY, 1.0f, key);
    keys.put(keys.index(h, a.p.position), key);
    values.put(values.index(h, a.p.position), v + h * DH);
  }
  return q;
}

// The calling thread norms and rotates; then threads share the blocks of keys, head after head. A
// cache row is read once for eight query heads.
template <class ACT, class Row>
void attend_rows(const KernelCall& call, const Args<ACT>& a) {
  const CacheRows<Row> all_keys(a.keys, a.c.KV_HEADS, a.p.capacity, a.c.DH);
  const CacheRows<Row> all_values(a.values, a.c.KV_HEADS, a.p.capacity, a.c.DH);
  const float* q = prepare(a, all_keys, all_values);
  const uint32_t H = a.c.HEADS, DH = a.c.DH, group = H / a.c.KV_HEADS, n = a.p.position + 1;
  const uint32_t blocks = a.c.MERGE ? a.p.blocks : 1, block = a.c.MERGE ? a.p.block : n;
  auto first_row = [&](uint32_t i) {
    return all_keys.index(i / blocks, i % blocks * block);
  };
  parallel_runs(call.pool, a.c.KV_HEADS * blocks, [&](uint32_t begin, uint32_t end, uint32_t) {
    static thread_local Scratch scratch;
    float* sums = scratch.room<float>(size_t{group} * (DH + 2));
    Extent* extents = reinterpret_cast<Extent*>(sums + group * DH);
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t b = i % blocks, head = i / blocks * group;
      const uint32_t size = std::min(n - b * block, block);
      const size_t row = first_row(i);
      const Row* keys = all_keys.row(row);
      const Row* next = i + 1 < end ? all_keys.row(first_row(i + 1)) : keys;
      if (i == begin) fetch(keys, size * DH);
      const Span<Row> span{keys, all_values.row(row), next,
                           all_keys.scale(row), all_values.scale(row), size, DH};
      if (a.c.MERGE) {
        const size_t at = size_t{b} * H + head;
        attend_group(span, group, q + head * DH, a.partial + at * DH,
                     reinterpret_cast<Extent*>(a.extent) + at);
        continue;
      }
      attend_group(span, group, q + head * DH, sums, extents);
      for (uint32_t h = 0; h < group; ++h)
        write_gated(sums + h * DH, 1.0f / extents[h].sum, a.qkv + (2 * (head + h) + 1) * DH, DH,
                    a.u + (head + h) * DH);
    }
  });
}

}  // namespace

template <class ACT>
void attend(const KernelCall& call) {
  const Args<ACT> a(call.slots, call.constants, call.params);
  if (a.c.KV_INT8)
    attend_rows<ACT, int8_t>(call, a);
  else
    attend_rows<ACT, ACT>(call, a);
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
