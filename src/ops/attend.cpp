// Gated attention over the KV cache.
#include "metal/attend.h"
#include "metal/attend_merge.h"
#include "metal/attend_project.h"
#include "metal/prefill_attend.h"
#include "metal/prefill_attend_prep.h"
#include "metal/prefill_attend_project.h"
#include "ops/ops.h"

namespace lily {

// Declared without its size, which only the session knows: a hazard covers the whole buffer.
Tensor Ops::cache(Role role, uint32_t n) {
  return rec_.binding(role, n, SlotType::cache, {});
}

// Columns from `first` on.
Tensor Ops::project_rows(const Tensor& x, const Tensor& norm, const Tensor& in, uint32_t first) {
  const uint32_t width = c_.qkv_width();
  Tensor qkv = act({rows(), width});
  rec_.dispatch<PrefillAttendProject>({.y = normed(x, norm), .weight = expanded(in), .qkv = qkv},
                                      {.D = c_.hidden_size, .N = width, .FIRST = first},
                                      [](auto& p, const Step& s) { p.rows = s.rows; },
                                      {{2, in.bytes * (width - first) / width}});
  return qkv;
}

// Queries to q if there is one, keys and values to the cache.
void Ops::prepare_rows(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                       const Tensor& frequencies, uint32_t n, const Tensor& q) {
  rec_.dispatch<PrefillAttendPrep>({.qkv = qkv,
                                    .q_norm = q_norm,
                                    .k_norm = k_norm,
                                    .frequencies = frequencies,
                                    .keys = cache(Role::keys, n),
                                    .values = cache(Role::values, n),
                                    .q = q},
                                   {.HEADS = c_.num_attention_heads,
                                    .KV_HEADS = c_.num_key_value_heads,
                                    .DH = c_.head_dim,
                                    .ROTARY = c_.rotary_dim,
                                    .KV_INT8 = options_.kv_int8,
                                    .CACHE_ONLY = !q,
                                    .EPS = c_.rms_norm_eps},
                                   [](auto& p, const Step& s) {
                                     p.rows = s.rows;
                                     p.position = s.position;
                                     p.capacity = s.capacity;
                                   });
}

void Ops::attend_cache(const Tensor& x, const Tensor& norm, const Tensor& in, const Tensor& k_norm,
                       const Tensor& frequencies, uint32_t n) {
  const Tensor qkv = project_rows(x, norm, in, 2 * c_.query_width());
  prepare_rows(qkv, {}, k_norm, frequencies, n, {});
}

Tensor Ops::attend_project(const Tensor& x, const Tensor& norm, const Tensor& in) {
  if (prefill()) return project_rows(x, norm, in, 0);
  const uint32_t width = c_.qkv_width();
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
    prepare_rows(qkv, q_norm, k_norm, frequencies, n, q);
    rec_.dispatch<PrefillAttend>({.q = q, .keys = keys, .values = values, .qkv = qkv, .u = u},
                                 {.HEADS = heads,
                                  .KV_HEADS = kv_heads,
                                  .DH = dh,
                                  .KV_INT8 = options_.kv_int8,
                                  .APART = without(Technique::gqa_packing)},
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
  const bool apart = without(Technique::fused_qk_prep);
  Tensor q;
  if (apart) {
    q = act({heads, dh});
    prepare_rows(qkv, q_norm, k_norm, frequencies, n, q);
  }
  rec_.dispatch<Attend>({.qkv = qkv,
                         .q_norm = apart ? Tensor{} : q_norm,
                         .k_norm = apart ? Tensor{} : k_norm,
                         .frequencies = apart ? Tensor{} : frequencies,
                         .keys = keys,
                         .values = values,
                         .u = merge ? Tensor{} : u,
                         .partial = partial,
                         .extent = extent,
                         .q = q},
                        {.HEADS = heads,
                         .KV_HEADS = kv_heads,
                         .DH = dh,
                         .ROTARY = c_.rotary_dim,
                         .MERGE = merge,
                         .PREPARED = apart,
                         .KV_INT8 = options_.kv_int8,
                         .BY_KEY = without(Technique::coalesced_kv),
                         .APART = without(Technique::gqa_packing),
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
