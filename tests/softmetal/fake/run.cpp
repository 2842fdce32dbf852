// One dispatch, by way of the emulator.
#include <cstring>
#include <map>

#include "fake.h"
#include "metal.h"
#include "settings.h"

namespace fake {

namespace {

struct Moved {
  uint64_t loaded, read, written;
};

struct Counts {
  std::mutex mutex;
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> of_last;
  Moved moved[fake_metal_kinds] = {};
};

Counts& counts() {
  static Counts* c = new Counts;
  return *c;
}

}  // namespace

// Indices that the kernel does not name were bound for another one.
std::vector<Use> Dispatch::uses() const {
  std::vector<Use> list;
  for (uint32_t i = 0; i < bindings.size(); ++i) {
    const Binding& b = bindings[i];
    if (!pipeline->kernel) {
      if (b.fresh) list.push_back({i, pipeline->name + " buffer " + std::to_string(i), b.write});
      continue;
    }
    for (uint32_t a = 0; a < pipeline->kernel->n_arguments; ++a) {
      const SoftmetalArgument& argument = pipeline->kernel->arguments[a];
      if (argument.kind == 0 && argument.index == i && b.bound)
        list.push_back({i, pipeline->name + " " + argument.name,
                        b.declared ? b.write : argument.writable != 0});
    }
  }
  return list;
}

void Queue::run_dispatch(Dispatch& d) {
  std::vector<SoftmetalBinding> bindings;
  for (const Use& use : d.uses()) {
    Binding& b = d.bindings[use.index];
    SoftmetalBinding s{};
    s.index = use.index;
    s.reads = {0, b.declared_bytes};
    s.base = b.buffer ? b.buffer->memory + b.offset : b.bytes.data();
    s.length = b.buffer ? b.buffer->length - b.offset : b.bytes.size();
    if (use.write) s.writes = s.reads;
    // A dispatch may read what it wrote to a slot itself; what was there before is gone.
    if (b.buffer && b.declared && b.write && !b.read) {
      std::memset(s.base, d.pipeline->library ? 0xff : 0, b.declared_bytes);
      std::memset(b.buffer->defined_map() + b.offset, 0, b.declared_bytes);
    }
    if (b.buffer && b.buffer->defined) s.defined = b.buffer->defined.get() + b.offset;
    bindings.push_back(s);
  }
  if (!d.pipeline->library) return;
  SoftmetalDispatch s{};
  s.kernel = d.pipeline->kernel;
  std::memcpy(s.groups, d.groups, sizeof s.groups);
  std::memcpy(s.threads, d.threads, sizeof s.threads);
  s.bindings = bindings.data();
  s.n_bindings = static_cast<uint32_t>(bindings.size());
  const int order = settings().order;
  s.order = order == mixed_order ? static_cast<int>(random_() % mixed_order) : order;
  s.seed = random_();
  s.workers = 2;
  SoftmetalResult* result = softmetal_run(d.pipeline->library, &s);
  for (uint32_t i = 0; i < softmetal_report_count(result); ++i)
    report(softmetal_report(result, i)->text);
  {
    std::lock_guard lock(counts().mutex);
    counts().of_last.clear();
    for (uint32_t i = 0; i < softmetal_counts_count(result); ++i) {
      const SoftmetalCounts* c = softmetal_counts(result, i);
      counts().of_last[c->index] = {c->distinct_read, c->distinct_written};
      const Binding& b = d.bindings[c->index];
      if (!b.declared) continue;
      Moved& moved = counts().moved[b.kind];
      moved.loaded += c->read_bytes;
      moved.read += c->distinct_read;
      moved.written += c->distinct_written;
    }
  }
  softmetal_free(result);
}

}  // namespace fake

void fake_metal_counts(uint32_t index, uint64_t* read, uint64_t* written) {
  std::lock_guard lock(fake::counts().mutex);
  const auto found = fake::counts().of_last.find(index);
  *read = found == fake::counts().of_last.end() ? 0 : found->second.first;
  *written = found == fake::counts().of_last.end() ? 0 : found->second.second;
}

void fake_metal_moved(uint32_t kind, uint64_t* loaded, uint64_t* read, uint64_t* written) {
  std::lock_guard lock(fake::counts().mutex);
  const fake::Moved none{};
  const fake::Moved& m = kind < fake_metal_kinds ? fake::counts().moved[kind] : none;
  *loaded = m.loaded;
  *read = m.read;
  *written = m.written;
}
