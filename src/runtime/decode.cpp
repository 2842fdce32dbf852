#include "runtime/decode.h"

#include <algorithm>

#include "base/error.h"

namespace lily {

Decoder::Decoder(Session& session, const Draw& draw, bool penalties, uint32_t max_tokens)
    : s_(session),
      draw_(draw),
      penalties_(penalties),
      next_(draw.temperature == 0 && draw.n_bias == 0 && !penalties ? PlanKind::next_greedy
                                                                    : PlanKind::next_drawn),
      start_(session.position()),
      most_(std::min<uint64_t>(max_tokens, uint64_t{session.context()} - start_ + 1)),
      in_flight_(by_host() ? 1 : 2) {}

bool Decoder::by_host() const {
  return s_.engine_->options().ablation.without(Technique::token_handover);
}

bool Decoder::may_commit() const { return committed_ < most_ && committed_ < returned_ + in_flight_; }

void Decoder::commit() {
  const uint32_t i = committed_;
  const uint32_t position = start_ + i - (i ? 1 : 0);  // of the token that this step consumes
  const PlanKind kind = i == 0 ? PlanKind::pick : next_;
  const Plan& plan = s_.engine_->plan(s_.decode_plan(kind, position, penalties_));
  if (i) make_room(position);
  Step step = s_.step_at(position, 1);
  step.slot = i & 1;
  step.first_token = step.slot ^ 1;
  step.draw = draw_;
  step.draw_step = start_ + i;
  if (i && by_host()) reinterpret_cast<uint32_t*>(s_.slots_->data)[step.first_token] = last_;
  s_.bind(*s_.slots_, *s_.logits_);
  try {
    flights_.push_back({i, plan.replay(s_.engine_->device(), s_.bindings_, step)});
  } catch (...) {
    s_.poisoned_ = true;
    throw;
  }
  if (i) {
    s_.parity_ ^= 1;
    s_.has_logits_ = false;
  }
  ++committed_;
}

// A cache moves only while nothing runs: a step in flight has the old rows bound.
void Decoder::make_room(uint32_t position) {
  if (s_.kv_.claim(position, position + 1)) return;
  try {
    for (const Flight& f : flights_) f.commands->wait();
  } catch (...) {
    s_.poisoned_ = true;
    throw;
  }
  s_.kv_.reserve(position, position + 1, s_.context());
}

uint32_t Decoder::wait_oldest() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  s_.wait(*flight.commands);
  return reinterpret_cast<const uint32_t*>(s_.slots_->data)[flight.index & 1];
}

std::optional<uint32_t> Decoder::next() {
  if (returned_ >= most_ || s_.cancelled_) return std::nullopt;
  while (may_commit()) commit();
  uint32_t token;
  try {
    token = wait_oldest();
    if (token >= s_.engine_->config().n_tokens)
      throw DeviceError("decode: no token drawn, the logits are not finite");
  } catch (...) {
    s_.poisoned_ = true;
    throw;
  }
  if (returned_) s_.tokens_.push_back(last_);
  last_ = token;
  s_.pending_ = token;
  ++returned_;
  return token;
}

void Decoder::stop() {
  try {
    while (!flights_.empty()) {
      const uint32_t index = flights_.front().index;
      const uint32_t token = wait_oldest();
      if (penalties_ && token < s_.engine_->config().vocab_size)
        --reinterpret_cast<uint32_t*>(s_.counts_->data)[token];
      if (index == 0) continue;
      s_.parity_ ^= 1;
      s_.kv_.release(start_ + index - 1, start_ + index);
    }
  } catch (...) {
    s_.poisoned_ = true;
    throw;
  }
}

// The device must be done with the session's buffers before they go.
Decoder::~Decoder() {
  for (const Flight& f : flights_) {
    try {
      f.commands->wait();
    } catch (const Error&) {
      s_.poisoned_ = true;
    }
  }
}

}  // namespace lily
