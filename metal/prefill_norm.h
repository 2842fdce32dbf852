// y = x / sqrt(mean(x²) + EPS) ⊙ gamma, rounded once
#pragma once
#include "contract.h"
namespace lily {

struct PrefillNorm_Params { uint32_t rows; };
#define PrefillNorm_CONSTANTS(C) C(uint32_t, D) C(float, EPS)
#define PrefillNorm_SLOTS(READ, WRITE, UPDATE)       \
  READ  (1, x,     float, "[T, D] residual stream")  \
  READ  (2, gamma, float, "[D]")                     \
  WRITE (3, y,     ACT,   "[T, D]")
LILY_CONTRACT(PrefillNorm, "prefill_norm")

}  // namespace lily
