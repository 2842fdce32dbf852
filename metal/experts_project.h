// GATED = 1: out_i = silu(W_gate[ids_i] · norm(x)) ⊙ W_up[ids_i] · norm(x)
// GATED = 0: out_i = W_gate[ids_i] · norm(x), or W_up[ids_i] · norm(x) when up = 1
// Parts of experts_up, for experts that another kernel, or the host, has chosen.
#pragma once
#include "contract.h"
namespace lily {

struct ExpertsProject_Params { uint32_t up; };
#define ExpertsProject_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, GATED) C(uint32_t, ROWS) \
  C(float, EPS)
#define ExpertsProject_SLOTS(READ, WRITE, UPDATE)                                        \
  READ  (1, x,      float,    "[D] residual stream")                                     \
  READ  (2, gamma,  float,    "[D] norm weight")                                         \
  READ  (3, ids,    uint32_t, "[TOP]")                                                   \
  READ  (4, weight, packed,   "role experts_up, EXPERTS of [F gate | F up, D]")          \
  WRITE (5, out,    ACT,      "[TOP, F]")
LILY_CONTRACT(ExpertsProject, "experts_project")

}  // namespace lily
