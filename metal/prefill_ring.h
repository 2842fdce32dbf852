// The last min(T, 4) rows of qkv enter the conv ring: position p goes to slot p & 3.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillRing_Params { uint32_t rows; uint32_t position; };
#define PrefillRing_CONSTANTS(C) C(uint32_t, CHANNELS)
#define PrefillRing_SLOTS(READ, WRITE, UPDATE)                \
  READ  (1, qkv,  ACT, "[T, CHANNELS] before convolution")    \
  UPDATE(2, ring, ACT, "[4, CHANNELS]")
LILY_CONTRACT(PrefillRing, "prefill_ring")

}  // namespace lily
