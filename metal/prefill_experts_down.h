// out_r = W_down[e] · h_r for the grouped rows r of each expert e;  shared_out = W_shared_down · shared
#pragma once
#include "contract.h"
namespace lily {

struct PrefillExpertsDown_Params { uint32_t rows; };
#define PrefillExpertsDown_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, EXPERTS) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, SHARED) \
  C(uint32_t, TILE_ROWS)
#define PrefillExpertsDown_SLOTS(READ, WRITE, UPDATE)                             \
  READ  (1, h,             ACT,      "[T · TOP, F]")                              \
  READ  (2, shared,        ACT,      "[T, SHARED]")                               \
  READ  (3, offsets,       uint32_t, "[EXPERTS + 1]")                             \
  READ  (4, weight,        packed,   "role experts_down, EXPERTS of [D, F]")      \
  READ  (5, shared_weight, packed,   "role shared_down, [D, SHARED]")             \
  WRITE (6, out,           ACT,      "[T · TOP, D]")                              \
  WRITE (7, shared_out,    ACT,      "[T, D]")
LILY_CONTRACT(PrefillExpertsDown, "prefill_experts_down")

}  // namespace lily
