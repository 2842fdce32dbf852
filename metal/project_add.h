// x += W · (u ⊙ r),  r = rsqrt(Σ squares / (K / HEADS) + EPS) per head; r = 1 when HEADS = 0    (G3, A4)
#pragma once
#include "contract.h"
namespace lily {

struct ProjectAdd_Params { uint32_t rows; };  // 1
#define ProjectAdd_CONSTANTS(C) \
  C(uint32_t, K) C(uint32_t, N) C(uint32_t, HEADS) C(uint32_t, PARTIALS) C(uint32_t, ROWS) \
  C(float, EPS)
#define ProjectAdd_SLOTS(READ, WRITE, UPDATE)                                     \
  READ  (1, u,       ACT,    "[K] heads, gated")                                  \
  READ  (2, squares, float,  "[HEADS, PARTIALS]; not bound when HEADS = 0")       \
  READ  (3, weight,  packed, "role out, [N, K]")                                  \
  UPDATE(4, x,       float,  "[N] residual stream")
LILY_CONTRACT(ProjectAdd, "project_add")

}  // namespace lily
