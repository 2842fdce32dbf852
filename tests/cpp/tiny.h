// A tiny checkpoint for C++ tests: random bytes in a file, and the table and config to load it.
#pragma once

#include <cstdio>
#include <random>
#include <string>
#include <unistd.h>

#include "base/bf16.h"
#include "checkpoint/table.h"
#include "ops/config.h"

namespace lily::test {

inline Config tiny_config() {
  Config c;
  c.hidden_size = 64;
  c.vocab_size = 200;
  c.n_tokens = 190;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 32;
  c.rotary_dim = 8;
  c.linear_num_key_heads = 2;
  c.linear_num_value_heads = 4;
  c.linear_key_head_dim = 32;
  c.linear_value_head_dim = 32;
  c.num_experts = 8;
  c.num_experts_per_tok = 2;
  c.moe_intermediate_size = 64;
  c.shared_expert_intermediate_size = 64;
  c.rms_norm_eps = 1e-6f;
  c.rope_theta = 1e7;
  c.full_attention = {false, false, true, false};
  return c;
}

// Writes bf16 tensors one behind the other; the file goes with the object.
class TinyCheckpoint {
 public:
  explicit TinyCheckpoint(uint32_t seed = 0) : random_(seed) {
    char path[] = "/tmp/lily-tiny-XXXXXX";
    const int handle = mkstemp(path);
    path_ = path;
    file_ = fdopen(handle, "wb");
    const Config c = tiny_config();
    const uint32_t d = c.hidden_size, f = c.moe_intermediate_size;
    const uint32_t s = c.shared_expert_intermediate_size, e = c.num_experts;
    add("embed_tokens.weight", {c.vocab_size, d}, 1);
    add("lm_head.weight", {c.vocab_size, d}, 0.2f);
    add("norm.weight", {d}, 0.1f, 1);
    for (uint32_t i = 0; i < c.n_layers(); ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      add(layer + "input_layernorm.weight", {d}, 0.1f, 1);
      add(layer + "post_attention_layernorm.weight", {d}, 0.1f, 1);
      if (c.full_attention[i]) {
        const std::string m = layer + "self_attn.";
        add(m + "q_proj.weight", {2 * c.query_width(), d}, 0.2f);
        add(m + "k_proj.weight", {c.kv_width(), d}, 0.2f);
        add(m + "v_proj.weight", {c.kv_width(), d}, 0.2f);
        add(m + "o_proj.weight", {d, c.query_width()}, 0.1f);
        add(m + "q_norm.weight", {c.head_dim}, 0.1f, 1);
        add(m + "k_norm.weight", {c.head_dim}, 0.1f, 1);
      } else {
        const std::string m = layer + "linear_attn.";
        add(m + "in_proj_qkv.weight", {c.conv_channels(), d}, 0.2f);
        add(m + "in_proj_z.weight", {c.value_width(), d}, 0.2f);
        add(m + "in_proj_b.weight", {c.linear_num_value_heads, d}, 0.2f);
        add(m + "in_proj_a.weight", {c.linear_num_value_heads, d}, 0.2f);
        add(m + "out_proj.weight", {d, c.value_width()}, 0.1f);
        add(m + "conv1d.weight", {c.conv_channels(), 4, 1}, 0.5f);
        add(m + "A_log", {c.linear_num_value_heads}, 1);
        add(m + "dt_bias", {c.linear_num_value_heads}, 1);
        add(m + "norm.weight", {c.linear_value_head_dim}, 0.1f, 1);
      }
      const std::string m = layer + "mlp.";
      add(m + "gate.weight", {e, d}, 0.3f);
      add(m + "shared_expert_gate.weight", {1, d}, 0.2f);
      add(m + "shared_expert.gate_proj.weight", {s, d}, 0.2f);
      add(m + "shared_expert.up_proj.weight", {s, d}, 0.2f);
      add(m + "shared_expert.down_proj.weight", {d, s}, 0.1f);
      add(m + "switch_mlp.gate_proj.weight", {e, f, d}, 0.2f);
      add(m + "switch_mlp.up_proj.weight", {e, f, d}, 0.2f);
      add(m + "switch_mlp.down_proj.weight", {e, d, f}, 0.1f);
    }
    std::fclose(file_);
    table.files = {path_};
  }
  ~TinyCheckpoint() { unlink(path_.c_str()); }
  TinyCheckpoint(const TinyCheckpoint&) = delete;
  TinyCheckpoint& operator=(const TinyCheckpoint&) = delete;

  TensorTable table;

 private:
  void add(const std::string& name, std::vector<uint64_t> shape, float scale, float around = 0) {
    uint64_t count = 1;
    for (uint64_t n : shape) count *= n;
    std::vector<bf16> values;
    std::uniform_real_distribution<float> uniform(-scale, scale);
    for (uint64_t i = 0; i < count; ++i) values.emplace_back(around + uniform(random_));
    std::fwrite(values.data(), 2, count, file_);
    table.tensors[name] = {0, offset_, 2 * count, FileType::bf16, std::move(shape)};
    offset_ += 2 * count;
  }

  std::mt19937 random_;
  std::string path_;
  std::FILE* file_;
  uint64_t offset_ = 0;
};

}  // namespace lily::test
