// Memory of one thread that a kernel keeps from call to call. It grows and is never given back.
//
// Kernel files avoid the standard containers: their code would be compiled with this instruction
// set's flags, and the linker could choose that copy for the whole program.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace lily::cpu::LILY_ISA {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Room for n elements, aligned to a cache line; what was there is lost.
  template <class T>
  T* room(size_t n) {
    reserve(n * sizeof(T));
    return static_cast<T*>(memory_);
  }

 private:
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(memory_);
    bytes_ = (bytes + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(64, bytes_);
    if (!memory_) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
  }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lily::cpu::LILY_ISA
