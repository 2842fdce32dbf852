// q | gate (interleaved by head), k, v = W_in · norm(x)                                    (A1)
#pragma once
#include "contract.h"
namespace lily {

struct AttendProject_Params { uint32_t rows; };  // 1
#define AttendProject_CONSTANTS(C) C(uint32_t, D) C(uint32_t, N) C(uint32_t, ROWS) C(float, EPS)
#define AttendProject_SLOTS(READ, WRITE, UPDATE)                                            \
  READ  (1, x,      float,  "[D] residual stream")                                          \
  READ  (2, gamma,  float,  "[D] norm weight")                                              \
  READ  (3, weight, packed, "role attend_in, [HEADS · 2 · DH | KV_HEADS · DH twice, D]")    \
  WRITE (4, qkv,    ACT,    "[N] per head query | gate; then keys; then values")
LILY_CONTRACT(AttendProject, "attend_project")

}  // namespace lily
