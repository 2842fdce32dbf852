#include "ops/config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"

namespace lily {

namespace {

void require(bool ok, const char* field, const std::string& expected, uint64_t found) {
  if (!ok)
    throw CheckpointError(std::string("config.json: ") + field + ": expected " + expected +
                          ", found " + std::to_string(found));
}

void in_range(const char* field, uint32_t value, uint32_t low, uint32_t high) {
  require(value >= low && value <= high, field,
          std::to_string(low) + "…" + std::to_string(high), value);
}

void multiple(const char* field, uint32_t value, uint32_t of) {
  require(of != 0 && value % of == 0, field, "a multiple of " + std::to_string(of), value);
}

}  // namespace

uint32_t Config::n_attention_layers() const {
  return static_cast<uint32_t>(std::count(full_attention.begin(), full_attention.end(), true));
}

// The ranges keep every product of two dimensions, and of heads with head sizes, inside 32 bits.
void Config::check() const {
  in_range("num_hidden_layers", n_layers(), 1, 1024);
  in_range("hidden_size", hidden_size, 64, 32768);
  in_range("vocab_size", vocab_size, 1, 4194304);
  in_range("num_attention_heads", num_attention_heads, 1, 512);
  in_range("num_key_value_heads", num_key_value_heads, 1, 512);
  in_range("head_dim", head_dim, 32, 256);
  in_range("linear_num_key_heads", linear_num_key_heads, 1, 512);
  in_range("linear_num_value_heads", linear_num_value_heads, 1, 512);
  in_range("linear_key_head_dim", linear_key_head_dim, 32, 256);
  in_range("linear_value_head_dim", linear_value_head_dim, 32, 256);
  in_range("num_experts", num_experts, 1, 4096);
  in_range("num_experts_per_tok", num_experts_per_tok, 1, std::min(num_experts, 64u));
  in_range("moe_intermediate_size", moe_intermediate_size, 64, 32768);
  in_range("shared_expert_intermediate_size", shared_expert_intermediate_size, 64, 32768);
  in_range("rotary_dim", rotary_dim, 2, head_dim);
  in_range("n_tokens", n_tokens, 1, vocab_size);
  multiple("hidden_size", hidden_size, 64);
  multiple("moe_intermediate_size", moe_intermediate_size, 64);
  multiple("shared_expert_intermediate_size", shared_expert_intermediate_size, 64);
  multiple("head_dim", head_dim, 32);
  multiple("linear_key_head_dim", linear_key_head_dim, 32);
  multiple("linear_value_head_dim", linear_value_head_dim, 32);
  multiple("rotary_dim", rotary_dim, 2);
  multiple("num_attention_heads", num_attention_heads, num_key_value_heads);
  multiple("linear_num_value_heads", linear_num_value_heads, linear_num_key_heads);
  multiple("num_attention_heads * head_dim", query_width(), 64);
  multiple("linear_num_value_heads * linear_value_head_dim", value_width(), 64);
  require(std::isfinite(rms_norm_eps) && rms_norm_eps > 0 && rms_norm_eps < 1, "rms_norm_eps",
          "a number in (0, 1)", 0);
  require(std::isfinite(rope_theta) && rope_theta > 1, "rope_theta", "a number above 1", 0);
}

}  // namespace lily
