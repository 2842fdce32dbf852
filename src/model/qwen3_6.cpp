#include "model/qwen3_6.h"

#include <cmath>

namespace lily {

// ---------------------------------------------------------------------------------------------
// Weights: checkpoint name, shape
// ---------------------------------------------------------------------------------------------

Qwen36::Qwen36(const Config& config, Loader& load) : c_(config) {
  load.buffer("embedding");
  embedding_ = load.matrix({{"embed_tokens", c_.vocab_size, c_.hidden_size}});
  std::vector<float> frequencies;
  for (uint32_t i = 0; i < c_.rotary_dim; i += 2)
    frequencies.push_back(1.0f / std::pow(static_cast<float>(c_.rope_theta),
                                          static_cast<float>(i) / static_cast<float>(c_.rotary_dim)));
  frequencies_ = load.constants(std::move(frequencies));

  uint32_t n_delta = 0, n_attention = 0;
  for (uint32_t i = 0; i < c_.n_layers(); ++i) {
    const std::string name = "layers." + std::to_string(i);
    load.buffer(name);
    Layer layer;
    if (c_.full_attention[i])
      layer.mix = attention(load, name, n_attention++);
    else
      layer.mix = delta_net(load, name, n_delta++);
    layer.experts = experts(load, name);
    layers_.push_back(std::move(layer));
  }

  load.buffer("head");
  norm_ = load.norm("norm.weight", c_.hidden_size);
  head_ = c_.tie_word_embeddings
              ? embedding_
              : load.matrix({{"lm_head", c_.vocab_size, c_.hidden_size}});
}

DeltaNet Qwen36::delta_net(Loader& load, const std::string& layer, uint32_t n) const {
  const std::string m = layer + ".linear_attn.";
  const uint32_t d = c_.hidden_size, heads = c_.linear_num_value_heads;
  return {
      .n = n,
      .norm = load.norm(layer + ".input_layernorm.weight", d),
      .in = load.matrix({{m + "in_proj_qkv", c_.conv_channels(), d},
                         {m + "in_proj_z", c_.value_width(), d},
                         {m + "in_proj_b", heads, d},
                         {m + "in_proj_a", heads, d}}),
      .conv = load.conv(m + "conv1d.weight", c_.conv_channels(), conv_taps),
      .decay = load.decay(m + "A_log", m + "dt_bias", heads),
      .gamma = load.vector(m + "norm.weight", c_.linear_value_head_dim),
      .out = load.matrix({{m + "out_proj", d, c_.value_width()}}),
  };
}

Attention Qwen36::attention(Loader& load, const std::string& layer, uint32_t n) const {
  const std::string m = layer + ".self_attn.";
  const uint32_t d = c_.hidden_size;
  return {
      .n = n,
      .norm = load.norm(layer + ".input_layernorm.weight", d),
      .in = load.matrix({{m + "q_proj", 2 * c_.query_width(), d},
                         {m + "k_proj", c_.kv_width(), d},
                         {m + "v_proj", c_.kv_width(), d}}),
      .q_norm = load.norm(m + "q_norm.weight", c_.head_dim),
      .k_norm = load.norm(m + "k_norm.weight", c_.head_dim),
      .out = load.matrix({{m + "o_proj", d, c_.query_width()}}),
  };
}

Experts Qwen36::experts(Loader& load, const std::string& layer) const {
  const std::string m = layer + ".mlp.";
  const uint32_t d = c_.hidden_size, f = c_.moe_intermediate_size;
  const uint32_t shared = c_.shared_expert_intermediate_size;
  return {
      .norm = load.norm(layer + ".post_attention_layernorm.weight", d),
      .route = load.matrix({{m + "gate", c_.num_experts, d},
                            {m + "shared_expert_gate", 1, d},
                            {m + "shared_expert.gate_proj", shared, d},
                            {m + "shared_expert.up_proj", shared, d}}),
      .up = load.experts({{m + "switch_mlp.gate_proj", f, d}, {m + "switch_mlp.up_proj", f, d}},
                         c_.num_experts),
      .down = load.experts({{m + "switch_mlp.down_proj", d, f}}, c_.num_experts),
      .shared_down = load.matrix({{m + "shared_expert.down_proj", d, shared}}),
  };
}

// ---------------------------------------------------------------------------------------------
// The pass, in a decode plan one dispatch a line
// ---------------------------------------------------------------------------------------------

namespace {

// x += W_out · gnorm(delta_rule(conv(W_in · norm(x))))
void mix(Ops& op, const DeltaNet& w, const Tensor& x) {
  DeltaInputs in = op.delta_project(x, w.norm, w.in, w.n);        // norm; q|k|v into the ring, z, b, a
  Heads u = op.delta_step(in, w.conv, w.decay, w.gamma, w.n);     // conv, gates, S ← γS + …, read-out
  op.project_add(u, w.out, x);                                    // head norm, projection, residual
}

// x += W_out · (attend(rope(norm(q)), rope(norm(k)), v) ⊙ σ(gate))
void mix(Ops& op, const Attention& w, const Tensor& x, const Tensor& frequencies) {
  Tensor qkv = op.attend_project(x, w.norm, w.in);                        // norm; q|gate, k, v
  Heads u = op.attend(qkv, w.q_norm, w.k_norm, frequencies, w.n);         // cache, softmax, gate
  op.project_add(u, w.out, x);                                            // projection, residual
}

// Of a last layer that nobody reads: ring and state, or keys and values.
void keep(Ops& op, const DeltaNet& w, const Tensor& x) {
  DeltaInputs in = op.delta_project(x, w.norm, w.in, w.n);
  op.delta_state(in, w.conv, w.decay, w.n);
}
void keep(Ops& op, const Attention& w, const Tensor& x, const Tensor& frequencies) {
  op.attend_cache(x, w.norm, w.in, w.k_norm, frequencies, w.n);
}

// x += Σ_top share · expert(norm(x)) + σ(gate) · shared_expert(norm(x))
void moe(Ops& op, const Experts& w, const Tensor& x) {
  Routed r = op.route_shared(x, w.norm, w.route);      // router, shared gate and up
  op.experts_up(r, x, w.norm, w.up);                   // top-k, gate and up of the chosen
  op.experts_down_add(r, w.down, w.shared_down, x);    // down, weighted sum, residual
}

}  // namespace

void Qwen36::forward(Ops& op) const {
  op.stage("embed");
  Tensor x = op.embed(embedding_);
  if (op.kind() != PlanKind::pick) {
    for (uint32_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const bool kept = i + 1 == layers_.size() && op.skips_last_layer();
      if (const auto* delta = std::get_if<DeltaNet>(&layer.mix)) {
        op.stage("delta", static_cast<int>(i));
        kept ? keep(op, *delta, x) : mix(op, *delta, x);
      } else {
        op.stage("attention", static_cast<int>(i));
        const Attention& w = std::get<Attention>(layer.mix);
        kept ? keep(op, w, x, frequencies_) : mix(op, w, x, frequencies_);
      }
      if (kept) break;
      op.stage("experts", static_cast<int>(i));
      moe(op, layer.experts, x);
    }
    op.stage("head");
    op.head(x, norm_, head_);
  }
  op.stage("sample");
  op.sample(embedding_);
}

}  // namespace lily
