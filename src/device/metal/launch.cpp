#include "device/metal/launch.h"

#include "metal/embed.h"
#include "metal/grids.h"

namespace lily::metal {

namespace {

// A threadgroup for each row.
Launch embed(const Embed::Constants&, const Embed::Params& p) {
  return {{p.rows, 1, 1}, EMBED_THREADS};
}

constexpr LaunchEntry shared_launches[] = {
    {"embed", &typed<Embed, embed>},
};

}  // namespace

const LaunchEntry* find_launch(std::string_view kernel) {
  for (std::span<const LaunchEntry> table :
       {std::span<const LaunchEntry>(shared_launches), decode_launches(), prefill_launches()})
    for (const LaunchEntry& entry : table)
      if (entry.kernel == kernel) return &entry;
  return nullptr;
}

}  // namespace lily::metal
