// Checks every access of a detecting library: bounds, order, initialisation, alignment; and counts.
//
// Device memory. The dispatch declares which bytes of each slot it reads and writes. Slots that
// overlap share a *region*; each region is copied to a place of its own, far from all others, so
// that an access beyond it meets nothing. What was written is copied back at the end.
//
// Order. Time is counted in epochs: a barrier that covers a memory starts a new one for it. Two
// accesses of one byte, one of them a write, are ordered if they are of one lane, or of one
// threadgroup in different epochs, or of one simdgroup with a simdgroup_barrier between them.
// Across threadgroups nothing is ordered. Atomic accesses do not conflict with each other, except
// with an atomic store: what it leaves depends on the order.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"
#include "report.h"

namespace softmetal {

// Zeros that take no memory until they are touched. (calloc clears what it was given before.)
template <class T>
class Zeroed {
 public:
  Zeroed() = default;
  explicit Zeroed(uint64_t n) : bytes_(n * sizeof(T)) {
    void* p = n ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                : nullptr;
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(p);
  }
  Zeroed(Zeroed&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Zeroed& operator=(Zeroed&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Zeroed() {
    if (data_) munmap(data_, bytes_);
  }
  explicit operator bool() const { return data_ != nullptr; }
  T& operator[](uint64_t i) const { return data_[i]; }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  uint64_t bytes_ = 0;
};

struct Range {
  uint64_t offset = 0, bytes = 0;
  bool contains(uint64_t at, uint64_t n) const {
    return at >= offset && at + n <= offset + bytes;
  }
};

struct Slot {
  uint32_t index;
  char* base;
  Range reads, writes;  // relative to base
  // A byte for each byte of the slot from base on, 0 where nothing was written yet; or null.
  uint8_t* defined = nullptr;
  uint64_t defined_bytes = 0;
  // Counted: requested by accesses, and different bytes among them.
  uint64_t read_bytes = 0, written_bytes = 0, distinct_read = 0, distinct_written = 0;
};

class Detector {
 public:
  static constexpr size_t arena_bytes = 512 << 10;  // threadgroup memory with its gaps
  static constexpr size_t arena_gap = 8 << 10;

  // `constants` is the library's own read-only data.
  Detector(std::vector<Slot>& slots, softmetal_Group& group, std::vector<Range> constants);
  Detector(const Detector&) = delete;
  Detector& operator=(const Detector&) = delete;

  // Copies what was written back to the slots and counts different bytes.
  void finish();

  void begin_group(const uint32_t (&group)[3]);
  void barrier(int flags);
  void simd_barrier(uint32_t simdgroup, int flags);

  // False: the access must not happen.
  bool access(Worker&, const void* address, uint64_t bytes, int kind, const void* site);

 private:
  // The last accesses of a byte. `who` is a lane, or one of the codes in detector.cpp.
  struct Past {
    uint32_t epoch;      // 0: none
    uint16_t who, turn;  // turn: the simdgroup's, see simd_barrier
    const void* site;
  };
  struct Cell {
    Past write, read;
  };
  // The past of some memory. Most accesses are of whole words, so that one cell does for four
  // bytes until something smaller is accessed among them.
  struct Shadow {
    Zeroed<Cell> cells;     // of each byte; of a whole word, the first
    Zeroed<uint8_t> split;  // of each word: its bytes have cells of their own
    void make(uint64_t bytes) {
      cells = Zeroed<Cell>(bytes + 4);
      split = Zeroed<uint8_t>(bytes / 4 + 1);
    }
    const Cell& of(uint64_t at) const { return cells[split[at / 4] ? at : at / 4 * 4]; }
    void split_word(uint64_t at) {
      Cell* word = &cells[at / 4 * 4];
      word[1] = word[2] = word[3] = word[0];
      split[at / 4] = 1;
    }
  };
  struct Region {
    uintptr_t host, copy;
    uint64_t bytes;
    std::vector<uint32_t> slots;  // indices into slots_
    Zeroed<uint8_t> state;        // flags for each byte
    Shadow shadow;                // empty if nothing may be written
  };
  // One memory's clock.
  struct Clock {
    bool of_all_groups;  // device memory, else a threadgroup's own
    uint32_t epoch = 0, group_began = 0;
    uint16_t turn[max_lanes / 32] = {};
  };
  struct Access {
    uintptr_t address;
    uint64_t bytes;
    int kind;
    const void* site;
  };

  void make_regions();
  void copy_in();
  Region* region_near(uintptr_t address);
  uintptr_t copied(const Slot&) const;
  bool access_device(Worker&, const Access&, Region&);
  bool access_threadgroup(Worker&, const Access&);
  Slot* declared(Region&, uint64_t at, uint64_t bytes, bool write);
  template <class Where>
  void order(Worker&, const Access&, Shadow&, uint64_t at, const Clock&, Where);
  static void mark(uint8_t* state, uint64_t bytes, uint8_t set, uint8_t& seen);
  static bool of_another_group(const Past&, const Clock&);
  static bool ordered(const Past&, const Clock&, uint32_t lane);
  static Past joined(const Past& read, const Past& now, const Clock&, uint32_t lane);
  bool refuse(Worker&, Kind, const std::string& what, const Access&);
  bool outside(Worker&, const Access&);
  std::string slot_place(const Region&, uint64_t at) const;

  std::vector<Slot>& slots_;
  std::vector<Region> regions_;
  uint32_t window_bits_ = 0;  // each region lies in a window of address space of this size
  std::vector<Range> constants_;
  Clock device_{.of_all_groups = true}, threadgroup_{.of_all_groups = false};
  Shadow arena_;
  const Array* last_array_ = nullptr;
  Zeroed<char> space_;  // of all copies
};

}  // namespace softmetal
