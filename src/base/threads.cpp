#include "base/threads.h"

#include <algorithm>
#include <exception>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "base/error.h"

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily {

namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `value` is no longer `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  constexpr int spins = 4000, yields = 200;  // tens of microseconds; a few hundred
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  for (int i = 0; i < yields; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(uint32_t n_threads) {
  n_threads = std::max(n_threads, 1u);
  threads_.reserve(n_threads - 1);
  try {
    for (uint32_t i = 1; i < n_threads; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (const std::exception&) {  // no further thread
    end();
    throw DeviceError("threads: " + std::to_string(n_threads) + ", the system gives only " +
                      std::to_string(size()));
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  stop_ = true;
  ticket_.fetch_add(1);
  ticket_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ThreadPool::run(const Job& job) {
  if (job.n == 0) return;
  if (threads_.empty() || job.n <= job.grain) {
    job.call(job.context, 0, job.n, 0);
    return;
  }
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  running_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  ticket_.fetch_add(1, std::memory_order_release);  // publishes the job
  ticket_.notify_all();
  work(0);
  for (uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;)
    wait_while(running_, left);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::work(uint32_t thread) noexcept {
  const Job job = job_;
  try {
    for (;;) {
      uint32_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
      if (begin >= job.n) return;
      job.call(job.context, begin, std::min(begin + job.grain, job.n), thread);
    }
  } catch (...) {
    std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void ThreadPool::loop(uint32_t thread) {
  for (uint32_t seen = 0;; ++seen) {
    wait_while(ticket_, seen);
    if (stop_) return;
    work(thread);
    if (running_.fetch_sub(1, std::memory_order_release) == 1) running_.notify_one();
  }
}

uint32_t physical_cores() {
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::string> cores;
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (!CPU_ISSET(i, &allowed)) continue;
      std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(i) +
                             "/topology/thread_siblings_list");
      std::string line;
      if (!std::getline(siblings, line)) line = std::to_string(i);
      cores.insert(line);
    }
    if (!cores.empty()) return static_cast<uint32_t>(cores.size());
  }
#elif defined(__APPLE__)
  uint32_t n = 0;
  size_t size = sizeof n;
  if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, nullptr, 0) == 0 && n) return n;
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace lily
