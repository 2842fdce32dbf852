// h = silu(gate) ⊙ up
//
// Threadgroups: ceil(N / THREADS). A thread owns one element.
#include "gated_product.h"

#include "activations.h"
#include "grids.h"

[[max_total_threads_per_threadgroup(GATED_PRODUCT_THREADS)]]
kernel void gated_product(LILY_ARGUMENTS(GatedProduct),
                          uint3 at [[thread_position_in_grid]]) {
  if (at.x < GatedProduct_N) h[at.x] = ACT(silu(float(gate[at.x])) * float(up[at.x]));
}
