// u = Σ_b e^(max_b - max) partial_b / Σ_b e^(max_b - max) sum_b ⊙ sigmoid(gate)              (A3)
#pragma once
#include "contract.h"
namespace lily {

struct AttendMerge_Params { uint32_t blocks; };
#define AttendMerge_CONSTANTS(C) C(uint32_t, HEADS) C(uint32_t, DH)
#define AttendMerge_SLOTS(READ, WRITE, UPDATE)                                      \
  READ  (1, partial, float, "[blocks, HEADS, DH]")                                  \
  READ  (2, extent,  float, "[blocks, HEADS, 2] max, sum")                          \
  READ  (3, qkv,     ACT,   "[N] per head query | gate; then keys; then values")    \
  WRITE (4, u,       ACT,   "[HEADS, DH] gated output")
LILY_CONTRACT(AttendMerge, "attend_merge")

}  // namespace lily
