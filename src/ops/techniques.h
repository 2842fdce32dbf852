// What plans do to be fast. Each can be left out by name, so that its worth can be measured.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lily {

enum class Technique : uint8_t {
  dequantise_in_product,
  gpu_routing,
  tile_rows_by_load,
  register_scan,
  chunked_prompts,
  last_layer_skip,
  row_parallel,
  token_handover,
  concurrent_dispatch,
  fused_gate_up,
  fused_down,
  fused_qk_prep,
  fused_delta_norm,
  coalesced_kv,
  gqa_packing,
  split_kv,
};

struct TechniqueInfo {
  std::string_view name;
  std::string_view without;  // what a plan does instead
};

std::span<const TechniqueInfo> techniques();  // in the order of the enumeration

// Techniques that are left out.
class Ablation {
 public:
  Ablation() = default;
  explicit Ablation(std::span<const std::string> names);  // throws ArgumentError

  bool without(Technique t) const { return bits_ >> static_cast<unsigned>(t) & 1; }
  bool operator==(const Ablation&) const = default;

 private:
  uint32_t bits_ = 0;
};

}  // namespace lily
