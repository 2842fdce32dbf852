// out = the weight with all its codes as numbers, rounded to bf16, in the device's form of 16 bits
#pragma once
#include "contract.h"
namespace lily {

struct ExpandWeight_Params { uint32_t passes; };  // 1
#define ExpandWeight_CONSTANTS(C) C(uint32_t, EXPERTS) C(uint32_t, N) C(uint32_t, K)
#define ExpandWeight_SLOTS(READ, WRITE, UPDATE)                              \
  READ  (1, weight, packed, "any role, EXPERTS of [N, K]")                   \
  WRITE (2, out,    packed, "the same matrices, 16 bits")
LILY_CONTRACT(ExpandWeight, "expand_weight")

}  // namespace lily
