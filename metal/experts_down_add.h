// x += Σ_i shares_i · W_down[ids_i] · h_i + shares_TOP · W_shared_down · shared                   (E3)
#pragma once
#include "contract.h"
namespace lily {

struct ExpertsDownAdd_Params { uint32_t rows; };  // 1
#define ExpertsDownAdd_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, SHARED) C(uint32_t, ROWS)
#define ExpertsDownAdd_SLOTS(READ, WRITE, UPDATE)                                     \
  READ  (1, h,             ACT,      "[TOP, F]")                                      \
  READ  (2, shared,        ACT,      "[SHARED]")                                      \
  READ  (3, ids,           uint32_t, "[TOP]")                                         \
  READ  (4, shares,        float,    "[TOP + 1]")                                     \
  READ  (5, weight,        packed,   "role experts_down, EXPERTS of [D, F]")          \
  READ  (6, shared_weight, packed,   "role shared_down, [D, SHARED]")                 \
  UPDATE(7, x,             float,    "[D] residual stream")
LILY_CONTRACT(ExpertsDownAdd, "experts_down_add")

}  // namespace lily
