// Products of many rows with a packed weight: the loop over tiles that the dense and the grouped
// kernels share. Only Metal reads this header.
//
// A threadgroup of four simdgroups makes ROWS × 64 outputs, 16, 32 or 64 rows. In each step, of 32
// columns, it brings the rows and the expanded weights into threadgroup memory and multiplies them
// there, while what the next step needs is on its way from device memory to registers. What
// multiplies is a back end: tile_mma.h everywhere, tile_tensor.h where the host finds that tensor
// operations work and defines LILY_TENSOR.
// Fewer ROWS take less memory and registers, so more threadgroups run at a time; more of them expand
// a weight less often. The bits of a result are the same: K is summed in the same order.
// A step is half a group of the weight, so a thread needs one scale and one bias for its 16 codes.
//
// For tile_mma.h rows are staged as float and weights, in the fast build, as half. Products of mixed
// operands sum in float32. Weights in bf16 (8 bits) would cost accuracy that can be measured in a
// model's perplexity; half (11 bits) is at least 8 times as precise, at half the traffic of float.
// Rows stay float, because activations may exceed half's range; from bf16 they are exact. Scaling
// sums of exact codes per group would take a product with a diagonal matrix for every eight others.
// For tile_tensor.h rows and weights have one type, LILY_TENSOR_TYPE: half in kernels whose rows
// come from a norm, which bounds them by √K · gamma, else bf16. Then a product of K terms is off by
// 1.5e-3 of √K terms, the rounding of its weights, where half leaves 3e-5 (4 bits) to 2e-4 (8).
// Strides are padded by 8, so that the rows of a fragment lie in different banks.
#pragma once

#include "fours.h"
#include "grids.h"
#include "packed_weights.h"
#include "unroll.h"

// The types that rows and weights are staged in.
#if LILY_TENSOR
#include "tile_tensor.h"
#ifndef LILY_TENSOR_TYPE
#define LILY_TENSOR_TYPE bfloat
#endif
#define LILY_TILE_ROW LILY_TENSOR_TYPE
#define LILY_TILE_WEIGHT LILY_TENSOR_TYPE
#else
#include "tile_mma.h"
#define LILY_TILE_ROW float
#if LILY_FLOAT32
#define LILY_TILE_WEIGHT float
#else
#define LILY_TILE_WEIGHT half
#endif
#endif

#define LILY_TILE_STEP 32u
#define LILY_TILE_STRIDE (LILY_TILE_STEP + 8u)
#define LILY_STRIP_STRIDE 36u  // of a piece of sums, 32 outputs each row, on their way out

static_assert(PREFILL_TILE_OUTPUTS == 64 && PREFILL_TILE_SIMDGROUPS == 4,
              "the loops below are written for these");

template <uint ROWS>
struct Tile {
  typedef TileSums<LILY_TILE_ROW, LILY_TILE_WEIGHT, ROWS, LILY_TILE_STEP, LILY_TILE_STRIDE> Sums;
  enum : uint {
    rows_bytes = ROWS * LILY_TILE_STRIDE * sizeof(LILY_TILE_ROW),
    weights_bytes = PREFILL_TILE_OUTPUTS * LILY_TILE_STRIDE * sizeof(LILY_TILE_WEIGHT),
    strip = Sums::piece_rows * LILY_STRIP_STRIDE,  // floats
    strips_bytes = PREFILL_TILE_SIMDGROUPS * strip * sizeof(float),
    staged_bytes = rows_bytes + weights_bytes,
    // The strips of four simdgroups take the place of rows and weights.
    fours = (staged_bytes > strips_bytes ? staged_bytes : strips_bytes) / 16
  };
};

// At the top of a kernel: the threadgroup memory of a tile, in fours for its alignment.
#define LILY_TILE_MEMORY(ROWS) threadgroup float4 tile_memory[Tile<ROWS>::fours];
#define LILY_TILE_THREAD(simdgroup, lane) {simdgroup, lane, tile_memory}

struct TileThread {
  uint simdgroup, lane;
  threadgroup float4* memory;
};

// 16 neighbouring codes of a row as they lie in memory: of the width that its part has.
struct HeldCodes {
  Codes<4> four;
  Codes<8> eight;
  Codes<16> sixteen;
  uint affine;

  METAL_FUNC thread Codes<4>& of(thread const Codes<4>*) thread { return four; }
  METAL_FUNC thread Codes<8>& of(thread const Codes<8>*) thread { return eight; }
  METAL_FUNC thread Codes<16>& of(thread const Codes<16>*) thread { return sixteen; }
};

// Brings them from memory, and expands them into a tile.
template <class Form>
struct WeightPiece {
  device const uchar* weight;  // of one expert
  uint row, column;
  bool loads;
  threadgroup LILY_TILE_WEIGHT* to;
  HeldCodes held;

  METAL_FUNC void load(uint first_column) thread {
    column = first_column;
    loads = true;
    Form::for_parts(*this);
  }
  METAL_FUNC void expand() thread {
    loads = false;
    Form::for_parts(*this);
  }

  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    if (Form::n_parts > 1 && (row < FIRST || row >= FIRST + ROWS)) return;
    thread Codes<BITS>& codes = held.of((thread const Codes<BITS>*)nullptr);
    if (loads) {
      const uint r = row - FIRST;
      codes.load(weight + CODES + ulong(r) * code_bytes<BITS>(Form::cols) +
                 code_bytes<BITS>(column));
      if (BITS != 16)
        held.affine = ((device const uint*)(weight + AFFINE))[ulong(r) * affine_words(Form::cols) +
                                                              column / LILY_GROUP];
    } else {
      float v[16];
      codes.expand(v);
      if (BITS != 16)
        LILY_UNROLL for (uint i = 0; i < 16; i++)
          v[i] = fma(affine_scale(held.affine), v[i], affine_bias(held.affine));
      LILY_UNROLL for (uint i = 0; i < 16; i += 4)
        put4(to + i, float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
    }
  }
};

// What the 64 outputs of a tile are: `Sink::Outputs`. A simdgroup hands over `n_rows` rows of 32
// sums, from row `row` and output 32 · half_ on.
struct PlainOutputs {  // sink.put(row, n, sum)
  template <class Sink>
  static METAL_FUNC void write(thread const Sink& sink, threadgroup const float* strip, uint row,
                               uint n_rows, uint half_, uint lane) {
    for (uint r = 0; r < n_rows; r++)
      sink.put(row + r, 32 * half_ + lane, strip[r * LILY_STRIP_STRIDE + lane]);
  }
};
// 32 gates and 32 up projections: 16 and 16 of the same outputs in each half.
struct GatedOutputs {  // sink.put(row, n, gate, up), n = 0 … 31
  template <class Sink>
  static METAL_FUNC void write(thread const Sink& sink, threadgroup const float* strip, uint row,
                               uint n_rows, uint half_, uint lane) {
    for (uint r = lane / 16; r < n_rows; r += 2) {
      threadgroup const float* at = strip + r * LILY_STRIP_STRIDE + lane % 16;
      sink.put(row + r, 16 * half_ + lane % 16, at[0], at[16]);
    }
  }
  // The weight's row of output n of the tile. The tile's first gate is `first` of `count`; the gate
  // projection begins at row 0, the up projection at row `count`. What is beyond repeats the last.
  static METAL_FUNC uint weight_row(uint n, uint first, uint count) {
    const uint out = min(first + n / 32 * 16 + n % 16, count - 1);
    return n % 32 < 16 ? out : count + out;
  }
};

// A tile of ROWS rows of a product. `source.row(r)` points to the input of row r of the tile;
// `n_rows` are there. Output n of the tile is row `sink.weight_row(n)` of the weight. Every thread
// of the threadgroup calls it, with the same tile. Ends without a barrier: who goes on to another
// tile has to put one.
template <uint ROWS, class Form, class Source, class Sink>
METAL_FUNC void tile_product(thread const TileThread& me, device const uchar* weight,
                             thread const Source& source, thread const Sink& sink, uint n_rows) {
  typedef Tile<ROWS> Memory;
  typedef typename Memory::Sums TileOf;
  constexpr uint N = ROWS / 16;  // rows that a thread brings
  static_assert(ROWS == 16 * N && N > 0, "rows are shared out by sixteens");
  threadgroup LILY_TILE_ROW* rows = (threadgroup LILY_TILE_ROW*)me.memory;
  threadgroup LILY_TILE_WEIGHT* weights =
      (threadgroup LILY_TILE_WEIGHT*)(me.memory + Memory::rows_bytes / 16);
  const uint index = 32 * me.simdgroup + me.lane;
  const uint half_ = me.simdgroup % 2, group = me.simdgroup / 2;  // its outputs, its rows
  const uint staged = (n_rows + TileOf::staged_rows - 1) / TileOf::staged_rows * TileOf::staged_rows;

  // A thread brings four columns of N rows. Rows that are missing in a fragment repeat the last.
  const uint column = index % 8 * 4;
  device const ACT* from[N];
  LILY_UNROLL for (uint i = 0; i < N; i++)
    from[i] = source.row(min(index / 8 + 16 * i, n_rows - 1)) + column;
  WeightPiece<Form> piece;
  piece.weight = weight;
  piece.row = sink.weight_row(index / 2);
  piece.to = weights + index / 2 * LILY_TILE_STRIDE + index % 2 * 16;

  vec<ACT, 4> held[N];
  LILY_UNROLL for (uint i = 0; i < N; i++) held[i] = *(device const vec<ACT, 4>*)from[i];
  piece.load(index % 2 * 16);

  TileOf sums;
  sums.clear();
  for (uint k = LILY_TILE_STEP; k <= Form::cols; k += LILY_TILE_STEP) {
    LILY_UNROLL for (uint i = 0; i < N; i++) {
      const uint r = index / 8 + 16 * i;
      if (r < staged) put4(rows + r * LILY_TILE_STRIDE + column, float4(held[i]));
    }
    piece.expand();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k < Form::cols) {  // what the next step needs arrives while this one multiplies
      LILY_UNROLL for (uint i = 0; i < N; i++) held[i] = *(device const vec<ACT, 4>*)(from[i] + k);
      piece.load(k + index % 2 * 16);
    }
    sums.add(rows, weights, group, half_, n_rows);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // A piece at a time goes out through threadgroup memory, so that lanes write neighbours.
  threadgroup float* strip = (threadgroup float*)me.memory + me.simdgroup * Memory::strip;
  LILY_UNROLL for (uint i = 0; i < TileOf::pieces; i++) {
    const uint row = TileOf::row(i, group);
    if (row >= n_rows) continue;
    sums.store(i, strip, LILY_STRIP_STRIDE);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    Sink::Outputs::write(sink, strip, row, min(uint(TileOf::piece_rows), n_rows - row), half_,
                         me.lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Rows that follow each other.
struct Rows {
  device const ACT* first;
  uint columns;
  METAL_FUNC device const ACT* row(uint r) const thread { return first + ulong(r) * columns; }
};
