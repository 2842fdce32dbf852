// Kernels, compiled in the background by a few threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device.h"
#include "device/metal/launch.h"
#include "device/metal/objc.h"

namespace lily::metal {

struct MetalKernel final : Kernel {
  MetalKernel(const Contract& contract, const LaunchEntry& grid, std::span<const std::byte> constants,
              std::string source, bool tensors)
      : contract(contract),
        grid(grid),
        constants(constants.begin(), constants.end()),
        source(std::move(source)),
        tensors(tensors) {}

  void ready() const override;
  KernelFacts facts() const override { return {max_threads, compile_s}; }
  Launch launch(std::span<const std::byte> params) const {
    return grid.launch(constants.data(), params.data());
  }

  const Contract& contract;
  const LaunchEntry& grid;
  std::vector<std::byte> constants;
  uint32_t act_bytes = 0;  // of an activation

  // Written by the compiler, read after ready().
  std::string source;
  bool tensors;  // built on tensor operations; before, whether that is to be tried
  Ref<MTLComputePipelineState> pipeline;
  uint32_t max_threads = 0;
  double compile_s = 0;

 private:
  friend class Compiler;
  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  bool done_ = false;
  std::string error_;
};

class Compiler {
 public:
  explicit Compiler(MTLDevice* device) : device_(device) {}
  ~Compiler();  // what has not begun is given up

  void compile(std::shared_ptr<MetalKernel>);

  // Why the first kernel was not built on tensor operations although it was to be; empty if none.
  std::string fallback();

 private:
  void loop();
  void build(MetalKernel&);  // throws DeviceError

  MTLDevice* device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<MetalKernel>> queue_;
  bool stop_ = false;
  std::string fallback_;
  std::vector<std::thread> threads_;
};

// One kernel of a source. `threads`: what all its threadgroups will have, where the pipeline has to
// know; else 0. Throws DeviceError.
Ref<MTLComputePipelineState> build_pipeline(MTLDevice*, const std::string& name,
                                            const std::string& source, NSUInteger language,
                                            uint32_t threads);

}  // namespace lily::metal
