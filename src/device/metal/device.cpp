#include "device/metal/device.h"

#include <algorithm>

#include "base/error.h"
#include "device/metal/commands.h"
#include "device/metal/pack.h"
#include "device/metal/source.h"
#include "metal/grids.h"

namespace lily::metal {

namespace {

// About as many rows as an expert has: more would be empty, fewer expand its weights more often.
uint32_t tile_rows(uint32_t rows, uint32_t experts) {
  return rows < 24ull * experts ? 16 : rows < 96ull * experts ? 32 : 64;
}

Tuning tuning_numbers() {
  Tuning t;
  t.delta_partials = DELTA_STEP_PARTIALS;
  t.head_maxima = HEAD_MAXIMA;
  t.chunk = 2048;
  t.tile_rows = tile_rows;
  return t;
}

class MetalBuffer final : public Buffer {
 public:
  MetalBuffer(Ref<MTLBuffer> object, size_t size, std::shared_ptr<Residency> residency)
      : object(std::move(object)), residency_(std::move(residency)) {
    data = static_cast<std::byte*>(this->object->contents());
    bytes = size;
    residency_->add(this->object.get());
  }
  ~MetalBuffer() override { residency_->remove(object.get()); }

  const Ref<MTLBuffer> object;

 private:
  std::shared_ptr<Residency> residency_;
};

// A part is many stages: the message can only tell where it begins and ends.
std::string failure(const Work& work, const Work::Part& part, NSError* error) {
  uint32_t dispatches = 0;
  std::string first, last;  // "layer.0/delta: delta_project"
  for (size_t s = part.first; s < part.last; ++s) {
    const Work::Step& step = work.steps[s];
    if (!step.kernel) continue;
    last = step.stage.empty() ? "" : std::string(step.stage) + ": ";
    last += step.kernel->contract.name;
    if (dispatches++ == 0) first = last;
  }
  std::string message = "metal: command buffer of " + std::to_string(dispatches) +
                        (dispatches == 1 ? " dispatch (" : " dispatches (") + first +
                        (last == first ? "" : " to " + last) + ") failed: " + text(error);
  if (error && error->code() == MTLCommandBufferErrorOutOfMemory)
    message += "\nhint: open the session with a smaller context";
  return message;
}

// After these the system ignores what the process submits.
bool is_lost(NSError* error) {
  const NSInteger code = error ? error->code() : 0;
  return code == MTLCommandBufferErrorAccessRevoked || code == MTLCommandBufferErrorDeviceRemoved;
}

}  // namespace

MTLBuffer* object_of(const Buffer& buffer) {
  return static_cast<const MetalBuffer&>(buffer).object.get();
}

MetalDevice::MetalDevice()
    : device_(Ref<MTLDevice>::taking(static_cast<MTLDevice*>(MTLCreateSystemDefaultDevice()))),
      compiler_(device_.get()) {
  if (!device_) throw DeviceError("metal: this machine has no Metal device");
  Pool pool;
  info_.name = "metal";
  info_.description = "metal " + text(device_->name()) + ", macOS " +
                      text(NSProcessInfo::processInfo()->operatingSystemVersionString());
  if (!device_->supportsFamily(MTLGPUFamilyApple7))
    throw DeviceError(info_.description + ": expected Apple silicon (M1 or later)");
  info_.memory_bytes = device_->recommendedMaxWorkingSetSize();
  max_buffer_bytes_ = device_->maxBufferLength();
  tuning_ = tuning_numbers();
  queue_ = Ref<MTLCommandQueue>::taking(device_->newCommandQueue());
  fence_ = Ref<MTLFence>::taking(device_->newFence());
  if (!queue_ || !fence_) throw DeviceError(info_.description + ": no command queue");
  tier_ = find_tier(device_.get(), queue_.get());
  if (tier_.tensors) info_.description += ", tensor operations";
  residency_ = std::make_shared<Residency>(device_.get(), queue_.get());
  unbound_ = allocate(256, "unbound slots");
}

std::shared_ptr<Buffer> MetalDevice::allocate(size_t bytes, const std::string& label) {
  Pool pool;
  const size_t length = std::max<size_t>(bytes, 16);
  Ref<MTLBuffer> object;
  if (length <= max_buffer_bytes_)
    object = Ref<MTLBuffer>::taking(device_->newBufferWithLength(
        length, MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked));
  if (!object)
    throw DeviceError("metal: cannot allocate " + std::to_string(bytes) + " bytes for " + label);
  object->setLabel(string(label));
  return std::make_shared<MetalBuffer>(std::move(object), bytes, residency_);
}

size_t MetalDevice::packed_bytes(const PackSpec& spec) const { return metal::packed_bytes(spec); }

void MetalDevice::pack_begin(const PackSpec&, std::byte*) const {}

void MetalDevice::pack_rows(const PackSpec& spec, std::byte* packed, uint32_t expert,
                            uint32_t segment, uint32_t first_row, uint32_t n_rows,
                            const RawRows& raw) const {
  metal::pack_rows(spec, packed, expert, segment, first_row, n_rows, raw);
}

void MetalDevice::unpack(const PackSpec& spec, const std::byte* packed, uint32_t expert,
                         uint32_t segment, float* out) const {
  metal::unpack(spec, packed, expert, segment, out);
}

const Kernel* MetalDevice::kernel(const Contract& contract, std::span<const std::byte> constants,
                                  Precision precision, std::span<const PackSpec* const> weights) {
  const LaunchEntry* grid = find_launch(contract.name);
  if (!grid || !has_kernel(contract.name))
    throw InternalError("metal: no kernel " + std::string(contract.name));
  std::string head = definitions(contract, constants, precision, weights);
  if (tier_.half_tiles) head += half_tiles_definition;
  std::lock_guard lock(kernels_mutex_);
  std::shared_ptr<MetalKernel>& kernel = kernels_[{contract.name, head}];
  if (!kernel) {
    const std::string text = kernel_text(contract.name);
    // float32 stays float32: tensor operations take bf16.
    const bool tensors = tier_.tensors && precision == Precision::fast &&
                         text.find("LILY_TENSOR") != std::string::npos;
    kernel = std::make_shared<MetalKernel>(contract, *grid, constants, head + text, tensors);
    kernel->act_bytes = precision == Precision::float32 ? 4 : 2;
    compiler_.compile(kernel);
  }
  return kernel.get();
}

std::unique_ptr<CommandBuffer> MetalDevice::command_buffer() {
  return std::make_unique<MetalCommandBuffer>(*this);
}

void MetalDevice::submit(Work& work) {
  std::lock_guard lock(submit_mutex_);
  if (lost_)
    throw DeviceError("metal: the system has stopped serving this process after a GPU failure\n"
                      "hint: restart the process");
  for (size_t first = 0; first < work.steps.size() || work.parts.empty();) {
    const size_t last = first < work.steps.size() ? end_of_part(work, first, budget) : first;
    Pool pool;
    auto commands = Ref<MTLCommandBuffer>::sharing(queue_->commandBufferWithUnretainedReferences());
    MTLComputeCommandEncoder* encoder =
        commands ? commands->computeCommandEncoderWithDispatchType(MTLDispatchTypeConcurrent)
                 : nullptr;
    if (!encoder) throw DeviceError("metal: no command buffer");
    work.parts.push_back({first, last, std::move(commands)});
    if (fence_updated_) encoder->waitForFence(fence_.get());
    encode(encoder, work, work.parts.back(), *unbound_);
    encoder->updateFence(fence_.get());
    encoder->endEncoding();
    work.parts.back().commands->commit();
    fence_updated_ = true;
    first = last;
  }
  residency_->used();
}

// What comes behind a part that failed has run as well, on whatever the part left.
void MetalDevice::finish(Work& work) {
  if (work.finished) return;
  Pool pool;
  for (Work::Part& part : work.parts) {
    part.commands->waitUntilCompleted();
    const bool good = part.commands->status() == MTLCommandBufferStatusCompleted;
    NSError* error = good ? nullptr : part.commands->error();
    if (!good && work.error.empty()) work.error = failure(work, part, error);
    if (is_lost(error)) lost_ = true;
  }
  if (!work.parts.empty())
    work.timing = {work.parts.front().commands->GPUStartTime(),
                   work.parts.back().commands->GPUEndTime()};
  work.finished = true;
}

}  // namespace lily::metal
