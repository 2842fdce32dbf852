// The dimensions of a checkpoint, named as in its config.json.
#pragma once

#include <cstdint>
#include <vector>

namespace lily {

struct Config {
  uint32_t hidden_size = 0, vocab_size = 0;
  uint32_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0, rotary_dim = 0;
  uint32_t linear_num_key_heads = 0, linear_num_value_heads = 0;
  uint32_t linear_key_head_dim = 0, linear_value_head_dim = 0;
  uint32_t num_experts = 0, num_experts_per_tok = 0;
  uint32_t moe_intermediate_size = 0, shared_expert_intermediate_size = 0;
  float rms_norm_eps = 0;
  double rope_theta = 0;
  bool tie_word_embeddings = false;
  std::vector<bool> full_attention;  // for each layer; false is a Gated DeltaNet layer
  uint32_t n_tokens = 0;             // ids that the tokenizer knows; rows above are padding

  // Derived widths.
  uint32_t key_width() const { return linear_num_key_heads * linear_key_head_dim; }
  uint32_t value_width() const { return linear_num_value_heads * linear_value_head_dim; }
  uint32_t conv_channels() const { return 2 * key_width() + value_width(); }
  uint32_t query_width() const { return num_attention_heads * head_dim; }
  uint32_t kv_width() const { return num_key_value_heads * head_dim; }
  uint32_t qkv_width() const { return 2 * query_width() + 2 * kv_width(); }
  uint32_t n_layers() const { return static_cast<uint32_t>(full_attention.size()); }
  uint32_t n_attention_layers() const;
  uint32_t n_delta_layers() const { return n_layers() - n_attention_layers(); }

  // Throws CheckpointError naming the field that the kernels cannot run with.
  void check() const;
};

constexpr uint32_t conv_taps = 4;

}  // namespace lily
