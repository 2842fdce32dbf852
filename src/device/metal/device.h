// The Metal device: one queue, shared untracked buffers, kernels compiled from source when they
// are first asked for.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include "device/device.h"
#include "device/metal/compiler.h"
#include "device/metal/costs.h"
#include "device/metal/objc.h"
#include "device/metal/residency.h"
#include "device/metal/tier.h"

namespace lily::metal {

struct Work;  // what a command buffer holds

class MetalDevice final : public Device {
 public:
  MetalDevice();  // throws DeviceError where there is no Metal

  const DeviceInfo& info() const override { return info_; }
  const Tuning& tuning() const override { return tuning_; }
  std::shared_ptr<Buffer> allocate(size_t bytes, const std::string& label) override;

  size_t packed_bytes(const PackSpec&) const override;
  void pack_begin(const PackSpec&, std::byte* packed) const override;
  void pack_rows(const PackSpec&, std::byte* packed, uint32_t expert, uint32_t segment,
                 uint32_t first_row, uint32_t n_rows, const RawRows&) const override;
  void unpack(const PackSpec&, const std::byte* packed, uint32_t expert, uint32_t segment,
              float* out) const override;

  const Kernel* kernel(const Contract&, std::span<const std::byte> constants, Precision,
                       std::span<const PackSpec* const> weights) override;
  std::unique_ptr<CommandBuffer> command_buffer() override;
  std::vector<Finding> findings() override;

  const Tier& tier() const { return tier_; }
  Budget budget;  // of what is committed at once; tests make it small

  // Encodes and commits. Throws DeviceError if the device is lost.
  void submit(Work&);
  // Waits, and sets the work's error or timing.
  void finish(Work&);

 private:
  DeviceInfo info_;
  Tuning tuning_;
  Ref<MTLDevice> device_;
  Ref<MTLCommandQueue> queue_;
  Tier tier_;
  std::shared_ptr<Residency> residency_;  // buffers may outlive the device
  std::shared_ptr<Buffer> unbound_;       // what slots without a buffer get
  size_t max_buffer_bytes_ = 0;

  // Encoding and committing is one step, so that fences follow the order of commits.
  std::mutex submit_mutex_;
  Ref<MTLFence> fence_;
  bool fence_updated_ = false;
  std::atomic<bool> lost_{false};

  std::mutex kernels_mutex_;
  using Key = std::pair<std::string_view, std::string>;  // name, definitions
  std::map<Key, std::shared_ptr<MetalKernel>> kernels_;
  Compiler compiler_;  // last: its threads use the device
};

// Runs a few small kernels and compares their numbers with known ones. Throws DeviceError.
void self_check(MetalDevice&);

}  // namespace lily::metal
