// The row product of several experts at once. Only Metal reads this header.
#pragma once

#include "qmv.h"

// sums[r] = Σ_i shares[i] · row (first + r) of expert ids[i] · h[i], as each lane's share. F
// columns are one or a few rounds, so it is the experts that keep memory busy: the loads of a batch
// of them are issued before any is used.
template <class Form, uint TOP, uint R>
struct ExpertsProduct {
  device const uchar* weight;
  device const ACT* h;  // [TOP, cols]
  device const uint* ids;
  device const float* shares;
  uint lane;
  uint first;
  float sums[R];

  METAL_FUNC void run() thread {
    for (uint r = 0; r < R; r++) sums[r] = 0.0f;
    Form::for_parts(*this);
  }

  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    // As in RowProduct, rows that are not here repeat one that is.
    if (first >= FIRST + ROWS || first + R <= FIRST) return;
    constexpr uint last = FIRST + ROWS - 1;
    uint at[R];
    for (uint r = 0; r < R; r++) at[r] = clamp(first + r, FIRST, last) - FIRST;

    constexpr uint batch = 32 / BITS;
    PlainInput input;
    for (uint begin = 0; begin < TOP; begin += batch) {
      device const uchar* experts[batch];
      float scales[batch];
      for (uint i = 0; i < batch; i++) {
        const uint choice = min(begin + i, TOP - 1);
        experts[i] = Form::expert(weight, ids[choice]);
        scales[i] = begin + i < TOP ? shares[choice] : 0.0f;
      }
      for (uint start = 0; start < Form::cols; start += LILY_ROUND) {
        const uint column = min(start + 16 * lane, Form::cols - 16u);
        Round<BITS, R> rounds[batch];
        for (uint i = 0; i < batch; i++) {
          for (uint r = 0; r < R; r++) {
            rounds[i].codes[r].load(experts[i] + CODES +
                                    at[r] * code_bytes<BITS>(Form::cols) +
                                    code_bytes<BITS>(column));
            if (BITS != 16)
              rounds[i].affine[r] = ((device const uint*)(experts[i] + AFFINE))
                  [at[r] * affine_words(Form::cols) + column / LILY_GROUP];
          }
        }
        for (uint i = 0; i < batch; i++) {
          input.u = h + min(begin + i, TOP - 1) * Form::cols;
          float x[16], sum = 0.0f;
          input.load(column, start + 16 * lane < Form::cols, x);
          for (uint j = 0; j < 16; j++) {
            x[j] *= scales[i];
            sum += x[j];
          }
          prepare16<BITS>(x);
          for (uint r = 0; r < R; r++)
            if (first + r == at[r] + FIRST) sums[r] += round_dot<BITS, R>(rounds[i], r, x, sum);
        }
      }
    }
  }
};
