// qkv | z | b | a = W_in · y
#pragma once
#include "contract.h"
namespace lily {

struct PrefillDeltaProject_Params { uint32_t rows; };
#define PrefillDeltaProject_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, CHANNELS) C(uint32_t, VALUES) C(uint32_t, HEADS)
#define PrefillDeltaProject_SLOTS(READ, WRITE, UPDATE)                                \
  READ  (1, y,      ACT,    "[T, D] normed")                                          \
  READ  (2, weight, packed, "role delta_in, [CHANNELS | VALUES | HEADS | HEADS, D]")  \
  WRITE (3, qkv,    ACT,    "[T, CHANNELS] before convolution")                       \
  WRITE (4, z,      ACT,    "[T, VALUES] output gate, before silu")                   \
  WRITE (5, gates,  float,  "[T, 2, HEADS] b, a")
LILY_CONTRACT(PrefillDeltaProject, "prefill_delta_project")

}  // namespace lily
