// The products of gemm.h on the matrix unit: 16 rows of A by 32 columns times 32 columns by 16
// outputs in one instruction. Included by gemm.h.
#pragma once

#if defined(__AMX_BF16__)

#include "device/cpu/tiles.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t amx_rows = tile_rows<bf16>;
static_assert(amx_rows == 16);

// Registers 0 to 3 hold sums [half of the rows][block], 4 and 5 rows of A, 6 and 7 weights: four
// products for four loads.
class TileEngine {
 public:
  static constexpr uint32_t rows = 2 * amx_rows;  // of a run
  static constexpr uint32_t lines = 1u << 20;      // all: to put sums aside costs more than it saves
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

}  // namespace lily::cpu::LILY_ISA

#endif
