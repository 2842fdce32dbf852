// Stacks for the lanes of a threadgroup, and the switch between them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace softmetal {

constexpr uint32_t max_lanes = 1024;  // of a threadgroup

// Save the running context in *from and go on with `to`.
extern "C" void softmetal_switch(void** from, void* to);

class Stacks {
 public:
  Stacks();
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  // A context that, switched to, calls `entry`, which must not return.
  void* prepare(uint32_t lane, void (*entry)());

  bool contains(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - base_) < stride * max_lanes;
  }
  // The lane whose stack an address lies in.
  uint32_t lane(const void* address) const {
    return static_cast<uint32_t>((static_cast<const char*>(address) - base_) / stride);
  }

 private:
  static constexpr size_t guard = 4096, bytes = 128 << 10, stride = bytes + guard;
  char* base_;
};

}  // namespace softmetal
