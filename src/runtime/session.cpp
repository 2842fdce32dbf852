#include "runtime/session.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "runtime/decode.h"

namespace lily {

Session::Session(std::shared_ptr<Engine> engine, uint32_t context)
    : engine_(std::move(engine)),
      context_(context),
      kv_(engine_->device(), engine_->kv_shape()),
      bindings_(engine_->config().n_layers()) {
  engine_->check_process();
  if (context == 0) throw ArgumentError("context: expected at least 1 token, found 0");
  const MemoryNeed& need = engine_->memory();
  if (context > need.largest_context())
    throw ContextError("context: " + std::to_string(context) + " tokens, expected at most " +
                       std::to_string(need.largest_context()) + ", which is what fits in memory");
  Device& device = engine_->device();
  const Config& c = engine_->config();
  auto allocate = [&](size_t bytes, const char* label) {
    return device.allocate(std::max<size_t>(bytes, 4), label);
  };
  for (auto& state : states_) state = allocate(c.n_delta_layers() * engine_->state_bytes(), "state");
  ring_ = allocate(c.n_delta_layers() * engine_->ring_bytes(), "conv ring");
  tokens_buffer_ = allocate(engine_->options().chunk * sizeof(uint32_t), "tokens");
  slots_ = allocate(2 * sizeof(uint32_t), "token slots");
  residual_ = allocate(c.hidden_size * sizeof(float), "residual");
  logits_ = allocate(c.vocab_size * sizeof(float), "logits");
  bias_ = allocate(8, "logit bias");
  begin_run();
}

Session::~Session() = default;

// A new run of passes starts at the present position.
void Session::begin_run() {
  if (!lineage_.empty() && lineage_.back().first == position()) lineage_.pop_back();
  lineage_.emplace_back(position(), new_run());
}

// ---------------------------------------------------------------------------------------------
// Checks
// ---------------------------------------------------------------------------------------------

Turn::Turn(std::atomic<std::thread::id>& user) : user_(user) {
  const std::thread::id own = std::this_thread::get_id();
  if (user == own) return;
  std::thread::id nobody;
  ends_ = user.compare_exchange_strong(nobody, own);
  if (!ends_) throw ArgumentError("session: another thread uses it, expected one at a time");
}

void Session::check_usable() {
  engine_->check_process();
  if (poisoned_)
    throw DeviceError(
        "the session's state was lost in a device failure\nhint: reset it, or restore a snapshot");
}

void Session::check_tokens(std::span<const uint32_t> tokens) const {
  if (tokens.empty()) throw ArgumentError("tokens: expected at least one, found none");
  const uint32_t v = engine_->config().vocab_size;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] >= v)
      throw ArgumentError("tokens[" + std::to_string(i) + "]: " + std::to_string(tokens[i]) +
                          ", expected below " + std::to_string(v));
}

void Session::check_room(size_t n) const {
  if (tokens_.size() + n > context_)
    throw ContextError(std::to_string(tokens_.size()) + " + " + std::to_string(n) +
                       " tokens, expected at most " + std::to_string(context_) +
                       "\nhint: open the session with a larger context");
}

// ---------------------------------------------------------------------------------------------
// Passes
// ---------------------------------------------------------------------------------------------

Step Session::step_at(uint32_t position, uint32_t rows) const {
  Step step = lily::step_at(engine_->tuning(), position, rows);
  step.capacity = kv_.capacity();
  return step;
}

PlanOptions Session::decode_plan(PlanKind kind, uint32_t position, bool penalties) const {
  return {.kind = kind,
          .single_block = position + 1 <= engine_->tuning().single_block,
          .penalties = penalties};
}

PlanOptions Session::prefill_plan(PlanKind kind, uint32_t rows) const {
  const Config& c = engine_->config();
  PlanOptions options{.kind = kind};
  if (const auto choose = engine_->device().tuning().tile_rows)
    options.tile_rows = choose(rows * c.num_experts_per_tok, c.num_experts);
  return options;
}

void Session::bind(Buffer& tokens, Buffer& logits) {
  const Config& c = engine_->config();
  const size_t state = engine_->state_bytes(), ring = engine_->ring_bytes();
  for (uint32_t n = 0; n < c.n_delta_layers(); ++n) {
    bindings_.at(Role::state_in, n) = {states_[parity_].get(), n * state, state};
    bindings_.at(Role::state_out, n) = {states_[parity_ ^ 1].get(), n * state, state};
    bindings_.at(Role::ring, n) = {ring_.get(), n * ring, ring};
  }
  for (uint32_t n = 0; n < c.n_attention_layers() && kv_.capacity(); ++n) {
    bindings_.at(Role::keys, n) = kv_.keys(n);
    bindings_.at(Role::values, n) = kv_.values(n);
  }
  auto whole = [&](Role role, Buffer& b) { bindings_.at(role) = {&b, 0, b.bytes}; };
  whole(Role::tokens, tokens);
  whole(Role::residual, *residual_);
  whole(Role::logits, logits);
  const size_t half = bias_->bytes / 2;
  bindings_.at(Role::bias_ids) = {bias_.get(), 0, half};
  bindings_.at(Role::bias) = {bias_.get(), half, half};
  if (counts_) whole(Role::counts, *counts_);
}

void Session::run(const Plan& plan, const Step& step) {
  try {
    wait(*plan.replay(engine_->device(), bindings_, step));
  } catch (...) {
    poisoned_ = true;
    throw;
  }
}

void Session::wait(CommandBuffer& commands) {
  const Timing timing = commands.wait();
  device_s_ += timing.end_s - timing.start_s;
}

// A number that is not finite means that the state behind it is lost as well.
void Session::take_logits() {
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(logits_->data);
  uint32_t bad = 0;
  for (uint32_t i = 0; i < engine_->config().vocab_size; ++i)
    bad |= (bits[i] & 0x7f800000u) == 0x7f800000u;
  poisoned_ = bad;
  if (bad) throw DeviceError("the logits are not finite after token " + std::to_string(position()));
  has_logits_ = true;
}

// What a pass may be refused, memory above all, is refused here, before anything changes: `steps`
// decode steps, then `n` tokens in chunks.
void Session::prepare(uint32_t steps, uint32_t n, bool scores) {
  const size_t v = engine_->config().vocab_size;
  if (scores && !scores_)
    scores_ = engine_->device().allocate(most_rows(scores) * v * sizeof(float), "scores");
  for (uint32_t i = 0; i < steps; ++i)
    engine_->plan(decode_plan(PlanKind::step, position() + i, false));
  for (uint32_t done = 0; done < n; done += most_rows(scores)) chunk_plan(n - done, scores);
  kv_.reserve(position(), position() + steps + n, context_);
}

uint32_t Session::most_rows(bool scores) const {
  return engine_->max_rows(scores ? PlanKind::score : PlanKind::prompt);
}

// Of the next chunk, with so many tokens to go.
const Plan& Session::chunk_plan(uint32_t left, bool scores) {
  const uint32_t most = most_rows(scores);
  const PlanKind kind = scores        ? PlanKind::score
                        : left > most ? PlanKind::prefill
                                      : PlanKind::prompt;
  return engine_->plan(prefill_plan(kind, std::min(left, most)));
}

// Appends tokens chunk by chunk; with `scores` also takes the logits of each row.
void Session::chunked(std::span<const uint32_t> tokens, float* scores, const Poll& poll) {
  const uint32_t end = position() + static_cast<uint32_t>(tokens.size());
  try {
    chunks(tokens, scores, poll);
  } catch (...) {
    kv_.release(position(), end);
    throw;
  }
}

void Session::chunks(std::span<const uint32_t> tokens, float* scores, const Poll& poll) {
  const size_t v = engine_->config().vocab_size;
  const uint32_t total = static_cast<uint32_t>(tokens.size());
  cancelled_ = false;
  for (uint32_t done = 0; done < total;) {
    if (done && poll) poll(done, total);
    if (cancelled_) throw Cancelled("prefill: cancelled");
    const Plan& plan = chunk_plan(total - done, scores);
    const uint32_t rows = std::min(most_rows(scores), total - done);
    std::copy_n(tokens.data() + done, rows, reinterpret_cast<uint32_t*>(tokens_buffer_->data));
    bind(*tokens_buffer_, scores ? *scores_ : *logits_);
    has_logits_ = false;
    run(plan, step_at(position(), rows));
    parity_ ^= 1;
    prefilled(rows);
    tokens_.insert(tokens_.end(), tokens.begin() + done, tokens.begin() + done + rows);
    prompt_length_ = position();
    pending_.reset();
    if (scores) {
      std::memcpy(scores + done * v, scores_->data, rows * v * sizeof(float));
      std::memcpy(logits_->data, scores_->data + (rows - 1) * v * sizeof(float), v * sizeof(float));
    }
    done += rows;
  }
  take_logits();
  if (poll) poll(total, total);
}

// Prefill gives the same bits however a sequence is cut; a decode step has its own rounding.
void Session::prefilled(uint32_t rows) {
  if (exact()) exact_length_ += rows;
}

void Session::prefill(std::span<const uint32_t> tokens, const Poll& poll) {
  const auto held = turn();
  check_usable();
  check_tokens(tokens);
  check_room(tokens.size() + pending_.has_value());
  stop();
  std::vector<uint32_t> all;
  if (pending_) all.push_back(*pending_);
  all.insert(all.end(), tokens.begin(), tokens.end());
  prepare(0, static_cast<uint32_t>(all.size()), false);
  chunked(all, nullptr, poll);
}

void Session::score(std::span<const uint32_t> tokens, float* out, const Poll& poll) {
  const auto held = turn();
  check_usable();
  check_tokens(tokens);
  check_room(tokens.size() + pending_.has_value());
  stop();
  prepare(pending_.has_value(), static_cast<uint32_t>(tokens.size()), true);
  consume_pending();
  chunked(tokens, out, poll);
}

void Session::step(uint32_t token) {
  const Plan& plan = engine_->plan(decode_plan(PlanKind::step, position(), false));
  *reinterpret_cast<uint32_t*>(tokens_buffer_->data) = token;
  bind(*tokens_buffer_, *logits_);
  has_logits_ = false;
  run(plan, step_at(position(), 1));
  parity_ ^= 1;
  tokens_.push_back(token);
  take_logits();
}

// Its caller has prepared the step: rows that are asked for twice would move where others share them.
void Session::consume_pending() {
  if (!pending_) return;
  step(*pending_);
  pending_.reset();
}

void Session::decode(uint32_t token) {
  const auto held = turn();
  check_usable();
  check_tokens({&token, 1});
  check_room(1 + pending_.has_value());
  stop();
  prepare(1 + pending_.has_value(), 0, false);
  consume_pending();
  step(token);
}

void Session::observe(std::span<const uint32_t> tokens, bool as_prefill,
                      const Plan::Observer& observer) {
  const auto held = turn();
  check_usable();
  check_tokens(tokens);
  check_room(tokens.size() + pending_.has_value());
  const uint32_t rows = static_cast<uint32_t>(tokens.size());
  const uint32_t most = as_prefill ? engine_->max_rows(PlanKind::prompt) : 1;
  if (rows > most)
    throw ArgumentError("tokens: " + std::to_string(rows) + ", expected at most " +
                        std::to_string(most) + " at a time");
  stop();
  prepare(pending_.has_value() + !as_prefill, as_prefill ? rows : 0, false);
  consume_pending();
  const Plan& plan = as_prefill ? chunk_plan(rows, false)
                                : engine_->plan(decode_plan(PlanKind::step, position(), false));
  std::copy(tokens.begin(), tokens.end(), reinterpret_cast<uint32_t*>(tokens_buffer_->data));
  bind(*tokens_buffer_, *logits_);
  has_logits_ = false;
  try {
    plan.observe(engine_->device(), bindings_, step_at(position(), rows), observer);
  } catch (...) {
    poisoned_ = true;
    throw;
  }
  parity_ ^= 1;
  if (as_prefill) prefilled(rows);
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  take_logits();
}

void Session::reserve(uint32_t tokens) {
  const auto held = turn();
  check_usable();
  check_room(tokens);
  stop();
  kv_.make_room(position(), position() + tokens, context_);
}

const float* Session::logits() const {
  return has_logits_ ? reinterpret_cast<const float*>(logits_->data) : nullptr;
}

// ---------------------------------------------------------------------------------------------
// Streams
// ---------------------------------------------------------------------------------------------

void Session::check_bias(const Bias& bias) const {
  const uint32_t v = engine_->config().vocab_size, n = engine_->config().n_tokens;
  if (bias.ids.size() != bias.values.size())
    throw ArgumentError("bias: " + std::to_string(bias.values.size()) + " values, expected one for " +
                        "each of " + std::to_string(bias.ids.size()) + " ids");
  std::vector<bool> banned;
  uint32_t left = n;
  for (size_t i = 0; i < bias.ids.size(); ++i) {
    const uint32_t id = bias.ids[i];
    if (id >= v)
      throw ArgumentError("bias: token " + std::to_string(id) + ", expected below " +
                          std::to_string(v));
    if (std::isnan(bias.values[i]))
      throw ArgumentError("bias: NaN for token " + std::to_string(id) + ", expected a number");
    if (bias.values[i] != -INFINITY || id >= n) continue;
    banned.resize(n);
    left -= !banned[id];
    banned[id] = true;
  }
  if (left == 0)
    throw ArgumentError("bias: bans all " + std::to_string(n) + " tokens, expected one to be left");
}

void Session::start(const Draw& draw, const Bias& bias, uint32_t max_tokens) {
  const auto held = turn();
  check_usable();
  if (max_tokens == 0) throw ArgumentError("max_tokens: expected at least 1, found 0");
  check_bias(bias);
  if (!pending_ && !has_logits_)
    throw ArgumentError("stream: expected a session with logits, found none\n"
                        "hint: call prefill() or decode() first");
  check_room(pending_.has_value());
  stop();
  fill_bias(bias);
  Draw complete = draw;
  complete.n_bias = static_cast<uint32_t>(bias.ids.size());
  const bool penalties = draw.repetition != 1 || draw.presence != 0 || draw.frequency != 0;
  const size_t count_bytes = engine_->config().vocab_size * sizeof(uint32_t);
  if (penalties && !counts_) counts_ = engine_->device().allocate(count_bytes, "penalty counts");
  if (pending_) prepare(1, 0, false);
  consume_pending();
  if (penalties) fill_counts();
  cancelled_ = false;
  decoder_ = std::make_unique<Decoder>(*this, complete, penalties, max_tokens);
  streaming_ = true;
}

// The buffer grows in powers of two: masks differ in length from token to token.
void Session::fill_bias(const Bias& bias) {
  const size_t bytes = bias.ids.size_bytes();
  if (bias_->bytes < 2 * bytes)
    bias_ = engine_->device().allocate(2 * std::bit_ceil(bytes), "logit bias");
  if (bytes == 0) return;
  std::memcpy(bias_->data, bias.ids.data(), bytes);
  std::memcpy(bias_->data + bias_->bytes / 2, bias.values.data(), bytes);
}

// Everything up to the last prefill is prompt, what came after it was generated.
void Session::fill_counts() {
  uint32_t* counts = reinterpret_cast<uint32_t*>(counts_->data);
  std::memset(counts, 0, counts_->bytes);
  for (uint32_t i = 0; i < position(); ++i) {
    if (i < prompt_length_)
      counts[tokens_[i]] |= 0x80000000u;
    else
      ++counts[tokens_[i]];
  }
}

std::optional<uint32_t> Session::next() {
  const auto held = turn();
  check_usable();
  if (!decoder_) return std::nullopt;
  try {
    return decoder_->next();
  } catch (...) {
    if (poisoned_) decoder_.reset();  // else the same call may succeed the next time
    throw;
  }
}

void Session::advance() {
  const auto held = turn();
  check_usable();
  if (!pending_) throw ArgumentError("advance: expected a pending token, found none");
  check_room(1);
  end_decoder();
  prepare(1, 0, false);
  consume_pending();
}

void Session::force(uint32_t token) {
  const auto held = turn();
  check_usable();
  check_tokens({&token, 1});
  check_room(pending_.has_value());
  end_decoder();
  if (pending_) prepare(1, 0, false);
  consume_pending();
  pending_ = token;
}

void Session::stop() {
  const auto held = turn();
  streaming_ = false;
  end_decoder();
}

void Session::end_decoder() {
  if (!decoder_) return;
  auto decoder = std::move(decoder_);
  decoder->stop();
}

// ---------------------------------------------------------------------------------------------
// State as a whole
// ---------------------------------------------------------------------------------------------

void Session::reset() {
  const auto held = turn();
  engine_->check_process();
  decoder_.reset();
  streaming_ = false;
  kv_ = KvCache(engine_->device(), engine_->kv_shape());
  for (auto& state : states_) std::memset(state->data, 0, state->bytes);
  std::memset(ring_->data, 0, ring_->bytes);
  parity_ = 0;
  tokens_.clear();
  lineage_.clear();
  begin_run();
  prompt_length_ = exact_length_ = 0;
  pending_.reset();
  has_logits_ = poisoned_ = false;
}

size_t Session::snapshot_bytes(uint32_t rows) const {
  return states_[0]->bytes + ring_->bytes + logits_->bytes + kv_.bytes_of(rows);
}

Snapshot Session::snapshot() {
  const auto held = turn();
  check_usable();
  stop();
  auto copy = [&](const Buffer& from, const char* label) {
    auto to = engine_->device().allocate(from.bytes, label);
    std::memcpy(to->data, from.data, from.bytes);
    return to;
  };
  return {engine_,
          kv_,
          copy(*states_[parity_], "snapshot"),
          copy(*ring_, "snapshot"),
          has_logits_ ? copy(*logits_, "snapshot") : nullptr,
          {tokens_, prompt_length_, exact_length_, pending_},
          lineage_};
}

void Session::restore(const Snapshot& from) {
  const auto held = turn();
  engine_->check_process();
  if (from.engine != engine_)
    throw ArgumentError("snapshot: expected one of this model, found one of another");
  if (from.position() > context_)
    throw ContextError("snapshot: " + std::to_string(from.position()) +
                       " tokens, expected at most " + std::to_string(context_));
  decoder_.reset();
  streaming_ = false;
  kv_ = from.kv;
  parity_ = 0;
  std::memcpy(states_[0]->data, from.state->data, from.state->bytes);
  std::memcpy(ring_->data, from.ring->data, from.ring->bytes);
  if (from.logits) std::memcpy(logits_->data, from.logits->data, from.logits->bytes);
  has_logits_ = from.logits != nullptr;
  tokens_ = from.at.tokens;
  prompt_length_ = from.at.prompt_length;
  exact_length_ = from.at.exact_length;
  pending_ = from.at.pending;
  lineage_ = from.lineage;
  begin_run();
  poisoned_ = false;
}

void Session::discard_pending() {
  const auto held = turn();
  check_usable();
  stop();
  pending_.reset();
}

std::vector<float> Session::state(uint32_t n) const {
  LILY_CHECK(n < engine_->config().n_delta_layers());
  const size_t bytes = engine_->state_bytes();
  std::vector<float> out(bytes / sizeof(float));
  std::memcpy(out.data(), states_[parity_]->data + n * bytes, bytes);
  return out;
}

std::vector<float> Session::conv(uint32_t n) const {
  LILY_CHECK(n < engine_->config().n_delta_layers());
  const uint32_t channels = engine_->config().conv_channels();
  std::vector<float> out;
  for (uint32_t back = 3; back >= 1; --back) {
    const size_t first = size_t{(position() - back) & 3} * channels;
    const std::byte* ring = ring_->data + n * engine_->ring_bytes();
    for (uint32_t c = 0; c < channels; ++c)
      out.push_back(engine_->options().precision == Precision::fast
                        ? static_cast<float>(reinterpret_cast<const bf16*>(ring)[first + c])
                        : reinterpret_cast<const float*>(ring)[first + c]);
  }
  return out;
}

}  // namespace lily
