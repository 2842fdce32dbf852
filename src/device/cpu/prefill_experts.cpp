// The experts of a prefill pass: the rows of each expert, grouped, times that expert's weights.
// Threads take panels of (expert, outputs); an expert without rows costs nothing.
#include "device/cpu/gemm.h"
#include "metal/prefill_experts_down.h"
#include "metal/prefill_experts_up.h"

namespace lily::cpu::LILY_ISA {

// The rows are gathered while they are copied into tiles.
template <class ACT>
void prefill_experts_up(const KernelCall& call) {
  PrefillExpertsUp::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips(a.weight, 0);
  strips.expect(a.c.EXPERTS, a.c.D, 0, a.c.F);
  multiply_grouped<ACT>(
      call, a.offsets, strips, [&](uint64_t r) { return a.y + size_t{a.src[r]} * a.c.D; },
      Gated<ACT>{a.h, a.c.F});
}

// The shared expert takes all rows in the order of the tokens.
template <class ACT>
void prefill_experts_down(const KernelCall& call) {
  PrefillExpertsDown::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips = Strips::all_plain(a.weight);
  const Strips shared = Strips::all_plain(a.shared_weight);
  strips.expect(a.c.EXPERTS, a.c.F, a.c.D);
  shared.expect(1, a.c.SHARED, a.c.D);
  multiply_grouped<ACT>(
      call, a.offsets, strips, [&](uint64_t r) { return a.h + r * a.c.F; },
      Columns<ACT>{a.out, a.c.D, 0, a.c.D});
  multiply_dense(call, a.shared, a.p.rows, shared, Columns<ACT>{a.shared_out, a.c.D, 0, a.c.D});
}

LILY_CPU_KERNEL(prefill_experts_up)
LILY_CPU_KERNEL(prefill_experts_down)

}  // namespace lily::cpu::LILY_ISA
