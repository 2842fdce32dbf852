// q ← rope(norm(q)) / sqrt(DH); rope(norm(k)) and v enter the cache at their positions
// Cache slots and KV_INT8 are attend's. CACHE_ONLY = 1: keys and values alone.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillAttendPrep_Params { uint32_t rows; uint32_t position; uint32_t capacity; };
#define PrefillAttendPrep_CONSTANTS(C)                                         \
  C(uint32_t, HEADS) C(uint32_t, KV_HEADS) C(uint32_t, DH) C(uint32_t, ROTARY) \
  C(uint32_t, KV_INT8) C(uint32_t, CACHE_ONLY) C(float, EPS)
#define PrefillAttendPrep_SLOTS(READ, WRITE, UPDATE)                                        \
  READ  (1, qkv,         ACT,   "[T, N] per head query | gate; then keys; then values")     \
  READ  (2, q_norm,      float, "[DH]")                                                     \
  READ  (3, k_norm,      float, "[DH]")                                                     \
  READ  (4, frequencies, float, "[ROTARY / 2] radians per position")                        \
  UPDATE(5, keys,        cache, "[KV_HEADS, capacity, DH] rotated keys")                    \
  UPDATE(6, values,      cache, "[KV_HEADS, capacity, DH]")                                 \
  WRITE (7, q,           ACT,   "[T, HEADS, DH]; not bound when CACHE_ONLY = 1")
LILY_CONTRACT(PrefillAttendPrep, "prefill_attend_prep")

}  // namespace lily
