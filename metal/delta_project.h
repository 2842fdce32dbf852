// qkv | z | b | a = W_in · norm(x)                                                        (G1)
// The qkv part goes straight into the conv ring, slot position & 3, before convolution.
#pragma once
#include "contract.h"
namespace lily {

struct DeltaProject_Params { uint32_t position; };
#define DeltaProject_CONSTANTS(C) \
  C(uint32_t, D) C(uint32_t, CHANNELS) C(uint32_t, VALUES) C(uint32_t, HEADS) \
  C(uint32_t, ROWS) C(float, EPS)
#define DeltaProject_SLOTS(READ, WRITE, UPDATE)                                       \
  READ  (1, x,      float,  "[D] residual stream")                                    \
  READ  (2, gamma,  float,  "[D] norm weight")                                        \
  READ  (3, weight, packed, "role delta_in, [CHANNELS | VALUES | HEADS | HEADS, D]")  \
  UPDATE(4, ring,   ACT,    "[4, CHANNELS] last inputs of the convolution")           \
  WRITE (5, z,      ACT,    "[VALUES] output gate, before silu")                      \
  WRITE (6, gates,  float,  "[2, HEADS] b, a")
LILY_CONTRACT(DeltaProject, "delta_project")

}  // namespace lily
