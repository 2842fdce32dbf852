#include "ops/techniques.h"

#include "base/error.h"

namespace lily {

namespace {

constexpr TechniqueInfo all[] = {
    {"dequantise_in_product", "prefill: a dispatch of its own expands each weight to bf16 first"},
    {"gpu_routing", "the host chooses the experts and groups the rows, while the GPU waits"},
    {"tile_rows_by_load", "prefill: tiles of experts have 64 rows, however few rows there are"},
    {"register_scan", "prefill: the delta rule's state lies in device memory between tokens"},
    {"chunked_prompts", "a prompt of up to 16,384 tokens is one pass"},
    {"last_layer_skip", "prefill: all chunks pass through all of the last layer"},
    {"row_parallel", "decode: a simdgroup makes one row (or pair of gate and up) at a time"},
    {"token_handover", "decode: the host reads each token and hands it to the next step"},
    {"concurrent_dispatch", "every dispatch waits for the one before"},
    {"fused_gate_up", "decode: top-k, gate and up, and their product are dispatches of their own"},
    {"fused_down", "decode: down projections and their weighted sum are two dispatches"},
    {"fused_qk_prep", "decode: norm and rotation of queries and keys are a dispatch of their own"},
    {"fused_delta_norm", "decode: the norm after the delta rule is a dispatch of its own"},
    {"coalesced_kv", "decode: neighbouring lanes read different keys"},
    {"gqa_packing", "each query head reads keys and values for itself"},
    {"split_kv", "decode: attention blocks stay at 256 keys beyond 32K, up to 4,096 of them"},
};

}  // namespace

std::span<const TechniqueInfo> techniques() { return all; }

Ablation::Ablation(std::span<const std::string> names) {
  for (const std::string& name : names) {
    uint32_t i = 0;
    while (i < std::size(all) && all[i].name != name) ++i;
    if (i == std::size(all)) {
      std::string known;
      for (const TechniqueInfo& t : all) known.append(known.empty() ? "" : ", ").append(t.name);
      throw ArgumentError("ablate: " + name + ", expected some of " + known);
    }
    bits_ |= 1u << i;
  }
}

}  // namespace lily
