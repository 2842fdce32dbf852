// How much a dispatch computes, as far as it matters for how long the GPU is held.
#pragma once

#include <span>

#include "metal/contract.h"

namespace lily::metal {

// What the device commits at once. macOS ends work that holds the GPU too long while a display is
// on, so long passes are cut: the slowest GPUs that the released model fits do about 2e12 sums and
// products a second here, 50 ms. A cut costs a GPU some 20 µs.
struct Budget {
  double flops = 1e11;           // of one Metal command buffer, unless one dispatch has more
  double attention_flops = 4e10;  // of one dispatch of prefill_attend,
  uint32_t attention_rows = 128;  // which has at least so many rows: fewer do not fill a GPU
};

// Sums and products of a dispatch; 0 for kernels that only move what they read.
double flops(const Contract&, const void* constants, const void* params);

// Rows of a dispatch of prefill_attend that keep within the budget, at least one of all.
uint32_t attention_rows(const Budget&, const void* constants, const void* params);

}  // namespace lily::metal
