// A recorded pass: replayed with a session's bindings and the numbers of one step.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "graph/tensor.h"

namespace lily {

// How the next token is drawn (see metal/sample.h).
struct Draw {
  float temperature = 0, top_p = 1, min_p = 0;
  float repetition = 1, presence = 0, frequency = 0;
  uint32_t top_k = 0, n_bias = 0;
  uint64_t seed = 0;
};

// What changes from one replay to the next.
struct Step {
  uint32_t rows = 1;         // tokens of this pass
  uint32_t position = 0;     // tokens before it
  uint32_t capacity = 0;     // positions that the KV cache has room for
  uint32_t block = 0;        // keys of an attention block, and their number
  uint32_t blocks = 1;
  uint32_t first_token = 0;  // index into Role::tokens
  uint32_t slot = 0;         // token slot that `sample` writes
  uint64_t draw_step = 0;    // random counter: the position that the drawn token will have
  Draw draw;
};

class Bindings {
 public:
  explicit Bindings(size_t layers) : layers_(layers), slots_(n_roles * layers) {}
  Slot& at(Role role, uint32_t layer = 0) {
    return slots_[static_cast<size_t>(role) * layers_ + layer];
  }
  const Slot& at(Role role, uint32_t layer = 0) const {
    return slots_[static_cast<size_t>(role) * layers_ + layer];
  }

 private:
  size_t layers_;
  std::vector<Slot> slots_;
};

using FillParams = void (*)(std::byte* params, const Step&);

// Work of the host on slots in memory that it shares with the device.
using HostWork = void (*)(void* const* slots, const std::byte* constants, const std::byte* params);

struct PlanStats {
  uint32_t dispatches = 0;
  uint32_t host_steps = 0;  // that wait for the device, and it for them
  uint32_t stages = 0;    // groups of dispatches that may overlap
  uint32_t barriers = 0;  // between them
  size_t weight_bytes = 0;  // packed weights that a replay is expected to read
  size_t read_bytes = 0;    // everything else it reads, KV cache aside
  size_t written_bytes = 0;
  size_t temporary_bytes = 0;
};

class Plan {
 public:
  struct Entry {
    const Contract* contract;
    std::string stage;       // "layer.3/experts"
    uint32_t order;          // which group between barriers
    const Kernel* kernel = nullptr;  // or else `host`, with these constants
    HostWork host = nullptr;
    std::vector<std::byte> constants;
    std::vector<Tensor> slots;
    std::vector<std::byte> params;
    FillParams fill;
    size_t bytes = 0;  // that a replay is expected to read and write, KV cache aside
  };

  // Commits the pass and returns its command buffer, the last of several where the host has a part
  // in it.
  std::unique_ptr<CommandBuffer> replay(Device&, const Bindings&, const Step&) const;

  // Called before a dispatch (with no timing) and after it (with one), its slots as bound.
  using Observer = std::function<void(const Entry&, std::span<const Slot>, const Timing*)>;

  // Runs the pass one dispatch at a time, for profiles and dumps. Slow, and the same numbers.
  void observe(Device&, const Bindings&, const Step&, const Observer&) const;

  const PlanStats& stats() const { return stats_; }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  friend class Recorder;
  std::vector<Entry> entries_;
  std::shared_ptr<Buffer> temporaries_;
  PlanStats stats_;
  // Held while a pass with host steps is under way: sessions share the temporaries.
  std::unique_ptr<std::mutex> whole_pass_ = std::make_unique<std::mutex>();
};

}  // namespace lily
