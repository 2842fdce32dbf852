#include "base/threads.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily {

namespace {

constexpr int spins_before_sleep = 20000;  // about 50 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(uint32_t n_threads) {
  for (uint32_t i = 1; i < std::max(n_threads, 1u); ++i)
    threads_.emplace_back([this, i] { loop(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    ticket_.fetch_add(1);
  }
  wake_.notify_all();
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
  ticket_.fetch_add(1);  // publishes the job
  if (sleeping_.load() != 0) {
    { std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  work(0);
  while (running_.load(std::memory_order_acquire) != 0) pause();
}

void ThreadPool::work(uint32_t thread) {
  const Job job = job_;
  for (;;) {
    uint32_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
    if (begin >= job.n) return;
    job.call(job.context, begin, std::min(begin + job.grain, job.n), thread);
  }
}

void ThreadPool::loop(uint32_t thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; ticket_.load(std::memory_order_acquire) == seen; ++i) {
      if (i < spins_before_sleep) {
        pause();
        continue;
      }
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return ticket_.load() != seen; });
      sleeping_.fetch_sub(1);
    }
    if (stop_) return;
    ++seen;
    work(thread);
    running_.fetch_sub(1, std::memory_order_release);
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
