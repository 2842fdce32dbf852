// The engine of gemm.h for the matrix unit, in bf16. What it multiplies is exact: rows of A are bf16
// in the fast build, and so are weights of 16 bits and codes of 4 or 8. With w = s · c + b, a group
// of 64 columns adds  s · Σ a c + b · Σ a.
//
// Tile registers sum a c over one group; then their sums join those of the other groups in float32,
// while the matrix unit is at the next group. b · Σ a is a product of its own that comes first: the
// group's sum of a row, as two bf16, is two more columns of A, and the weights there are b and b.
#pragma once

#include "device/cpu/tiles.h"

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/cpu/gemm_cells.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

// Of K columns. The kernel takes two groups at a time: what fills up the last two is zero.
struct TileForm {
  uint32_t groups, padded, bias_lines;

  explicit TileForm(uint32_t K)
      : groups(K / group_cols), padded((groups + 1) / 2 * 2),
        bias_lines((groups + line_steps - 1) / line_steps) {}
  uint32_t code_lines() const { return 2 * padded; }
  uint32_t lines() const { return code_lines() + bias_lines; }
};

class TileEngine {
 public:
  static constexpr uint32_t tile_rows = 16, run_rows = 2 * tile_rows;
  static constexpr size_t panel_bytes = size_t{768} << 10;  // of the 2 MB of L2 cache

  static uint32_t tile_lines(uint32_t K) { return TileForm(K).lines(); }
  // The codes, the biases, a line of scales for each group.
  static uint32_t block_lines(uint32_t K) {
    const TileForm form(K);
    return form.lines() * line_steps + form.padded;
  }

  // row_at(r) is where row r begins; from `rows` on, rows are zero.
  template <class ACT, class RowAt>
  static void fill_tile(Line* tile, uint32_t K, uint32_t rows, const RowAt& row_at) {
    const TileForm form(K);
    for (uint32_t r = 0; r < tile_rows; ++r)
      fill_row(tile + r, form, r < rows ? row_at(r) : nullptr);
  }

  struct Weights {
    const Line* lines = nullptr;
    const float* scales = nullptr;  // none: `lines` are weights and not codes
    explicit operator bool() const { return lines; }
  };
  static Weights expand(const Block& b, uint32_t K, Line* room) {
    if (b.bits == 16) return {reinterpret_cast<const Line*>(b.records)};
    const TileForm form(K);
    float* scales = numbers(room + form.lines() * line_steps);
    if (b.bits == 4) expand_records<4>(b.records, form, room, scales);
    if (b.bits == 8) expand_records<8>(b.records, form, room, scales);
    return {room, scales};
  }

  // What multiply() needs room for: two results and the sums of four groups.
  static constexpr size_t sum_floats(uint32_t) { return 6 * run_sums; }

  // Two tiles, or one where there are no more rows, times strips of weights. done(s, sums) is called
  // once for each.
  template <class Done>
  void multiply(const Line* tile, uint32_t rows, uint32_t K, const Weights* left,
                const Weights* right, uint32_t n, float* sums, const Done& done) const {
    const TileForm form(K);
    TileScope::fence();
    for (uint32_t s = 0; s < n; ++s) {
      const Weights other = right[s] ? right[s] : left[s];
      if (!left[s].scales == !other.scales) {
        multiply_strip(tile, rows, form, left[s], other, sums);
      } else {  // one of codes, one of 16 bits
        float* of_other = sums + run_sums;
        multiply_strip(tile, rows, form, left[s], left[s], sums);
        multiply_strip(tile, rows, form, other, other, of_other);
        for (uint32_t r = 0; r < rows; ++r)
          std::memcpy(sums + r * strip_columns + block_rows,
                      of_other + r * strip_columns + block_rows, block_rows * sizeof(float));
      }
      done(s, sums);
    }
  }

 private:
  static constexpr uint32_t run_sums = run_rows * strip_columns;
  static constexpr uint32_t tile_sums = tile_rows * strip_columns;
  static constexpr long sums_stride = strip_columns * sizeof(float);

  static float* numbers(Line* line) { return reinterpret_cast<float*>(line); }
  static bf16* pairs(Line* line) { return reinterpret_cast<bf16*>(line); }
  // What store_pairs() makes of x.
  static F nearest_bf16(F x) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x8000));
    return high_half({bits});
  }

  // A row's lines are tile_rows apart; `from` is nullptr for a row of zeros.
  static void fill_row(Line* line, const TileForm& form, const bf16* from) {
    const P ones = as_pairs(_mm512_set1_epi16(0x3f80));
    Line* sums_line = line + form.code_lines() * tile_rows;
    for (uint32_t first = 0; first < form.padded; first += lanes, sums_line += tile_rows) {
      F sums[lanes];
      for (uint32_t i = 0; i < lanes; ++i) {
        sums[i] = zero();
        if (first + i >= form.padded) continue;
        const bool some = from && first + i < form.groups;
        for (uint32_t half = 0; half < 2; ++half, line += tile_rows) {
          const U two = some ? load_words(from) : U{_mm512_setzero_si512()};
          _mm512_store_si512(line, two.v);
          sums[i] = dot(as_pairs(two.v), ones, sums[i]);
          if (some) from += 2 * lanes;
        }
      }
      const F sum = reduce_add_each(sums), upper = nearest_bf16(sum);
      store_pairs(pairs(sums_line), upper, sum - upper);
    }
  }

  template <uint32_t bits>
  static void expand_records(const std::byte* record, const TileForm& form, Line* to,
                             float* scales) {
    Line* biases = to + form.code_lines() * line_steps;
    for (uint32_t g = 0; g < form.groups; ++g, record += record_bytes(bits), scales += block_rows) {
      each_word<bits>(record, [&](U w) {
        if constexpr (bits == 4) {
          for (int i = 0; i < 4; ++i, ++to) _mm512_store_si512(to, (__m512i)code4_pairs(w, i).v);
        } else {
          for (int i = 0; i < 16; i += 8, ++to)
            store_pairs(pairs(to), code8(w, i), code8(w, i + 16));
        }
      });
      const F bias = load(scales_of<bits>(record) + block_rows);
      store(scales, load(scales_of<bits>(record)));
      store_pairs(pairs(biases++), bias, bias);
    }
    if (form.groups != form.padded) {
      std::memset(to, 0, 2 * line_steps * sizeof(Line));
      store(scales, zero());
    }
    const uint32_t steps = form.bias_lines * line_steps - form.groups;
    std::memset(biases, 0, steps * sizeof(Line));
  }

  // Tile registers 0 to 3 hold sums [half of the rows][block], 4 and 5 rows of A, 6 and 7 weights:
  // four products for four loads, which leave the L1 cache to the sums.
  static void multiply_strip(const Line* tile, uint32_t rows, const TileForm& form,
                             const Weights& left, const Weights& right, float* sums) {
    const size_t bias = size_t{form.code_lines()} * line_steps;
    if (rows > tile_rows) {
      const Line* other_tile = tile + size_t{form.lines()} * tile_rows;
      if (!left.scales)
        return two_plain(tile, other_tile, left.lines, right.lines, 2 * form.groups, sums);
      two_plain(tile + bias, other_tile + bias, left.lines + bias, right.lines + bias,
                form.bias_lines, sums);
      two_coded(tile, other_tile, form, left, right, sums);
    } else {
      if (!left.scales) return one_plain(tile, left.lines, right.lines, 2 * form.groups, sums);
      one_plain(tile + bias, left.lines + bias, right.lines + bias, form.bias_lines, sums);
      one_coded(tile, form, left, right, sums);
    }
  }

  static void two_plain(const Line* upper, const Line* lower, const Line* left, const Line* right,
                        uint32_t n, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t l = 0; l < n * line_steps; l += line_steps) {
      _tile_stream_loadd(4, upper + l, sizeof(Line));
      _tile_stream_loadd(6, left + l, sizeof(Line));
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, right + l, sizeof(Line));
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, lower + l, sizeof(Line));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + block_rows, sums_stride);
    _tile_stored(2, sums + tile_sums, sums_stride);
    _tile_stored(3, sums + tile_sums + block_rows, sums_stride);
  }

  static void one_plain(const Line* tile, const Line* left, const Line* right, uint32_t n,
                        float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (uint32_t l = 0; l < n * line_steps; l += line_steps) {
      _tile_stream_loadd(4, tile + l, sizeof(Line));
      _tile_stream_loadd(6, left + l, sizeof(Line));
      _tile_stream_loadd(7, right + l, sizeof(Line));
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + block_rows, sums_stride);
  }

  // Sums of two groups, run_sums apart, that are to join the result.
  struct Pair {
    const float* sums;
    F scales[2][2];  // [group][block]
  };
  static LILY_INLINE Pair pair(const float* sums, const float* left, const float* right) {
    return {sums, {{load(left), load(right)}, {load(left + lanes), load(right + lanes)}}};
  }

  // Rows `row` and `row` + 1.
  static LILY_INLINE void join(const Pair& pair, uint32_t row, float* sums) {
    for (uint32_t at = row * strip_columns; at < (row + 2) * strip_columns; at += strip_columns)
      for (uint32_t b = 0; b < 2; ++b) {
        const float* from = pair.sums + at + b * block_rows;
        F sum = load(sums + at + b * block_rows);
        sum = fma(load(from), pair.scales[0][b], sum);
        sum = fma(load(from + run_sums), pair.scales[1][b], sum);
        store(sums + at + b * block_rows, sum);
      }
  }

  // Two lines of two tiles times a group's codes. Half of the last two groups' sums join the result
  // meanwhile, from row `row` on. A store waits for its tile, and holds up what follows: it comes
  // some products later, that of the lower tile during the next group.
  template <bool joins, uint32_t row>
  static LILY_INLINE void two_group(const Line* upper, const Line* lower, const Line* left,
                                    const Line* right, float* sums, float* sums_before,
                                    const Pair& before, float* result) {
    constexpr long line = sizeof(Line);
    _tile_stream_loadd(4, upper, line);
    _tile_stream_loadd(6, left, line);
    _tile_dpbf16ps(0, 4, 6);
    if (joins) join(before, row, result);
    if (sums_before) _tile_stored(2, sums_before + tile_sums, sums_stride);
    _tile_zero(2);
    _tile_stream_loadd(7, right, line);
    _tile_dpbf16ps(1, 4, 7);
    if (joins) join(before, row + 2, result);
    _tile_stream_loadd(5, lower, line);
    _tile_dpbf16ps(2, 5, 6);
    if (joins) join(before, row + 4, result);
    if (sums_before) _tile_stored(3, sums_before + tile_sums + block_rows, sums_stride);
    _tile_zero(3);
    _tile_dpbf16ps(3, 5, 7);
    if (joins) join(before, row + 6, result);
    _tile_stream_loadd(4, upper + line_steps, line);
    _tile_stream_loadd(6, left + line_steps, line);
    _tile_dpbf16ps(0, 4, 6);
    if (joins) join(before, row + 8, result);
    _tile_stream_loadd(7, right + line_steps, line);
    _tile_dpbf16ps(1, 4, 7);
    if (joins) join(before, row + 10, result);
    _tile_stored(0, sums, sums_stride);
    _tile_zero(0);
    _tile_stream_loadd(5, lower + line_steps, line);
    _tile_dpbf16ps(2, 5, 6);
    if (joins) join(before, row + 12, result);
    _tile_dpbf16ps(3, 5, 7);
    if (joins) join(before, row + 14, result);
    _tile_stored(1, sums + block_rows, sums_stride);
    _tile_zero(1);
  }

  static void two_coded(const Line* upper, const Line* lower, const TileForm& form,
                        const Weights& left, const Weights& right, float* result) {
    constexpr uint32_t step = 2 * line_steps;
    float *sums = result + run_sums, *other = sums + 2 * run_sums;
    Pair before;
    _tile_zero(0);
    _tile_zero(1);
    const Line *l = left.lines, *r = right.lines;
    two_group<false, 0>(upper, lower, l, r, sums, nullptr, before, result);
    two_group<false, 0>(upper + step, lower + step, l + step, r + step, sums + run_sums, sums,
                        before, result);
    for (uint32_t g = 2; g < form.padded; g += 2) {
      before = pair(sums, left.scales + (g - 2) * lanes, right.scales + (g - 2) * lanes);
      upper += 2 * step, lower += 2 * step, l += 2 * step, r += 2 * step;
      two_group<true, 0>(upper, lower, l, r, other, sums + run_sums, before, result);
      two_group<true, 16>(upper + step, lower + step, l + step, r + step, other + run_sums, other,
                          before, result);
      std::swap(sums, other);
    }
    _tile_stored(2, sums + run_sums + tile_sums, sums_stride);
    _tile_stored(3, sums + run_sums + tile_sums + block_rows, sums_stride);
    const uint32_t last = (form.padded - 2) * lanes;
    before = pair(sums, left.scales + last, right.scales + last);
    for (uint32_t row = 0; row < run_rows; row += 2) join(before, row, result);
  }

  // One tile: the second group has registers 2 and 3.
  template <bool joins>
  static LILY_INLINE void one_pair(const Line* tile, const Line* left, const Line* right,
                                   float* sums, const Pair& before, float* result) {
    constexpr long line = sizeof(Line);
    constexpr uint32_t second = 2 * line_steps;
    _tile_zero(0);
    _tile_zero(1);
    for (uint32_t i = 0; i < 2; ++i) {
      _tile_stream_loadd(4, tile + i * line_steps, line);
      _tile_stream_loadd(6, left + i * line_steps, line);
      _tile_dpbf16ps(0, 4, 6);
      if (joins) join(before, 4 * i, result);
      _tile_stream_loadd(7, right + i * line_steps, line);
      _tile_dpbf16ps(1, 4, 7);
      if (joins) join(before, 4 * i + 2, result);
    }
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t i = 0; i < 2; ++i) {
      _tile_stream_loadd(4, tile + second + i * line_steps, line);
      _tile_stream_loadd(6, left + second + i * line_steps, line);
      _tile_dpbf16ps(2, 4, 6);
      if (joins) join(before, 8 + 4 * i, result);
      _tile_stream_loadd(7, right + second + i * line_steps, line);
      _tile_dpbf16ps(3, 4, 7);
      if (joins) join(before, 8 + 4 * i + 2, result);
    }
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + block_rows, sums_stride);
    _tile_stored(2, sums + run_sums, sums_stride);
    _tile_stored(3, sums + run_sums + block_rows, sums_stride);
  }

  static void one_coded(const Line* tile, const TileForm& form, const Weights& left,
                        const Weights& right, float* result) {
    constexpr uint32_t step = 4 * line_steps;
    float *sums = result + run_sums, *other = sums + 2 * run_sums;
    Pair before;
    const Line *l = left.lines, *r = right.lines;
    one_pair<false>(tile, l, r, sums, before, result);
    for (uint32_t g = 2; g < form.padded; g += 2) {
      before = pair(sums, left.scales + (g - 2) * lanes, right.scales + (g - 2) * lanes);
      tile += step, l += step, r += step;
      one_pair<true>(tile, l, r, other, before, result);
      std::swap(sums, other);
    }
    const uint32_t last = (form.padded - 2) * lanes;
    before = pair(sums, left.scales + last, right.scales + last);
    for (uint32_t row = 0; row < tile_rows; row += 2) join(before, row, result);
  }

  TileScope scope_;
};

}  // namespace lily::cpu::LILY_ISA

#endif
