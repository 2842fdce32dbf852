// Where tokens become rows and rows become tokens: embedding, output head, sampling; and the two
// ops that every layer uses.
#include "metal/embed.h"
#include "metal/expand_weight.h"
#include "metal/head.h"
#include "metal/prefill_head.h"
#include "metal/prefill_norm.h"
#include "metal/prefill_project_add.h"
#include "metal/project_add.h"
#include "metal/sample.h"
#include "metal/sample_greedy.h"
#include "ops/ops.h"

namespace lily {

void Ops::stage(const char* name, int layer) {
  rec_.stage(layer < 0 ? std::string(name) : "layer." + std::to_string(layer) + "/" + name);
}

Tensor Ops::residual() {
  return rec_.binding(Role::residual, 0, SlotType::f32, {c_.hidden_size});
}

Tensor Ops::logits() {
  const uint32_t n = kind() == PlanKind::score ? rows() : 1;
  return rec_.binding(Role::logits, 0, SlotType::f32, {n, c_.vocab_size});
}

Tensor Ops::embed(const Tensor& embedding) {
  const bool given = prefill() || kind() == PlanKind::step ||
                     (kind() != PlanKind::pick && without(Technique::token_handover));
  if (!given) return residual();
  Tensor x = prefill() ? f32({rows(), c_.hidden_size}) : residual();
  Tensor tokens = rec_.binding(Role::tokens, 0, SlotType::u32, {rows()});
  rec_.dispatch<Embed>({.tokens = tokens, .weight = embedding, .x = x}, {.D = c_.hidden_size},
                       [](auto& p, const Step& s) {
                         p.rows = s.rows;
                         p.first = s.first_token;
                       },
                       {{2, embedding.bytes / c_.vocab_size * rows()}});
  return x;
}

// Weights of equal shapes take turns in one temporary, that of all layers' experts too.
Tensor Ops::expanded(const Tensor& weight) {
  if (!without(Technique::dequantise_in_product)) return weight;
  PackSpec form = *weight.form;
  std::vector<uint32_t> shape{form.experts};
  uint32_t n = 0;
  bool packed = false;
  for (Segment& s : form.segments) {
    packed |= s.bits != 16;
    s.bits = 16;
    n += s.rows;
    shape.insert(shape.end(), {s.rows, s.cols});
  }
  if (!packed) return weight;
  Tensor& out = expanded_[shape];
  if (!out) out = rec_.temporary(std::make_shared<const PackSpec>(std::move(form)));
  rec_.dispatch<ExpandWeight>({.weight = weight, .out = out},
                              {.EXPERTS = shape.front(), .N = n, .K = shape.back()},
                              [](auto& p, const Step&) { p.passes = 1; });
  return out;
}

Tensor Ops::normed(const Tensor& x, const Tensor& gamma) {
  Tensor y = act({rows(), c_.hidden_size});
  rec_.dispatch<PrefillNorm>({.x = x, .gamma = gamma, .y = y},
                             {.D = c_.hidden_size, .EPS = c_.rms_norm_eps},
                             [](auto& p, const Step& s) { p.rows = s.rows; });
  return y;
}

void Ops::project_add(const Heads& heads, const Tensor& weight, const Tensor& x) {
  const uint32_t k = static_cast<uint32_t>(heads.u.shape.count() / rows());
  if (prefill()) {
    rec_.dispatch<PrefillProjectAdd>({.u = heads.u, .weight = expanded(weight), .x = x},
                                     {.K = k, .N = c_.hidden_size},
                                     [](auto& p, const Step& s) { p.rows = s.rows; });
    return;
  }
  const bool norm = static_cast<bool>(heads.squares);
  rec_.dispatch<ProjectAdd>(
      {.u = heads.u, .squares = heads.squares, .weight = weight, .x = x},
      {.K = k,
       .N = c_.hidden_size,
       .HEADS = norm ? c_.linear_num_value_heads : 0,
       .PARTIALS = norm ? tuning_.delta_partials : 0,
       .ROWS = product_rows(1),
       .EPS = c_.rms_norm_eps},
      [](auto& p, const Step&) { p.rows = 1; });
}

void Ops::head(const Tensor& x, const Tensor& norm, const Tensor& weight) {
  if (kind() == PlanKind::prefill) return;
  if (kind() == PlanKind::score) {
    rec_.dispatch<PrefillHead>({.y = normed(x, norm), .weight = expanded(weight), .logits = logits()},
                               {.D = c_.hidden_size, .V = c_.vocab_size},
                               [](auto& p, const Step& s) { p.rows = s.rows; });
    return;
  }
  const bool store = kind() != PlanKind::next_greedy;
  maxima_ = u32({tuning_.head_maxima, 2});
  rec_.dispatch<Head>({.x = x,
                       .gamma = norm,
                       .weight = weight,
                       .logits = store ? logits() : Tensor{},
                       .maxima = maxima_},
                      {.D = c_.hidden_size,
                       .V = c_.vocab_size,
                       .VALID = c_.n_tokens,
                       .STORE = store,
                       .MAXIMA = tuning_.head_maxima,
                       .ROWS = product_rows(1),
                       .EPS = c_.rms_norm_eps},
                      [](auto& p, const Step& s) { p.row = s.rows - 1; });
}

void Ops::sample(const Tensor& embedding) {
  if (kind() < PlanKind::pick) return;
  Tensor tokens = rec_.binding(Role::tokens, 0, SlotType::u32, {2});
  const size_t row = embedding.bytes / c_.vocab_size;
  if (kind() == PlanKind::next_greedy) {
    rec_.dispatch<SampleGreedy>(
        {.maxima = maxima_, .embedding = embedding, .tokens = tokens, .x = residual()},
        {.D = c_.hidden_size, .MAXIMA = tuning_.head_maxima},
        [](auto& p, const Step& s) { p.slot = s.slot; }, {{2, row}});
    return;
  }
  Tensor counts;
  if (options_.penalties) counts = rec_.binding(Role::counts, 0, SlotType::u32, {c_.vocab_size});
  rec_.dispatch<Sample>(
      {.logits = logits(),
       .embedding = embedding,
       .bias_ids = rec_.binding(Role::bias_ids, 0, SlotType::u32, {1}),
       .bias = rec_.binding(Role::bias, 0, SlotType::f32, {1}),
       .counts = counts,
       .adjusted = f32({c_.vocab_size}),
       .tokens = tokens,
       .x = residual()},
      {.D = c_.hidden_size,
       .V = c_.vocab_size,
       .VALID = c_.n_tokens,
       .PENALTIES = options_.penalties},
      [](auto& p, const Step& s) {
        const Draw& d = s.draw;
        p = {.seed = d.seed,
             .step = s.draw_step,
             .temperature = d.temperature,
             .top_p = d.top_p,
             .min_p = d.min_p,
             .repetition = d.repetition,
             .presence = d.presence,
             .frequency = d.frequency,
             .top_k = d.top_k,
             .n_bias = d.n_bias,
             .slot = s.slot,
             .unused = 0};
      },
      {{2, row}});
}

}  // namespace lily
