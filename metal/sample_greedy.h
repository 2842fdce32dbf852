// token = index of the largest maximum, lowest on ties;  x = E[token] for the next step          (H2)
// An index beyond the vocabulary is handed on, with x = 0: no logit was a number.
#pragma once
#include "contract.h"
namespace lily {

struct SampleGreedy_Params { uint32_t slot; };  // token slot to write, 0 or 1
#define SampleGreedy_CONSTANTS(C) C(uint32_t, D) C(uint32_t, MAXIMA)
#define SampleGreedy_SLOTS(READ, WRITE, UPDATE)                                           \
  READ  (1, maxima,    uint32_t, "[MAXIMA, 2] bits of the largest logit, its index")      \
  READ  (2, embedding, packed,   "role embedding, [V, D]")                                \
  UPDATE(3, tokens,    uint32_t, "[2] token slots")                                       \
  WRITE (4, x,         float,    "[D] residual stream of the next step")
LILY_CONTRACT(SampleGreedy, "sample_greedy")

}  // namespace lily
