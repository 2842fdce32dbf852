// x += W · u
#pragma once
#include "contract.h"
namespace lily {

struct PrefillProjectAdd_Params { uint32_t rows; };
#define PrefillProjectAdd_CONSTANTS(C) C(uint32_t, K) C(uint32_t, N)
#define PrefillProjectAdd_SLOTS(READ, WRITE, UPDATE)   \
  READ  (1, u,      ACT,    "[T, K]")                  \
  READ  (2, weight, packed, "role out, [N, K]")        \
  UPDATE(3, x,      float,  "[T, N] residual stream")
LILY_CONTRACT(PrefillProjectAdd, "prefill_project_add")

}  // namespace lily
