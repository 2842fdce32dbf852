// A pool of threads that share the work of one kernel after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace lily {

// One caller at a time. Whoever waits spins for some microseconds, then offers its processor to
// others, then sleeps: work follows work closely in a decode step, and a busy machine is no excuse
// to hold a processor that the awaited thread may need.
class ThreadPool {
 public:
  // `n_threads` counts the caller. Throws DeviceError if the system does not give so many.
  explicit ThreadPool(uint32_t n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(threads_.size()) + 1; }

  // Calls body(begin, end, thread) for consecutive ranges that cover [0, n), in pieces of `grain`
  // handed out as threads become free. `thread` is in [0, size()). Returns when all are done; then
  // throws what a call threw, the first if several did.
  template <class Body>
  void parallel_for(uint32_t n, uint32_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(Job{const_cast<void*>(static_cast<const void*>(&body)),
            [](void* context, uint32_t begin, uint32_t end, uint32_t thread) {
              (*static_cast<Plain*>(context))(begin, end, thread);
            },
            n, grain == 0 ? 1 : grain});
  }

 private:
  struct Job {
    void* context;
    void (*call)(void*, uint32_t, uint32_t, uint32_t);
    uint32_t n, grain;
  };

  void run(const Job&);
  void work(uint32_t thread) noexcept;
  void loop(uint32_t thread);
  void end();

  std::vector<std::thread> threads_;
  Job job_{};
  std::atomic<uint32_t> next_{0};     // first index not handed out
  std::atomic<uint32_t> ticket_{0};   // counts jobs; a change wakes the threads
  std::atomic<uint32_t> running_{0};  // threads still in the current job
  std::atomic<bool> stop_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

// Physical cores that this process may run on.
uint32_t physical_cores();

}  // namespace lily
