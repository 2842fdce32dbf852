// Draw a token and embed it for the next step:                                                   (H2)
//   bias → ids from VALID on are masked → penalties → temperature → top-k → top-p → min-p → draw
// temperature 0 is argmax, lowest index on ties; top_k 0 means no limit. `counts` keeps, per token
// id, how often it was generated (low 31 bits) and whether the prompt holds it (bit 31). Repetition
// covers both, presence and frequency the generated part. With PENALTIES, the drawn token is counted.
// The draw: u is the first word of Philox4x32-10 with key `seed` and counter `step`, over 2^32; the
// token is where the running mass of the tokens kept, in the device's own order, reaches u of all.
// Where no logit is a number above -inf, the token is 0xffffffff, uncounted, and x = 0.
#pragma once
#include "contract.h"
namespace lily {

struct Sample_Params {
  uint64_t seed;
  uint64_t step;
  float temperature;
  float top_p;
  float min_p;
  float repetition;
  float presence;
  float frequency;
  uint32_t top_k;
  uint32_t n_bias;
  uint32_t slot;  // token slot to write, 0 or 1
  uint32_t unused;
};
#define Sample_CONSTANTS(C) C(uint32_t, D) C(uint32_t, V) C(uint32_t, VALID) C(uint32_t, PENALTIES)
#define Sample_SLOTS(READ, WRITE, UPDATE)                                             \
  READ  (1, logits,    float,    "[V]")                                               \
  READ  (2, embedding, packed,   "role embedding, [V, D]")                            \
  READ  (3, bias_ids,  uint32_t, "[n_bias] token ids; a bias of -inf bans one")       \
  READ  (4, bias,      float,    "[n_bias]")                                          \
  UPDATE(5, counts,    uint32_t, "[V]; not bound when PENALTIES = 0")                 \
  WRITE (6, adjusted,  float,    "[V] scratch")                                       \
  UPDATE(7, tokens,    uint32_t, "[2] token slots")                                   \
  WRITE (8, x,         float,    "[D] residual stream of the next step")
LILY_CONTRACT(Sample, "sample")

}  // namespace lily
