// The routed experts of one token.
#include "device/cpu/matvec.h"
#include "device/cpu/topk.h"
#include "metal/experts_down.h"
#include "metal/experts_down_add.h"
#include "metal/experts_project.h"
#include "metal/experts_up.h"
#include "metal/gated_product.h"

namespace lily::cpu::LILY_ISA {

namespace {

thread_local Scratch scratch;

// h_i = silu(gate) ⊙ up of expert ids_i. Threads share pairs of a gate and an up block, expert after
// expert, so that each reads long runs of one expert.
template <class ACT>
void gated_rows(const KernelCall& call, const PackedHeader& weight, const Vector& x,
                const uint32_t* ids, uint32_t top, uint32_t f, ACT* h) {
  const uint32_t pairs = weight.segments[0].blocks;
  parallel_runs(call.pool, top * pairs, [&](uint32_t begin, uint32_t end, uint32_t) {
    F gate = zero();
    product_run<ACT>(
        2 * begin, 2 * end, 1, x,
        [&](uint32_t i) { return block_at(weight, ids[i / 2 / pairs], {i % 2, i / 2 % pairs}); },
        [&](uint32_t i, F y) {
          const uint32_t choice = i / 2 / pairs, row = i / 2 % pairs * block_rows;
          if (i % 2 == 0)
            gate = silu(y);
          else
            store_rows(h + size_t{choice} * f, gate * y, row, f);
        });
  });
  call.count(top * weight.expert_bytes);
}

// W · h for each of some vectors h that lie one after the other: choice i takes expert ids_i, the
// last one the shared expert. Threads share blocks, expert after expert, so that they read long
// runs; store(choice, block, results).
template <class ACT, class Args, class Store>
void down_rows(const KernelCall& call, const Args& a, Store&& store_block) {
  const PackedHeader& routed = packed_header(a.weight);
  const PackedHeader& shared = packed_header(a.shared_weight);
  const uint32_t all = a.c.TOP * a.c.F, blocks = shared.segments[0].blocks;
  const Vector h = prepare<ACT>(scratch, all + a.c.SHARED, [&](uint32_t i) {
    return i < all ? load(a.h + i) : load(a.shared + (i - all));
  });
  auto find = [&](uint32_t i) {
    const uint32_t choice = i / blocks, block = i % blocks;
    const bool is_shared = choice == a.c.TOP;
    Block b = block_at(is_shared ? shared : routed, is_shared ? 0 : a.ids[choice], {0, block});
    b.col = choice * a.c.F;
    return b;
  };
  parallel_runs(call.pool, (a.c.TOP + 1) * blocks, [&](uint32_t begin, uint32_t end, uint32_t) {
    product_run<ACT>(begin, end, spread(routed.segments[0]), h, find,
                     [&](uint32_t i, F y) { store_block(i / blocks, i % blocks, y); });
  });
  call.count(a.c.TOP * routed.expert_bytes + shared.expert_bytes);
}

}  // namespace

// The calling thread chooses.
template <class ACT>
void experts_up(const KernelCall& call) {
  ExpertsUp::Host<ACT> a(call.slots, call.constants, call.params);
  choose_experts(a.logits, a.c.EXPERTS, a.c.TOP, a.ids, a.shares);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  gated_rows<ACT>(call, packed_header(a.weight), x, a.ids, a.c.TOP, a.c.F, a.h);
}

template <class ACT>
void experts_project(const KernelCall& call) {
  ExpertsProject::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  if (a.c.GATED) return gated_rows<ACT>(call, weight, x, a.ids, a.c.TOP, a.c.F, a.out);
  const PackedSegment& segment = weight.segments[a.p.up];
  const uint32_t blocks = segment.blocks;
  parallel_runs(call.pool, a.c.TOP * blocks, [&](uint32_t begin, uint32_t end, uint32_t) {
    product_run<ACT>(
        begin, end, spread(segment), x,
        [&](uint32_t i) { return block_at(weight, a.ids[i / blocks], {a.p.up, i % blocks}); },
        [&](uint32_t i, F y) {
          store_rows(a.out + size_t{i / blocks} * a.c.F, y, i % blocks * block_rows, a.c.F);
        });
  });
  call.count(a.c.TOP * blocks * segment.block_bytes());
}

template <class ACT>
void gated_product(const KernelCall& call) {
  GatedProduct::Host<ACT> a(call.slots, call.constants, call.params);
  for (uint32_t i = 0; i < a.c.N; i += lanes)
    store(a.h + i, silu(load(a.gate + i)) * load(a.up + i));
}

// The calling thread adds up what each expert gave for every output.
template <class ACT>
void experts_down_add(const KernelCall& call) {
  ExpertsDownAdd::Host<ACT> a(call.slots, call.constants, call.params);
  const uint32_t blocks = (a.c.D + block_rows - 1) / block_rows;
  static thread_local Scratch given_scratch;
  float* given = given_scratch.room<float>(size_t{a.c.TOP + 1} * blocks * block_rows);
  down_rows<ACT>(call, a, [&](uint32_t choice, uint32_t block, F y) {
    store(given + (size_t{choice} * blocks + block) * block_rows, y);
  });
  for (uint32_t row = 0; row < a.c.D; row += block_rows) {
    F sum = zero();
    for (uint32_t i = 0; i <= a.c.TOP; ++i)
      sum = fma(load(given + size_t{i} * blocks * block_rows + row), set1(a.shares[i]), sum);
    add_rows(a.x, sum, row, a.c.D);
  }
}

template <class ACT>
void experts_down(const KernelCall& call) {
  ExpertsDown::Host<ACT> a(call.slots, call.constants, call.params);
  down_rows<ACT>(call, a, [&](uint32_t choice, uint32_t block, F y) {
    ACT* out = choice == a.c.TOP ? a.shared_out : a.out + size_t{choice} * a.c.D;
    store_rows(out, y, block * block_rows, a.c.D);
  });
}

LILY_CPU_KERNEL(experts_up)
LILY_CPU_KERNEL(experts_down_add)
LILY_CPU_KERNEL(experts_project)
LILY_CPU_KERNEL(gated_product)
LILY_CPU_KERNEL(experts_down)

}  // namespace lily::cpu::LILY_ISA
