// The row by row work of a prefill pass: norms, the router's choice, grouping by expert, combining.
#include <cmath>

#include "device/cpu/kernels.h"
#include "device/cpu/topk.h"
#include "device/cpu/vec.h"
#include "metal/prefill_combine.h"
#include "metal/prefill_gated_norm.h"
#include "metal/prefill_norm.h"
#include "metal/prefill_scatter.h"
#include "metal/prefill_topk.h"

namespace lily::cpu::LILY_ISA {

namespace {

constexpr uint32_t grain = 8;  // rows handed out at a time: some microseconds of work

template <class T>
F reciprocal_rms(const T* x, uint32_t n, float eps) {
  return set1(1.0f / std::sqrt(sum_squares(x, n) / static_cast<float>(n) + eps));
}

}  // namespace

// A thread takes a few rows; a row is read twice, the second time from the L1 cache.
template <class ACT>
void prefill_norm(const KernelCall& call) {
  PrefillNorm::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t D = a.c.D;
  call.pool.parallel_for(a.p.rows, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (size_t t = begin; t < end; ++t) {
      const float* x = a.x + t * D;
      const F r = reciprocal_rms(x, D, a.c.EPS);
      for (uint32_t i = 0; i < D; i += lanes)
        store(a.y + t * D + i, load(x + i) * r * load(a.gamma + i));
    }
  });
}

// A thread takes all heads of a few rows.
template <class ACT>
void prefill_gated_norm(const KernelCall& call) {
  PrefillGatedNorm::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t DV = a.c.DV;
  call.pool.parallel_for(a.p.rows, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (size_t head = size_t{begin} * a.c.HEADS; head < size_t{end} * a.c.HEADS; ++head) {
      const float* o = a.o + head * DV;
      const F r = reciprocal_rms(o, DV, a.c.EPS);
      for (uint32_t i = 0; i < DV; i += lanes) {
        F normed = load(o + i) * r * load(a.gamma + i);
        store(a.u + head * DV + i, normed * silu(load(a.z + head * DV + i)));
      }
    }
  });
}

// A thread takes a few rows.
template <class ACT>
void prefill_topk(const KernelCall& call) {
  PrefillTopk::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t E = a.c.EXPERTS, K = a.c.TOP;
  call.pool.parallel_for(a.p.rows, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (size_t t = begin; t < end; ++t)
      choose_experts(a.logits + t * (E + 1), E, K, a.ids + t * K, a.shares + t * (K + 1));
  });
}

// Counting sort by one thread, some microseconds for 512 tokens; stable, so that an expert sees its
// tokens in order. While rows are placed, offsets[e] is where the next row of e goes; afterwards it
// is where e + 1 begins, and moves there.
template <class ACT>
void prefill_scatter(const KernelCall& call) {
  PrefillScatter::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t E = a.c.EXPERTS, n = a.p.rows * a.c.TOP;
  for (uint32_t e = 0; e <= E; ++e) a.offsets[e] = 0;
  for (uint32_t i = 0; i < n; ++i) ++a.offsets[a.ids[i]];
  for (uint32_t e = 0, before = 0; e <= E; ++e) {
    uint32_t count = a.offsets[e];
    a.offsets[e] = before;
    before += count;
  }
  for (uint32_t i = 0; i < n; ++i) {
    uint32_t row = a.offsets[a.ids[i]]++;
    a.src[row] = i / a.c.TOP;
    a.inv[i] = row;
  }
  for (uint32_t e = E; e > 0; --e) a.offsets[e] = a.offsets[e - 1];
  a.offsets[0] = 0;
}

// A thread takes a few tokens and reads the rows of a token's experts side by side, a cache line or
// two of each at a time, so that the sum stays in registers.
template <class ACT>
void prefill_combine(const KernelCall& call) {
  PrefillCombine::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t D = a.c.D, K = a.c.TOP;
  constexpr uint32_t step = 2 * lanes;
  call.pool.parallel_for(a.p.rows, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (size_t t = begin; t < end; ++t) {
      const float* shares = a.shares + t * (K + 1);
      for (uint32_t d = 0; d < D; d += step) {
        F low = zero(), high = zero();
        auto add = [&](const ACT* row, float share) {
          low = fma(set1(share), load(row + d), low);
          high = fma(set1(share), load(row + d + lanes), high);
        };
        for (size_t i = 0; i < K; ++i) {
          const size_t at = t * K + i;
          add(a.out + (a.c.GROUPED ? a.inv[at] : at) * D, shares[i]);
        }
        add(a.shared_out + t * D, shares[K]);
        float* x = a.x + t * D + d;
        store(x, load(x) + low);
        store(x + lanes, load(x + lanes) + high);
      }
    }
  });
}

LILY_CPU_KERNEL(prefill_norm)
LILY_CPU_KERNEL(prefill_gated_norm)
LILY_CPU_KERNEL(prefill_topk)
LILY_CPU_KERNEL(prefill_scatter)
LILY_CPU_KERNEL(prefill_combine)

}  // namespace lily::cpu::LILY_ISA
