// The dense projections of a prefill pass. Each is a product of gemm.h with its own sink; threads
// take panels of outputs, so that a weight is expanded once for all rows.
#include "device/cpu/gemm.h"
#include "metal/prefill_attend_project.h"
#include "metal/prefill_delta_project.h"
#include "metal/prefill_head.h"
#include "metal/prefill_project_add.h"
#include "metal/prefill_route.h"

namespace lily::cpu::LILY_ISA {

template <class ACT>
void prefill_delta_project(const KernelCall& call) {
  PrefillDeltaProject::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips = Strips::all_plain(a.weight);
  const uint32_t z = a.c.CHANNELS, gates = z + a.c.VALUES, n = gates + 2 * a.c.HEADS;
  strips.expect(1, a.c.D, n);
  const Columns<ACT> to_qkv{a.qkv, a.c.CHANNELS, 0, z}, to_z{a.z, a.c.VALUES, z, gates};
  const Columns<float> to_gates{a.gates, 2 * a.c.HEADS, gates, n};
  multiply_dense(call, a.y, a.p.rows, strips,
                 [&](const Strip& strip, uint64_t row, uint32_t rows, const float* sums) {
                   to_qkv(strip, row, rows, sums);
                   to_z(strip, row, rows, sums);
                   to_gates(strip, row, rows, sums);
                 });
}

template <class ACT>
void prefill_attend_project(const KernelCall& call) {
  PrefillAttendProject::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips = Strips::all_plain(a.weight, a.c.FIRST);
  strips.expect(1, a.c.D, a.c.N);
  multiply_dense(call, a.y, a.p.rows, strips, Columns<ACT>{a.qkv, a.c.N, 0, a.c.N});
}

template <class ACT>
void prefill_project_add(const KernelCall& call) {
  PrefillProjectAdd::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips = Strips::all_plain(a.weight);
  strips.expect(1, a.c.K, a.c.N);
  multiply_dense(call, a.u, a.p.rows, strips, AddTo{a.x, a.c.N});
}

// The router and the shared expert's gate are plain, its gate and up projections a pair.
template <class ACT>
void prefill_route(const KernelCall& call) {
  PrefillRoute::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips(a.weight, 2);
  const uint32_t n = a.c.EXPERTS + 1;
  strips.expect(1, a.c.D, n, a.c.SHARED);
  const Columns<float> to_logits{a.logits, n, 0, n};
  const Gated<ACT> to_shared{a.shared, a.c.SHARED};
  multiply_dense(call, a.y, a.p.rows, strips,
                 [&](const Strip& strip, uint64_t row, uint32_t rows, const float* sums) {
                   if (strip.paired) return to_shared(strip, row, rows, sums);
                   to_logits(strip, row, rows, sums);
                 });
}

template <class ACT>
void prefill_head(const KernelCall& call) {
  PrefillHead::Host<ACT> a(call.slots, call.constants, call.params);
  const Strips strips = Strips::all_plain(a.weight);
  strips.expect(1, a.c.D, a.c.V);
  multiply_dense(call, a.y, a.p.rows, strips, Columns<float>{a.logits, a.c.V, 0, a.c.V});
}

LILY_CPU_KERNEL(prefill_delta_project)
LILY_CPU_KERNEL(prefill_attend_project)
LILY_CPU_KERNEL(prefill_project_add)
LILY_CPU_KERNEL(prefill_route)
LILY_CPU_KERNEL(prefill_head)

}  // namespace lily::cpu::LILY_ISA
