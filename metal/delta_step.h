// One step of the gated delta rule, per value head h with key head h / (HEADS / KEY_HEADS):   (G2)
//   q, k, v = silu(conv(ring)); q, k l2-normalised, q scaled by DK^-1/2
//   g = exp(decay · softplus(a + dt_bias)), β = sigmoid(b)
//   S ← g S;  S ← S + β (v - S k) kᵀ;  o = S q
//   u = o ⊙ gamma ⊙ silu(z), not yet normalised; squares = Σ o² over each part of the head
// RAW = 1: o as it is.
#pragma once
#include "contract.h"
namespace lily {

struct DeltaStep_Params { uint32_t position; };
#define DeltaStep_CONSTANTS(C) \
  C(uint32_t, KEY_HEADS) C(uint32_t, HEADS) C(uint32_t, DK) C(uint32_t, DV) \
  C(uint32_t, PARTIALS) C(uint32_t, RAW)
#define DeltaStep_SLOTS(READ, WRITE, UPDATE)                                                \
  READ  (1, ring,      ACT,   "[4, CHANNELS] slot position & 3 is the newest")              \
  READ  (2, conv,      float, "[CHANNELS, 4] taps, the last multiplies the newest input")   \
  READ  (3, z,         ACT,   "[HEADS, DV]")                                                \
  READ  (4, gates,     float, "[2, HEADS] b, a")                                            \
  READ  (5, decay,     float, "[2, HEADS] -exp(A_log), dt_bias")                            \
  READ  (6, gamma,     float, "[DV] head norm weight")                                      \
  READ  (7, state_in,  float, "[HEADS, DV, DK]")                                            \
  WRITE (8, state_out, float, "[HEADS, DV, DK]")                                            \
  WRITE (9, u,         ACT,   "[HEADS, DV]; not bound when RAW = 1")                        \
  WRITE (10, squares,  float, "[HEADS, PARTIALS]; not bound when RAW = 1")                  \
  WRITE (11, o,        float, "[HEADS, DV]; not bound when RAW = 0")
LILY_CONTRACT(DeltaStep, "delta_step")

}  // namespace lily
