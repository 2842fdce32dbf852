// What tests are told of a dispatch: each slot of its contract, and the bytes bound. Metal itself
// learns only where a slot begins. Null but in test builds, where the software Metal's definition
// is linked instead of declared.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "metal/contract.h"

namespace lily::metal {

using DeclareSlot = void (*)(const SlotInfo&, size_t bytes);
extern const DeclareSlot declare_slot;  // called after the slot's setBuffer

}  // namespace lily::metal
