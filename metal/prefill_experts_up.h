// h_r = silu(W_gate[e] · y[src_r]) ⊙ W_up[e] · y[src_r] for the grouped rows r of each expert e
#pragma once
#include "contract.h"
namespace lily {

struct PrefillExpertsUp_Params { uint32_t rows; };
#define PrefillExpertsUp_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, EXPERTS) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, TILE_ROWS)
#define PrefillExpertsUp_SLOTS(READ, WRITE, UPDATE)                                   \
  READ  (1, y,       ACT,      "[T, D] normed")                                       \
  READ  (2, offsets, uint32_t, "[EXPERTS + 1]")                                       \
  READ  (3, src,     uint32_t, "[T · TOP]")                                           \
  READ  (4, weight,  packed,   "role experts_up, EXPERTS of [F gate | F up, D]")      \
  WRITE (5, h,       ACT,      "[T · TOP, F]")
LILY_CONTRACT(PrefillExpertsUp, "prefill_experts_up")

}  // namespace lily
