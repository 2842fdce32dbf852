// Command buffers: what order they promise, and running them.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "fake.h"
#include "metal.h"
#include "settings.h"

namespace fake {

namespace {

constexpr size_t most_watched = 1 << 20;  // bytes of a slot that are compared at commit and at run

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint64_t sum_of(const uint8_t* bytes, size_t length) {
  uint64_t h = 14695981039346656037u;
  for (; length >= 8; bytes += 8, length -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    h = (h ^ word) * 1099511628211u;
  }
  for (; length; ++bytes, --length) h = (h ^ *bytes) * 1099511628211u;
  return h;
}

std::vector<Access> accesses(const Dispatch& d) {
  std::vector<Access> list;
  for (const Use& use : d.uses()) {
    const Binding& b = d.bindings[use.index];
    if (!b.buffer || b.declared_bytes == 0) continue;
    const uint8_t* begin = b.buffer->memory + b.offset;
    list.push_back({begin, begin + b.declared_bytes, use.write, use.name});
  }
  return list;
}

const Access* conflict(const Access& a, const std::vector<Access>& others) {
  for (const Access& b : others)
    if ((a.write || b.write) && a.begin < b.end && b.begin < a.end) return &b;
  return nullptr;
}

void check_pair(const std::vector<Access>& first, const std::vector<Access>& second,
                const std::string& missing) {
  for (const Access& a : second)
    if (const Access* b = conflict(a, first)) {
      const char* how = !a.write    ? "written, then read"
                        : !b->write ? "read, then written"
                                    : "both write";
      report("hazard: " + b->name + " and " + a.name + " (" + how + "), " + missing);
      return;
    }
}

}  // namespace

void Queue::commit(CommandBuffer* c) {
  std::lock_guard lock(mutex_);
  if (c->committed) return report("command buffer: committed twice");
  if (c->encoding) report("command buffer: committed before endEncoding");
  c->committed = true;
  c->number = ++committed_;
  c->status = 2;
  numbers().command_buffers++;
  retain(c);

  c->after = known_done_;
  for (Fence* f : c->waits) {
    if (!f->updated) report("fence: waits for a fence that nothing has updated");
    c->after.insert(f->covers.begin(), f->covers.end());
  }
  c->after.erase(c->after.begin(), c->after.lower_bound(oldest_open()));
  for (Fence* f : c->updates) {
    f->updated = true;
    f->covers = c->after;
    f->covers.insert(c->number);
  }

  // Inputs that no work on its way writes are the host's: it must leave them until they are read.
  std::vector<Access> written;
  for (CommandBuffer* earlier : waiting_)
    for (const Step& s : earlier->steps)
      if (s.work)
        for (const Access& a : accesses(*s.work))
          if (a.write) written.push_back(a);
  for (const Step& s : c->steps) {
    if (!s.work) continue;
    for (const Binding& b : s.work->bindings)
      if (b.buffer) ++b.buffer->in_flight;
    const std::vector<Access> all = accesses(*s.work);
    for (const Access& a : all)
      if (!a.write && !conflict({a.begin, a.end, true, ""}, written) &&
          static_cast<size_t>(a.end - a.begin) <= most_watched)
        c->seen.push_back({a.begin, static_cast<size_t>(a.end - a.begin),
                           sum_of(a.begin, static_cast<size_t>(a.end - a.begin)), a.name});
    for (const Access& a : all)
      if (a.write) written.push_back(a);
  }
  waiting_.push_back(c);
}

void Queue::run_until(CommandBuffer* c) {
  std::lock_guard lock(mutex_);
  if (!c->committed) return report("command buffer: waits for one that was not committed");
  while (!c->done) {
    CommandBuffer* next = waiting_.front();
    run(*next);
    waiting_.pop_front();
    release(next);
  }
  // What it came after is done as well.
  known_done_.insert(c->after.begin(), c->after.end());
  known_done_.insert(c->number);
  while (!past_.empty() && known_done_.count(past_.front().number)) past_.pop_front();
  known_done_.erase(known_done_.begin(), known_done_.lower_bound(oldest_open()));
}

// The first whose accesses still matter.
uint64_t Queue::oldest_open() const {
  if (!past_.empty()) return past_.front().number;
  return waiting_.empty() ? committed_ : waiting_.front()->number;
}

void Queue::check_order(const CommandBuffer& c) {
  Past now{c.number, {}};
  for (const Step& s : c.steps)
    if (s.work)
      for (Access& a : accesses(*s.work)) now.accesses.push_back(std::move(a));
  for (const Past& p : past_)
    if (!c.after.count(p.number))
      check_pair(p.accesses, now.accesses, "and no fence or wait between their command buffers");
  past_.push_back(std::move(now));
}

void Queue::run(CommandBuffer& c) {
  const uint32_t before = fake_metal_report_count();
  std::string failure;
  int64_t code = 1;
  c.start = now_s();
  for (const CommandBuffer::Seen& s : c.seen)
    if (sum_of(s.bytes, s.length) != s.sum)
      report("host: changed what " + s.name + " reads while the command buffer was in flight");
  check_order(c);
  if (refuses_) {
    failure = "Ignored (for causing prior/excessive GPU errors)";
    code = 4;
  } else if (fails(settings().fail_command_buffer)) {
    failure = "made to fail";
    code = settings().fail_code;
    refuses_ = code == 4 || code == 11;
  } else {
    random_.seed(settings().seed * 1000003 + c.number);
    std::vector<Dispatch*> group;
    for (const Step& s : c.steps) {
      if (s.work) group.push_back(s.work.get());
      if (!s.work) run_group(c, group);
    }
    run_group(c, group);
  }
  for (const Step& s : c.steps)
    if (s.work)
      for (const Binding& b : s.work->bindings)
        if (b.buffer) --b.buffer->in_flight;
  for (uint32_t i = before; i < fake_metal_report_count(); ++i)
    failure.append(failure.empty() ? "" : "\n").append(fake_metal_report(i));
  if (!failure.empty()) c.error = new Error("MTLCommandBufferErrorDomain", code, failure);
  c.status = failure.empty() ? 4 : 5;
  c.end = now_s();
  c.done = true;
}

// Dispatches between two barriers, in any order.
void Queue::run_group(CommandBuffer&, std::vector<Dispatch*>& group) {
  for (size_t i = 0; i < group.size(); ++i)
    for (size_t j = i + 1; j < group.size(); ++j)
      check_pair(accesses(*group[i]), accesses(*group[j]), "and no barrier between them");
  std::shuffle(group.begin(), group.end(), random_);
  for (Dispatch* d : group) run_dispatch(*d);
  group.clear();
}

}  // namespace fake
