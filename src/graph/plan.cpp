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
  void run_on_host(const Plan::Entry& e) const {
    std::vector<void*> memory;
    for (const Slot& s : slots) memory.push_back(s.buffer ? s.buffer->data + s.offset : nullptr);
    e.host(memory.data(), e.constants.data(), params.data());
  }
};

}  // namespace

std::unique_ptr<CommandBuffer> Plan::replay(Device& device, const Bindings& bindings,
                                            const Step& step) const {
  std::unique_lock lock(*whole_pass_, std::defer_lock);
  if (stats_.host_steps) lock.lock();
  Call call;
  uint32_t order = 0;
  bool waited = false;
  auto commands = device.command_buffer();
  for (const Entry& e : entries_) {
    call.prepare(e, bindings, step);
    if (e.host) {
      if (!waited) {
        commands->commit();
        commands->wait();
        commands = device.command_buffer();
      }
      call.run_on_host(e);
    } else {
      if (e.order != order && !waited) commands->barrier();
      commands->dispatch({e.kernel, call.slots, call.params, e.stage});
    }
    order = e.order;
    waited = e.host != nullptr;
  }
  commands->commit();
  return commands;
}

void Plan::observe(Device& device, const Bindings& bindings, const Step& step,
                   const Observer& observer) const {
  Call call;
  for (const Entry& e : entries_) {
    call.prepare(e, bindings, step);
    observer(e, call.slots, nullptr);
    Timing timing;
    if (e.host) {
      call.run_on_host(e);
    } else {
      auto commands = device.command_buffer();
      commands->dispatch({e.kernel, call.slots, call.params, e.stage});
      commands->commit();
      timing = commands->wait();
    }
    observer(e, call.slots, &timing);
  }
}

}  // namespace lily
