#include "device/cpu/device.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "base/error.h"
#include "device/cpu/features.h"
#include "device/cpu/pack.h"

namespace lily::cpu {

// One command buffer's dispatches, shared by whoever recorded it and the device's thread.
struct Work {
  struct Step {
    const struct CpuKernel* kernel;
    size_t slots, params;  // where they begin
  };
  std::vector<Step> steps;
  std::vector<void*> slots;
  std::vector<uint64_t> params;

  std::mutex mutex;
  std::condition_variable finished;
  bool committed = false, done = false;
  Timing timing;
  std::string error;
};

struct CpuKernel final : Kernel {
  const Contract& contract;
  KernelFn call;
  std::vector<std::byte> constants;

  CpuKernel(const Contract& contract, KernelFn call, std::span<const std::byte> constants)
      : contract(contract), call(call), constants(constants.begin(), constants.end()) {}
};

namespace {

struct Isa {
  std::string_view name;
  bool supported;
  std::span<const KernelEntry> (*kernels)();
};

// The best last.
std::vector<Isa> instruction_sets() {
  std::vector<Isa> isas{{"portable", true, portable::kernels}};
#if defined(__x86_64__) && !defined(LILY_PORTABLE_ONLY)
  const Features& f = features();
  isas.push_back({"avx2", f.avx2, avx2::kernels});
  isas.push_back({"avx512", f.avx512, avx512::kernels});
  isas.push_back({"avx512_bf16", f.avx512_bf16, avx512_bf16::kernels});
#endif
  return isas;
}

Isa choose_isa(std::string_view asked) {
  if (asked.empty())
    if (const char* forced = std::getenv("LILY_CPU_ISA")) asked = forced;
  std::string known;
  Isa best{};
  for (const Isa& isa : instruction_sets()) {
    if (!isa.supported) continue;
    known += (known.empty() ? "" : ", ") + std::string(isa.name);
    best = isa;
    if (isa.name == asked) return isa;
  }
  if (!asked.empty())
    throw DeviceError("cpu: instruction set " + std::string(asked) +
                      ", expected one that this processor has: " + known);
  return best;
}

#if defined(__linux__)
// The first number of a file, or of its line that begins so; "no limit" when there is none. Without
// operator>>, whose locale is another library's where a program holds two C++ libraries.
size_t number_in(const std::string& path, const std::string& after = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(after, 0) != 0) continue;
    const size_t start = line.find_first_not_of(" \t", after.size());
    if (start == std::string::npos) break;
    size_t n = 0;
    const char* end = line.data() + line.size();
    if (std::from_chars(line.data() + start, end, n).ec == std::errc()) return n;
    break;
  }
  return std::numeric_limits<size_t>::max();
}

size_t control_group_limit() {
  size_t limit = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    std::string path = line.substr(3);  // any ancestor may limit it too
    for (;; path.resize(path.rfind('/'))) {
      limit = std::min(limit, number_in("/sys/fs/cgroup" + path + "/memory.max"));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return limit;
}

size_t usable_memory() {
  const size_t free_kb = number_in("/proc/meminfo", "MemAvailable:");
  return std::min(free_kb > SIZE_MAX / 1024 ? SIZE_MAX : free_kb * 1024, control_group_limit());
}
#elif defined(__APPLE__)
size_t usable_memory() {
  uint64_t bytes = 0;
  size_t size = sizeof bytes;
  sysctlbyname("hw.memsize", &bytes, &size, nullptr, 0);
  return bytes;
}
#else
size_t usable_memory() { return std::numeric_limits<size_t>::max(); }
#endif

[[noreturn]] void refuse_allocation(size_t bytes, const std::string& label) {
  throw DeviceError("cpu: cannot allocate " + std::to_string(bytes) + " bytes for " + label);
}

#if defined(__linux__)
// Large buffers begin at a huge page, so that all of them can be huge pages.
class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(size_t size, const std::string& label) {
    constexpr size_t huge = size_t{1} << 21;
    const size_t slack = size >= huge ? huge : 0;
    if (size > SIZE_MAX - slack) refuse_allocation(size, label);
    mapped_bytes_ = std::max(size, size_t{1}) + slack;
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                   0);
    if (mapped_ == MAP_FAILED) refuse_allocation(size, label);
    const size_t start = reinterpret_cast<size_t>(mapped_);
    data = static_cast<std::byte*>(mapped_) + (slack ? (huge - start % huge) % huge : 0);
    bytes = size;
    if (slack) madvise(data, size, MADV_HUGEPAGE);
  }
  ~CpuBuffer() override { munmap(mapped_, mapped_bytes_); }
  CpuBuffer(const CpuBuffer&) = delete;
  CpuBuffer& operator=(const CpuBuffer&) = delete;

 private:
  void* mapped_;
  size_t mapped_bytes_;
};
#else
class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(size_t size, const std::string& label) {
    constexpr size_t alignment = 4096;
    if (size > SIZE_MAX - alignment) refuse_allocation(size, label);
    const size_t rounded = (size / alignment + 1) * alignment;
    data = static_cast<std::byte*>(std::aligned_alloc(alignment, rounded));
    if (!data) refuse_allocation(size, label);
    std::memset(data, 0, rounded);
    bytes = size;
  }
  ~CpuBuffer() override { std::free(data); }
  CpuBuffer(const CpuBuffer&) = delete;
  CpuBuffer& operator=(const CpuBuffer&) = delete;
};
#endif

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void* address(const Slot& slot) {
  if (!slot.buffer) return nullptr;
  LILY_CHECK(slot.offset <= slot.buffer->bytes && slot.bytes <= slot.buffer->bytes - slot.offset);
  return slot.buffer->data + slot.offset;
}

class CpuCommandBuffer final : public CommandBuffer {
 public:
  explicit CpuCommandBuffer(CpuDevice& device) : device_(device) {}

  void dispatch(const Dispatch& d) override {
    const CpuKernel& kernel = static_cast<const CpuKernel&>(*d.kernel);
    LILY_CHECK(!work_->committed);
    LILY_CHECK(d.slots.size() == kernel.contract.n_slots);
    LILY_CHECK(d.params.size() == kernel.contract.params_bytes);
    Work& w = *work_;
    w.steps.push_back({&kernel, w.slots.size(), w.params.size()});
    for (const Slot& slot : d.slots) w.slots.push_back(address(slot));
    w.params.resize(w.params.size() + (d.params.size() + 7) / 8);
    std::memcpy(w.params.data() + w.steps.back().params, d.params.data(), d.params.size());
  }

  void barrier() override {}  // the device runs one dispatch after the other

  void commit() override {
    LILY_CHECK(!work_->committed);
    work_->committed = true;
    device_.enqueue(work_);
  }

  Timing wait() override {
    LILY_CHECK(work_->committed);
    std::unique_lock lock(work_->mutex);
    work_->finished.wait(lock, [this] { return work_->done; });
    if (!work_->error.empty()) throw DeviceError(work_->error);
    return work_->timing;
  }

 private:
  CpuDevice& device_;
  std::shared_ptr<Work> work_ = std::make_shared<Work>();
};

}  // namespace

CpuDevice::CpuDevice(uint32_t threads, std::string_view isa)
    : pool_(threads == 0 ? physical_cores() : threads) {
  const Isa chosen = choose_isa(isa);
  table_ = chosen.kernels();
  const bool tiles = chosen.name == "avx512_bf16" && features().amx_bf16;
  info_.name = "cpu";
  info_.description = "cpu " + std::string(chosen.name) + (tiles ? " amx_bf16, " : ", ") +
                      std::to_string(pool_.size()) + (pool_.size() == 1 ? " thread" : " threads");
  info_.memory_bytes = usable_memory();
  worker_ = std::thread([this] { loop(); });
}

// Finishes what was committed.
CpuDevice::~CpuDevice() {
  {
    std::lock_guard lock(queue_mutex_);
    stop_ = true;
  }
  queue_changed_.notify_one();
  worker_.join();
}

std::shared_ptr<Buffer> CpuDevice::allocate(size_t bytes, const std::string& label) {
  return std::make_shared<CpuBuffer>(bytes, label);
}

size_t CpuDevice::packed_bytes(const PackSpec& spec) const { return cpu::packed_bytes(spec); }

void CpuDevice::pack_begin(const PackSpec& spec, std::byte* packed) const {
  cpu::pack_begin(spec, packed);
}

void CpuDevice::pack_rows(const PackSpec&, std::byte* packed, uint32_t expert, uint32_t segment,
                          uint32_t first_row, uint32_t n_rows, const RawRows& raw) const {
  cpu::pack_rows(packed, expert, segment, first_row, n_rows, raw);
}

void CpuDevice::unpack(const PackSpec&, const std::byte* packed, uint32_t expert, uint32_t segment,
                       float* out) const {
  cpu::unpack(packed, expert, segment, out);
}

const Kernel* CpuDevice::kernel(const Contract& contract, std::span<const std::byte> constants,
                                Precision precision, std::span<const PackSpec* const>) {
  LILY_CHECK(constants.size() == 4 * size_t{contract.n_constants});
  const bool fast = precision == Precision::fast;
  std::string key = std::string(contract.name) + (fast ? " fast " : " float32 ");
  key.append(reinterpret_cast<const char*>(constants.data()), constants.size());
  std::lock_guard lock(kernels_mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[key];
  if (!kernel) {
    auto entry = std::ranges::find(table_, contract.name, &KernelEntry::name);
    if (entry == table_.end())
      throw InternalError("cpu: no kernel " + std::string(contract.name));
    kernel = std::make_unique<CpuKernel>(contract, fast ? entry->fast : entry->float32, constants);
  }
  return kernel.get();
}

std::unique_ptr<CommandBuffer> CpuDevice::command_buffer() {
  return std::make_unique<CpuCommandBuffer>(*this);
}

void CpuDevice::enqueue(std::shared_ptr<Work> work) {
  {
    std::lock_guard lock(queue_mutex_);
    queue_.push_back(std::move(work));
  }
  queue_changed_.notify_one();
}

void CpuDevice::loop() {
  for (;;) {
    std::shared_ptr<Work> work;
    {
      std::unique_lock lock(queue_mutex_);
      queue_changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    run(*work);
  }
}

void CpuDevice::run(Work& work) {
  Timing timing{now_s(), 0};
  std::string error;
  for (const Work::Step& step : work.steps) {
    try {
      step.kernel->call({work.slots.data() + step.slots, step.kernel->constants.data(),
                         work.params.data() + step.params, pool_, &weight_bytes_});
    } catch (const std::exception& e) {
      error = "cpu: " + std::string(step.kernel->contract.name) + ": " + e.what();
      break;
    }
  }
  timing.end_s = now_s();
  {
    std::lock_guard lock(work.mutex);
    work.timing = timing;
    work.error = std::move(error);
    work.done = true;
  }
  work.finished.notify_all();
}

}  // namespace lily::cpu
