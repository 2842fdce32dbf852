#include "device/metal/compiler.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/error.h"
#include "device/metal/tier.h"

namespace lily::metal {

namespace {

constexpr size_t most_threads = 4;
constexpr NSUInteger lanes = 32;  // of a simdgroup; the kernels count on it

// Kernels mean what they say: no fast math unless they spell it out.
Ref<MTLCompileOptions> compile_options(NSUInteger language) {
  auto options = Ref<MTLCompileOptions>::taking(MTLCompileOptions::make());
  options->setLanguageVersion(language);
  if (options->responds(MTLCompileOptions::setMathMode_selector)) {
    options->setMathMode(MTLMathModeSafe);
    options->setMathFloatingPointFunctions(MTLMathFloatingPointFunctionsPrecise);
  } else {
    options->setFastMathEnabled(false);
  }
  return options;
}

}  // namespace

void MetalKernel::ready() const {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done_; });
  if (!error_.empty()) throw DeviceError(error_);
}

Compiler::~Compiler() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Compiler::compile(std::shared_ptr<MetalKernel> kernel) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(kernel));
  const size_t wanted = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, most_threads);
  if (threads_.size() < std::min(wanted, queue_.size())) threads_.emplace_back([this] { loop(); });
  changed_.notify_one();
}

void Compiler::loop() {
  for (;;) {
    std::shared_ptr<MetalKernel> kernel;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      kernel = std::move(queue_.front());
      queue_.pop_front();
    }
    std::string error;
    try {
      build(*kernel);
    } catch (const std::exception& e) {
      error = e.what();
    }
    std::lock_guard lock(kernel->mutex_);
    kernel->error_ = std::move(error);
    kernel->done_ = true;
    kernel->finished_.notify_all();
  }
}

std::string Compiler::fallback() {
  std::lock_guard lock(mutex_);
  return fallback_;
}

void Compiler::build(MetalKernel& kernel) {
  const std::string name(kernel.contract.name);
  const auto begin = std::chrono::steady_clock::now();
  if (kernel.tensors) {
    try {
      const std::vector<std::byte> any_params(kernel.contract.params_bytes);
      kernel.pipeline = build_pipeline(device_, name, tensor_definition + kernel.source,
                                       MTLLanguageVersion4_0, kernel.launch(any_params).threads);
    } catch (const DeviceError& e) {
      kernel.tensors = false;
      std::lock_guard lock(mutex_);
      if (fallback_.empty())
        std::fprintf(stderr, "lily: on tensor operations, %s\nlily: base kernels do instead\n",
                     e.what());
      fallback_ = e.what();
    }
  }
  if (!kernel.tensors)
    kernel.pipeline = build_pipeline(device_, name, kernel.source, MTLLanguageVersion3_1, 0);
  kernel.max_threads = static_cast<uint32_t>(kernel.pipeline->maxTotalThreadsPerThreadgroup());
  kernel.compile_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  kernel.source.clear();
}

Ref<MTLComputePipelineState> build_pipeline(MTLDevice* device, const std::string& name,
                                            const std::string& source, NSUInteger language,
                                            uint32_t threads) {
  auto refuse = [&](const std::string& why) { throw DeviceError("metal: kernel " + name + ": " + why); };
  Pool pool;
  NSError* error = nullptr;
  const auto library = Ref<MTLLibrary>::taking(
      device->newLibraryWithSource(string(source), compile_options(language).get(), &error));
  if (!library) refuse("does not compile: " + text(error));
  const auto function = Ref<MTLFunction>::taking(library->newFunctionWithName(string(name)));
  if (!function) refuse("not in its source");
  Ref<MTLComputePipelineState> pipeline;
  if (threads) {
    const auto all = Ref<MTLComputePipelineDescriptor>::taking(MTLComputePipelineDescriptor::make());
    all->setComputeFunction(function.get());
    if (all->responds(MTLComputePipelineDescriptor::setRequiredThreadsPerThreadgroup_selector))
      all->setRequiredThreadsPerThreadgroup(MTLSize{threads, 1, 1});
    pipeline = Ref<MTLComputePipelineState>::taking(device->newComputePipelineStateWithDescriptor(
        all.get(), MTLPipelineOptionNone, static_cast<MTLComputePipelineReflection**>(nullptr), &error));
  } else {
    pipeline = Ref<MTLComputePipelineState>::taking(
        device->newComputePipelineStateWithFunction(function.get(), &error));
  }
  if (!pipeline) refuse("no pipeline: " + text(error));
  if (const NSUInteger width = pipeline->threadExecutionWidth(); width != lanes)
    refuse("simdgroups of " + std::to_string(width) + ", expected " + std::to_string(lanes));
  return pipeline;
}

}  // namespace lily::metal
