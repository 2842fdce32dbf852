// What fake_metal_set sets.
#pragma once

#include <atomic>
#include <cstdint>

namespace fake {

enum class Mode : uint8_t { plain, detect, stub };

constexpr int mixed_order = 4;  // after those of softmetal

struct Selector;

struct Settings {
  std::atomic<Mode> mode;
  std::atomic<int> order;
  std::atomic<uint64_t> seed;
  std::atomic<int> system;
  std::atomic<int> told_major, told_minor;  // what a process is told of it
  std::atomic<int> chip;  // n of Mn
  std::atomic<uint64_t> memory, width, max_threads;
  std::atomic<const Selector*> wrong_types;
  // Counted down; the one that reaches 0 fails.
  std::atomic<int64_t> fail_allocation, fail_library, fail_pipeline, fail_command_buffer;
  std::atomic<int64_t> fail_code;

  Settings();
};

Settings& settings();

// Is this the one that fails?
inline bool fails(std::atomic<int64_t>& countdown) { return countdown > 0 && --countdown == 0; }

struct Numbers {
  std::atomic<uint64_t> buffers, allocations, command_buffers, dispatches, barriers, compiled,
      residency_requests, devices;
};

Numbers& numbers();

}  // namespace fake
