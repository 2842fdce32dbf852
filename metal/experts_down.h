// out_i = W_down[ids_i] · h_i;  shared_out = W_shared_down · shared:  experts_down_add without its sum
#pragma once
#include "contract.h"
namespace lily {

struct ExpertsDown_Params { uint32_t rows; };  // 1
#define ExpertsDown_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, SHARED) C(uint32_t, ROWS)
#define ExpertsDown_SLOTS(READ, WRITE, UPDATE)                                        \
  READ  (1, h,             ACT,      "[TOP, F]")                                      \
  READ  (2, shared,        ACT,      "[SHARED]")                                      \
  READ  (3, ids,           uint32_t, "[TOP]")                                         \
  READ  (4, weight,        packed,   "role experts_down, EXPERTS of [D, F]")          \
  READ  (5, shared_weight, packed,   "role shared_down, [D, SHARED]")                 \
  WRITE (6, out,           ACT,      "[TOP, D]")                                      \
  WRITE (7, shared_out,    ACT,      "[D]")
LILY_CONTRACT(ExpertsDown, "experts_down")

}  // namespace lily
