// What the emulator and the detector have to say about a dispatch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace softmetal {

enum class Kind : uint8_t {
  race,           // two accesses that no barrier orders
  out_of_bounds,  // outside every buffer and threadgroup array
  undeclared,     // inside a bound buffer, outside what the dispatch declared of it
  uninitialised,  // a read of what nothing wrote
  misaligned,     // an access that is not aligned to its size
  divergence,     // lanes that wait at different barriers or simdgroup functions
  early_return,   // lanes that have returned while others wait for them
  bad_lane,       // a shuffle from a lane that is not there
  launch,         // a dispatch that Metal would refuse
};

const char* name(Kind);

struct Place {
  const void* site = nullptr;  // in the kernel library
  std::string file;
  uint32_t line = 0;
};

struct Report {
  Kind kind;
  std::string what;  // one clause
  uint32_t group[3] = {};
  uint32_t lane = 0;
  Place place;
  // The other access of a race, the other place of a divergence.
  uint32_t other_lane = 0;
  Place other;
  uint64_t count = 1;  // of the same kind at the same place
  std::string text;    // all of it, after finish()
};

class Reports {
 public:
  // A kind is kept once for each place, with a count.
  void add(Report);
  bool empty() const { return all_.empty(); }
  const std::vector<Report>& all() const { return all_; }

  // Looks up the lines of all places in the library file, and writes the texts.
  void finish(const std::string& kernel, const std::string& library);

 private:
  static constexpr size_t most = 64;
  std::vector<Report> all_;
};

}  // namespace softmetal
