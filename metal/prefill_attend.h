// u = softmax(q · keys) · values ⊙ sigmoid(gate), row t over keys 0 … position + t
// Key tiles sit at absolute positions, so a row's sums do not depend on how a prompt was cut.
// Cache slots, KV_INT8 and APART are attend's.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillAttend_Params { uint32_t rows; uint32_t position; uint32_t capacity; };
#define PrefillAttend_CONSTANTS(C)                             \
  C(uint32_t, HEADS) C(uint32_t, KV_HEADS) C(uint32_t, DH)     \
  C(uint32_t, KV_INT8) C(uint32_t, APART)
#define PrefillAttend_SLOTS(READ, WRITE, UPDATE)                                         \
  READ  (1, q,      ACT,   "[T, HEADS, DH] normed, rotated, scaled")                     \
  READ  (2, keys,   cache, "[KV_HEADS, capacity, DH]")                                   \
  READ  (3, values, cache, "[KV_HEADS, capacity, DH]")                                   \
  READ  (4, qkv,    ACT,   "[T, N] for the gates: per head query | gate; keys; values")  \
  WRITE (5, u,      ACT,   "[T, HEADS, DH] gated output")
LILY_CONTRACT(PrefillAttend, "prefill_attend")

}  // namespace lily
