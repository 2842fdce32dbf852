#include "device/metal/residency.h"

namespace lily::metal {

namespace {
constexpr auto period = std::chrono::milliseconds(500);
constexpr auto patience = std::chrono::minutes(3);
}  // namespace

Residency::Residency(MTLDevice* device, MTLCommandQueue* queue) {
  if (!device->responds(MTLDevice::newResidencySetWithDescriptor_selector)) return;
  Pool pool;
  const auto descriptor = Ref<MTLResidencySetDescriptor>::taking(MTLResidencySetDescriptor::make());
  NSError* error = nullptr;
  set_ = Ref<MTLResidencySet>::taking(
      device->newResidencySetWithDescriptor(descriptor.get(), &error));
  if (set_) queue->addResidencySet(set_.get());
}

Residency::~Residency() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (keeper_.joinable()) keeper_.join();
  if (set_) set_->endResidency();
}

void Residency::add(MTLBuffer* buffer) {
  std::lock_guard lock(mutex_);
  if (!set_) return;
  set_->addAllocation(buffer);
  set_->commit();
  set_->requestResidency();
}

void Residency::remove(MTLBuffer* buffer) {
  std::lock_guard lock(mutex_);
  if (!set_) return;
  set_->removeAllocation(buffer);
  set_->commit();
}

void Residency::used() {
  std::lock_guard lock(mutex_);
  if (!set_) return;
  last_use_ = std::chrono::steady_clock::now();
  if (!idle_) return;
  idle_ = false;
  set_->requestResidency();
  if (keeper_.joinable())
    changed_.notify_all();
  else
    keeper_ = std::thread([this] { keep(); });
}

void Residency::keep() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (idle_) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_for(lock, period);
    if (stop_) return;
    Pool pool;
    idle_ = std::chrono::steady_clock::now() - last_use_ > patience;
    if (!idle_) set_->requestResidency();
  }
}

}  // namespace lily::metal
