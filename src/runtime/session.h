// One sequence of tokens: position, KV cache, recurrent state.
//
// Every call first checks its arguments and then changes the session; a refused call leaves it as
// it was. One thread changes a session at a time; only cancel() may come from others.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <thread>

#include "runtime/snapshot.h"

namespace lily {

class Decoder;

// Values to add to logits, by token id; -inf bans one. An id may occur several times.
struct Bias {
  std::span<const uint32_t> ids;
  std::span<const float> values;
};

// A thread's time with a session.
class Turn {
 public:
  explicit Turn(std::atomic<std::thread::id>& user);
  ~Turn() {
    if (ends_) user_ = std::thread::id();
  }
  Turn(const Turn&) = delete;

 private:
  std::atomic<std::thread::id>& user_;
  bool ends_ = false;  // not within another turn of the same thread
};

class Session {
 public:
  Session(std::shared_ptr<Engine>, uint32_t context);
  ~Session();

  // Called between chunks of a prefill with tokens done and in all; may throw to stop there.
  using Poll = std::function<void(uint32_t done, uint32_t total)>;

  // Appends tokens (a pending one first). Throws Cancelled, or what `poll` throws, between two
  // chunks: the session then holds the chunks before and has no logits.
  void prefill(std::span<const uint32_t> tokens, const Poll& poll);
  // The same, and the logits after each token into `out` [n, V].
  void score(std::span<const uint32_t> tokens, float* out, const Poll& poll);
  // Appends one token with a decode step (after a pending one).
  void decode(uint32_t token);

  // As decode(token) or, for several, a prefill of one chunk, one dispatch at a time.
  void observe(std::span<const uint32_t> tokens, bool as_prefill, const Plan::Observer&);

  // Makes room for so many more tokens at once, so that the KV cache need not move in between.
  void reserve(uint32_t tokens);

  // float32 [V] after the last token, or nullptr where there are none.
  const float* logits() const;

  // Starts a stream of drawn tokens, ending one that runs.
  void start(const Draw&, const Bias&, uint32_t max_tokens);
  // The next token, or none after max_tokens, at the end of the context, or when cancelled.
  std::optional<uint32_t> next();
  // Between two tokens of a stream, which stays open but draws no more until started again:
  // consumes the pending token by a decode step that leaves logits;
  void advance();
  // appends a token as if it had been drawn: consumes the one pending, and is pending then.
  void force(uint32_t token);
  void stop();  // ends the stream; the last token stays pending
  bool streaming() const { return streaming_; }

  void cancel() { cancelled_ = true; }  // from any thread: ends a running prefill or stream
  bool cancelled() const { return cancelled_; }

  void reset();
  Snapshot snapshot();
  void restore(const Snapshot&);
  void discard_pending();

  // Held by whoever changes the session or reads what may move meanwhile. Throws ArgumentError while
  // another thread does; a callback may call again from within.
  Turn turn() { return Turn(user_); }

  uint32_t position() const { return static_cast<uint32_t>(tokens_.size()); }
  uint32_t context() const { return context_; }
  std::optional<uint32_t> pending() const { return pending_; }
  // Whether prefill alone made the present state.
  bool exact() const { return exact_length_ == position(); }
  const std::vector<uint32_t>& tokens() const { return tokens_; }
  size_t kv_bytes() const { return kv_.bytes(); }
  // What a snapshot would copy, and `rows` KV rows.
  size_t snapshot_bytes(uint32_t rows) const;
  // Seconds that the device has worked on what the session waited for.
  double device_s() const { return device_s_; }
  Engine& engine() { return *engine_; }
  const std::shared_ptr<Engine>& engine_ptr() const { return engine_; }

  // Copies for tests: recurrent state [Hv, Dv, Dk] and the last three conv inputs [3, C], as
  // float32, of the n-th Gated DeltaNet layer.
  std::vector<float> state(uint32_t n) const;
  std::vector<float> conv(uint32_t n) const;

 private:
  friend class Decoder;

  void check_usable();
  void check_tokens(std::span<const uint32_t> tokens) const;
  void check_room(size_t n) const;
  void check_bias(const Bias&) const;
  void prepare(uint32_t steps, uint32_t n, bool scores);
  uint32_t most_rows(bool scores) const;
  const Plan& chunk_plan(uint32_t left, bool scores);
  void chunked(std::span<const uint32_t> tokens, float* scores, const Poll&);
  void chunks(std::span<const uint32_t> tokens, float* scores, const Poll&);
  Step step_at(uint32_t position, uint32_t rows) const;
  PlanOptions decode_plan(PlanKind kind, uint32_t position, bool penalties) const;
  PlanOptions prefill_plan(PlanKind kind, uint32_t rows) const;
  void bind(Buffer& tokens, Buffer& logits);
  void run(const Plan&, const Step&);  // commits and waits; poisons on failure
  void wait(CommandBuffer&);
  void take_logits();
  void step(uint32_t token);
  void consume_pending();
  void end_decoder();
  void fill_counts();
  void fill_bias(const Bias&);
  void prefilled(uint32_t rows);
  void begin_run();

  std::shared_ptr<Engine> engine_;
  uint32_t context_;
  KvCache kv_;
  std::shared_ptr<Buffer> states_[2];  // [layer][Hv][Dv][Dk]; a pass reads one and writes the other
  std::shared_ptr<Buffer> ring_, tokens_buffer_, slots_, residual_, logits_, scores_, counts_, bias_;
  uint32_t parity_ = 0;  // which state buffer holds the state at position()
  std::vector<uint32_t> tokens_;
  uint32_t prompt_length_ = 0;  // tokens before it count as prompt for penalties
  uint32_t exact_length_ = 0;
  Lineage lineage_;
  std::optional<uint32_t> pending_;  // returned by a stream, not consumed yet
  double device_s_ = 0;
  bool has_logits_ = false;
  bool poisoned_ = false;
  bool streaming_ = false;  // a stream was started, and only its own calls came since
  std::atomic<bool> cancelled_{false};
  std::atomic<std::thread::id> user_{};  // the thread whose turn it is
  Bindings bindings_;
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace lily
