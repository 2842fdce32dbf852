// Mixture of experts: routing, the chosen experts and the shared one.
#include "metal/experts_down.h"
#include "metal/experts_down_add.h"
#include "metal/experts_project.h"
#include "metal/experts_up.h"
#include "metal/gated_product.h"
#include "metal/prefill_combine.h"
#include "metal/prefill_experts_down.h"
#include "metal/prefill_experts_up.h"
#include "metal/prefill_route.h"
#include "metal/prefill_scatter.h"
#include "metal/prefill_topk.h"
#include "metal/route_shared.h"
#include "ops/host_routing.h"
#include "ops/ops.h"

namespace lily {

Routed Ops::route_shared(const Tensor& x, const Tensor& norm, const Tensor& route) {
  const uint32_t experts = c_.num_experts, shared = c_.shared_expert_intermediate_size;
  Routed r;
  if (prefill()) {
    r.y = normed(x, norm);
    r.logits = f32({rows(), experts + 1});
    r.shared = act({rows(), shared});
    rec_.dispatch<PrefillRoute>(
        {.y = r.y, .weight = expanded(route), .logits = r.logits, .shared = r.shared},
        {.D = c_.hidden_size, .EXPERTS = experts, .SHARED = shared},
        [](auto& p, const Step& s) { p.rows = s.rows; });
    return r;
  }
  r.logits = f32({experts + 1});
  r.shared = act({shared});
  rec_.dispatch<RouteShared>(
      {.x = x, .gamma = norm, .weight = route, .logits = r.logits, .shared = r.shared},
      {.D = c_.hidden_size,
       .EXPERTS = experts,
       .SHARED = shared,
       .ROWS = product_rows(2),
       .EPS = c_.rms_norm_eps},
      [](auto& p, const Step&) { p.rows = 1; });
  return r;
}

void Ops::choose(const Routed& r) {
  const PrefillTopk::Bind<Tensor> bind{.logits = r.logits, .ids = r.ids, .shares = r.shares};
  const PrefillTopk::Constants sizes{.EXPERTS = c_.num_experts, .TOP = c_.num_experts_per_tok};
  auto fill = [](auto& p, const Step& s) { p.rows = s.rows; };
  if (without(Technique::gpu_routing))
    rec_.on_host<PrefillTopk, choose_on_host>(bind, sizes, fill);
  else
    rec_.dispatch<PrefillTopk>(bind, sizes, fill);
}

void Ops::group(const Routed& r, const Tensor& src) {
  const PrefillScatter::Bind<Tensor> bind{
      .ids = r.ids, .offsets = r.offsets, .src = src, .inv = r.inv};
  const PrefillScatter::Constants sizes{.EXPERTS = c_.num_experts, .TOP = c_.num_experts_per_tok};
  auto fill = [](auto& p, const Step& s) { p.rows = s.rows; };
  if (without(Technique::gpu_routing))
    rec_.on_host<PrefillScatter, group_on_host>(bind, sizes, fill);
  else
    rec_.dispatch<PrefillScatter>(bind, sizes, fill);
}

void Ops::experts_up(Routed& r, const Tensor& x, const Tensor& norm, const Tensor& up) {
  const uint32_t experts = c_.num_experts, top = c_.num_experts_per_tok;
  const uint32_t f = c_.moe_intermediate_size, t = rows();
  if (prefill()) {
    r.ids = u32({t, top});
    r.shares = f32({t, top + 1});
    r.h = act({t * top, f});
    r.offsets = u32({experts + 1});
    r.inv = u32({t, top});
    Tensor src = u32({t, top});
    choose(r);
    group(r, src);
    rec_.dispatch<PrefillExpertsUp>(
        {.y = r.y, .offsets = r.offsets, .src = src, .weight = expanded(up), .h = r.h},
        {.D = c_.hidden_size,
         .EXPERTS = experts,
         .TOP = top,
         .F = f,
         .TILE_ROWS = options_.tile_rows},
        [](auto& p, const Step& s) { p.rows = s.rows; });
    return;
  }
  r.ids = u32({top});
  r.shares = f32({top + 1});
  r.h = act({top, f});
  auto project = [&](const Tensor& out, bool gated, auto fill) {
    rec_.dispatch<ExpertsProject>(
        {.x = x, .gamma = norm, .ids = r.ids, .weight = up, .out = out},
        {.D = c_.hidden_size,
         .TOP = top,
         .F = f,
         .GATED = gated,
         .ROWS = product_rows(gated ? 2 : 1),
         .EPS = c_.rms_norm_eps},
        fill,
        {{4, up.bytes / experts * top / (gated ? 1 : 2)}});
  };
  if (without(Technique::fused_gate_up)) {
    choose(r);
    Tensor gate = act({top, f}), raised = act({top, f});
    project(gate, false, [](auto& p, const Step&) { p.up = 0; });
    project(raised, false, [](auto& p, const Step&) { p.up = 1; });
    rec_.dispatch<GatedProduct>({.gate = gate, .up = raised, .h = r.h}, {.N = top * f},
                                [](auto& p, const Step&) { p.rows = 1; });
    return;
  }
  if (without(Technique::gpu_routing)) {
    choose(r);
    project(r.h, true, [](auto& p, const Step&) { p.up = 0; });
    return;
  }
  rec_.dispatch<ExpertsUp>({.x = x,
                            .gamma = norm,
                            .logits = r.logits,
                            .weight = up,
                            .ids = r.ids,
                            .shares = r.shares,
                            .h = r.h},
                           {.D = c_.hidden_size,
                            .EXPERTS = experts,
                            .TOP = top,
                            .F = f,
                            .ROWS = product_rows(2),
                            .EPS = c_.rms_norm_eps},
                           [](auto& p, const Step&) { p.rows = 1; },
                           {{4, up.bytes / experts * top}});
}

void Ops::experts_down_add(const Routed& r, const Tensor& down, const Tensor& shared_down,
                           const Tensor& x) {
  const uint32_t experts = c_.num_experts, top = c_.num_experts_per_tok;
  const uint32_t d = c_.hidden_size, f = c_.moe_intermediate_size;
  const uint32_t shared = c_.shared_expert_intermediate_size, t = rows();
  auto combine = [&](const Tensor& out, const Tensor& shared_out) {
    rec_.dispatch<PrefillCombine>(
        {.out = out, .shared_out = shared_out, .inv = r.inv, .shares = r.shares, .x = x},
        {.D = d, .TOP = top, .GROUPED = prefill()},
        [](auto& p, const Step& s) { p.rows = s.rows; });
  };
  if (prefill()) {
    Tensor out = act({t * top, d}), shared_out = act({t, d});
    rec_.dispatch<PrefillExpertsDown>(
        {.h = r.h,
         .shared = r.shared,
         .offsets = r.offsets,
         .weight = expanded(down),
         .shared_weight = expanded(shared_down),
         .out = out,
         .shared_out = shared_out},
        {.D = d,
         .EXPERTS = experts,
         .TOP = top,
         .F = f,
         .SHARED = shared,
         .TILE_ROWS = options_.tile_rows},
        [](auto& p, const Step& s) { p.rows = s.rows; });
    combine(out, shared_out);
    return;
  }
  if (without(Technique::fused_down)) {
    Tensor out = act({top, d}), shared_out = act({d});
    rec_.dispatch<ExpertsDown>({.h = r.h,
                                .shared = r.shared,
                                .ids = r.ids,
                                .weight = down,
                                .shared_weight = shared_down,
                                .out = out,
                                .shared_out = shared_out},
                               {.D = d,
                                .TOP = top,
                                .F = f,
                                .SHARED = shared,
                                .ROWS = product_rows(1)},
                               [](auto& p, const Step&) { p.rows = 1; },
                               {{4, down.bytes / experts * top}});
    combine(out, shared_out);
    return;
  }
  rec_.dispatch<ExpertsDownAdd>({.h = r.h,
                                 .shared = r.shared,
                                 .ids = r.ids,
                                 .shares = r.shares,
                                 .weight = down,
                                 .shared_weight = shared_down,
                                 .x = x},
                                {.D = d,
                                 .TOP = top,
                                 .F = f,
                                 .SHARED = shared,
                                 .ROWS = product_rows(1)},
                                [](auto& p, const Step&) { p.rows = 1; },
                                {{5, down.bytes / experts * top}});
}

}  // namespace lily
