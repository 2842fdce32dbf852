// Command buffers: noted first, encoded when they are committed.
#pragma once

#include <vector>

#include "device/metal/compiler.h"
#include "device/metal/objc.h"

namespace lily::metal {

class MetalDevice;

// An encoder that is begun has to be ended, and one thread's work must not mix with another's. So
// dispatches are only noted, and encoding happens in one go.
struct Work {
  struct Step {
    const MetalKernel* kernel;  // null: a barrier
    Launch launch;
    size_t first_slot, first_param;
  };
  std::vector<Step> steps;
  std::vector<Slot> slots;
  std::vector<std::byte> params;

  uint32_t dispatches = 0;
  std::string first_place, last_place;  // for messages: "layer.0/delta: delta_project"

  Ref<MTLCommandBuffer> commands;  // once committed
  bool finished = false;
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
  MetalDevice& device_;
  Work work_;
};

MTLBuffer* object_of(const Buffer&);  // of a buffer that the Metal device made

// `unbound` stands in for slots without a buffer.
void encode(MTLComputeCommandEncoder*, const Work&, const Buffer& unbound);

}  // namespace lily::metal
