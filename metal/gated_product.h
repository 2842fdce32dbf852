// h = silu(gate) ⊙ up
#pragma once
#include "contract.h"
namespace lily {

struct GatedProduct_Params { uint32_t rows; };  // 1
#define GatedProduct_CONSTANTS(C) C(uint32_t, N)
#define GatedProduct_SLOTS(READ, WRITE, UPDATE)  \
  READ  (1, gate, ACT, "[N]")                    \
  READ  (2, up,   ACT, "[N]")                    \
  WRITE (3, h,    ACT, "[N]")
LILY_CONTRACT(GatedProduct, "gated_product")

}  // namespace lily
