// logits = W_head · norm(x[row]), and the largest of the first VALID with its lowest index      (H1)
// If none of them is a number, the index is 0xffffffff.
#pragma once
#include "contract.h"
namespace lily {

struct Head_Params { uint32_t row; };
#define Head_CONSTANTS(C)                                                       \
  C(uint32_t, D) C(uint32_t, V) C(uint32_t, VALID) C(uint32_t, STORE)           \
  C(uint32_t, MAXIMA) C(uint32_t, ROWS) C(float, EPS)
#define Head_SLOTS(READ, WRITE, UPDATE)                                                   \
  READ  (1, x,      float,    "[> row, D] residual stream")                               \
  READ  (2, gamma,  float,    "[D] final norm weight")                                    \
  READ  (3, weight, packed,   "role head, [V, D]")                                        \
  WRITE (4, logits, float,    "[V]; not bound when STORE = 0")                            \
  WRITE (5, maxima, uint32_t, "[MAXIMA, 2] bits of the largest logit, its index")
LILY_CONTRACT(Head, "head")

}  // namespace lily
