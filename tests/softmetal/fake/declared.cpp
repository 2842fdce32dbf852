// Linked into test builds instead of src/device/metal/declared.cpp.
#include "device/metal/declared.h"

#include "fake.h"

namespace lily::metal {

namespace {

void declare(uint32_t index, Access access, size_t bytes) {
  fake_metal_declare(index, static_cast<int>(access), bytes);
}

}  // namespace

const DeclareSlot declare_slot = declare;

}  // namespace lily::metal
