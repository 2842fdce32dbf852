// The matrix unit (AMX): eight tile registers of 16 lines of 64 bytes.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>

#include "device/cpu/features.h"

namespace lily::cpu::LILY_ISA {

// LILY_CPU_NO_TILES in the environment leaves the matrix unit unused, for tests and comparisons.
inline bool tiles_usable() {
  static const bool usable = features().amx_bf16 && !std::getenv("LILY_CPU_NO_TILES");
  return usable;
}

// Makes all of the thread's tile registers full size while it lives, where they are usable.
class TileScope {
 public:
  TileScope() {
    static constexpr Shape full;
    if (tiles_usable()) _tile_loadconfig(&full);
  }
  ~TileScope() {
    if (tiles_usable()) _tile_release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  // Belongs between writing memory and loading tiles from it: the compiler does not know that tile
  // loads read memory.
  static void fence() { asm volatile("" ::: "memory"); }

 private:
  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

}  // namespace lily::cpu::LILY_ISA

#endif
