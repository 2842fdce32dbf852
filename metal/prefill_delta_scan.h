// The gated delta rule over T tokens in order, per value head h with key head h / (HEADS / KEY_HEADS):
//   S ← g_t S;  S ← S + β_t (v_t - S k_t) k_tᵀ;  o_t = S q_t
// IN_MEMORY = 1: a GPU keeps S in state_out, not in registers, between tokens.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillDeltaScan_Params { uint32_t rows; };
#define PrefillDeltaScan_CONSTANTS(C) \
  C(uint32_t, KEY_HEADS) C(uint32_t, HEADS) C(uint32_t, DK) C(uint32_t, DV) \
  C(uint32_t, IN_MEMORY)
#define PrefillDeltaScan_SLOTS(READ, WRITE, UPDATE)                          \
  READ  (1, q,         ACT,   "[T, KEY_HEADS, DK] normalised, scaled")       \
  READ  (2, k,         ACT,   "[T, KEY_HEADS, DK] normalised")               \
  READ  (3, v,         ACT,   "[T, HEADS, DV]")                              \
  READ  (4, steps,     float, "[T, 2, HEADS] g, β")                          \
  READ  (5, state_in,  float, "[HEADS, DV, DK]")                             \
  WRITE (6, state_out, float, "[HEADS, DV, DK]")                             \
  WRITE (7, o,         float, "[T, HEADS, DV]")
LILY_CONTRACT(PrefillDeltaScan, "prefill_delta_scan")

}  // namespace lily
