// Linked into test builds instead of src/device/metal/declared.cpp.
#include "device/metal/declared.h"

#include "fake.h"

namespace lily::metal {

namespace {

void declare(const SlotInfo& slot, size_t bytes) {
  fake_metal_declare(slot.number, static_cast<int>(slot.access), bytes,
                     static_cast<uint32_t>(slot.type));
}

}  // namespace

const DeclareSlot declare_slot = declare;

}  // namespace lily::metal
