// The inner loops of gemm.h: tiles of rows times a strip of weights, on vectors or the matrix unit.
#pragma once

#include "device/cpu/gemm_cells.h"
#include "device/cpu/tiles.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

// Some lines of a few rows times the same columns of a strip.
struct Run {
  const Line* tile;   // the first row's tile, at the run's first line
  size_t tile_lines;  // from one tile to the next
  uint32_t rows;
  const Line* left;   // the blocks, at the run's first step
  const Line* right;  // or nullptr
  uint32_t lines;
  bool first;   // sums begin here
  float* sums;  // [rows][32]
};

LILY_INLINE F weights(const float* p) { return load(p); }
LILY_INLINE F spread(const float* p) {
  float x;
  std::memcpy(&x, p, sizeof x);  // the tile's lines are not floats to the compiler
  return set1(x);
}
LILY_INLINE F multiply_add(F a, F w, F sum) { return fma(a, w, sum); }
#if defined(__AVX512BF16__)
LILY_INLINE P weights(const bf16* p) { return as_pairs(load_words(p).v); }
LILY_INLINE P spread(const bf16* p) { return set1_pair(p); }
LILY_INLINE F multiply_add(P a, P w, F sum) { return dot(a, w, sum); }
#endif

// n_rows rows, their sums in registers. Each run sums up by itself before it joins the others: long
// sums in float32 stay exact to less than 1e-6 that way.
template <class C, uint32_t n_rows>
LILY_INLINE void multiply_micro(const Line* tile, const Line* const* blocks, uint32_t lines,
                                bool first, float* sums) {
  F sum[n_rows][micro_blocks];
  for (auto& row : sum)
    for (F& s : row) s = zero();
  for (uint32_t l = 0; l < lines; ++l) {
    for (uint32_t step = 0; step < line_steps; ++step) {
      decltype(weights(static_cast<const C*>(nullptr))) w[micro_blocks];
      for (uint32_t b = 0; b < micro_blocks; ++b)
        w[b] = weights(reinterpret_cast<const C*>(blocks[b] + l * line_steps + step));
#pragma GCC unroll 12
      for (uint32_t r = 0; r < n_rows; ++r) {
        const auto a = spread(reinterpret_cast<const C*>(tile[l * tile_rows<C> + r].steps + step));
        for (uint32_t b = 0; b < micro_blocks; ++b) sum[r][b] = multiply_add(a, w[b], sum[r][b]);
      }
    }
  }
  for (uint32_t r = 0; r < n_rows; ++r)
    for (uint32_t b = 0; b < micro_blocks; ++b) {
      float* to = sums + r * strip_columns + b * block_rows;
      store(to, first ? sum[r][b] : load(to) + sum[r][b]);
    }
}

template <class C>
struct VectorEngine {
  static constexpr uint32_t rows = tile_rows<C>;  // of a run
  static constexpr uint32_t lines = 8;            // of a run: a tile's stay in the L1 cache
  static constexpr size_t panel_bytes = size_t{512} << 10;

  void multiply(const Run& run) const {
    for (uint32_t b = 0; b < (run.right ? 2 : 1); b += micro_blocks) {
      const Line* blocks[] = {b == 0 ? run.left : run.right, run.right ? run.right : run.left};
      float* sums = run.sums + b * block_rows;
      uint32_t r = 0;
      for (; r + micro_rows<C> <= run.rows; r += micro_rows<C>)
        multiply_micro<C, micro_rows<C>>(run.tile + r, blocks, run.lines, run.first,
                                         sums + r * strip_columns);
      for (; r < run.rows; r += micro_few)
        multiply_micro<C, micro_few>(run.tile + r, blocks, run.lines, run.first,
                                     sums + r * strip_columns);
    }
  }
};

#if defined(__AMX_BF16__)

constexpr uint32_t amx_rows = tile_rows<bf16>;
static_assert(amx_rows == 16);

// Registers 0 to 3 hold sums [half of the rows][block], 4 and 5 rows of A, 6 and 7 weights: four
// products for four loads.
class TileEngine {
 public:
  static constexpr uint32_t rows = 2 * amx_rows;  // of a run
  static constexpr uint32_t lines = 1u << 20;     // all: putting sums aside does not pay
  static constexpr size_t panel_bytes = size_t{768} << 10;  // of the 2 MB of L2 cache

  void multiply(const Run& run) const {
    TileScope::fence();
    const Line* right = run.right ? run.right : run.left;
    if (run.rows > amx_rows) return two_tiles(run, right);
    one_tile(run, right);
  }

 private:
  static constexpr long sums_stride = strip_columns * sizeof(float);

  static void two_tiles(const Run& run, const Line* right) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t l = 0; l < run.lines; ++l) {
      _tile_loadd(4, run.tile + l * amx_rows, sizeof(Line));
      _tile_loadd(6, run.left + l * line_steps, sizeof(Line));
      _tile_loadd(7, right + l * line_steps, sizeof(Line));
      _tile_loadd(5, run.tile + run.tile_lines + l * amx_rows, sizeof(Line));
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* lower = run.sums + amx_rows * strip_columns;
    _tile_stored(0, run.sums, sums_stride);
    _tile_stored(1, run.sums + block_rows, sums_stride);
    _tile_stored(2, lower, sums_stride);
    _tile_stored(3, lower + block_rows, sums_stride);
  }

  static void one_tile(const Run& run, const Line* right) {
    _tile_zero(0);
    _tile_zero(1);
    for (uint32_t l = 0; l < run.lines; ++l) {
      _tile_loadd(4, run.tile + l * amx_rows, sizeof(Line));
      _tile_loadd(6, run.left + l * line_steps, sizeof(Line));
      _tile_loadd(7, right + l * line_steps, sizeof(Line));
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, run.sums, sums_stride);
    _tile_stored(1, run.sums + block_rows, sums_stride);
  }

  TileScope scope_;
};

#endif

}  // namespace lily::cpu::LILY_ISA
