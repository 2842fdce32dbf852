// A token's row of the embedding, for the next step. Only Metal reads this header.
#pragma once

#include "packed_weights.h"

// x = E[token], or 0 where there is no such token. Each thread writes some runs of 16 columns.
template <class Form>
struct EmbeddingRow {
  device const uchar* weight;
  device float* x;
  uint token, thread_index, threads;
  bool found;

  METAL_FUNC void write() thread {
    found = false;
    Form::for_parts(*this);
    if (found) return;
    for (uint i = thread_index; i < Form::cols; i += threads) x[i] = 0.0f;
  }

  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    if (token < FIRST || token >= FIRST + ROWS) return;
    found = true;
    const uint row = token - FIRST;
    device const uchar* codes = weight + CODES + ulong(row) * code_bytes<BITS>(Form::cols);
    device const uint* affine =
        (device const uint*)(weight + AFFINE) + ulong(row) * affine_words(Form::cols);
    for (uint column = 16 * thread_index; column < Form::cols; column += 16 * threads) {
      Codes<BITS> some;
      some.load(codes + code_bytes<BITS>(column));
      float w[16];
      some.expand(w);
      if (BITS != 16) {
        const uint pair = affine[column / LILY_GROUP];
        for (uint i = 0; i < 16; i++) w[i] = affine_scale(pair) * w[i] + affine_bias(pair);
      }
      for (uint i = 0; i < 16; i += 4)
        *(device float4*)(x + column + i) = float4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    }
  }
};
