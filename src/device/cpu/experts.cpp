// The routed experts of one token.
#include "device/cpu/matvec.h"
#include "device/cpu/topk.h"
#include "metal/experts_down_add.h"
#include "metal/experts_up.h"

namespace lily::cpu::LILY_ISA {

namespace {

thread_local Scratch scratch;

}  // namespace

// The calling thread chooses; then threads share pairs of a gate and an up block, expert after
// expert, so that each reads long runs of one expert.
template <class ACT>
void experts_up(const KernelCall& call) {
  ExpertsUp::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& weight = packed_header(a.weight);
  choose_experts(a.logits, a.c.EXPERTS, a.c.TOP, a.ids, a.shares);
  const Vector x = prepare_normed<ACT>(scratch, a.x, a.gamma, a.c.D, a.c.EPS);
  const uint32_t pairs = weight.segments[0].blocks;
  parallel_runs(call.pool, a.c.TOP * pairs, [&](uint32_t begin, uint32_t end, uint32_t) {
    F gate = zero();
    product_run<ACT>(
        2 * begin, 2 * end, 1, x,
        [&](uint32_t i) {
          return block_at(weight, a.ids[i / 2 / pairs], {i % 2, i / 2 % pairs});
        },
        [&](uint32_t i, F y) {
          const uint32_t choice = i / 2 / pairs, row = i / 2 % pairs * block_rows;
          if (i % 2 == 0)
            gate = silu(y);
          else
            store_rows(a.h + size_t{choice} * a.c.F, gate * y, row, a.c.F);
        });
  });
  call.count(a.c.TOP * weight.expert_bytes);
}

// Expert after expert, so that threads read long runs; the calling thread then adds up what each
// expert gave for every output.
template <class ACT>
void experts_down_add(const KernelCall& call) {
  ExpertsDownAdd::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& routed = packed_header(a.weight);
  const PackedHeader& shared = packed_header(a.shared_weight);
  const uint32_t all = a.c.TOP * a.c.F, blocks = shared.segments[0].blocks;
  const Vector h = prepare<ACT>(scratch, all + a.c.SHARED, [&](uint32_t i) {
    return i < all ? load(a.h + i) : load(a.shared + (i - all));
  });
  static thread_local Scratch given_scratch;
  float* given = given_scratch.room<float>(size_t{a.c.TOP + 1} * blocks * block_rows);
  auto find = [&](uint32_t i) {
    const uint32_t choice = i / blocks, block = i % blocks;
    const bool is_shared = choice == a.c.TOP;
    Block b = block_at(is_shared ? shared : routed, is_shared ? 0 : a.ids[choice], {0, block});
    b.col = choice * a.c.F;
    return b;
  };
  parallel_runs(call.pool, (a.c.TOP + 1) * blocks, [&](uint32_t begin, uint32_t end, uint32_t) {
    product_run<ACT>(begin, end, spread(routed.segments[0]), h, find,
                     [&](uint32_t i, F y) { store(given + size_t{i} * block_rows, y); });
  });
  for (uint32_t row = 0; row < a.c.D; row += block_rows) {
    F sum = zero();
    for (uint32_t i = 0; i <= a.c.TOP; ++i)
      sum = fma(load(given + size_t{i} * blocks * block_rows + row), set1(a.shares[i]), sum);
    add_rows(a.x, sum, row, a.c.D);
  }
  call.count(a.c.TOP * routed.expert_bytes + shared.expert_bytes);
}

LILY_CPU_KERNEL(experts_up)
LILY_CPU_KERNEL(experts_down_add)

}  // namespace lily::cpu::LILY_ISA
