// Gated attention over the KV cache.
#include "metal/attend.h"
#include "metal/attend_merge.h"
#include "metal/attend_project.h"
#include "metal/prefill_attend.h"
#include "metal/prefill_attend_prep.h"
#include "metal/prefill_attend_project.h"
#include "ops/ops.h"

namespace lily {

// Declared without its capacity, which only the session knows: a hazard covers the whole buffer.
Tensor Ops::cache(Role role, uint32_t n) {
  return rec_.binding(role, n, SlotType::act, {c_.num_key_value_heads, c_.head_dim});
}

Tensor Ops::attend_project(const Tensor& x, const Tensor& norm, const Tensor& in) {
  const uint32_t width = c_.qkv_width();
  if (prefill()) {
    Tensor qkv = act({rows(), width});
    rec_.dispatch<PrefillAttendProject>({.y = normed(x, norm), .weight = expanded(in), .qkv = qkv},
                                        {.D = c_.hidden_size, .N = width},
                                        [](auto& p, const Step& s) { p.rows = s.rows; });
    return qkv;
  }
  Tensor qkv = act({width});
  rec_.dispatch<AttendProject>({.x = x, .gamma = norm, .weight = in, .qkv = qkv},
                               {.D = c_.hidden_size,
                                .N = width,
                                .ROWS = product_rows(1),
                                .EPS = c_.rms_norm_eps},
                               [](auto& p, const Step&) { p.rows = 1; });
  return qkv;
}

Heads Ops::attend(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                  const Tensor& frequencies, uint32_t n) {
  const uint32_t heads = c_.num_attention_heads, kv_heads = c_.num_key_value_heads;
  const uint32_t dh = c_.head_dim;
  Tensor keys = cache(Role::keys, n), values = cache(Role::values, n);
  if (prefill()) {
    Tensor q = act({rows(), heads, dh}), u = act({rows(), heads, dh});
    rec_.dispatch<PrefillAttendPrep>({.qkv = qkv,
                                      .q_norm = q_norm,
                                      .k_norm = k_norm,
                                      .frequencies = frequencies,
                                      .keys = keys,
                                      .values = values,
                                      .q = q},
                                     {.HEADS = heads,
                                      .KV_HEADS = kv_heads,
                                      .DH = dh,
                                      .ROTARY = c_.rotary_dim,
                                      .EPS = c_.rms_norm_eps},
                                     [](auto& p, const Step& s) {
                                       p.rows = s.rows;
                                       p.position = s.position;
                                       p.capacity = s.capacity;
                                     });
    rec_.dispatch<PrefillAttend>({.q = q, .keys = keys, .values = values, .qkv = qkv, .u = u},
                                 {.HEADS = heads, .KV_HEADS = kv_heads, .DH = dh},
                                 [](auto& p, const Step& s) {
                                   p.rows = s.rows;
                                   p.position = s.position;
                                   p.capacity = s.capacity;
                                 });
    return {u, {}};
  }
  const bool merge = !options_.single_block;
  Tensor u = act({heads, dh}), partial, extent;
  if (merge) {
    partial = f32({tuning_.max_blocks, heads, dh});
    extent = f32({tuning_.max_blocks, heads, 2});
  }
  rec_.dispatch<Attend>({.qkv = qkv,
                         .q_norm = q_norm,
                         .k_norm = k_norm,
                         .frequencies = frequencies,
                         .keys = keys,
                         .values = values,
                         .u = merge ? Tensor{} : u,
                         .partial = partial,
                         .extent = extent},
                        {.HEADS = heads,
                         .KV_HEADS = kv_heads,
                         .DH = dh,
                         .ROTARY = c_.rotary_dim,
                         .MERGE = merge,
                         .EPS = c_.rms_norm_eps},
                        [](auto& p, const Step& s) {
                          p.position = s.position;
                          p.capacity = s.capacity;
                          p.block = s.block;
                          p.blocks = s.blocks;
                        },
                        {{5, 0}, {6, 0}, {8, 0}, {9, 0}});
  if (merge)
    rec_.dispatch<AttendMerge>({.partial = partial, .extent = extent, .qkv = qkv, .u = u},
                               {.HEADS = heads, .DH = dh},
                               [](auto& p, const Step& s) { p.blocks = s.blocks; },
                               {{1, 0}, {2, 0}});
  return {u, {}};
}

}  // namespace lily
