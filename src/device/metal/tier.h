// What a GPU and its system offer beyond the base that lily needs.
#pragma once

#include <string>

#include "device/metal/objc.h"

namespace lily::metal {

struct Tier {
  // M1 and M2 emulate arithmetic on bf16: prefill attention stages half instead.
  bool half_tiles = false;
  // Products of tiles on the tensor operations of Metal 4, which M5 has units for. Older chips have
  // the operations too, on the same arithmetic as everything else, where they gain nothing.
  bool tensors = false;
  std::string tensors_reason;  // "the probe multiplies correctly", or why they are not used
};

// Asks the system, and on a chip that should have them lets a probe multiply. Never throws.
// LILY_METAL_NO_TENSORS in the environment leaves them unused, for comparisons.
Tier find_tier(MTLDevice*, MTLCommandQueue*);

// What the host writes in front of a source.
inline constexpr const char* half_tiles_definition = "#define LILY_HALF_TILES 1\n";
inline constexpr const char* tensor_definition = "#define LILY_TENSOR 1\n";

}  // namespace lily::metal
