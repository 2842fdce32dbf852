// q, k, v = silu(conv(qkv)); q, k l2-normalised per head, q scaled by DK^-1/2
// steps = exp(decay · softplus(a + dt_bias)), sigmoid(b)
// The first three rows take their older inputs from the ring.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillDeltaPrep_Params { uint32_t rows; uint32_t position; };
#define PrefillDeltaPrep_CONSTANTS(C) \
  C(uint32_t, KEY_HEADS) C(uint32_t, HEADS) C(uint32_t, DK) C(uint32_t, DV)
#define PrefillDeltaPrep_SLOTS(READ, WRITE, UPDATE)                                       \
  READ  (1, qkv,   ACT,   "[T, CHANNELS] before convolution")                             \
  READ  (2, ring,  ACT,   "[4, CHANNELS] input of position p in slot p & 3")              \
  READ  (3, conv,  float, "[CHANNELS, 4] taps, the last multiplies the newest input")     \
  READ  (4, gates, float, "[T, 2, HEADS] b, a")                                           \
  READ  (5, decay, float, "[2, HEADS] -exp(A_log), dt_bias")                              \
  WRITE (6, q,     ACT,   "[T, KEY_HEADS, DK]")                                           \
  WRITE (7, k,     ACT,   "[T, KEY_HEADS, DK]")                                           \
  WRITE (8, v,     ACT,   "[T, HEADS, DV]")                                               \
  WRITE (9, steps, float, "[T, 2, HEADS] decay factor g in (0, 1), step size β")
LILY_CONTRACT(PrefillDeltaPrep, "prefill_delta_prep")

}  // namespace lily
