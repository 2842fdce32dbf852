// The CPU device: kernels of the best instruction set that the processor has, run in order on one
// pool of threads by one thread of the device's own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "base/threads.h"
#include "device/cpu/kernels.h"
#include "device/device.h"

namespace lily::cpu {

struct Work;  // what a command buffer holds

class CpuDevice final : public Device {
 public:
  // `isa` is portable, avx2, avx512 or avx512_bf16; empty means the LILY_CPU_ISA of the
  // environment, or else the best one. 0 threads means one for each physical core.
  explicit CpuDevice(uint32_t threads, std::string_view isa = {});
  ~CpuDevice() override;

  const DeviceInfo& info() const override { return info_; }
  const Tuning& tuning() const override { return tuning_; }
  std::shared_ptr<Buffer> allocate(size_t bytes, const std::string& label) override;

  size_t packed_bytes(const PackSpec&) const override;
  void pack_begin(const PackSpec&, std::byte* packed) const override;
  void pack_rows(const PackSpec&, std::byte* packed, uint32_t expert, uint32_t segment,
                 uint32_t first_row, uint32_t n_rows, const RawRows&) const override;
  void unpack(const PackSpec&, const std::byte* packed, uint32_t expert, uint32_t segment,
              float* out) const override;

  const Kernel* kernel(const Contract&, std::span<const std::byte> constants, Precision,
                       std::span<const PackSpec* const> weights) override;
  std::unique_ptr<CommandBuffer> command_buffer() override;

  void enqueue(std::shared_ptr<Work>);
  void warn(std::string text) { info_.warning = std::move(text); }

  // Packed bytes that kernels have read since the device was made.
  uint64_t weight_bytes_read() const override { return weight_bytes_.load(); }

 private:
  void loop();
  void run(Work&);

  DeviceInfo info_;
  Tuning tuning_;
  std::span<const KernelEntry> table_;
  std::atomic<uint64_t> weight_bytes_{0};
  ThreadPool pool_;

  std::mutex kernels_mutex_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;  // by name, precision and constants

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Work>> queue_;
  bool stop_ = false;
  std::thread worker_;
};

}  // namespace lily::cpu
