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

// One long stage list is one command buffer: the message can only tell where it begins and ends.
std::string failure(const Work& work, NSError* error) {
  std::string place = work.first_place;
  if (work.last_place != work.first_place) place += " to " + work.last_place;
  std::string message = "metal: command buffer of " + std::to_string(work.dispatches) +
                        (work.dispatches == 1 ? " dispatch (" : " dispatches (") + place +
                        ") failed: " + text(error);
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
  Pool pool;
  auto commands = Ref<MTLCommandBuffer>::sharing(queue_->commandBufferWithUnretainedReferences());
  MTLComputeCommandEncoder* encoder =
      commands ? commands->computeCommandEncoderWithDispatchType(MTLDispatchTypeConcurrent) : nullptr;
  if (!encoder) throw DeviceError("metal: no command buffer");
  if (fence_updated_) encoder->waitForFence(fence_.get());
  encode(encoder, work, *unbound_);
  encoder->updateFence(fence_.get());
  encoder->endEncoding();
  commands->commit();
  fence_updated_ = true;
  work.commands = std::move(commands);
  residency_->used();
}

void MetalDevice::finish(Work& work) {
  if (work.finished) return;
  Pool pool;
  work.commands->waitUntilCompleted();
  if (work.commands->status() == MTLCommandBufferStatusCompleted) {
    work.timing = {work.commands->GPUStartTime(), work.commands->GPUEndTime()};
  } else {
    NSError* error = work.commands->error();
    work.error = failure(work, error);
    if (is_lost(error)) lost_ = true;
  }
  work.finished = true;
}

}  // namespace lily::metal
