// Command buffers: noted first, encoded when they are committed.
#pragma once

#include <deque>
#include <vector>

#include "device/metal/compiler.h"
#include "device/metal/costs.h"
#include "device/metal/objc.h"

namespace lily::metal {

class MetalDevice;

// An encoder that is begun has to be ended, and one thread's work must not mix with another's. So
// dispatches are only noted, and encoding happens in one go. A long pass becomes several Metal
// command buffers, each no longer than the budget allows.
struct Work {
  struct Step {
    const MetalKernel* kernel = nullptr;  // null: a barrier
    Launch launch{};
    size_t first_slot = 0, first_param = 0;
    double flops = 0;
    std::string_view stage = {};  // in `stages`
  };
  struct Part {
    size_t first, last;  // steps, the last not included
    Ref<MTLCommandBuffer> commands;
  };
  std::vector<Step> steps;
  std::vector<Slot> slots;
  std::vector<std::byte> params;
  std::deque<std::string> stages;

  std::vector<Part> parts;  // committed
  bool committed = false, finished = false;
  Timing timing;
  std::string error;
};

class MetalCommandBuffer final : public CommandBuffer {
 public:
  explicit MetalCommandBuffer(MetalDevice& device) : device_(device) {}
  ~MetalCommandBuffer() override;  // waits: the GPU may still use the buffers

  void dispatch(const Dispatch&) override;
  void barrier() override;
  void commit() override;
  Timing wait() override;

 private:
  void add(const Dispatch&, const MetalKernel&, std::span<const Slot>,
           std::span<const std::byte> params);
  void add_slices(const Dispatch&, const MetalKernel&);

  MetalDevice& device_;
  Work work_;
};

MTLBuffer* object_of(const Buffer&);  // of a buffer that the Metal device made

// Where the part that begins at step `first` ends.
size_t end_of_part(const Work&, size_t first, const Budget&);

// `unbound` stands in for slots without a buffer.
void encode(MTLComputeCommandEncoder*, const Work&, const Work::Part&, const Buffer& unbound);

}  // namespace lily::metal
