// Qwen3.6 text model: Gated DeltaNet, gated attention, mixture of experts.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "checkpoint/loader.h"
#include "ops/config.h"
#include "ops/ops.h"

namespace lily {

struct DeltaNet {
  uint32_t n;  // which Gated DeltaNet layer it is
  Tensor norm, in, conv, decay, gamma, out;
};

struct Attention {
  uint32_t n;  // which attention layer it is
  Tensor norm, in, q_norm, k_norm, out;
};

struct Experts {
  Tensor norm, route, up, down, shared_down;
};

struct Layer {
  std::variant<DeltaNet, Attention> mix;
  Experts experts;
};

class Qwen36 {
 public:
  // Declares the weights; call it once with a loader that measures, and again with one that places.
  Qwen36(const Config& config, Loader& load);

  // Records one pass over all layers.
  void forward(Ops& op) const;

  const Config& config() const { return c_; }

 private:
  DeltaNet delta_net(Loader&, const std::string& layer, uint32_t n) const;
  Attention attention(Loader&, const std::string& layer, uint32_t n) const;
  Experts experts(Loader&, const std::string& layer) const;

  Config c_;
  Tensor embedding_, frequencies_, norm_, head_;
  std::vector<Layer> layers_;
};

}  // namespace lily
