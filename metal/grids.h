// The numbers that a kernel and its launch share, said once. Plain defines: C++ and Metal read
// them.
#pragma once

// Decode. ROWS: rows of the weight for each simdgroup; SIMDGROUPS: of a threadgroup. Fewer rows
// where a projection is short, so that enough simdgroups run to keep memory busy. A constant ROWS
// that is not 0 takes their place.
#define LILY_ROWS(asked, usual) ((asked) != 0 ? (asked) : (usual))
#define DELTA_PROJECT_ROWS 4
#define DELTA_PROJECT_SIMDGROUPS 2
#define ATTEND_PROJECT_ROWS 4
#define ATTEND_PROJECT_SIMDGROUPS 2
#define PROJECT_ADD_ROWS 2
#define PROJECT_ADD_SIMDGROUPS 2
#define ROUTE_SHARED_ROWS 4  // or half as many pairs of gate and up
#define ROUTE_SHARED_SIMDGROUPS 2
#define EXPERTS_UP_ROWS 4  // half as many pairs of gate and up
#define EXPERTS_UP_SIMDGROUPS 2
#define EXPERTS_DOWN_ADD_ROWS 2
#define EXPERTS_DOWN_ADD_SIMDGROUPS 2
#define GATED_PRODUCT_THREADS 256
#define HEAD_ROWS 8  // at a time
#define HEAD_SIMDGROUPS 8
// Rows of the vocabulary for each threadgroup of `head`.
#define HEAD_SPAN(v, maxima)                                                            \
  ((((v) + (maxima)-1) / (maxima) + HEAD_ROWS * HEAD_SIMDGROUPS - 1) /                  \
   (HEAD_ROWS * HEAD_SIMDGROUPS) * (HEAD_ROWS * HEAD_SIMDGROUPS))
#define HEAD_MAXIMA 2048  // the device's choice of MAXIMA; any other works too
#define DELTA_STEP_SIMDGROUPS 8
#define DELTA_STEP_PARTIALS 4  // the device's choice of PARTIALS; any divisor of DV works
#define ATTEND_HEADS 4  // query heads of one key/value head that a threadgroup takes, at most
#define ATTEND_SIMDGROUPS 8
#define ATTEND_MERGE_COLS 64  // of a head for each threadgroup
#define ATTEND_MERGE_SIMDGROUPS 8
#define SAMPLE_GREEDY_THREADS 256
#define SAMPLE_THREADS 1024

// Prefill. Row kernels: simdgroups of a threadgroup, each with a row of its own.
#define PREFILL_SIMDGROUPS 4
#define PREFILL_DELTA_PREP_TOKENS 16    // tokens that a simdgroup convolves in a run
#define PREFILL_RING_THREADS 256        // one channel each
#define PREFILL_COMBINE_THREADS 256     // four columns each
#define PREFILL_DELTA_SCAN_ROWS 8       // rows of the state of a simdgroup, four lanes each
#define PREFILL_DELTA_SCAN_SIMDGROUPS 2
#define PREFILL_TILE_ROWS 64            // of a tile of a dense product, and outputs of a weight
#define PREFILL_TILE_OUTPUTS 64
#define PREFILL_TILE_SIMDGROUPS 4
#define EXPAND_WEIGHT_THREADS 256        // sixteen columns each
#define PREFILL_ATTEND_ROWS 32          // query rows of a threadgroup
#define PREFILL_ATTEND_SIMDGROUPS 4

// Both.
#define EMBED_THREADS 128
