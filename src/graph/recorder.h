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
  // A packed weight that a pass makes for itself.
  Tensor temporary(std::shared_ptr<const PackSpec>);
  Tensor binding(Role role, uint32_t layer, SlotType type, Shape shape);

  // Records one dispatch of contract Op. `fill` sets what a replay changes:
  //   rec.dispatch<ProjectAdd>({.u = u, …}, {.K = …}, [](auto& p, const Step& s) { p.rows = s.rows; });
  template <class Op, class Fill>
  void dispatch(const typename Op::template Bind<Tensor>& bind,
                const typename Op::Constants& constants, Fill,
                std::initializer_list<Moves> moves = {}) {
    add(entry<Op, Fill>(bind, constants), moves);
  }

  // The same work done by the host, for contracts without activations and weights. What comes
  // before is waited for, and what comes after waits.
  template <class Op, void (*work)(const typename Op::template Host<float>&), class Fill>
  void on_host(const typename Op::template Bind<Tensor>& bind,
               const typename Op::Constants& constants, Fill) {
    Plan::Entry e = entry<Op, Fill>(bind, constants);
    e.host = [](void* const* slots, const std::byte* c, const std::byte* p) {
      work(typename Op::template Host<float>(slots, c, p));
    };
    add(std::move(e), {});
  }

  // Without memory for its temporaries a plan only tells what it would take. Plans of one device may
  // share that memory, as their replays follow each other: `shared` is used, and replaced where it is
  // too small. Not by a plan with steps of the host, as other replays may come between.
  Plan finish(bool allocate = true, std::shared_ptr<Buffer>* shared = nullptr);

 private:
  template <class Op, class Fill>
  static Plan::Entry entry(const typename Op::template Bind<Tensor>& bind,
                           const typename Op::Constants& constants) {
    Plan::Entry e{};
    e.contract = &Op::contract;
    for (const Tensor* t : bind.list()) e.slots.push_back(*t);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(&constants, 1));
    e.constants.assign(bytes.begin(), bytes.end());
    const typename Op::Params params{};
    e.params.resize(sizeof params);
    std::memcpy(e.params.data(), &params, sizeof params);
    e.fill = [](std::byte* p, const Step& step) {
      Fill{}(*reinterpret_cast<typename Op::Params*>(p), step);
    };
    return e;
  }
  void add(Plan::Entry&&, std::initializer_list<Moves>);

  Device& device_;
  Precision precision_;
  bool serial_ = false;
  std::string stage_;
  std::vector<size_t> temporaries_;  // bytes of each
  std::vector<Plan::Entry> entries_;
  PlanStats stats_;
};

}  // namespace lily
