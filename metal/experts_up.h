// ids = the TOP largest logits, lowest index first on ties;  shares = softmax over them          (E2)
// h_i = silu(W_gate[ids_i] · norm(x)) ⊙ W_up[ids_i] · norm(x)
#pragma once
#include "contract.h"
namespace lily {

struct ExpertsUp_Params { uint32_t rows; };  // 1
#define ExpertsUp_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, EXPERTS) C(uint32_t, TOP) C(uint32_t, F) C(uint32_t, ROWS) \
  C(float, EPS)
#define ExpertsUp_SLOTS(READ, WRITE, UPDATE)                                             \
  READ  (1, x,      float,    "[D] residual stream")                                     \
  READ  (2, gamma,  float,    "[D] norm weight")                                         \
  READ  (3, logits, float,    "[EXPERTS + 1]")                                           \
  READ  (4, weight, packed,   "role experts_up, EXPERTS of [F gate | F up, D]")          \
  WRITE (5, ids,    uint32_t, "[TOP] in falling order of logit")                         \
  WRITE (6, shares, float,    "[TOP + 1] routing weights, then sigmoid(shared gate)")    \
  WRITE (7, h,      ACT,      "[TOP, F]")
LILY_CONTRACT(ExpertsUp, "experts_up")

}  // namespace lily
