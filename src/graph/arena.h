// Places temporaries in one buffer: two may share bytes when their lives do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lily {

struct Lifetime {
  size_t bytes;
  uint32_t first, last;  // stages, both included
};

struct Placement {
  std::vector<size_t> offsets;
  size_t bytes;  // of the whole buffer
};

Placement place(const std::vector<Lifetime>&, size_t alignment = 256);

}  // namespace lily
