#include <algorithm>

#include "device/device.h"

namespace lily {

uint32_t Tuning::block(uint32_t keys) const {
  if (keys <= 64 * single_block) return single_block;
  const uint32_t share = (keys - 1) / max_blocks + 1, step = (single_block + 1) / 2;
  const uint32_t least = (keys <= split_from ? 2 : 4) * single_block;
  return std::max(least, (share + step - 1) / step * step);
}

}  // namespace lily
