// logits = W_router | w_shared_gate · y;  shared = silu(W_gate · y) ⊙ W_up · y
#pragma once
#include "contract.h"
namespace lily {

struct PrefillRoute_Params { uint32_t rows; };
#define PrefillRoute_CONSTANTS(C) C(uint32_t, D) C(uint32_t, EXPERTS) C(uint32_t, SHARED)
#define PrefillRoute_SLOTS(READ, WRITE, UPDATE)                                        \
  READ  (1, y,      ACT,    "[T, D] normed")                                           \
  READ  (2, weight, packed, "role route, [EXPERTS | 1 | SHARED gate | SHARED up, D]")  \
  WRITE (3, logits, float,  "[T, EXPERTS + 1] router, then the shared expert's gate")  \
  WRITE (4, shared, ACT,    "[T, SHARED]")
LILY_CONTRACT(PrefillRoute, "prefill_route")

}  // namespace lily
