// The forms in which gemm.h multiplies: rows of A as tiles, weights as blocks of 16 outputs.
//
// A cell is a number of A or W as it is multiplied, bf16 or float. A step is four bytes of a row of
// A (two bf16 or one float) times a vector of 16 outputs. A line is 16 steps.
#pragma once

#include <cstring>
#include <type_traits>

#include "device/cpu/gemm_columns.h"
#include "device/cpu/packed.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

#if defined(__AVX512BF16__)
template <class ACT>
using Cell = ACT;
#else
template <class ACT>
using Cell = float;
#endif

constexpr uint32_t line_steps = 16;
struct alignas(64) Line {
  uint32_t steps[line_steps];
};
template <class C>
constexpr uint32_t line_cells = sizeof(Line) / sizeof(C);

// Rows of a tile. The vector registers hold the sums of micro_rows of them, or of micro_few where
// fewer are left, times micro_blocks blocks of 16 outputs.
#if defined(__AVX512F__)
template <class C>
constexpr uint32_t tile_rows = sizeof(C) == 2 ? 16 : 12;  // 16 is what the matrix unit takes
template <class C>
constexpr uint32_t micro_rows = sizeof(C) == 2 ? 8 : 12;
constexpr uint32_t micro_few = 4, micro_blocks = 2;
#elif defined(__AVX2__)
template <class C>
constexpr uint32_t tile_rows = 6;
template <class C>
constexpr uint32_t micro_rows = 6;
constexpr uint32_t micro_few = 2, micro_blocks = 1;
#else
template <class C>
constexpr uint32_t tile_rows = 4;
template <class C>
constexpr uint32_t micro_rows = 4;
constexpr uint32_t micro_few = 2, micro_blocks = 1;
#endif

// A line of cells from as many numbers of a row.
template <class ACT>
LILY_INLINE void copy_line(Line* to, const ACT* from) {
  if constexpr (std::is_same_v<ACT, Cell<ACT>>)
    std::memcpy(to, from, sizeof(Line));
  else
    store(reinterpret_cast<float*>(to), load(from));
}

// Fills a tile, [lines][tile_rows] of lines. row_at(r) is where row r begins; from `rows` on, rows
// are zero.
template <class ACT, class RowAt>
void fill_tile(Line* tile, uint32_t lines, uint32_t rows, const RowAt& row_at) {
  using C = Cell<ACT>;
  for (uint32_t r = 0; r < tile_rows<C>; ++r) {
    Line* to = tile + r;
    if (r >= rows) {
      for (uint32_t l = 0; l < lines; ++l) std::memset(to + l * tile_rows<C>, 0, sizeof(Line));
      continue;
    }
    const ACT* from = row_at(r);
    for (uint32_t l = 0; l < lines; ++l) copy_line(to + l * tile_rows<C>, from + l * line_cells<C>);
  }
}

// The codes or bf16 numbers at bit `shift` of each word.
template <uint32_t bits>
LILY_INLINE F code(U words, int shift) {
  if constexpr (bits == 4) return code4(words, shift);
  if constexpr (bits == 8) return code8(words, shift);
  return shift == 0 ? low_half(words) : high_half(words);
}

// An even column and the odd one after it: 32 cells.
LILY_INLINE void store_cells(float* to, F even, F odd) {
  store(to, even);
  store(to + lanes, odd);
}
#if defined(__AVX512BF16__)
LILY_INLINE void store_cells(bf16* to, F even, F odd) { store_pairs(to, even, odd); }
#endif

// The cells of a block from its records: [steps] lines, each a step of 16 outputs.
template <uint32_t bits, class C>
void expand(const std::byte* record, uint32_t groups, C* to) {
  constexpr uint32_t words = group_cols * bits / 32, pairs = 16 / bits;
  for (uint32_t g = 0; g < groups; ++g, record += record_bytes(bits)) {
    const bf16* scales = reinterpret_cast<const bf16*>(record + words * sizeof(Line));
    const F scale = bits == 16 ? zero() : load(scales);
    const F bias = bits == 16 ? zero() : load(scales + block_rows);
#pragma GCC unroll 8
    for (uint32_t j = 0; j < words; ++j, to += pairs * 2 * lanes) {
      const std::byte* word = record + j * sizeof(Line);
      __builtin_prefetch(word + 2048);  // farther than the processor looks ahead by itself
      const U w = load_words(word);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < pairs; ++i) {
        const int shift = static_cast<int>(i * bits);
        F even = code<bits>(w, shift), odd = code<bits>(w, shift + 16);
        if constexpr (bits != 16) {
          even = fma(even, scale, bias);
          odd = fma(odd, scale, bias);
        }
        store_cells(to + i * 2 * lanes, even, odd);
      }
    }
  }
}

// Where a block's cells are: in `memory` or, where its packed form is just that, in place.
template <class C>
const Line* cells(const Block& b, uint32_t groups, Line* memory) {
  if constexpr (std::is_same_v<C, bf16>)
    if (b.bits == 16) return reinterpret_cast<const Line*>(b.records);
  C* to = reinterpret_cast<C*>(memory);
  if (b.bits == 4) expand<4>(b.records, groups, to);
  if (b.bits == 8) expand<8>(b.records, groups, to);
  if constexpr (std::is_same_v<C, float>)
    if (b.bits == 16) expand<16>(b.records, groups, to);
  return memory;
}

}  // namespace lily::cpu::LILY_ISA
