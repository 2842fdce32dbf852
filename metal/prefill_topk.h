// ids = the TOP largest logits of a row, lowest index first on ties;  shares = softmax over them
#pragma once
#include "contract.h"
namespace lily {

struct PrefillTopk_Params { uint32_t rows; };
#define PrefillTopk_CONSTANTS(C) C(uint32_t, EXPERTS) C(uint32_t, TOP)
#define PrefillTopk_SLOTS(READ, WRITE, UPDATE)                                              \
  READ  (1, logits, float,    "[T, EXPERTS + 1]")                                           \
  WRITE (2, ids,    uint32_t, "[T, TOP] in falling order of logit")                         \
  WRITE (3, shares, float,    "[T, TOP + 1] routing weights, then sigmoid(shared gate)")
LILY_CONTRACT(PrefillTopk, "prefill_topk")

}  // namespace lily
