// Gated DeltaNet: projections into the conv ring, one step or a scan of the delta rule.
#include "metal/delta_project.h"
#include "metal/delta_step.h"
#include "metal/prefill_delta_prep.h"
#include "metal/prefill_delta_project.h"
#include "metal/prefill_delta_scan.h"
#include "metal/prefill_gated_norm.h"
#include "metal/prefill_ring.h"
#include "ops/ops.h"

namespace lily {

Tensor Ops::ring(uint32_t n) {
  return rec_.binding(Role::ring, n, SlotType::act, {conv_taps, c_.conv_channels()});
}

Tensor Ops::state(Role role, uint32_t n) {
  return rec_.binding(
      role, n, SlotType::f32,
      {c_.linear_num_value_heads, c_.linear_value_head_dim, c_.linear_key_head_dim});
}

DeltaInputs Ops::delta_project(const Tensor& x, const Tensor& norm, const Tensor& in, uint32_t n) {
  const uint32_t heads = c_.linear_num_value_heads;
  DeltaInputs out;
  if (prefill()) {
    const uint32_t t = rows();
    out = {act({t, c_.conv_channels()}), act({t, c_.value_width()}), f32({t, 2, heads})};
    rec_.dispatch<PrefillDeltaProject>(
        {.y = normed(x, norm),
         .weight = expanded(in),
         .qkv = out.qkv,
         .z = out.z,
         .gates = out.gates},
        {.D = c_.hidden_size,
         .CHANNELS = c_.conv_channels(),
         .VALUES = c_.value_width(),
         .HEADS = heads},
        [](auto& p, const Step& s) { p.rows = s.rows; });
    return out;
  }
  out = {{}, act({c_.value_width()}), f32({2, heads})};
  rec_.dispatch<DeltaProject>(
      {.x = x, .gamma = norm, .weight = in, .ring = ring(n), .z = out.z, .gates = out.gates},
      {.D = c_.hidden_size,
       .CHANNELS = c_.conv_channels(),
       .VALUES = c_.value_width(),
       .HEADS = heads,
       .ROWS = product_rows(1),
       .EPS = c_.rms_norm_eps},
      [](auto& p, const Step& s) { p.position = s.position; });
  return out;
}

Tensor Ops::delta_state(const DeltaInputs& in, const Tensor& conv, const Tensor& decay,
                        uint32_t n) {
  const uint32_t key_heads = c_.linear_num_key_heads, heads = c_.linear_num_value_heads;
  const uint32_t dk = c_.linear_key_head_dim, dv = c_.linear_value_head_dim;
  const uint32_t t = rows();
  Tensor q = act({t, key_heads, dk}), k = act({t, key_heads, dk}), v = act({t, heads, dv});
  Tensor steps = f32({t, 2, heads}), o = f32({t, heads, dv});
  rec_.dispatch<PrefillDeltaPrep>({.qkv = in.qkv,
                                   .ring = ring(n),
                                   .conv = conv,
                                   .gates = in.gates,
                                   .decay = decay,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .steps = steps},
                                  {.KEY_HEADS = key_heads, .HEADS = heads, .DK = dk, .DV = dv},
                                  [](auto& p, const Step& s) {
                                    p.rows = s.rows;
                                    p.position = s.position;
                                  });
  rec_.dispatch<PrefillRing>({.qkv = in.qkv, .ring = ring(n)}, {.CHANNELS = c_.conv_channels()},
                             [](auto& p, const Step& s) {
                               p.rows = s.rows;
                               p.position = s.position;
                             });
  rec_.dispatch<PrefillDeltaScan>({.q = q,
                                   .k = k,
                                   .v = v,
                                   .steps = steps,
                                   .state_in = state(Role::state_in, n),
                                   .state_out = state(Role::state_out, n),
                                   .o = o},
                                  {.KEY_HEADS = key_heads,
                                   .HEADS = heads,
                                   .DK = dk,
                                   .DV = dv,
                                   .IN_MEMORY = without(Technique::register_scan)},
                                  [](auto& p, const Step& s) { p.rows = s.rows; });
  return o;
}

Heads Ops::delta_step(const DeltaInputs& in, const Tensor& conv, const Tensor& decay,
                      const Tensor& gamma, uint32_t n) {
  const uint32_t key_heads = c_.linear_num_key_heads, heads = c_.linear_num_value_heads;
  const uint32_t dk = c_.linear_key_head_dim, dv = c_.linear_value_head_dim;
  auto gated_norm = [&](const Tensor& o, const Tensor& u) {
    rec_.dispatch<PrefillGatedNorm>({.o = o, .z = in.z, .gamma = gamma, .u = u},
                                    {.HEADS = heads, .DV = dv, .EPS = c_.rms_norm_eps},
                                    [](auto& p, const Step& s) { p.rows = s.rows; });
  };
  if (!prefill()) {
    const bool raw = without(Technique::fused_delta_norm);
    Heads out{act({heads, dv}), raw ? Tensor{} : f32({heads, tuning_.delta_partials})};
    Tensor o = raw ? f32({heads, dv}) : Tensor{};
    rec_.dispatch<DeltaStep>({.ring = ring(n),
                              .conv = conv,
                              .z = in.z,
                              .gates = in.gates,
                              .decay = decay,
                              .gamma = gamma,
                              .state_in = state(Role::state_in, n),
                              .state_out = state(Role::state_out, n),
                              .u = raw ? Tensor{} : out.u,
                              .squares = out.squares,
                              .o = o},
                             {.KEY_HEADS = key_heads,
                              .HEADS = heads,
                              .DK = dk,
                              .DV = dv,
                              .PARTIALS = tuning_.delta_partials,
                              .RAW = raw},
                             [](auto& p, const Step& s) { p.position = s.position; });
    if (raw) gated_norm(o, out.u);
    return out;
  }
  Heads out{act({rows(), heads, dv}), {}};
  gated_norm(delta_state(in, conv, decay, n), out.u);
  return out;
}

}  // namespace lily
