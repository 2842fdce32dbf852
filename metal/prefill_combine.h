// x_t += Σ_i shares_ti · out[inv_ti] + shares_t,TOP · shared_out_t, i in order
// GROUPED = 0: out has the choices of a token one after the other.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillCombine_Params { uint32_t rows; };
#define PrefillCombine_CONSTANTS(C) C(uint32_t, D) C(uint32_t, TOP) C(uint32_t, GROUPED)
#define PrefillCombine_SLOTS(READ, WRITE, UPDATE)                               \
  READ  (1, out,        ACT,      "[T · TOP, D]")                               \
  READ  (2, shared_out, ACT,      "[T, D]")                                     \
  READ  (3, inv,        uint32_t, "[T, TOP]; not bound when GROUPED = 0")       \
  READ  (4, shares,     float,    "[T, TOP + 1]")                               \
  UPDATE(5, x,          float,    "[T, D] residual stream")
LILY_CONTRACT(PrefillCombine, "prefill_combine")

}  // namespace lily
