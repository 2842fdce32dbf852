// bfloat16 as a storage type: the upper half of a float32.
#pragma once

#include <bit>
#include <cstdint>

namespace lily {

struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  // Rounds to nearest, ties to even; a NaN stays a NaN.
  explicit bf16(float value) {
    uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>(u >> 16 | 0x40u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
static_assert(sizeof(bf16) == 2);

}  // namespace lily
