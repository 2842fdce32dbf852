#include "base/error.h"
#include "device/cpu/device.h"
#include "device/device.h"
#ifdef LILY_METAL
#include "device/metal/device.h"
#endif

namespace lily {

namespace {

std::shared_ptr<Device> make_metal([[maybe_unused]] bool checked) {
#ifdef LILY_METAL
  auto device = std::make_shared<metal::MetalDevice>();
  if (checked) metal::self_check(*device);
  return device;
#else
  throw DeviceError("device metal: this build has none, expected macOS on Apple silicon");
#endif
}

}  // namespace

std::shared_ptr<Device> metal_or_cpu(uint32_t threads) {
  try {
    return make_metal(true);
  } catch (const DeviceError& e) {
    auto device = std::make_shared<cpu::CpuDevice>(threads);
    device->warn("running on the CPU device, because Metal does not work here: " +
                 std::string(e.what()));
    return device;
  }
}

std::shared_ptr<Device> make_device(const std::string& name, uint32_t threads, bool checked) {
#ifdef LILY_METAL_BY_DEFAULT
  if (name == "auto") return metal_or_cpu(threads);
#endif
  if (name == "auto" || name == "cpu") return std::make_shared<cpu::CpuDevice>(threads);
  if (name == "metal") return make_metal(checked);
  throw ArgumentError("device " + name + ", expected auto, cpu or metal");
}

}  // namespace lily
