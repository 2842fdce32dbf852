#include "device/metal/declared.h"

namespace lily::metal {

const DeclareSlot declare_slot = nullptr;

}  // namespace lily::metal
