// Records dispatches, finds which of them must wait for which, and makes a plan of them.
//
// Nobody writes a barrier: each dispatch declares, through its contract, the byte ranges it reads
// and writes. A dispatch goes into the first group after all those it conflicts with; between two
// groups stands one barrier. Temporaries are placed after that, so that sharing bytes never makes
// two independent dispatches wait for each other.
#pragma once

#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "graph/plan.h"

namespace lily {

// What a dispatch is expected to move through one slot, where that is not the whole range.
struct Moves {
  uint32_t slot;
  size_t bytes;
};

class Recorder {
 public:
  Recorder(Device& device, Precision precision) : device_(device), precision_(precision) {}

  // Every dispatch waits for the one before.
  void serial() { serial_ = true; }
  void stage(std::string name) { stage_ = std::move(name); }
  Tensor temporary(SlotType type, Shape shape);
  Tensor binding(Role role, uint32_t layer, SlotType type, Shape shape);

  // Records one dispatch of contract Op. `fill` sets what a replay changes:
  //   rec.dispatch<ProjectAdd>({.u = u, …}, {.K = …}, [](auto& p, const Step& s) { p.rows = s.rows; });
  template <class Op, class Fill>
  void dispatch(const typename Op::template Bind<Tensor>& bind,
                const typename Op::Constants& constants, Fill,
                std::initializer_list<Moves> moves = {}) {
    Plan::Entry entry{};
    entry.contract = &Op::contract;
    for (const Tensor* t : bind.list()) entry.slots.push_back(*t);
    const typename Op::Params params{};
    entry.params.resize(sizeof params);
    std::memcpy(entry.params.data(), &params, sizeof params);
    entry.fill = [](std::byte* p, const Step& step) {
      Fill{}(*reinterpret_cast<typename Op::Params*>(p), step);
    };
    add(std::move(entry), std::as_bytes(std::span(&constants, 1)), moves);
  }

  // Without memory for its temporaries a plan only tells what it would take.
  Plan finish(bool allocate = true);

 private:
  void add(Plan::Entry&&, std::span<const std::byte> constants, std::initializer_list<Moves>);

  Device& device_;
  Precision precision_;
  bool serial_ = false;
  std::string stage_;
  std::vector<size_t> temporaries_;  // bytes of each
  std::vector<Plan::Entry> entries_;
  PlanStats stats_;
};

}  // namespace lily
