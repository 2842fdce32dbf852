// Row products: rows of a packed weight times one vector. Only Metal reads this header.
//
// A simdgroup computes R rows. In a round its lanes cover 512 neighbouring columns, 16 each, so
// that a row's 4-bit codes arrive as 256 bytes in one load, 8 a lane. The loads of all rows of the
// next round are issued before this round's are used: a GPU hides latency with bytes in flight, and
// a decoded token has no other work to hide it with. x is read once for all R rows.
#pragma once

#include "activations.h"
#include "packed_weights.h"

#define LILY_ROUND 512u  // columns that a simdgroup covers in a round
#define LILY_NO_ROW 0xffffffffu  // counts as 0 in a product

// The vector x / rms(x) ⊙ gamma. The norm is one number for all rows, so it multiplies the finished
// sums, and Σ x² costs nothing: every simdgroup reads all of x anyway.
struct NormedInput {
  device const float* x;
  device const float* gamma;
  float squares;

  METAL_FUNC void begin() thread { squares = 0.0f; }
  METAL_FUNC void load(uint column, bool inside, thread float* out) thread {
    float weights[16];
    load_row<16>(x + column, out);
    load_row<16>(gamma + column, weights);
    for (uint i = 0; i < 16; i++) {
      const float v = inside ? out[i] : 0.0f;
      squares += v * v;
      out[i] = v * weights[i];
    }
  }
  METAL_FUNC float factor(uint cols, float eps) const thread {
    return precise::rsqrt(simd_sum(squares) / float(cols) + eps);
  }
};

// Activations as they are.
struct PlainInput {
  device const ACT* u;

  METAL_FUNC void begin() thread {}
  METAL_FUNC void load(uint column, bool inside, thread float* out) thread {
    load_row<16>(u + column, out);
    for (uint i = 0; i < 16; i++) out[i] = inside ? out[i] : 0.0f;
  }
};

// Activations; each of HEADS heads scaled by rsqrt(Σ squares / width + eps), unless HEADS = 0.
template <uint COLS, uint HEADS, uint PARTIALS>
struct HeadsInput {
  enum : uint { width = COLS / (HEADS == 0 ? 1 : HEADS), registers = (HEADS + 31) / 32 };
  device const ACT* u;
  device const float* squares;
  uint lane;
  float eps;
  float scales[HEADS == 0 ? 1 : registers];  // lane l holds those of heads l, l + 32, …

  METAL_FUNC void begin() thread {
    for (uint i = 0; i < registers; i++) {
      const uint head = min(32 * i + lane, HEADS - 1u);
      float sum = 0.0f;
      for (uint j = 0; j < PARTIALS; j++) sum += squares[head * PARTIALS + j];
      scales[i] = precise::rsqrt(sum / float(width) + eps);
    }
  }
  // Heads are multiples of 32 wide, so 16 columns lie in one.
  METAL_FUNC void load(uint column, bool inside, thread float* out) thread {
    const uint head = column / width;
    float scale = 1.0f;
    for (uint i = 0; i < registers; i++) {
      const float other = simd_shuffle(scales[i], ushort(head % 32));
      scale = head / 32 == i ? other : scale;
    }
    load_row<16>(u + column, out);
    for (uint i = 0; i < 16; i++) out[i] = inside ? out[i] * scale : 0.0f;
  }
};

// Σ codes · x. For 4 bits, x[i] comes divided by 16^(i % 4): then a nibble counts where it stands
// in its 16-bit word, and needs no shift.
template <uint BITS>
METAL_FUNC void prepare16(thread float* x) {
  if (BITS != 4) return;
  for (uint i = 0; i < 16; i += 4) {
    x[i + 1] *= 1.0f / 16.0f;
    x[i + 2] *= 1.0f / 256.0f;
    x[i + 3] *= 1.0f / 4096.0f;
  }
}
METAL_FUNC float dot16(thread const Codes<4>& codes, thread const float* x) {
  const ushort4 words = as_type<ushort4>(codes.words);
  float sum = 0.0f;
  for (uint i = 0; i < 4; i++) {
    const uint w = words[i];
    sum += x[4 * i] * float(w & 0x000fu) + x[4 * i + 1] * float(w & 0x00f0u) +
           x[4 * i + 2] * float(w & 0x0f00u) + x[4 * i + 3] * float(w & 0xf000u);
  }
  return sum;
}
METAL_FUNC float dot16(thread const Codes<8>& codes, thread const float* x) {
  float q[16], sum = 0.0f;
  codes.expand(q);
  for (uint i = 0; i < 16; i++) sum += x[i] * q[i];
  return sum;
}
METAL_FUNC float dot16(thread const Codes<16>& codes, thread const float* x) {
  float w[16], sum = 0.0f;
  codes.expand(w);
  for (uint i = 0; i < 16; i++) sum += x[i] * w[i];
  return sum;
}

// What a lane holds of R rows in one round.
template <uint BITS, uint R>
struct Round {
  Codes<BITS> codes[R];
  uint affine[R];
};

// The share of row r; `sum` is Σ x.
template <uint BITS, uint R>
METAL_FUNC float round_dot(thread const Round<BITS, R>& round, uint r, thread const float* x,
                           float sum) {
  const float dot = dot16(round.codes[r], x);
  if (BITS == 16) return dot;
  return affine_scale(round.affine[r]) * dot + affine_bias(round.affine[r]) * sum;
}

// sums[r] = row rows[r] of the weight · the input, as each lane's share: simd_sum completes it.
// Rows that are not there count as 0.
template <class Form, class Input, uint R>
struct RowProduct {
  device const uchar* weight;  // of one expert
  uint lane;
  Input input;
  uint rows[R];
  float sums[R];

  METAL_FUNC void run() thread {
    for (uint r = 0; r < R; r++) sums[r] = 0.0f;
    Form::for_parts(*this);
  }

  template <uint FIRST, uint ROWS, uint BITS, ulong CODES, ulong AFFINE>
  METAL_FUNC void part() thread {
    // A row of another part, or of none, repeats one of this part: the same bytes again, from the
    // cache, rather than a branch between the loads.
    bool here[R];
    uint some = ROWS;
    for (uint r = 0; r < R; r++) {
      here[r] = rows[r] >= FIRST && rows[r] < FIRST + ROWS;
      if (here[r]) some = rows[r] - FIRST;
    }
    if (some == ROWS) return;

    device const uchar* codes[R];
    device const uint* affine[R];
    for (uint r = 0; r < R; r++) {
      const uint row = here[r] ? rows[r] - FIRST : some;
      codes[r] = weight + CODES + ulong(row) * code_bytes<BITS>(Form::cols);
      affine[r] = (device const uint*)(weight + AFFINE) + ulong(row) * affine_words(Form::cols);
    }

    constexpr uint rounds = (Form::cols + LILY_ROUND - 1) / LILY_ROUND;
    float totals[R];
    for (uint r = 0; r < R; r++) totals[r] = 0.0f;
    input.begin();
    Round<BITS, R> now, ahead;
    load<BITS>(now, codes, affine, column(0));
#pragma unroll(8)
    for (uint i = 0; i < rounds; i++) {
      if (i + 1 < rounds) load<BITS>(ahead, codes, affine, column(i + 1));
      float x[16], sum = 0.0f;
      input.load(column(i), i * LILY_ROUND + 16 * lane < Form::cols, x);
      for (uint j = 0; j < 16; j++) sum += x[j];
      prepare16<BITS>(x);
      for (uint r = 0; r < R; r++) totals[r] += round_dot<BITS, R>(now, r, x, sum);
      now = ahead;
    }
    for (uint r = 0; r < R; r++) sums[r] = here[r] ? totals[r] : sums[r];
  }

 private:
  // Beyond the last column a lane repeats the last 16, and the input gives 0 for them.
  METAL_FUNC uint column(uint round) const thread {
    return min(round * LILY_ROUND + 16 * lane, Form::cols - 16u);
  }
  template <uint BITS>
  METAL_FUNC void load(thread Round<BITS, R>& round, device const uchar* thread* codes,
                       device const uint* thread* affine, uint column) const thread {
    for (uint r = 0; r < R; r++) {
      round.codes[r].load(codes[r] + code_bytes<BITS>(column));
      if (BITS != 16) round.affine[r] = affine[r][column / LILY_GROUP];
    }
  }
};

// The completed sums of R rows, that of row r in lane r.
template <uint R>
METAL_FUNC float sum_to_lanes(thread const float* sums, uint lane) {
  float mine = 0.0f;
  for (uint r = 0; r < R; r++) {
    const float total = simd_sum(sums[r]);
    mine = lane == r ? total : mine;
  }
  return mine;
}
