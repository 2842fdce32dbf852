// logits = W_router | w_shared_gate · norm(x);  shared = silu(W_gate · norm(x)) ⊙ W_up · norm(x)   (E1)
#pragma once
#include "contract.h"
namespace lily {

struct RouteShared_Params { uint32_t rows; };  // 1
#define RouteShared_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, EXPERTS) C(uint32_t, SHARED) C(uint32_t, ROWS) C(float, EPS)
#define RouteShared_SLOTS(READ, WRITE, UPDATE)                                         \
  READ  (1, x,      float,  "[D] residual stream")                                     \
  READ  (2, gamma,  float,  "[D] norm weight")                                         \
  READ  (3, weight, packed, "role route, [EXPERTS | 1 | SHARED gate | SHARED up, D]")  \
  WRITE (4, logits, float,  "[EXPERTS + 1] router, then the shared expert's gate")     \
  WRITE (5, shared, ACT,    "[SHARED]")
LILY_CONTRACT(RouteShared, "route_shared")

}  // namespace lily
