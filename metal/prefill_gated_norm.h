// u = (o / sqrt(mean(o²) + EPS) ⊙ gamma) ⊙ silu(z), per head
#pragma once
#include "contract.h"
namespace lily {

struct PrefillGatedNorm_Params { uint32_t rows; };
#define PrefillGatedNorm_CONSTANTS(C) C(uint32_t, HEADS) C(uint32_t, DV) C(float, EPS)
#define PrefillGatedNorm_SLOTS(READ, WRITE, UPDATE)  \
  READ  (1, o,     float, "[T, HEADS, DV]")          \
  READ  (2, z,     ACT,   "[T, HEADS, DV]")          \
  READ  (3, gamma, float, "[DV]")                    \
  WRITE (4, u,     ACT,   "[T, HEADS, DV]")
LILY_CONTRACT(PrefillGatedNorm, "prefill_gated_norm")

}  // namespace lily
