// How kernels read packed weights. Only Metal reads this header.
//
// A weight is a few *parts*, one below the other: rows whose codes have equal width. A part of 4 or
// 8 bits is codes [rows, cols · bits / 32] uint32, the first column in the lowest bits, and affine
// [rows, cols / 64] uint32, a group's scale (bf16) in the low half and bias in the high half:
// w = scale · code + bias. A part of 16 bits is bf16 [rows, cols].
//
// The host defines the parts of slot `weight` of contract `Op` in front of the source:
//   Op_weight_PARTS(P)      P(first row, rows, bits, codes offset, affine offset) for each part
//   Op_weight_N_PARTS, Op_weight_COLS, Op_weight_EXPERT_BYTES
// So a kernel knows them when it is compiled, and one part of one width is straight code.
#pragma once

#define LILY_GROUP 64u  // columns that share a scale and a bias

// Declares `struct Op_slot`, the form of a packed slot:
//   for_parts(each)       calls each.part<FIRST, ROWS, BITS, CODES, AFFINE>() for every part;
//                         offsets are bytes from the expert's start
//   expert(weight, e)     where an expert starts
#define LILY_PACKED(Op, slot)                                                                \
  struct Op##_##slot {                                                                       \
    enum : uint { cols = Op##_##slot##_COLS, n_parts = Op##_##slot##_N_PARTS };              \
    template <class Each>                                                                    \
    static METAL_FUNC void for_parts(thread Each& each) {                                    \
      Op##_##slot##_PARTS(LILY_PACKED_PART)                                                  \
    }                                                                                        \
    static METAL_FUNC device const uchar* expert(device const uchar* weight, uint e) {       \
      return weight + ulong(e) * Op##_##slot##_EXPERT_BYTES;                                 \
    }                                                                                        \
  };
#define LILY_PACKED_PART(first, rows, bits, codes, affine) \
  each.template part<first, rows, bits, codes, affine>();

METAL_FUNC float affine_scale(uint affine) { return as_type<float>(affine << 16); }
METAL_FUNC float affine_bias(uint affine) { return as_type<float>(affine & 0xffff0000u); }

// Bytes of a row's codes, and words of a row's affine numbers.
template <uint BITS>
METAL_FUNC constexpr uint code_bytes(uint cols) {
  return cols / 8 * BITS;
}
METAL_FUNC constexpr uint affine_words(uint cols) { return cols / LILY_GROUP; }

// 16 neighbouring codes of a row, the first at a multiple of 16 columns: what a lane loads at once.
template <uint BITS>
struct Codes;

template <>
struct Codes<4> {
  uint2 words;
  METAL_FUNC void load(device const uchar* at) thread { words = *(device const uint2*)at; }
  // The codes as numbers.
  METAL_FUNC void expand(thread float* q) const thread {
    for (uint i = 0; i < 8; i++) {
      q[i] = float(words.x >> (4 * i) & 15u);
      q[8 + i] = float(words.y >> (4 * i) & 15u);
    }
  }
};

template <>
struct Codes<8> {
  uint4 words;
  METAL_FUNC void load(device const uchar* at) thread { words = *(device const uint4*)at; }
  METAL_FUNC void expand(thread float* q) const thread {
    for (uint i = 0; i < 4; i++) {
      const float4 v = float4(as_type<uchar4>(words[i]));
      for (uint j = 0; j < 4; j++) q[4 * i + j] = v[j];
    }
  }
};

// bf16: the values themselves.
template <>
struct Codes<16> {
  uint4 words[2];
  METAL_FUNC void load(device const uchar* at) thread {
    words[0] = ((device const uint4*)at)[0];
    words[1] = ((device const uint4*)at)[1];
  }
  METAL_FUNC void expand(thread float* q) const thread {
    for (uint i = 0; i < 8; i++) {
      const uint pair = words[i / 4][i % 4];
      q[2 * i] = as_type<float>(pair << 16);
      q[2 * i + 1] = as_type<float>(pair & 0xffff0000u);
    }
  }
};
