// The thread pool: every index once, and exceptions that end the call and not the process.
#include <atomic>
#include <stdexcept>

#include "base/threads.h"
#include "check.h"

namespace lily {
namespace {

TEST(pool_hands_out_every_index_once) {
  for (uint32_t threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    for (uint32_t n : {0u, 1u, 7u, 1000u})
      for (uint32_t grain : {1u, 3u, 2000u}) {
        std::vector<std::atomic<int>> seen(n);
        pool.parallel_for(n, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
          CHECK(thread < pool.size());
          for (uint32_t i = begin; i < end; ++i) ++seen[i];
        });
        for (auto& count : seen) CHECK(count == 1);
      }
  }
}

// A failed allocation in a pool thread ended the process.
TEST(pool_passes_exceptions_on) {
  ThreadPool pool(3);
  for (int round = 0; round < 200; ++round)
    CHECK(test::throws<std::runtime_error>(
        [&] {
          pool.parallel_for(30, 1, [&](uint32_t begin, uint32_t, uint32_t) {
            if (begin % 7 == 3) throw std::runtime_error("piece failed");
          });
        },
        "piece failed"));
  int done = 0;
  pool.parallel_for(1, 1, [&](uint32_t, uint32_t, uint32_t) { ++done; });
  CHECK(done == 1);
}

}  // namespace
}  // namespace lily
