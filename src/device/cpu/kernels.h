// How the CPU device calls a kernel, and the tables of kernels for each instruction set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/bf16.h"
#include "base/threads.h"

namespace lily::cpu {

struct KernelCall {
  void* const* slots;  // slot 1 first; nullptr where a slot is not bound
  const void* constants;
  const void* params;
  ThreadPool& pool;
  std::atomic<uint64_t>* weight_bytes;  // where kernels count the packed bytes they read, or nullptr

  void count(uint64_t bytes) const {
    if (weight_bytes) weight_bytes->fetch_add(bytes, std::memory_order_relaxed);
  }
};

using KernelFn = void (*)(const KernelCall&);

struct KernelEntry {
  std::string_view name;  // the contract's
  KernelFn fast, float32;
};

// Each instruction set compiles the same sources (cpu/<op>.cpp) in a namespace of its own.
namespace portable {
std::span<const KernelEntry> kernels();
}
namespace avx2 {
std::span<const KernelEntry> kernels();
}
namespace avx512 {
std::span<const KernelEntry> kernels();
}
namespace avx512_bf16 {
std::span<const KernelEntry> kernels();
}

}  // namespace lily::cpu

// A kernel file defines `template <class ACT> void name(const KernelCall&)` in namespace
// lily::cpu::LILY_ISA and ends with LILY_CPU_KERNEL(name), which makes its two builds.
#define LILY_CPU_KERNEL(name)                              \
  template void name<::lily::bf16>(const KernelCall&);     \
  template void name<float>(const KernelCall&);
