#include "graph/arena.h"

#include <algorithm>
#include <numeric>

namespace lily {

// Largest first, each at the lowest offset that no overlapping life has taken.
Placement place(const std::vector<Lifetime>& lives, size_t alignment) {
  std::vector<uint32_t> order(lives.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return lives[a].bytes > lives[b].bytes; });

  Placement placed{std::vector<size_t>(lives.size()), 0};
  std::vector<uint32_t> by_offset;  // those already placed
  for (uint32_t i : order) {
    const size_t bytes = (lives[i].bytes + alignment - 1) / alignment * alignment;
    size_t offset = 0;
    for (uint32_t j : by_offset) {
      if (lives[j].last < lives[i].first || lives[i].last < lives[j].first) continue;
      if (placed.offsets[j] >= offset + bytes) break;
      offset = std::max(offset, (placed.offsets[j] + lives[j].bytes + alignment - 1) / alignment *
                                    alignment);
    }
    placed.offsets[i] = offset;
    placed.bytes = std::max(placed.bytes, offset + bytes);
    auto at = std::upper_bound(by_offset.begin(), by_offset.end(), offset,
                               [&](size_t o, uint32_t j) { return o < placed.offsets[j]; });
    by_offset.insert(at, i);
  }
  return placed;
}

}  // namespace lily
