// The engine of gemm.h for vectors: weights become float32, w = s · c + b, and so do rows of A.
#pragma once

#include <algorithm>

#include "device/cpu/gemm_cells.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

// Registers hold the sums of micro_rows rows of a tile, or of micro_few where fewer are left, times
// micro_blocks blocks of 16 outputs.
#if defined(__AVX512F__)
constexpr uint32_t micro_rows = 12, micro_few = 4, micro_blocks = 2;
#elif defined(__AVX2__)
constexpr uint32_t micro_rows = 6, micro_few = 2, micro_blocks = 1;
#else
constexpr uint32_t micro_rows = 4, micro_few = 2, micro_blocks = 1;
#endif

class VectorEngine {
 public:
  static constexpr uint32_t tile_rows = micro_rows, run_rows = tile_rows;
  static constexpr size_t panel_bytes = size_t{512} << 10;  // of the L2 cache

  static uint32_t tile_lines(uint32_t K) { return K / line_steps; }
  static uint32_t block_lines(uint32_t K) { return K; }

  // row_at(r) is where row r begins; from `rows` on, rows are zero.
  template <class ACT, class RowAt>
  static void fill_tile(Line* tile, uint32_t K, uint32_t rows, const RowAt& row_at) {
    for (uint32_t r = 0; r < tile_rows; ++r) {
      const ACT* from = r < rows ? row_at(r) : nullptr;
      for (uint32_t i = 0; i < K; i += line_steps)
        store(numbers(tile + i / line_steps * tile_rows + r), from ? load(from + i) : zero());
    }
  }

  using Weights = const Line*;
  static Weights expand(const Block& b, uint32_t K, Line* room) {
    if (b.bits == 4) expand_records<4>(b.records, K, room);
    if (b.bits == 8) expand_records<8>(b.records, K, room);
    if (b.bits == 16) expand_records<16>(b.records, K, room);
    return room;
  }

  // What multiply() needs room for: n results.
  static constexpr size_t sum_floats(uint32_t n) { return size_t{n} * tile_rows * strip_columns; }

  // A tile times strips of weights. done(s, sums) is called once for each.
  template <class Done>
  void multiply(const Line* tile, uint32_t rows, uint32_t K, const Weights* left,
                const Weights* right, uint32_t n, float* sums, const Done& done) const {
    const uint32_t lines = tile_lines(K);
    for (uint32_t line = 0; line < lines; line += run_lines)
      for (uint32_t s = 0; s < n; ++s) {
        const size_t step = size_t{line} * line_steps;
        float* of_strip = sums + s * tile_rows * strip_columns;
        multiply_run({tile + line * tile_rows, rows, left[s] + step,
                      right[s] ? right[s] + step : nullptr, std::min(run_lines, lines - line),
                      line == 0, of_strip});
        if (line + run_lines >= lines) done(s, of_strip);
      }
  }

 private:
  static constexpr uint32_t run_lines = 8;  // a tile's stay in the L1 cache

  // Some lines of a tile times the same columns of a strip.
  struct Run {
    const Line* tile;
    uint32_t rows;
    const Line *left, *right;  // the blocks; or nullptr
    uint32_t lines;
    bool first;   // sums begin here
    float* sums;  // [rows][32]
  };

  static float* numbers(Line* line) { return reinterpret_cast<float*>(line); }
  static LILY_INLINE F spread(const uint32_t* step) {
    float x;
    std::memcpy(&x, step, sizeof x);  // lines are not floats to the compiler
    return set1(x);
  }

  template <uint32_t bits>
  static LILY_INLINE F code(U words, int shift) {
    return bits == 4 ? code4(words, shift) : code8(words, shift);
  }
  template <uint32_t bits>
  static void expand_records(const std::byte* record, uint32_t K, Line* to) {
    constexpr uint32_t pairs = 16 / bits;  // of a word
    for (uint32_t col = 0; col < K; col += group_cols, record += record_bytes(bits)) {
      F scale = zero(), bias = zero();
      if constexpr (bits != 16) {
        scale = load(scales_of<bits>(record));
        bias = load(scales_of<bits>(record) + block_rows);
      }
      each_word<bits>(record, [&](U w) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < pairs; ++i, to += 2) {
          const int shift = static_cast<int>(i * bits);
          if constexpr (bits == 16) {
            store(numbers(to), low_half(w));
            store(numbers(to + 1), high_half(w));
          } else {
            store(numbers(to), fma(code<bits>(w, shift), scale, bias));
            store(numbers(to + 1), fma(code<bits>(w, shift + 16), scale, bias));
          }
        }
      });
    }
  }

  static void multiply_run(const Run& run) {
    for (uint32_t b = 0; b < (run.right ? 2 : 1); b += micro_blocks) {
      const Line* blocks[] = {b == 0 ? run.left : run.right, run.right ? run.right : run.left};
      uint32_t r = 0;
      for (; r + micro_rows <= run.rows; r += micro_rows)
        multiply_micro<micro_rows>(run, r, blocks, run.sums + b * block_rows);
      for (; r < run.rows; r += micro_few)
        multiply_micro<micro_few>(run, r, blocks, run.sums + b * block_rows);
    }
  }

  // Rows `row` … of a run, their sums in registers. Each run sums up by itself before it joins the
  // others: long sums in float32 stay exact to less than 1e-6 that way.
  template <uint32_t n_rows>
  static LILY_INLINE void multiply_micro(const Run& run, uint32_t row, const Line* const* blocks,
                                         float* sums) {
    F sum[n_rows][micro_blocks];
    for (auto& of_row : sum)
      for (F& s : of_row) s = zero();
    for (uint32_t l = 0; l < run.lines; ++l) {
      for (uint32_t step = 0; step < line_steps; ++step) {
        F w[micro_blocks];
        for (uint32_t b = 0; b < micro_blocks; ++b)
          w[b] = load(reinterpret_cast<const float*>(blocks[b] + l * line_steps + step));
#pragma GCC unroll 12
        for (uint32_t r = 0; r < n_rows; ++r) {
          const F a = spread(run.tile[l * tile_rows + row + r].steps + step);
          for (uint32_t b = 0; b < micro_blocks; ++b) sum[r][b] = fma(a, w[b], sum[r][b]);
        }
      }
    }
    for (uint32_t r = 0; r < n_rows; ++r)
      for (uint32_t b = 0; b < micro_blocks; ++b) {
        float* to = sums + (row + r) * strip_columns + b * block_rows;
        store(to, run.first ? sum[r][b] : load(to) + sum[r][b]);
      }
  }
};

}  // namespace lily::cpu::LILY_ISA
