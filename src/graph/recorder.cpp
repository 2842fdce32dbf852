#include "graph/recorder.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "graph/arena.h"

namespace lily {

namespace {

// Accesses so far to one piece of memory, to find the earliest group a new one may join.
class Hazards {
 public:
  // Returns the group after the last conflicting access, `at_least` otherwise.
  uint32_t after(const Tensor& t, bool write, uint32_t at_least) const {
    auto found = memory_.find(key(t));
    if (found == memory_.end()) return at_least;
    for (const Seen& s : found->second) {
      const bool overlap = t.offset < s.end && s.begin < t.offset + t.bytes;
      if (overlap && (write || s.write)) at_least = std::max(at_least, s.group + 1);
    }
    return at_least;
  }
  void add(const Tensor& t, bool write, uint32_t group) {
    memory_[key(t)].push_back({t.offset, t.offset + t.bytes, group, write});
  }

 private:
  struct Seen {
    size_t begin, end;
    uint32_t group;
    bool write;
  };
  using Key = std::tuple<Tensor::Place, Role, uint32_t, const Buffer*>;
  static Key key(const Tensor& t) { return {t.place, t.role, t.id, t.buffer}; }
  std::map<Key, std::vector<Seen>> memory_;
};

// Nothing writes these, so nothing waits for them.
bool is_weight(const Tensor& t) {
  return t.type == SlotType::packed && t.place != Tensor::Place::temporary;
}

}  // namespace

Tensor Recorder::temporary(SlotType type, Shape shape) {
  Tensor t;
  t.place = Tensor::Place::temporary;
  t.type = type;
  t.shape = shape;
  t.bytes = shape.count() * element_bytes(type, precision_);
  t.id = static_cast<uint32_t>(temporaries_.size());
  temporaries_.push_back(t.bytes);
  return t;
}

Tensor Recorder::temporary(std::shared_ptr<const PackSpec> form) {
  Tensor t = temporary(SlotType::packed, {});
  t.bytes = temporaries_[t.id] = device_.packed_bytes(*form);
  t.form = std::move(form);
  return t;
}

Tensor Recorder::binding(Role role, uint32_t layer, SlotType type, Shape shape) {
  Tensor t;
  t.place = Tensor::Place::binding;
  t.role = role;
  t.id = layer;
  t.type = type;
  t.shape = shape;
  t.bytes = shape.count() * element_bytes(type, precision_);
  return t;
}

void Recorder::add(Plan::Entry&& entry, std::initializer_list<Moves> moves) {
  const Contract& contract = *entry.contract;
  entry.stage = stage_;
  std::vector<const PackSpec*> forms;
  for (uint32_t i = 0; i < contract.n_slots; ++i)
    if (contract.slots[i].type == SlotType::packed) forms.push_back(entry.slots[i].form.get());
  if (!entry.host) entry.kernel = device_.kernel(contract, entry.constants, precision_, forms);
  for (uint32_t i = 0; i < contract.n_slots; ++i) {
    const Tensor& t = entry.slots[i];
    const SlotInfo& slot = contract.slots[i];
    if (!t) continue;
    LILY_CHECK(t.type == slot.type);
    size_t bytes = t.bytes;
    for (const Moves& m : moves)
      if (m.slot == slot.number) bytes = m.bytes;
    entry.bytes += slot.access == Access::update ? 2 * bytes : bytes;
    if (is_weight(t)) {
      stats_.weight_bytes += bytes;
      continue;
    }
    if (slot.access != Access::write) stats_.read_bytes += bytes;
    if (slot.access != Access::read) stats_.written_bytes += bytes;
  }
  entries_.push_back(std::move(entry));
}

Plan Recorder::finish(bool allocate, std::shared_ptr<Buffer>* shared) {
  Hazards hazards;
  std::vector<Lifetime> lives;
  for (size_t bytes : temporaries_) lives.push_back({bytes, UINT32_MAX, 0});

  uint32_t n_groups = 0;
  for (Plan::Entry& e : entries_) {
    auto each = [&](auto&& visit) {
      for (uint32_t i = 0; i < e.contract->n_slots; ++i)
        if (e.slots[i] && !is_weight(e.slots[i]))
          visit(e.slots[i], e.contract->slots[i].access != Access::read);
    };
    e.order = serial_ ? n_groups : 0;
    each([&](const Tensor& t, bool write) { e.order = hazards.after(t, write, e.order); });
    each([&](const Tensor& t, bool write) {
      hazards.add(t, write, e.order);
      if (t.place != Tensor::Place::temporary) return;
      lives[t.id].first = std::min(lives[t.id].first, e.order);
      lives[t.id].last = std::max(lives[t.id].last, e.order);
    });
    n_groups = std::max(n_groups, e.order + 1);
  }
  for (Lifetime& life : lives)
    if (life.first > life.last) life = {0, 0, 0};  // recorded but never used

  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Plan::Entry& a, const Plan::Entry& b) { return a.order < b.order; });

  if (allocate)
    for (const Plan::Entry& e : entries_)
      if (e.kernel) e.kernel->ready();
  const Placement placement = place(lives);
  Plan plan;
  const bool host = std::any_of(entries_.begin(), entries_.end(),
                                [](const Plan::Entry& e) { return e.host; });
  if (allocate && placement.bytes) {
    if (shared && !host && *shared && (*shared)->bytes >= placement.bytes)
      plan.temporaries_ = *shared;
    else
      plan.temporaries_ = device_.allocate(placement.bytes, "temporaries");
    if (shared && !host) *shared = plan.temporaries_;
  }
  for (Plan::Entry& e : entries_)
    for (Tensor& t : e.slots)
      if (t.place == Tensor::Place::temporary) {
        t.buffer = plan.temporaries_.get();
        t.offset = placement.offsets[t.id];
      }
  for (const Plan::Entry& e : entries_) ++(e.host ? stats_.host_steps : stats_.dispatches);
  stats_.stages = n_groups;
  stats_.barriers = n_groups ? n_groups - 1 : 0;
  stats_.temporary_bytes = placement.bytes;
  plan.entries_ = std::move(entries_);
  plan.stats_ = stats_;
  return plan;
}

}  // namespace lily
