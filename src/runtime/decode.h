// The double-buffered decode loop.
//
// Step 0 draws a token from the session's logits; step i consumes the token that step i-1 drew and
// draws the next. Tokens go from one step to the next on the device, through two token slots and
// the residual, so the host commits step i+1 before it knows what step i drew and learns each token
// one step late:
//
//   next() → commits s+1 (first call: 0 and 1), waits for s while s+1 runs, returns its token
//
// So at most two steps are in flight and at most one has consumed a token too many. stop() takes
// that one back: the recurrent state by parity, the conv ring and the KV cache by position.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "runtime/session.h"

namespace lily {

class Decoder {
 public:
  Decoder(Session&, const Draw&, bool penalties, uint32_t max_tokens);
  ~Decoder();

  std::optional<uint32_t> next();
  void stop();

 private:
  struct Flight {
    uint32_t index;
    std::unique_ptr<CommandBuffer> commands;
  };

  bool by_host() const;  // whether the host hands each token to the next step
  bool may_commit() const;
  void commit();
  void make_room(uint32_t position);
  uint32_t wait_oldest();

  Session& s_;
  Draw draw_;
  bool penalties_;
  PlanKind next_;        // kind of every step but the first
  uint32_t start_;       // session position before step 1
  uint64_t most_;        // steps that may be committed
  uint32_t in_flight_;   // at most so many at a time
  uint32_t committed_ = 0, returned_ = 0;
  uint32_t last_ = 0;    // token of step returned_ - 1
  std::deque<Flight> flights_;
};

}  // namespace lily
