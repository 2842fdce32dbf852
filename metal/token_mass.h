// Picking a token by its weight, by one threadgroup. Only Metal reads this header.
//
// Weights are in [0, 1], the best token's is 1. As bits they order like numbers. Sums of them are
// whole numbers of 2^-40: exact, so they depend neither on the order of adding nor on who adds.
//
// *Falling order* is by weight, among equals by id. Top-k, top-p and min-p all keep the first
// tokens of it, and the draw itself is one more search for where a running sum reaches a target.
#pragma once

#include "argmax.h"

// Weights as bits: 1; what is likely enough to be looked at first; the least that is ever kept.
#define LILY_ONE_BITS 0x3f800000u
#define LILY_LIKELY_BITS 0x39800000u  // 2^-12
#define LILY_LEAST_BITS 0x03800000u   // 2^-120

METAL_FUNC ulong fixed_mass(float weight) { return ulong(weight * 1099511627776.0f); }

// ceil(mass · fraction / 2^32), at least 1.
METAL_FUNC ulong part_of(ulong mass, uint fraction) {
  const ulong low = (mass & 0xffffffffu) * fraction;
  const ulong part =
      (mass >> 32) * fraction + (low >> 32) + ((low & 0xffffffffu) != 0 ? 1u : 0u);
  return part == 0 ? 1 : part;
}

struct Tally {
  uint count;
  ulong mass;

  METAL_FUNC void add(float weight) thread {
    count += 1;
    mass += fixed_mass(weight);
  }
  METAL_FUNC ulong amount(bool by_count) const thread { return by_count ? ulong(count) : mass; }
};

METAL_FUNC ulong simd_total(ulong value) {
  for (ushort mask = 16; mask > 0; mask /= 2)
    value += as_type<ulong>(simd_shuffle_xor(as_type<uint2>(value), mask));
  return value;
}
METAL_FUNC Tally simd_total(Tally mine) {
  Tally total;
  total.count = simd_sum(mine.count);
  total.mass = simd_total(mine.mass);
  return total;
}

// The last token that is kept, and the mass down to it.
struct Cut {
  uint bits, id;
  ulong mass;
};

// A thread's tokens are index, index + THREADS, …; it loads LILY_AHEAD of them before it uses the
// first.
#define LILY_AHEAD 8u

template <uint THREADS>
METAL_FUNC void load_ahead(device const float* from, uint begin, uint n, thread float* out) {
  for (uint j = 0; j < LILY_AHEAD; j++) {
    const uint i = begin + j * THREADS;
    out[j] = from[i < n ? i : begin];
  }
}

// THREADS is 32 · 32, so that a simdgroup adds up what simdgroups left.
template <uint THREADS>
struct Picker {
  device float* weights;  // [n]
  uint n;
  uint index, simdgroup, lane;
  threadgroup uint* words;  // [3 · 32]
  threadgroup uint* list_bits;  // [THREADS]
  threadgroup uint* list_ids;   // [THREADS]
  threadgroup atomic_uint* counter;
  Tally all, likely;  // all tokens that may be kept; those of 2^-12 or more

  // The tokens of the list are those with bits in [low, high), in any order; a thread has one.
  uint list_count;
  Tally list_above, list_total;  // before the list in falling order; in it
  Tally upto;                    // of the thread's token: it and all before it

  METAL_FUNC Best best_of(Best mine) thread {
    mine = simd_best(mine);
    if (lane == 0) {
      words[simdgroup] = as_type<uint>(mine.value);
      words[32 + simdgroup] = mine.index;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Best other = {as_type<float>(words[lane]), words[32 + lane]};
    other = simd_best(other);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return other;
  }

  METAL_FUNC Tally total_of(Tally mine) thread {
    mine = simd_total(mine);
    if (lane == 0) {
      words[simdgroup] = mine.count;
      words[32 + simdgroup] = uint(mine.mass);
      words[64 + simdgroup] = uint(mine.mass >> 32);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Tally other;
    other.count = words[lane];
    other.mass = ulong(words[64 + lane]) << 32 | words[32 + lane];
    other = simd_total(other);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return other;
  }

  // Those with bits in [low, high).
  METAL_FUNC Tally measure(uint low, uint high) thread {
    Tally mine = {0, 0};
    for (uint begin = index; begin < n; begin += LILY_AHEAD * THREADS) {
      float some[LILY_AHEAD];
      load_ahead<THREADS>(weights, begin, n, some);
      for (uint j = 0; j < LILY_AHEAD; j++) {
        const uint bits = as_type<uint>(some[j]);
        if (begin + j * THREADS < n && bits >= low && bits < high) mine.add(some[j]);
      }
    }
    return total_of(mine);
  }

  // In order of id, where the count or mass of those with bits in [low, high) reaches the target.
  // Simdgroups share out a stretch of ids; the one that holds the target's becomes the next
  // stretch.
  METAL_FUNC uint find_by_id(uint low, uint high, bool by_count, ulong target) thread {
    uint begin = 0, end = n;
    while (end - begin > 32) {
      const uint share = (end - begin + 31) / 32;
      const uint first = begin + simdgroup * share, last = min(first + share, end);
      ulong sum = 0;
      for (uint i = first + lane; i < last; i += 32) sum += amount_at(i, low, high, by_count);
      sum = simd_total(sum);
      if (lane == 0) {
        words[simdgroup] = uint(sum);
        words[32 + simdgroup] = uint(sum >> 32);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint chosen = 0;
      for (; chosen < 31; chosen++) {
        const ulong held = ulong(words[32 + chosen]) << 32 | words[chosen];
        if (held >= target) break;
        target -= held;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      begin += chosen * share;
      end = min(begin + share, end);
    }
    for (; begin + 1 < end; begin++) {
      const ulong held = amount_at(begin, low, high, by_count);
      if (held >= target) break;
      target -= held;
    }
    return begin;
  }

  // In falling order, the token at which the running count or mass reaches the target.
  METAL_FUNC Cut find(bool by_count, ulong target) thread {
    const ulong before = list_above.amount(by_count);
    if (list_count == 0 || target <= before || target > before + list_total.amount(by_count)) {
      // Halves the range of weights until what is left of it has one token for each thread.
      uint low = LILY_LEAST_BITS, high = LILY_ONE_BITS + 1;
      Tally above = {0, 0}, inside = all;
      if (likely.amount(by_count) >= target) {
        low = LILY_LIKELY_BITS;
        inside = likely;
      }
      while (inside.count > THREADS && high - low > 1) {
        const uint middle = low + (high - low) / 2;
        const Tally upper = measure(middle, high);
        if (above.amount(by_count) + upper.amount(by_count) >= target) {
          low = middle;
          inside = upper;
        } else {
          high = middle;
          above.count += upper.count;
          above.mass += upper.mass;
          inside.count -= upper.count;
          inside.mass -= upper.mass;
        }
      }
      if (inside.count > THREADS) {  // equal weights
        const ulong each = fixed_mass(as_type<float>(low)), left = target - above.amount(by_count);
        const ulong rank = by_count || each == 0 ? left : (left + each - 1) / each;
        return {low, find_by_id(low, high, true, rank), above.mass + rank * each};
      }
      list_above = above;
      list_total = inside;
      collect(low, high);
    }
    const ulong here = list_above.amount(by_count) + upto.amount(by_count);
    const ulong own =
        by_count || index >= list_count ? 1 : fixed_mass(as_type<float>(list_bits[index]));
    if (index < list_count && here >= target && here - own < target) {
      words[0] = list_bits[index];
      words[1] = list_ids[index];
      words[2] = uint(list_above.mass + upto.mass);
      words[3] = uint((list_above.mass + upto.mass) >> 32);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Cut cut = {words[0], words[1], ulong(words[3]) << 32 | words[2]};
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return cut;
  }

 private:
  METAL_FUNC ulong amount_at(uint i, uint low, uint high, bool by_count) const thread {
    const float weight = weights[i];
    const uint bits = as_type<uint>(weight);
    if (bits < low || bits >= high) return 0;
    return by_count ? 1 : fixed_mass(weight);
  }

  METAL_FUNC void collect(uint low, uint high) thread {
    if (index == 0) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint begin = index; begin < n; begin += LILY_AHEAD * THREADS) {
      float some[LILY_AHEAD];
      load_ahead<THREADS>(weights, begin, n, some);
      for (uint j = 0; j < LILY_AHEAD; j++) {
        const uint i = begin + j * THREADS, bits = as_type<uint>(some[j]);
        if (i >= n || bits < low || bits >= high) continue;
        const uint at = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
        list_bits[at] = bits;
        list_ids[at] = i;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    list_count = list_total.count;
    upto = {0, 0};
    if (index >= list_count) return;
    const uint bits = list_bits[index], id = list_ids[index];
    for (uint i = 0; i < list_count; i++) {
      const uint other = list_bits[i];
      if (other > bits || (other == bits && list_ids[i] <= id)) upto.add(as_type<float>(other));
    }
  }
};
