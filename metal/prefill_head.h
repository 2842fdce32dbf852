// logits = W_head · y for every row (scoring; generation takes the last row only, through `head`)
#pragma once
#include "contract.h"
namespace lily {

struct PrefillHead_Params { uint32_t rows; };
#define PrefillHead_CONSTANTS(C) C(uint32_t, D) C(uint32_t, V)
#define PrefillHead_SLOTS(READ, WRITE, UPDATE)  \
  READ  (1, y,      ACT,    "[T, D] normed")    \
  READ  (2, weight, packed, "role head, [V, D]")\
  WRITE (3, logits, float,  "[T, V]")
LILY_CONTRACT(PrefillHead, "prefill_head")

}  // namespace lily
