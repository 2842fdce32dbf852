#include "runtime/snapshot.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/error.h"

namespace lily {

bool Snapshot::precedes(const Snapshot& longer) const {
  if (engine != longer.engine || position() > longer.position()) return false;
  size_t runs = lineage.size();
  if (runs && lineage.back().first == position()) --runs;  // it has not got anywhere
  return runs <= longer.lineage.size() &&
         std::equal(lineage.begin(), lineage.begin() + runs, longer.lineage.begin()) &&
         (runs == longer.lineage.size() || longer.lineage[runs].first >= position());
}

Snapshot Snapshot::sharing(const Snapshot& longer) const {
  if (!precedes(longer))
    throw ArgumentError("snapshot: expected one that the longer sequence went through");
  Snapshot copy = *this;
  copy.kv = longer.kv;
  return copy;
}

Snapshot Snapshot::trimmed() const {
  Snapshot copy = *this;
  copy.kv = kv.trimmed(position());
  return copy;
}

void Snapshot::visit(const KvCache::Visit& visit) const {
  kv.visit(position(), visit);
  visit({state->data, state->bytes});
  visit({ring->data, ring->bytes});
  if (logits) visit({logits->data, logits->bytes});
}

size_t Snapshot::payload_bytes(const Engine& engine, uint32_t tokens, bool logits) {
  const Config& c = engine.config();
  const size_t n = c.n_delta_layers();
  return tokens * engine.kv_shape().position_bytes() + std::max<size_t>(n * engine.state_bytes(), 4) +
         std::max<size_t>(n * engine.ring_bytes(), 4) + (logits ? c.vocab_size * sizeof(float) : 0);
}

Snapshot Snapshot::build(std::shared_ptr<Engine> engine, Place at, bool with_logits,
                         const KvCache::Visit& fill) {
  engine->check_process();
  const Config& c = engine->config();
  const size_t n = at.tokens.size(), most = engine->memory().largest_context();
  if (n > most)
    throw ContextError("tokens: " + std::to_string(n) + ", expected at most " +
                       std::to_string(most) + ", which is what fits in memory");
  for (size_t i = 0; i < n; ++i)
    if (at.tokens[i] >= c.vocab_size)
      throw ArgumentError("tokens[" + std::to_string(i) + "]: " + std::to_string(at.tokens[i]) +
                          ", expected below " + std::to_string(c.vocab_size));
  if (at.pending && *at.pending >= c.n_tokens)
    throw ArgumentError("pending: " + std::to_string(*at.pending) + ", expected below " +
                        std::to_string(c.n_tokens));
  for (auto [name, length] :
       {std::pair{"prompt_length", at.prompt_length}, {"exact_length", at.exact_length}})
    if (length > n)
      throw ArgumentError(std::string(name) + ": " + std::to_string(length) +
                          ", expected at most " + std::to_string(n));
  if (with_logits && n == 0)
    throw ArgumentError("logits: found some before the first token, expected none");

  Device& device = engine->device();
  const auto allocate = [&](size_t bytes, const char* label) {
    return device.allocate(std::max<size_t>(bytes, 4), label);
  };
  KvCache kv(device, engine->kv_shape());
  kv.make_room(0, static_cast<uint32_t>(n), static_cast<uint32_t>(n));
  kv.claim(0, static_cast<uint32_t>(n));
  Snapshot made{engine,
                std::move(kv),
                allocate(c.n_delta_layers() * engine->state_bytes(), "snapshot"),
                allocate(c.n_delta_layers() * engine->ring_bytes(), "snapshot"),
                with_logits ? allocate(c.vocab_size * sizeof(float), "snapshot") : nullptr,
                std::move(at),
                {{0, new_run()}}};
  made.visit(fill);
  return made;
}

uint64_t new_run() {
  static std::atomic<uint64_t> runs{0};
  return ++runs;
}

}  // namespace lily
