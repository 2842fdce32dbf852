// x = E[token], rows dequantised.
#pragma once
#include "contract.h"
namespace lily {

struct Embed_Params { uint32_t rows; uint32_t first; };  // T; index of the first token in `tokens`
#define Embed_CONSTANTS(C) C(uint32_t, D)
#define Embed_SLOTS(READ, WRITE, UPDATE)                   \
  READ  (1, tokens, uint32_t, "[>= first + T] token ids")  \
  READ  (2, weight, packed,   "role embedding, [V, D]")    \
  WRITE (3, x,      float,    "[T, D] residual stream")
LILY_CONTRACT(Embed, "embed")

}  // namespace lily
