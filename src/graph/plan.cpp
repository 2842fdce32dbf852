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

}  // namespace

void Plan::replay(CommandBuffer& commands, const Bindings& bindings, const Step& step) const {
  std::vector<Slot> slots;
  std::vector<std::byte> params;
  uint32_t order = 0;
  for (const Entry& e : entries_) {
    if (e.order != order) commands.barrier();
    order = e.order;
    slots.clear();
    for (const Tensor& t : e.slots) slots.push_back(resolve(t, bindings));
    params = e.params;
    e.fill(params.data(), step);
    commands.dispatch({e.kernel, slots, params});
  }
}

}  // namespace lily
