// Group the T · TOP (token, expert) pairs by expert. Within an expert, tokens may come in any order.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillScatter_Params { uint32_t rows; };
#define PrefillScatter_CONSTANTS(C) C(uint32_t, EXPERTS) C(uint32_t, TOP)
#define PrefillScatter_SLOTS(READ, WRITE, UPDATE)                                   \
  READ  (1, ids,     uint32_t, "[T, TOP]")                                          \
  WRITE (2, offsets, uint32_t, "[EXPERTS + 1] first grouped row of each expert")    \
  WRITE (3, src,     uint32_t, "[T · TOP] token of a grouped row")                  \
  WRITE (4, inv,     uint32_t, "[T, TOP] grouped row of a token's choice")
LILY_CONTRACT(PrefillScatter, "prefill_scatter")

}  // namespace lily
