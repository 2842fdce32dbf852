// A session's state at one position, apart from any session.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "runtime/engine.h"
#include "runtime/kv_cache.h"

namespace lily {

// Which uninterrupted runs of passes made a history: where each begins, and a number that no other
// run of this process has. Histories that agree up to a position have the same bits up to there.
using Lineage = std::vector<std::pair<uint32_t, uint64_t>>;
uint64_t new_run();  // the next such number

// Where a session stands, but for the numbers themselves.
struct Place {
  std::vector<uint32_t> tokens = {};     // consumed so far
  uint32_t prompt_length = 0;            // tokens before it count as prompt for penalties
  uint32_t exact_length = 0;             // leading tokens that prefill alone consumed
  std::optional<uint32_t> pending = {};  // returned by a stream, not consumed yet
};

// A session's state at one position; restoring it into any session of the same model is exact. It
// never changes: any thread may use it.
struct Snapshot {
  std::shared_ptr<Engine> engine;
  KvCache kv;
  std::shared_ptr<Buffer> state, ring, logits;  // logits only if they were there
  Place at;
  Lineage lineage;

  uint32_t position() const { return static_cast<uint32_t>(at.tokens.size()); }
  bool exact() const { return at.exact_length == at.tokens.size(); }
  // Bytes that it shares with nobody.
  size_t bytes() const { return state->bytes + ring->bytes + (logits ? logits->bytes : 0); }
  // Whether `longer` went through this state.
  bool precedes(const Snapshot& longer) const;
  // The same state with the KV memory of one that it precedes, and with KV memory of just its size.
  Snapshot sharing(const Snapshot& longer) const;
  Snapshot trimmed() const;

  // Calls `visit` with all bytes of the numbers in turn: KV rows, state, ring, logits.
  void visit(const KvCache::Visit&) const;
  // How many those are for so many tokens.
  static size_t payload_bytes(const Engine&, uint32_t tokens, bool logits);
  // One whose bytes `fill` writes, in the order of visit().
  static Snapshot build(std::shared_ptr<Engine>, Place, bool logits, const KvCache::Visit& fill);
};

}  // namespace lily
