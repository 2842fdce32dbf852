// What the two engines of gemm.h share: the form of rows and weights as they are multiplied.
//
// A step is four bytes of a row of A (two bf16 or one float) times a vector of 16 outputs. A line is
// 16 steps. Rows of A lie in tiles, [lines][rows of a tile] of lines; the weights of a block of 16
// outputs are [steps] vectors of 64 bytes.
#pragma once

#include <cstring>

#include "device/cpu/gemm_columns.h"
#include "device/cpu/packed.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t line_steps = 16;
struct alignas(64) Line {
  uint32_t steps[line_steps];
};

// Calls use(words) for the vectors of words of a record, in order.
template <uint32_t bits, class Use>
LILY_INLINE void each_word(const std::byte* record, Use&& use) {
#pragma GCC unroll 8
  for (uint32_t i = 0; i < group_cols * bits / 32; ++i) {
    const std::byte* word = record + i * sizeof(Line);
    __builtin_prefetch(word + 2048);  // farther than the processor looks ahead by itself
    use(load_words(word));
  }
}

// Scales of a record of codes, [16]; the biases follow.
template <uint32_t bits>
LILY_INLINE const bf16* scales_of(const std::byte* record) {
  return reinterpret_cast<const bf16*>(record + group_cols * bits / 32 * sizeof(Line));
}

}  // namespace lily::cpu::LILY_ISA
