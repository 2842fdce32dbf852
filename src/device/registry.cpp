#include "base/error.h"
#include "device/cpu/device.h"
#include "device/device.h"

namespace lily {

std::shared_ptr<Device> make_device(const std::string& name, uint32_t threads) {
  if (name == "auto" || name == "cpu") return std::make_shared<cpu::CpuDevice>(threads);
  if (name == "metal") throw DeviceError("device metal: not part of this build yet");
  throw ArgumentError("device " + name + ", expected auto, cpu or metal");
}

}  // namespace lily
