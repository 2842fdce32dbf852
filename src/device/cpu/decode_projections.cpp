// The decode stages that are one product of a weight with one vector. The calling thread prepares
// the vector, which takes about a microsecond; then threads share the weight's blocks of 16 rows.
#include <bit>

#include "device/cpu/matvec.h"
#include "metal/attend_project.h"
#include "metal/delta_project.h"
#include "metal/head.h"
#include "metal/project_add.h"
#include "metal/route_shared.h"

namespace lily::cpu::LILY_ISA {

namespace {

thread_local Scratch scratch;

// Calls store(segment, first row of a block, its 16 results) for all of W · x.
template <class ACT, class Store>
void project(const KernelCall& call, const PackedHeader& weight, const Vector& x, Store&& store) {
  parallel_runs(call.pool, count_blocks(weight), [&](uint32_t begin, uint32_t end, uint32_t) {
    product_run<ACT>(
        begin, end, spread(weight.segments[0]), x,
        [&](uint32_t i) { return block_at(weight, 0, place_of(weight, i)); },
        [&](uint32_t i, F y) {
          const Place p = place_of(weight, i);
          store(p.segment, p.index * block_rows, y);
        });
  });
  call.count(weight.expert_bytes);
}

struct Best {
  float value;
  uint32_t index;
};

LILY_INLINE bool better(Best a, Best b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The best of a block's rows that come before `rows`.
LILY_INLINE void keep_best(Best& best, F values, uint32_t row, uint32_t rows) {
  float v[lanes];
  store(v, values);
  for (uint32_t i = 0; i < block_rows && row + i < rows; ++i)
    if (better({v[i], row + i}, best)) best = {v[i], row + i};
}

}  // namespace

template <class ACT>
void delta_project(const KernelCall& call) {
  DeltaProject::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  ACT* newest = a.ring + size_t{a.p.position & 3} * a.c.CHANNELS;
  project<ACT>(call, weight, x, [&](uint32_t s, uint32_t row, F y) {
    if (s == 0) store_rows(newest, y, row, a.c.CHANNELS);
    if (s == 1) store_rows(a.z, y, row, a.c.VALUES);
    if (s >= 2) store_rows(a.gates + (s - 2) * a.c.HEADS, y, row, a.c.HEADS);
  });
}

template <class ACT>
void attend_project(const KernelCall& call) {
  AttendProject::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  const PackedSegment* segments = weight.segments;
  const uint32_t first[] = {0, segments[0].rows, segments[0].rows + segments[1].rows};
  project<ACT>(call, weight, x, [&](uint32_t s, uint32_t row, F y) {
    store_rows(a.qkv + first[s], y, row, segments[s].rows);
  });
}

template <class ACT>
void project_add(const KernelCall& call) {
  ProjectAdd::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const uint32_t head = a.c.HEADS == 0 ? a.c.K : a.c.K / a.c.HEADS;
  auto scale = [&](uint32_t h) {
    if (a.c.HEADS == 0) return 1.0f;
    float sum = 0;
    for (uint32_t i = 0; i < a.c.PARTIALS; ++i) sum += a.squares[h * a.c.PARTIALS + i];
    return 1.0f / std::sqrt(sum / static_cast<float>(head) + a.c.EPS);
  };
  uint32_t head_end = 0;
  float r = 1;
  const Vector u = prepare<ACT>(scratch, a.c.K, [&](uint32_t i) {
    if (i == head_end) {
      r = scale(i / head);
      head_end += head;
    }
    return load(a.u + i) * set1(r);
  });
  project<ACT>(call, weight, u,
               [&](uint32_t, uint32_t row, F y) { add_rows(a.x, y, row, a.c.N); });
}

// Blocks in turn: the router's, the shared gate's, then gate and up by turns; one thread takes both
// of a pair.
template <class ACT>
void route_shared(const KernelCall& call) {
  RouteShared::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  const uint32_t router = weight.segments[0].blocks, pairs = weight.segments[2].blocks;
  auto place = [&](uint32_t i) -> Place {
    if (i <= router) return i < router ? Place{0, i} : Place{1, 0};
    return {2 + (i - router - 1) % 2, (i - router - 1) / 2};
  };
  auto first = [&](uint32_t unit) { return unit <= router ? unit : 2 * unit - router - 1; };
  parallel_runs(call.pool, router + 1 + pairs, [&](uint32_t begin, uint32_t end, uint32_t) {
    F gate = zero();
    product_run<ACT>(
        first(begin), first(end), 1, x, [&](uint32_t i) { return block_at(weight, 0, place(i)); },
        [&](uint32_t i, F y) {
          const Place p = place(i);
          const uint32_t row = p.index * block_rows;
          if (p.segment == 0) store_rows(a.logits, y, row, a.c.EXPERTS);
          if (p.segment == 1) store_first(a.logits + a.c.EXPERTS, y, 1);
          if (p.segment == 2) gate = silu(y);
          if (p.segment == 3) store_rows(a.shared, gate * y, row, a.c.SHARED);
        });
  });
  call.count(weight.expert_bytes);
}

// This device says that there is one maximum.
template <class ACT>
void head(const KernelCall& call) {
  Head::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const float* row_x = a.x + size_t{a.p.row} * a.c.D;
  const Vector x = prepare_normed<ACT>(scratch, row_x, a.gamma, a.c.D, a.c.EPS);
  static thread_local Scratch best_scratch;
  Best* best = best_scratch.room<Best>(call.pool.size());
  std::fill_n(best, call.pool.size(), Best{-INFINITY, ~0u});
  const uint32_t blocks = count_blocks(weight);
  parallel_runs(call.pool, blocks, [&](uint32_t begin, uint32_t end, uint32_t thread) {
    Best mine = best[thread];
    product_run<ACT>(
        begin, end, spread(weight.segments[0]), x,
        [&](uint32_t i) { return block_at(weight, 0, {0, i}); },
        [&](uint32_t i, F y) {
          if (a.c.STORE) store_rows(a.logits, y, i * block_rows, a.c.V);
          keep_best(mine, y, i * block_rows, a.c.VALID);
        });
    best[thread] = mine;
  });
  for (uint32_t t = 1; t < call.pool.size(); ++t)
    if (better(best[t], best[0])) best[0] = best[t];
  a.maxima[0] = std::bit_cast<uint32_t>(best[0].value);
  a.maxima[1] = best[0].index;
  call.count(weight.expert_bytes);
}

LILY_CPU_KERNEL(delta_project)
LILY_CPU_KERNEL(attend_project)
LILY_CPU_KERNEL(project_add)
LILY_CPU_KERNEL(route_shared)
LILY_CPU_KERNEL(head)

}  // namespace lily::cpu::LILY_ISA
