// Norm and rotation of one head of attention.
#pragma once

#include <cmath>
#include <cstdint>

#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t max_head = 256;

// The angle is a float32 product, as references have it, and exact from there on.
struct Rotation {
  float cos[max_head / 2], sin[max_head / 2];

  Rotation(uint32_t position, const float* frequencies, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      const double angle = static_cast<float>(position) * frequencies[i];
      cos[i] = static_cast<float>(std::cos(angle));
      sin[i] = static_cast<float>(std::sin(angle));
    }
  }
};

// out = rope(norm(x)) · scale
template <class In, class Out>
void norm_rotate(const In* x, const float* gamma, uint32_t DH, float eps, const Rotation& rotation,
                 uint32_t rotary, float scale, Out* out) {
  float y[max_head];
  const F r = set1(1.0f / std::sqrt(sum_squares(x, DH) / static_cast<float>(DH) + eps));
  for (uint32_t i = 0; i < DH; i += lanes) store(y + i, load(x + i) * r * load(gamma + i));
  for (uint32_t i = 0, j = rotary / 2; j < rotary; ++i, ++j) {
    const float a = y[i], b = y[j], c = rotation.cos[i], s = rotation.sin[i];
    y[i] = a * c - b * s;
    y[j] = b * c + a * s;
  }
  for (uint32_t i = 0; i < DH; i += lanes) store(out + i, load(y + i) * set1(scale));
}

}  // namespace lily::cpu::LILY_ISA
