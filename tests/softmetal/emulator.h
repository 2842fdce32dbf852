// Runs the threadgroups of a dispatch: one fiber per lane, switched wherever lanes wait for others.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "report.h"
#include "runtime.h"

namespace softmetal {

class Detector;

// Which lane runs when several can. Threadgroups follow the same order.
enum class Order : uint8_t {
  in_turn,
  reversed,
  random,
  ahead,  // one simdgroup runs until it waits for the others
};

// A threadgroup array: static ones are numbered by the translator, others by their index.
struct Array {
  std::string name;
  uint32_t offset, bytes;
};

// What the threadgroups of one dispatch have in common.
struct Task {
  void (*entry)(const softmetal_Lane*);
  softmetal_Group group;        // buffers, sizes; threadgroup memory is filled in by the worker
  std::vector<Array> statics;   // by the translator's number
  std::vector<Array> dynamics;  // with their index in `dynamic_index`
  std::vector<uint32_t> dynamic_index;
  uint32_t arena_bytes = 0;
  Order order = Order::in_turn;
  uint64_t seed = 0;
};

constexpr uint32_t threadgroup_memory = 32 << 10;

// Runs threadgroups one after another, on the thread that calls it.
class Worker {
 public:
  Worker();
  ~Worker();

  // Runs one threadgroup. False: it was given up, and `reports` says why.
  bool run(const Task&, const uint32_t (&group)[3], Reports& reports, Detector* detector = nullptr);

  // Calls a kernel for one lane up to the end of its threadgroup arrays, and returns those.
  std::vector<Array> probe(void (*entry)(const softmetal_Lane*));

  const softmetal_Group& group() const { return group_; }
  const softmetal_Lane& lane(uint32_t i) const { return lanes_[i]; }
  uint32_t current() const { return current_; }
  const Stacks& stacks() const { return stacks_; }
  char* arena() const { return arena_.get(); }

  // The functions that device code calls, for softmetal_Runtime.
  static const softmetal_Runtime& runtime();

 private:
  struct Simdgroup {
    uint32_t present, ready, waiting, at_barrier, done;  // a bit for each lane
    uint32_t phase;  // of the values below: a lane may read its result while others go on
    softmetal_Bits in[2][32], out[2][32];
    const void* site;  // of the collective that the first lane waits in
    uint32_t first;    // that lane
  };

  void start(const Task&, const uint32_t (&group)[3]);
  void barrier(int flags, const void* site);
  softmetal_Bits* meet(softmetal_Bits value, softmetal_Combine combine, bool full,
                       const void* site);
  void lane_done();
  void wait();           // let others run; returns when this lane is ready again
  uint32_t next() const; // the lane to run, or max_lanes
  void make_ready(uint32_t simdgroup, uint32_t lanes);
  void claim(uint32_t lane);
  void switch_to(uint32_t lane);
  [[noreturn]] void leave();
  [[noreturn]] void give_up();
  void report(Kind, std::string what, const void* site, uint32_t other_lane = 0,
              const void* other_site = nullptr);
  void report_deadlock();

  friend class Detector;
  static void fiber();
  static Worker& running();

  Stacks stacks_;
  std::unique_ptr<char[]> arena_;
  const Task* task_ = nullptr;
  Reports* reports_ = nullptr;
  Detector* detector_ = nullptr;
  softmetal_Group group_{};
  std::vector<softmetal_Lane> lanes_;
  std::vector<Simdgroup> simdgroups_;
  std::vector<void*> contexts_;
  void* host_ = nullptr;  // the context of run()
  uint32_t n_lanes_ = 0, n_simdgroups_ = 0, current_ = 0;
  uint32_t ready_groups_ = 0;  // a bit for each simdgroup with a ready lane
  uint32_t at_barrier_ = 0, done_ = 0;
  const void* barrier_site_ = nullptr;
  uint32_t barrier_first_ = 0;
  bool stopped_ = false;
  std::vector<Array>* probing_ = nullptr;
  mutable std::minstd_rand random_;
};

}  // namespace softmetal
