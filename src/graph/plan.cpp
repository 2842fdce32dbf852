#include "graph/plan.h"

#include "base/error.h"

namespace lily {

namespace {

Slot resolve(const Tensor& t, const Bindings& bindings) {
  switch (t.place) {
    case Tensor::Place::none:
      return {};
    case Tensor::Place::binding: {
      const Slot& bound = bindings.at(t.role, t.id);
      LILY_CHECK(bound.buffer != nullptr);
      return bound;
    }
    default:
      return {t.buffer, t.offset, t.bytes};
  }
}

// What a dispatch is given in one replay.
struct Call {
  std::vector<Slot> slots;
  std::vector<std::byte> params;

  void prepare(const Plan::Entry& e, const Bindings& bindings, const Step& step) {
    slots.clear();
    for (const Tensor& t : e.slots) slots.push_back(resolve(t, bindings));
    params = e.params;
    e.fill(params.data(), step);
  }
};

}  // namespace

void Plan::replay(CommandBuffer& commands, const Bindings& bindings, const Step& step) const {
  Call call;
  uint32_t order = 0;
  for (const Entry& e : entries_) {
    if (e.order != order) commands.barrier();
    order = e.order;
    call.prepare(e, bindings, step);
    commands.dispatch({e.kernel, call.slots, call.params, e.stage});
  }
}

void Plan::observe(Device& device, const Bindings& bindings, const Step& step,
                   const Observer& observer) const {
  Call call;
  for (const Entry& e : entries_) {
    call.prepare(e, bindings, step);
    observer(e, call.slots, nullptr);
    auto commands = device.command_buffer();
    commands->dispatch({e.kernel, call.slots, call.params, e.stage});
    commands->commit();
    const Timing timing = commands->wait();
    observer(e, call.slots, &timing);
  }
}

}  // namespace lily
