// q | gate (interleaved by head), k, v = W_in · y
// Columns from FIRST on are needed; some of those before may be left as they are.
#pragma once
#include "contract.h"
namespace lily {

struct PrefillAttendProject_Params { uint32_t rows; };
#define PrefillAttendProject_CONSTANTS(C) C(uint32_t, D) C(uint32_t, N) C(uint32_t, FIRST)
#define PrefillAttendProject_SLOTS(READ, WRITE, UPDATE)                                     \
  READ  (1, y,      ACT,    "[T, D] normed")                                                \
  READ  (2, weight, packed, "role attend_in, [HEADS · 2 · DH | KV_HEADS · DH twice, D]")    \
  WRITE (3, qkv,    ACT,    "[T, N] per head query | gate; then keys; then values")
LILY_CONTRACT(PrefillAttendProject, "prefill_attend_project")

}  // namespace lily
