#include "detector.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace softmetal {

namespace {

// `who` of a Past, beside a lane below max_lanes.
constexpr uint16_t lane_bits = 0x3ff;
constexpr uint16_t simdgroup = 0x0400;  // several lanes of the simdgroup in the low bits
constexpr uint16_t many = 0x0800;       // lanes of several simdgroups
constexpr uint16_t earlier = 0x1000;    // and lanes of earlier threadgroups
constexpr uint16_t settled = 0x2000;    // a race that was reported: ordered before everything
constexpr uint16_t atomically = 0x8000;

// `state` of a byte.
constexpr uint8_t was_read = 1, was_written = 2, undefined = 4;

constexpr uint64_t gap = 128 << 20;  // between regions, of address space only
constexpr uint64_t page = 4096;

bool is_power_of_two(uint64_t n) { return n && (n & (n - 1)) == 0; }

// Calls `body` for each byte of a range that has the mark.
template <class Body>
void each_marked(const Zeroed<uint8_t>& state, uint64_t begin, uint64_t bytes, uint8_t mark,
                 Body body) {
  for (uint64_t k = begin; k < begin + bytes; ++k) {
    uint64_t eight = 1;
    while (k + 8 <= begin + bytes && (std::memcpy(&eight, &state[k], 8), eight == 0)) k += 8;
    if (k < begin + bytes && state[k] & mark) body(k);
  }
}

const char* verb(int kind) {
  if (kind & softmetal_atomic) return "atomic access";
  return kind & softmetal_write ? "write" : "read";
}

}  // namespace

Detector::Detector(std::vector<Slot>& slots, softmetal_Group& group, std::vector<Range> constants)
    : slots_(slots), constants_(std::move(constants)) {
  arena_.make(arena_bytes);
  device_.epoch = device_.group_began = 1;
  make_regions();
  copy_in();
  for (const Slot& slot : slots_)
    group.buffer[slot.index] = reinterpret_cast<void*>(copied(slot));
}

void Detector::make_regions() {
  struct Extent {
    uintptr_t begin, end;
    uint32_t slot;
  };
  std::vector<Extent> extents;
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    const auto base = reinterpret_cast<uintptr_t>(slots_[i].base);
    const Range &r = slots_[i].reads, &w = slots_[i].writes;
    uint64_t begin = std::min(r.bytes ? r.offset : UINT64_MAX, w.bytes ? w.offset : UINT64_MAX);
    uint64_t end = std::max(r.bytes ? r.offset + r.bytes : 0, w.bytes ? w.offset + w.bytes : 0);
    if (begin > end) begin = end = 0;
    extents.push_back({base + begin, base + end, i});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (const Extent& e : extents) {
    const bool joins = !regions_.empty() && e.begin < e.end &&
                       e.begin < regions_.back().host + regions_.back().bytes;
    if (!joins) regions_.push_back({e.begin, 0, 0, {}, {}, {}});
    Region& region = regions_.back();
    region.bytes = std::max(region.bytes, e.end - region.host);
    region.slots.push_back(e.slot);
  }

}

void Detector::copy_in() {
  uint64_t largest = 0;
  for (const Region& r : regions_) largest = std::max(largest, r.bytes);
  window_bits_ = static_cast<uint32_t>(std::bit_width(largest + page + gap));
  space_ = Zeroed<char>(std::max<size_t>(regions_.size(), 1) << window_bits_);
  uintptr_t window = reinterpret_cast<uintptr_t>(space_.data());
  for (Region& r : regions_) {
    r.copy = window + gap / 2 + r.host % page;  // as aligned as it was
    window += uintptr_t{1} << window_bits_;
    std::memcpy(reinterpret_cast<void*>(r.copy), reinterpret_cast<void*>(r.host), r.bytes);
    r.state = Zeroed<uint8_t>(r.bytes);
    for (uint32_t i : r.slots) {
      const Slot& slot = slots_[i];
      if (slot.writes.bytes && !r.shadow.cells) r.shadow.make(r.bytes + page);
      // Another slot may cover bytes that this one says are undefined: they are.
      const uint64_t shift = reinterpret_cast<uintptr_t>(slot.base) - r.host;
      for (uint64_t k = 0; slot.defined && k < slot.defined_bytes; ++k)
        if (!slot.defined[k] && shift + k < r.bytes) r.state[shift + k] = undefined;
    }
  }
}

Detector::Region* Detector::region_near(uintptr_t address) {
  const uintptr_t index = (address - reinterpret_cast<uintptr_t>(space_.data())) >> window_bits_;
  return index < regions_.size() ? &regions_[index] : nullptr;
}

uintptr_t Detector::copied(const Slot& slot) const {
  for (const Region& r : regions_)
    for (uint32_t i : r.slots)
      if (&slots_[i] == &slot) return r.copy + (reinterpret_cast<uintptr_t>(slot.base) - r.host);
  return 0;
}

void Detector::finish() {
  for (Region& r : regions_) {
    each_marked(r.state, 0, r.bytes, was_written, [&](uint64_t k) {
      reinterpret_cast<char*>(r.host)[k] = reinterpret_cast<const char*>(r.copy)[k];
    });
    for (uint32_t i : r.slots) {
      Slot& slot = slots_[i];
      const uint64_t shift = reinterpret_cast<uintptr_t>(slot.base) - r.host;
      each_marked(r.state, shift + slot.reads.offset, slot.reads.bytes, was_read,
                  [&](uint64_t) { slot.distinct_read += 1; });
      each_marked(r.state, shift + slot.writes.offset, slot.writes.bytes, was_written,
                  [&](uint64_t k) {
                    slot.distinct_written += 1;
                    if (slot.defined && k - shift < slot.defined_bytes) slot.defined[k - shift] = 1;
                  });
    }
  }
}

void Detector::begin_group(const uint32_t (&)[3]) {
  for (Clock* clock : {&device_, &threadgroup_}) clock->group_began = ++clock->epoch;
}

void Detector::barrier(int flags) {
  if (flags & 1) device_.epoch += 1;
  if (flags & 2) threadgroup_.epoch += 1;
}

void Detector::simd_barrier(uint32_t group, int flags) {
  if (flags & 1) device_.turn[group] += 1;
  if (flags & 2) threadgroup_.turn[group] += 1;
}

bool Detector::access(Worker& worker, const void* address, uint64_t bytes, int kind,
                      const void* site) {
  const Access a{reinterpret_cast<uintptr_t>(address), bytes, kind, site};
  if (bytes == 0) return true;
  if (worker.stacks().contains(address)) {
    if (worker.stacks().lane(address) == worker.current()) return true;
    return refuse(worker, Kind::out_of_bounds,
                  std::string(verb(kind)) + " of another lane's variable", a);
  }
  if (bytes <= 16 && is_power_of_two(bytes) && a.address % bytes)
    return refuse(worker, Kind::misaligned,
                  std::string(verb(kind)) + " of " + std::to_string(bytes) +
                      " bytes at an address that is " + std::to_string(a.address % bytes) +
                      " past a multiple of that",
                  a);
  if (a.address - reinterpret_cast<uintptr_t>(worker.arena()) < arena_bytes)
    return access_threadgroup(worker, a);
  Region* region = region_near(a.address);
  if (region && a.address - region->copy < region->bytes) return access_device(worker, a, *region);
  for (const Range& r : constants_)
    if (r.contains(a.address, bytes) && !(kind & softmetal_write)) return true;
  return outside(worker, a);
}

bool Detector::access_device(Worker& worker, const Access& a, Region& region) {
  const uint64_t at = a.address - region.copy;
  if (at + a.bytes > region.bytes) return outside(worker, a);
  uint8_t set = 0;
  for (int one : {softmetal_read, softmetal_write}) {
    if (!(a.kind & one)) continue;
    const bool write = one == softmetal_write;
    Slot* slot = declared(region, at, a.bytes, write);
    if (!slot)
      return refuse(worker, Kind::undeclared,
                    std::string(write ? "write" : "read") + " of " + std::to_string(a.bytes) +
                        " bytes that the dispatch does not declare, " + slot_place(region, at),
                    a);
    (write ? slot->written_bytes : slot->read_bytes) += a.bytes;
    set |= write ? was_written : was_read;
  }
  uint8_t seen = 0;
  mark(&region.state[at], a.bytes, set, seen);
  if (set & was_read && seen & undefined)
    worker.report(Kind::uninitialised,
                  "read of " + std::to_string(a.bytes) + " bytes that nothing wrote, " +
                      slot_place(region, at),
                  a.site);
  if (region.shadow.cells)
    // By the address, so that words of the shadow are the kernel's words.
    order(worker, a, region.shadow, at + region.copy % 4, device_,
          [&] { return slot_place(region, at); });
  return true;
}

void Detector::mark(uint8_t* state, uint64_t bytes, uint8_t set, uint8_t& seen) {
  const auto keep = static_cast<uint8_t>(set & was_written ? ~undefined : ~0);
  uint64_t i = 0;
  for (constexpr uint32_t every = 0x01010101; i + 4 <= bytes; i += 4) {
    uint32_t word;
    std::memcpy(&word, state + i, 4);
    if (word & every * undefined) seen |= undefined;
    word = (word | every * set) & every * keep;
    std::memcpy(state + i, &word, 4);
  }
  for (; i < bytes; ++i) {
    seen |= state[i];
    state[i] = static_cast<uint8_t>((state[i] | set) & keep);
  }
}

Slot* Detector::declared(Region& region, uint64_t at, uint64_t bytes, bool write) {
  for (uint32_t i : region.slots) {
    Slot& slot = slots_[i];
    const uint64_t from = at - (reinterpret_cast<uintptr_t>(slot.base) - region.host);
    if ((write ? slot.writes : slot.reads).contains(from, bytes)) return &slot;
  }
  return nullptr;
}

bool Detector::access_threadgroup(Worker& worker, const Access& a) {
  const uint64_t at = a.address - reinterpret_cast<uintptr_t>(worker.arena());
  const auto holds = [&](const Array* array) {
    return array && at >= array->offset && at + a.bytes <= array->offset + array->bytes;
  };
  if (!holds(last_array_)) {
    last_array_ = nullptr;
    for (const auto* arrays : {&worker.task_->statics, &worker.task_->dynamics})
      for (const Array& array : *arrays)
        if (holds(&array)) last_array_ = &array;
    if (!last_array_) return outside(worker, a);
  }
  const auto where = [&] {
    return "threadgroup " + last_array_->name + " byte " + std::to_string(at - last_array_->offset);
  };
  if (a.kind & softmetal_read)
    for (uint64_t i = at; i < at + a.bytes; i += arena_.split[i / 4] ? 1 : 4 - i % 4)
      if (arena_.of(i).write.epoch < threadgroup_.group_began) {
        worker.report(
            Kind::uninitialised,
            "read of " + std::to_string(a.bytes) + " bytes that nothing wrote, " + where(), a.site);
        break;
      }
  order(worker, a, arena_, at, threadgroup_, where);
  return true;
}

// Threadgroup memory is new for each threadgroup: what was before does not count.
bool Detector::of_another_group(const Past& past, const Clock& clock) {
  if (!clock.of_all_groups || !past.epoch || past.who & settled) return false;
  return past.epoch < clock.group_began || past.who & earlier;
}

// Whether an earlier access comes before whatever `lane` does now.
bool Detector::ordered(const Past& past, const Clock& clock, uint32_t lane) {
  if (of_another_group(past, clock)) return false;
  if (past.epoch != clock.epoch || past.who & settled) return true;
  if (past.who & many) return false;
  const bool alone = !(past.who & simdgroup);
  const uint32_t low = past.who & lane_bits;
  if (alone && low == lane) return true;
  const uint32_t group = alone ? low / 32 : low;
  return group == lane / 32 && past.turn != clock.turn[group];
}

// The reads of a byte that a later write has to come after: the ones before and this one.
Detector::Past Detector::joined(const Past& read, const Past& now, const Clock& clock,
                                uint32_t lane) {
  Past both = now;
  // Atomic writes may come at any time if all reads are atomic.
  const auto all_atomic = static_cast<uint16_t>(read.who & now.who & atomically);
  if (of_another_group(read, clock)) {
    both.who = static_cast<uint16_t>(many | earlier | all_atomic);
  } else if (read.epoch == clock.epoch) {
    const bool alone = !(read.who & (simdgroup | many));
    const uint32_t low = read.who & lane_bits, group = alone ? low / 32 : low;
    if (read.who & many || group != lane / 32)
      both.who = static_cast<uint16_t>(many | all_atomic);
    else if (read.turn != now.turn)
      return now;
    else if (alone && low == lane)
      both.who = static_cast<uint16_t>(lane | all_atomic);
    else
      both.who = static_cast<uint16_t>(simdgroup | group | all_atomic);
  }
  return both;
}

// Compares an access with the past of its bytes, and makes it their past.
template <class Where>
void Detector::order(Worker& worker, const Access& a, Shadow& shadow, uint64_t at,
                     const Clock& clock, Where where) {
  const uint32_t lane = worker.current();
  const bool is_write = a.kind & softmetal_write;
  // An atomic store is not: what is left of other atomic accesses depends on when it happens.
  const bool is_atomic = a.kind & softmetal_atomic && a.kind & softmetal_read;
  const Past now{clock.epoch, static_cast<uint16_t>(lane | (is_atomic ? atomically : 0)),
                 clock.turn[lane / 32], a.site};
  const auto conflicts = [&](const Past& past) {
    return !(is_atomic && past.who & atomically) && !ordered(past, clock, lane);
  };
  bool told = false;
  for (uint64_t i = at, end = at + a.bytes; i < end;) {
    const bool whole = i % 4 == 0 && i + 4 <= end;
    if (!whole && !shadow.split[i / 4]) shadow.split_word(i);
    Cell& cell = shadow.cells[i];
    i += shadow.split[i / 4] ? 1 : 4;
    const bool on_write = conflicts(cell.write);
    if (told || on_write || (is_write && conflicts(cell.read))) {
      const Past past = on_write ? cell.write : cell.read;
      const uint32_t low = past.who & lane_bits;
      if (!told)
        worker.report(Kind::race,
                      std::string(verb(a.kind)) + " after " + (on_write ? "write" : "read") +
                          (of_another_group(past, clock) ? " by another threadgroup, "
                                                         : " without a barrier between, ") +
                          where(),
                      a.site, past.who & simdgroup ? low * 32 : low, past.site);
      // Told once: the other bytes, and later accesses, would say the same.
      told = true;
      cell = {{clock.epoch, settled, 0, a.site}, {}};
    } else if (is_write) {
      // A plain write is not forgotten for an atomic one of the same lane.
      const Past& past = cell.write;
      const bool again = past.epoch == now.epoch && past.turn == now.turn && past.who == lane;
      cell.write = now;
      if (again) cell.write.who = static_cast<uint16_t>(lane);
    } else {
      cell.read = joined(cell.read, now, clock, lane);
    }
  }
}

bool Detector::refuse(Worker& worker, Kind kind, const std::string& what, const Access& a) {
  worker.report(kind, what, a.site);
  return false;
}

// Says what the address is nearest to.
bool Detector::outside(Worker& worker, const Access& a) {
  std::string where = "far from every buffer";
  const uint64_t at = a.address - reinterpret_cast<uintptr_t>(worker.arena());
  if (at < arena_bytes) {
    const Array* nearest = nullptr;
    uint64_t least = UINT64_MAX;
    for (const auto* arrays : {&worker.task_->statics, &worker.task_->dynamics})
      for (const Array& array : *arrays) {
        const uint64_t distance =
            at < array.offset ? array.offset - at : at + a.bytes - array.offset - array.bytes;
        if (distance < least) least = distance, nearest = &array;
      }
    if (nearest)
      where = "threadgroup " + nearest->name + " byte " +
              std::to_string(static_cast<int64_t>(at) - static_cast<int64_t>(nearest->offset)) +
              " of " + std::to_string(nearest->bytes);
  } else {
    if (const Region* r = region_near(a.address)) where = slot_place(*r, a.address - r->copy);
  }
  return refuse(worker, Kind::out_of_bounds,
                std::string(verb(a.kind)) + " of " + std::to_string(a.bytes) + " bytes, " + where,
                a);
}

std::string Detector::slot_place(const Region& region, uint64_t at) const {
  // Of slots that share a region, the one with the nearest beginning.
  const Slot* best = nullptr;
  int64_t offset = 0;
  for (uint32_t i : region.slots) {
    const auto from = static_cast<int64_t>(at) -
                      (static_cast<int64_t>(reinterpret_cast<uintptr_t>(slots_[i].base)) -
                       static_cast<int64_t>(region.host));
    if (!best || std::abs(from) < std::abs(offset)) best = &slots_[i], offset = from;
  }
  if (!best) return "nowhere";
  return "buffer " + std::to_string(best->index) + " byte " + std::to_string(offset) + " (reads " +
         std::to_string(best->reads.offset) + "+" + std::to_string(best->reads.bytes) +
         ", writes " + std::to_string(best->writes.offset) + "+" +
         std::to_string(best->writes.bytes) + ")";
}

}  // namespace softmetal
