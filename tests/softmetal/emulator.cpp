#include "emulator.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "detector.h"

namespace softmetal {

namespace {

// The worker whose lanes run on this thread. Initial-exec: read at every call of device code.
__attribute__((tls_model("initial-exec"))) thread_local Worker* worker = nullptr;

uint32_t highest(uint32_t bits) { return 31 - static_cast<uint32_t>(std::countl_zero(bits)); }
uint32_t lowest(uint32_t bits) { return static_cast<uint32_t>(std::countr_zero(bits)); }
uint32_t first_bits(uint32_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }

}  // namespace

Worker::Worker()
    : arena_(new char[Detector::arena_bytes]),
      lanes_(max_lanes),
      simdgroups_(max_lanes / 32),
      contexts_(max_lanes) {}

Worker::~Worker() = default;

Worker& Worker::running() { return *worker; }

const softmetal_Runtime& Worker::runtime() {
  static const softmetal_Runtime table = {
      .barrier = [](int flags, const void* site) { running().barrier(flags, site); },
      .simd_barrier =
          [](int flags, const void* site) {
            Worker& w = running();
            // Before the lanes meet: none of them goes on before the last one is here.
            Simdgroup& s = w.simdgroups_[w.current_ / 32];
            const bool last = (s.waiting | s.done | 1u << w.current_ % 32) == s.present;
            if (last && w.detector_) w.detector_->simd_barrier(w.current_ / 32, flags);
            w.meet({}, nullptr, false, site);
          },
      .shuffle =
          [](softmetal_Bits value, unsigned source, const void* site) {
            Worker& w = running();
            const Simdgroup& s = w.simdgroups_[w.current_ / 32];
            if (source > 31 || !(s.present >> source & 1)) {
              w.report(Kind::bad_lane, "a value from lane " + std::to_string(source), site);
              source = w.current_ % 32;
            }
            return w.meet(value, nullptr, false, site)[source];
          },
      .combine =
          [](softmetal_Bits value, softmetal_Combine combine, int full, const void* site) {
            Worker& w = running();
            return w.meet(value, combine, full != 0, site)[w.current_ % 32];
          },
      .threadgroup_array = [](unsigned id, unsigned bytes, const char* name) -> void* {
        Worker& w = running();
        if (w.probing_) {
          w.probing_->push_back({name, 0, bytes});
          return w.arena_.get();
        }
        return w.arena_.get() + w.task_->statics[id].offset;
      },
      .arrays_done =
          [] {
            Worker& w = running();
            if (w.probing_) w.leave();
          },
      .lane = [] { return running().current_ % 32; },
      .access =
          [](const volatile void* address, unsigned long bytes, int kind, const void* site) {
            // Setters of function constants run outside of a kernel.
            if (!worker || !worker->detector_) return;
            if (!worker->detector_->access(*worker, const_cast<const void*>(address), bytes, kind,
                                           site))
              worker->give_up();
          },
  };
  return table;
}

void Worker::start(const Task& task, const uint32_t (&group)[3]) {
  task_ = &task;
  group_ = task.group;
  std::copy(group, group + 3, group_.group);
  for (size_t i = 0; i < task.dynamics.size(); ++i)
    group_.shared[task.dynamic_index[i]] = arena_.get() + task.dynamics[i].offset;
  // Not a number, in whatever type it is read.
  std::memset(arena_.get(), 0xff, task.arena_bytes);

  const uint32_t(&t)[3] = group_.threads;
  n_lanes_ = t[0] * t[1] * t[2];
  n_simdgroups_ = (n_lanes_ + 31) / 32;
  ready_groups_ = at_barrier_ = done_ = 0;
  barrier_site_ = nullptr;
  stopped_ = false;
  for (uint32_t i = 0; i < n_simdgroups_; ++i) {
    Simdgroup& s = simdgroups_[i];
    s.present = first_bits(n_lanes_ - 32 * i);
    s.ready = s.waiting = s.at_barrier = s.done = s.phase = 0;
    make_ready(i, s.present);
  }
  for (uint32_t i = 0; i < n_lanes_; ++i) {
    lanes_[i] = {&group_, {i % t[0], i / t[0] % t[1], i / (t[0] * t[1])}, i};
    contexts_[i] = stacks_.prepare(i, fiber);
  }
}

bool Worker::run(const Task& task, const uint32_t (&group)[3], Reports& reports,
                 Detector* detector) {
  reports_ = &reports;
  detector_ = detector;
  start(task, group);
  if (detector) detector->begin_group(group);
  const uint32_t serial = group[0] + group[1] * 1009 + group[2] * 100003;
  random_.seed(static_cast<uint32_t>(task.seed * 7919 + serial + 1));
  uint32_t first = 0;
  if (task.order == Order::reversed) first = n_lanes_ - 1;
  if (task.order == Order::random) first = static_cast<uint32_t>(random_() % n_lanes_);
  if (task.order == Order::ahead)
    first = static_cast<uint32_t>((task.seed + serial) % n_simdgroups_) * 32;
  worker = this;
  current_ = first;
  claim(first);
  softmetal_switch(&host_, contexts_[first]);
  worker = nullptr;
  detector_ = nullptr;
  return !stopped_;
}

std::vector<Array> Worker::probe(void (*entry)(const softmetal_Lane*)) {
  // The compiler may read a reference's object early: there has to be one.
  static char nothing[64 << 10];
  Task task{.entry = entry, .group = {}, .statics = {}, .dynamics = {}, .dynamic_index = {}};
  for (int i = 0; i < softmetal_buffers; ++i)
    task.group.buffer[i] = task.group.shared[i] = nothing;
  std::fill_n(task.group.groups, 3, 1);
  std::fill_n(task.group.threads, 3, 1);
  std::vector<Array> found;
  Reports none;
  probing_ = &found;
  run(task, {0, 0, 0}, none);
  probing_ = nullptr;
  return found;
}

void Worker::fiber() {
  Worker& w = running();
  w.task_->entry(&w.lanes_[w.current_]);
  w.lane_done();
  w.leave();
}

// Back to run(); the lanes that have not ended are forgotten.
void Worker::leave() {
  softmetal_switch(&contexts_[current_], host_);
  std::abort();
}

void Worker::give_up() {
  stopped_ = true;
  leave();
}

void Worker::make_ready(uint32_t simdgroup, uint32_t lanes) {
  simdgroups_[simdgroup].ready |= lanes;
  if (lanes) ready_groups_ |= 1u << simdgroup;
}

uint32_t Worker::next() const {
  if (!ready_groups_) return max_lanes;
  const uint32_t group = current_ / 32, lane = current_ % 32;
  const uint32_t own = simdgroups_[group].ready;
  const uint32_t above = lane == 31 ? 0 : ~0u << (lane + 1), below = first_bits(lane);
  const uint32_t groups_above = group == 31 ? 0 : ready_groups_ & ~0u << (group + 1);
  const uint32_t groups_below = ready_groups_ & first_bits(group);
  switch (task_->order) {
    case Order::in_turn: {
      if (own & above) return 32 * group + lowest(own & above);
      const uint32_t g = lowest(groups_above ? groups_above : ready_groups_);
      return 32 * g + lowest(simdgroups_[g].ready);
    }
    case Order::reversed: {
      if (own & below) return 32 * group + highest(own & below);
      const uint32_t g = highest(groups_below ? groups_below : ready_groups_);
      return 32 * g + highest(simdgroups_[g].ready);
    }
    case Order::random: {
      const auto turn = static_cast<uint32_t>(random_());
      const int by = static_cast<int>(turn >> 8 & 31);
      const uint32_t g =
          (lowest(std::rotr(ready_groups_, by)) + static_cast<uint32_t>(by)) & 31;
      const int lane_by = static_cast<int>(turn >> 16 & 31);
      const uint32_t l =
          (lowest(std::rotr(simdgroups_[g].ready, lane_by)) + static_cast<uint32_t>(lane_by)) & 31;
      return 32 * g + l;
    }
    case Order::ahead: {
      if (own) return 32 * group + lowest(own & above ? own & above : own);
      const uint32_t g = lowest(groups_above ? groups_above : ready_groups_);
      return 32 * g + lowest(simdgroups_[g].ready);
    }
  }
  return max_lanes;
}

// The lane runs now: it is not one of those that could.
void Worker::claim(uint32_t lane) {
  Simdgroup& s = simdgroups_[lane / 32];
  s.ready &= ~(1u << lane % 32);
  if (!s.ready) ready_groups_ &= ~(1u << lane / 32);
}

void Worker::switch_to(uint32_t lane) {
  claim(lane);
  const uint32_t from = current_;
  current_ = lane;
  if (lane != from) softmetal_switch(&contexts_[from], contexts_[lane]);
}

void Worker::wait() {
  const uint32_t lane = next();
  if (lane == max_lanes) {
    report_deadlock();
    give_up();
  }
  switch_to(lane);
}

softmetal_Bits* Worker::meet(softmetal_Bits value, softmetal_Combine combine, bool full,
                             const void* site) {
  Simdgroup& s = simdgroups_[current_ / 32];
  const uint32_t phase = s.phase & 1, bit = 1u << current_ % 32;
  s.in[phase][current_ % 32] = value;
  if (!s.waiting) {
    s.site = site;
    s.first = current_;
  } else if (s.site != site) {
    report(Kind::divergence, "lanes of a simdgroup in different simdgroup functions", site, s.first,
           s.site);
    give_up();
  }
  softmetal_Bits* result = combine ? s.out[phase] : s.in[phase];
  if ((s.waiting | s.done | bit) != s.present) {
    s.waiting |= bit;
    wait();
    return result;
  }
  if (s.done) {
    report(Kind::early_return, "a simdgroup function after lanes of the simdgroup have returned",
           site);
    give_up();
  }
  if (full && s.present != ~0u) {
    report(Kind::bad_lane, "a matrix product in a simdgroup of fewer than 32 lanes", site);
    give_up();
  }
  if (combine) combine(s.in[phase], s.out[phase], s.present);
  s.phase += 1;
  const uint32_t others = s.waiting;
  s.waiting = 0;
  make_ready(current_ / 32, others);
  if (task_->order == Order::random) {
    make_ready(current_ / 32, bit);
    wait();
  }
  return result;
}

void Worker::barrier(int flags, const void* site) {
  if (!at_barrier_) {
    barrier_site_ = site;
    barrier_first_ = current_;
  } else if (barrier_site_ != site) {
    report(Kind::divergence, "lanes of a threadgroup at different barriers", site, barrier_first_,
           barrier_site_);
    give_up();
  }
  simdgroups_[current_ / 32].at_barrier |= 1u << current_ % 32;
  at_barrier_ += 1;
  if (at_barrier_ + done_ < n_lanes_) {
    wait();
    return;
  }
  if (done_) {
    report(Kind::early_return, "a barrier after lanes of the threadgroup have returned", site);
    give_up();
  }
  if (detector_) detector_->barrier(flags);
  at_barrier_ = 0;
  for (uint32_t g = 0; g < n_simdgroups_; ++g) {
    make_ready(g, simdgroups_[g].at_barrier);
    simdgroups_[g].at_barrier = 0;
  }
  if (task_->order == Order::in_turn || task_->order == Order::ahead)
    claim(current_);
  else
    wait();
}

void Worker::lane_done() {
  Simdgroup& s = simdgroups_[current_ / 32];
  s.done |= 1u << current_ % 32;
  done_ += 1;
  if (done_ == n_lanes_) return;
  const bool last_at_barrier = at_barrier_ && at_barrier_ + done_ == n_lanes_;
  const bool last_in_simdgroup = s.waiting && (s.waiting | s.done) == s.present;
  if (last_at_barrier || last_in_simdgroup) {
    report(Kind::early_return,
           last_at_barrier ? "a barrier that lanes of the threadgroup do not reach"
                           : "a simdgroup function that lanes of the simdgroup do not reach",
           last_at_barrier ? barrier_site_ : s.site);
    stopped_ = true;
    return;
  }
  wait();
}

void Worker::report(Kind kind, std::string what, const void* site, uint32_t other_lane,
                    const void* other_site) {
  Report r{};
  r.kind = kind;
  r.what = std::move(what);
  r.lane = current_;
  std::copy(group_.group, group_.group + 3, r.group);
  r.place.site = site;
  r.other_lane = other_lane;
  r.other.site = other_site;
  reports_->add(std::move(r));
}

void Worker::report_deadlock() {
  // Some lanes of a simdgroup in a collective, others at a barrier.
  for (uint32_t g = 0; g < n_simdgroups_; ++g) {
    const Simdgroup& s = simdgroups_[g];
    if (!s.waiting) continue;
    const uint32_t missing = s.present & ~s.waiting & ~s.done;
    report(Kind::divergence,
           "a simdgroup function that " + std::to_string(std::popcount(missing)) +
               " lanes of the simdgroup do not reach",
           s.site, barrier_first_, s.at_barrier ? barrier_site_ : nullptr);
    return;
  }
  report(Kind::divergence, "lanes wait for each other", barrier_site_);
}

}  // namespace softmetal
