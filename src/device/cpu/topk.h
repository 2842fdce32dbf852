// The router's choice of experts.
#pragma once

#include <cmath>
#include <cstdint>

#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

// ids = the `top` largest of n logits in falling order, lowest index first on ties; shares =
// softmax over them, then sigmoid(logits[n]). Whatever the logits hold, ids are below n.
inline void choose_experts(const float* logits, uint32_t n, uint32_t top, uint32_t* ids,
                           float* shares) {
  for (uint32_t e = 0, chosen = 0; e < n; ++e) {
    if (chosen == top && !(logits[e] > logits[ids[top - 1]])) continue;
    uint32_t at = chosen < top ? chosen++ : top - 1;
    for (; at > 0 && logits[e] > logits[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = e;
  }
  float sum = 0;
  for (uint32_t i = 0; i < top; ++i) {
    shares[i] = std::exp(logits[ids[i]] - logits[ids[0]]);
    sum += shares[i];
  }
  for (uint32_t i = 0; i < top; ++i) shares[i] /= sum;
  shares[top] = 1.0f / (1.0f + std::exp(-logits[n]));
}

}  // namespace lily::cpu::LILY_ISA
