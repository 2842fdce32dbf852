// One query row per head against the cache, which first receives the new key and value.     (A2)
//   q, k ← rope(norm(q)), rope(norm(k)); scores = q · k / sqrt(DH) over keys 0…position
// Keys are split into blocks. MERGE = 0: one block, u = softmax · V ⊙ sigmoid(gate).
// MERGE = 1: each block leaves Σ e^(s - max) v, its max and its Σ e^(s - max); attend_merge joins them.
// PREPARED = 1: q is given, and the cache has the new key and value already.
//
// A cache slot holds rows [KV_HEADS, capacity, DH] of ACT. KV_INT8 = 1: of int8 codes, and behind
// them float scales [KV_HEADS, capacity]; value = code · scale, scale = max |value| / 127. Every
// reader sees a row as it was stored, the token that it belongs to as well.
//
// For a device to leave a technique out: BY_KEY = 1 has neighbouring lanes read different keys,
// APART = 1 has each query head read keys and values for itself.
#pragma once
#include "contract.h"
namespace lily {

struct Attend_Params { uint32_t position; uint32_t capacity; uint32_t block; uint32_t blocks; };
#define Attend_CONSTANTS(C)                                                      \
  C(uint32_t, HEADS) C(uint32_t, KV_HEADS) C(uint32_t, DH) C(uint32_t, ROTARY)   \
  C(uint32_t, MERGE) C(uint32_t, PREPARED) C(uint32_t, KV_INT8)                  \
  C(uint32_t, BY_KEY) C(uint32_t, APART) C(float, EPS)
#define Attend_SLOTS(READ, WRITE, UPDATE)                                                  \
  READ  (1, qkv,         ACT,   "[N] per head query | gate; then keys; then values")       \
  READ  (2, q_norm,      float, "[DH]; like k_norm, frequencies: not bound when PREPARED = 1") \
  READ  (3, k_norm,      float, "[DH]")                                                    \
  READ  (4, frequencies, float, "[ROTARY / 2] radians per position")                       \
  UPDATE(5, keys,        cache, "[KV_HEADS, capacity, DH] rotated keys")                   \
  UPDATE(6, values,      cache, "[KV_HEADS, capacity, DH]")                                \
  WRITE (7, u,           ACT,   "[HEADS, DH] gated output; not bound when MERGE = 1")      \
  WRITE (8, partial,     float, "[blocks, HEADS, DH]; not bound when MERGE = 0")           \
  WRITE (9, extent,      float, "[blocks, HEADS, 2] max, sum; not bound when MERGE = 0")   \
  READ  (10, q,          ACT,   "[HEADS, DH] normed, rotated, scaled; bound when PREPARED = 1")
LILY_CONTRACT(Attend, "attend")

}  // namespace lily
