// The kernels of one instruction set, by contract name.
#include "device/cpu/kernels.h"

// clang-format off
#define LILY_CPU_KERNELS(K)                                                                  \
  K(embed) K(delta_project) K(delta_step) K(project_add) K(attend_project) K(attend)         \
  K(attend_merge) K(route_shared) K(experts_up) K(experts_down_add) K(head) K(sample_greedy) \
  K(sample) K(experts_project) K(gated_product) K(experts_down)                              \
  K(prefill_norm) K(prefill_delta_project) K(prefill_delta_prep) K(prefill_ring)             \
  K(prefill_delta_scan) K(prefill_gated_norm) K(prefill_project_add)                         \
  K(prefill_attend_project) K(prefill_attend_prep) K(prefill_attend) K(prefill_route)        \
  K(prefill_topk) K(prefill_scatter) K(prefill_experts_up) K(prefill_experts_down)           \
  K(prefill_combine) K(prefill_head) K(expand_weight)
// clang-format on

namespace lily::cpu::LILY_ISA {

#define LILY_DECLARE(name) \
  template <class ACT>     \
  void name(const KernelCall&);
#define LILY_ENTRY(name) {#name, name<bf16>, name<float>},
LILY_CPU_KERNELS(LILY_DECLARE)

std::span<const KernelEntry> kernels() {
  static const KernelEntry entries[] = {LILY_CPU_KERNELS(LILY_ENTRY)};
  return entries;
}

}  // namespace lily::cpu::LILY_ISA
