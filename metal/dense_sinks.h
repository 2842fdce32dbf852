// Where sums of dense products go. Only Metal reads this header.
#pragma once

#include "tile_product.h"

// Columns of one matrix [T, N].
template <class T, uint N>
struct StoreSink {
  typedef PlainOutputs Outputs;
  device T* out;
  uint first_row, first;

  METAL_FUNC uint weight_row(uint n) const thread { return min(first + n, N - 1); }
  METAL_FUNC void put(uint r, uint n, float sum) const thread {
    if (first + n < N) out[ulong(first_row + r) * N + first + n] = T(sum);
  }
};

// Added to columns of one.
template <uint N>
struct AddSink {
  typedef PlainOutputs Outputs;
  device float* out;
  uint first_row, first;

  METAL_FUNC uint weight_row(uint n) const thread { return min(first + n, N - 1); }
  METAL_FUNC void put(uint r, uint n, float sum) const thread {
    if (first + n < N) out[ulong(first_row + r) * N + first + n] += sum;
  }
};
