// How threads share work that reads one long stretch of memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/threads.h"

namespace lily::cpu::LILY_ISA {

// Calls body(begin, end, thread) for ranges that cover [0, n). Each thread begins with one long run,
// nearly its share; short ones even out the end.
template <class Body>
void parallel_runs(ThreadPool& pool, uint32_t n, Body&& body) {
  const uint32_t threads = pool.size();
  const uint32_t first = threads == 1 ? n : n * 15 / (16 * threads);
  const uint32_t piece = std::max(1u, n / (64 * threads));
  const uint32_t shared = n - threads * first;
  auto begin_of = [=](uint32_t i) {
    return i < threads ? i * first : threads * first + std::min((i - threads) * piece, shared);
  };
  const uint32_t pieces = threads + (shared + piece - 1) / piece;
  pool.parallel_for(pieces, 1, [&](uint32_t i, uint32_t end, uint32_t thread) {
    for (; i < end; ++i)
      if (begin_of(i) < begin_of(i + 1)) body(begin_of(i), begin_of(i + 1), thread);
  });
}

}  // namespace lily::cpu::LILY_ISA
