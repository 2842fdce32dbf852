// The decode loop with cancellation from another thread, forks that share a cache, hostile tables.
// Run under ThreadSanitizer and AddressSanitizer as well.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "runtime/session.h"
#include "tiny.h"

namespace lily {
namespace {

using test::throws;

std::shared_ptr<Engine> engine() {
  static const test::TinyCheckpoint checkpoint;
  static const std::shared_ptr<Engine> loaded =
      Engine::load(make_device("cpu", 2), test::tiny_config(), checkpoint.table,
                   {.precision = Precision::float32, .chunk = 16}, nullptr);
  return loaded;
}

std::vector<uint32_t> prompt(uint32_t n) {
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < n; ++i) tokens.push_back((i * 37 + 11) % 190);
  return tokens;
}

std::vector<uint32_t> take(Session& s, uint32_t n, Draw draw = {}) {
  std::vector<uint32_t> out;
  s.start(draw, {}, n);
  while (auto token = s.next()) out.push_back(*token);
  s.stop();
  return out;
}

TEST(a_stream_stopped_anywhere_continues_as_if_it_had_not) {
  Session whole(engine(), 400);
  whole.prefill(prompt(20), nullptr);
  const auto expected = take(whole, 40);
  CHECK(expected.size() == 40);
  for (uint32_t cut = 1; cut < 40; cut += 3) {
    Session s(engine(), 400);
    s.prefill(prompt(20), nullptr);
    s.start({}, {}, 1000);
    std::vector<uint32_t> got;
    for (uint32_t i = 0; i < cut; ++i) got.push_back(*s.next());
    s.stop();
    CHECK(s.position() == 20 + cut - 1 && s.pending() == got.back());
    for (uint32_t token : take(s, 40 - cut)) got.push_back(token);
    CHECK(got == expected);
  }
}

// Token by token, with or without a mask that allows all, a stream draws what the pipelined one does;
// tokens that the caller forces are as if drawn.
TEST(steps_draw_what_the_pipeline_draws) {
  const Draw draw{.temperature = 1, .repetition = 1.2f, .presence = 0.5f, .seed = 3};
  Session whole(engine(), 100);
  whole.prefill(prompt(20), nullptr);
  const auto expected = take(whole, 100, draw);
  CHECK(expected.size() == 81);
  std::vector<uint32_t> ids(200);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> zeros(200);
  Session s(engine(), 100);
  s.prefill(prompt(20), nullptr);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (s.pending()) s.advance();
    CHECK(s.logits() != nullptr);
    if (i % 5 == 2) {
      s.force(expected[i]);
      continue;
    }
    s.start(draw, i % 2 ? Bias{ids, zeros} : Bias{}, i % 3 ? 1 : 9);
    CHECK(s.next() == expected[i] && s.streaming());
  }
  CHECK(s.position() == 100 && s.pending() == expected.back() && s.tokens() == whole.tokens());
  CHECK(throws<ContextError>([&] { s.advance(); }, "100 + 1 tokens"));
  CHECK(throws<ContextError>([&] { s.force(3); }, "100 + 1 tokens"));
  s.stop();
  CHECK(!s.streaming());
}

// One token is left of a vocabulary; in the next step another.
TEST(a_mask_may_ban_all_tokens_but_one) {
  Session s(engine(), 100);
  s.prefill(prompt(20), nullptr);
  for (uint32_t only : {7u, 180u, 0u}) {
    std::vector<uint32_t> ids;
    for (uint32_t i = 0; i < 200; ++i)
      if (i != only) ids.push_back(i);
    const std::vector<float> ban(ids.size(), -INFINITY);
    for (const Draw& draw : {Draw{}, Draw{.temperature = 1, .seed = 3}}) {
      s.start(draw, {ids, ban}, 3);
      while (auto token = s.next()) CHECK(*token == only);
    }
  }
}

TEST(cancelling_from_another_thread_leaves_the_session_exact) {
  Session fresh(engine(), 2000);
  fresh.prefill(prompt(50), nullptr);
  const auto expected = take(fresh, 30);
  Session s(engine(), 2000);
  for (int round = 0; round < 60; ++round) {
    std::atomic<bool> go{false};
    std::thread other([&] {
      while (!go) std::this_thread::yield();
      for (int i = 0; i < round * 50; ++i) std::this_thread::yield();
      s.cancel();
    });
    s.reset();
    try {
      go = true;
      s.prefill(prompt(50), [](uint32_t, uint32_t) {});
      s.start({.temperature = 1, .seed = 7}, {}, 300);
      while (s.next()) {
      }
      s.stop();
    } catch (const Cancelled&) {
      CHECK(s.logits() == nullptr);
    }
    other.join();
    s.reset();
    s.prefill(prompt(50), nullptr);
    CHECK(take(s, 30) == expected);
  }
}

TEST(forks_share_rows_and_go_their_own_ways) {
  Session a(engine(), 400);
  a.prefill(prompt(30), nullptr);
  const Snapshot at = a.snapshot();
  const auto greedy = take(a, 20);
  std::vector<std::vector<uint32_t>> seen(4);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      Session b(engine(), 400);
      b.restore(at);
      b.decode(i);
      b.restore(at);
      seen[i] = take(b, 20);
    });
  for (auto& t : threads) t.join();
  for (const auto& tokens : seen) CHECK(tokens == greedy);
}

TEST(snapshots_share_rows_of_one_history_only) {
  Session a(engine(), 400);
  a.prefill(prompt(30), nullptr);
  const Snapshot early = a.snapshot();
  a.prefill(prompt(10), nullptr);
  const Snapshot late = a.snapshot();
  CHECK(early.precedes(late) && !late.precedes(early) && early.precedes(early));
  CHECK(early.kv.identity() == late.kv.identity());

  Session b(engine(), 400);
  b.restore(early);
  const Snapshot same = b.snapshot();
  CHECK(same.precedes(early) && early.precedes(same));
  b.prefill(prompt(20), nullptr);
  const Snapshot other = b.snapshot();  // rows 30 … were another's
  CHECK(other.kv.identity() != early.kv.identity());
  CHECK(early.precedes(other) && !late.precedes(other) && !other.precedes(late));
  Session c(engine(), 400);
  c.prefill(prompt(40), nullptr);
  CHECK(!early.precedes(c.snapshot()));  // equal bits, but nobody knows

  const auto expected = take(a, 10);
  b.restore(early.sharing(other));
  const auto seen = take(b, 10);
  b.restore(early.trimmed());
  CHECK(take(b, 10) == seen);
  b.restore(late.trimmed());
  CHECK(take(b, 10) == expected);
  CHECK(late.trimmed().kv.bytes() == late.kv.bytes_of(40) && late.kv.bytes_of(40) < late.kv.bytes());
  CHECK(throws<ArgumentError>([&] { late.sharing(other); }, "went through"));
}

TEST(exactness_is_what_prefill_made) {
  Session s(engine(), 400);
  s.prefill(prompt(20), nullptr);
  CHECK(s.exact() && take(s, 1).size() == 1 && s.exact());
  const Snapshot before = s.snapshot();
  CHECK(take(s, 1).size() == 1 && !s.exact());
  s.prefill(prompt(5), nullptr);
  const Snapshot after = s.snapshot();
  CHECK(!after.exact() && after.at.exact_length == 20);
  s.restore(before);
  CHECK(s.exact());
}

TEST(a_snapshot_is_built_of_another_ones_bytes) {
  Session a(engine(), 400);
  a.prefill(prompt(37), nullptr);
  for (bool decoded : {false, true}) {
    if (decoded) take(a, 5);
    const Snapshot s = a.snapshot();
    std::vector<std::byte> bytes;
    s.visit([&](auto range) { bytes.insert(bytes.end(), range.begin(), range.end()); });
    const bool logits = s.logits != nullptr;
    CHECK(bytes.size() == Snapshot::payload_bytes(*engine(), s.position(), logits));
    size_t done = 0;
    const Snapshot made = Snapshot::build(engine(), s.at, logits, [&](auto range) {
      std::copy_n(bytes.begin() + done, range.size(), range.begin());
      done += range.size();
    });
    CHECK(done == bytes.size() && !made.precedes(s) && !s.precedes(made));
    Session b(engine(), 400);
    b.restore(made);
    CHECK(b.pending() == a.pending() && b.exact() == a.exact());
    CHECK(take(b, 12) == take(a, 12));
  }
}

TEST(a_place_that_lies_is_refused) {
  const auto refused = [](Place at, bool logits, const char* what) {
    return throws<ArgumentError>(
        [&] { Snapshot::build(engine(), std::move(at), logits, [](auto) { CHECK(false); }); }, what);
  };
  CHECK(refused({.tokens = {5, 200}}, false, "tokens[1]: 200, expected below 200"));
  CHECK(refused({.tokens = {5}, .prompt_length = 2}, false, "prompt_length: 2"));
  CHECK(refused({.tokens = {5}, .exact_length = 2}, false, "exact_length: 2"));
  CHECK(refused({.tokens = {5}, .pending = 5000}, false, "pending: 5000"));
  CHECK(refused({}, true, "logits: found some"));
}

TEST(a_refused_call_changes_nothing) {
  Session s(engine(), 40);
  s.prefill(prompt(30), nullptr);
  const std::vector<float> before(s.logits(), s.logits() + 200);
  CHECK(throws<ContextError>([&] { s.prefill(prompt(11), nullptr); }, "30 + 11 tokens"));
  const uint32_t wrong[] = {3, 200};
  CHECK(throws<ArgumentError>([&] { s.prefill(wrong, nullptr); }, "tokens[1]: 200"));
  CHECK(throws<ArgumentError>([&] { s.prefill({}, nullptr); }, "at least one"));
  const float less = -1, nan = NAN;
  CHECK(throws<ArgumentError>([&] { s.start({}, {{wrong + 1, 1}, {&less, 1}}, 5); },
                              "bias: token 200, expected below 200"));
  CHECK(throws<ArgumentError>([&] { s.start({}, {wrong, {&less, 1}}, 5); }, "1 values"));
  CHECK(throws<ArgumentError>([&] { s.start({}, {{wrong, 1}, {&nan, 1}}, 5); }, "NaN for token 3"));
  std::vector<uint32_t> ids(200);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> ban(200, -INFINITY);
  CHECK(throws<ArgumentError>([&] { s.start({}, {ids, ban}, 5); }, "bans all"));
  CHECK(throws<ArgumentError>([&] { s.advance(); }, "a pending token"));
  CHECK(throws<ArgumentError>([&] { s.force(200); }, "tokens[0]: 200"));
  CHECK(s.position() == 30 && std::equal(before.begin(), before.end(), s.logits()));
  CHECK(take(s, 100).size() == 11);  // ten more positions, and one token that is only drawn
  CHECK(throws<ContextError>([&] { take(s, 1); }, "40 + 1 tokens"));
}

TEST(tables_that_lie_are_refused_before_a_byte_is_read) {
  test::TinyCheckpoint good;
  auto broken = [&](auto&& change, const char* what) {
    TensorTable t = good.table;
    change(t);
    return throws<CheckpointError>(
        [&] { Engine::load(make_device("cpu", 1), test::tiny_config(), t, {}, nullptr); }, what);
  };
  auto& name = "layers.0.mlp.gate.weight";
  CHECK(broken([&](auto& t) { t.tensors[name].offset = UINT64_MAX - 4; }, "expected inside"));
  CHECK(broken([&](auto& t) { t.tensors[name].bytes += 2; }, "expected 1024"));
  CHECK(broken([&](auto& t) { t.tensors[name].file = 9; }, "file number 9"));
  CHECK(broken([&](auto& t) { t.tensors[name].offset += 2; }, "shares bytes"));
  CHECK(broken([&](auto& t) { t.tensors[name].shape = {1ull << 62, 1ull << 62}; }, "overflows"));
  CHECK(broken([&](auto& t) { t.tensors[name].shape = {64, 8}; }, "expected [8, 64]"));
  CHECK(broken([&](auto& t) { t.tensors[name].type = FileType::f16; }, "expected BF16"));
  CHECK(broken([&](auto& t) { t.tensors.erase(name); }, "not found"));
  CHECK(broken([&](auto& t) { t.files = {"/nonexistent"}; }, "/nonexistent"));
  CHECK(broken([&](auto& t) { t.formats["layers.0.mlp.gate"] = {3, 64}; }, "3 bits"));
}

TEST(a_model_that_does_not_fit_is_refused_with_both_numbers) {
  test::TinyCheckpoint good;
  CHECK(throws<DeviceError>(
      [&] {
        Engine::load(make_device("cpu", 1), test::tiny_config(), good.table,
                     {.memory_bytes = 100000}, nullptr);
      },
      "expected at most 0.00 GB"));
}

// Row by row, as heads × (elements, then scales) of a plane: whoever moves rows must take both along.
TEST(a_moved_cache_keeps_its_rows_and_their_scales) {
  const auto device = make_device("cpu", 1);
  const KvShape shape{2, 3, 32, 1, 4};
  CHECK(shape.position_bytes() == 2 * 2 * 3 * 36);
  KvCache cache(*device, shape);
  const auto at = [&](const KvCache& c, uint32_t plane, uint32_t head, uint32_t row, bool scale) {
    const Slot slot = plane % 2 ? c.values(plane / 2) : c.keys(plane / 2);
    const size_t rows = size_t{c.capacity()} * 3, i = size_t{c.capacity()} * head + row;
    return slot.buffer->data + slot.offset + (scale ? rows * 32 + 4 * i : 32 * i);
  };
  const auto number = [](uint32_t plane, uint32_t head, uint32_t row, bool scale) {
    return static_cast<std::byte>(plane * 61 + head * 17 + row * 5 + scale);
  };
  const auto each = [&](uint32_t end, auto&& body) {
    for (uint32_t plane = 0; plane < 4; ++plane)
      for (uint32_t head = 0; head < 3; ++head)
        for (uint32_t row = 0; row < end; ++row)
          for (bool scale : {false, true}) body(plane, head, row, scale);
  };
  cache.reserve(0, 50, 100);
  CHECK(cache.capacity() == 128 && cache.bytes() == 128 * shape.position_bytes());
  each(50, [&](auto... i) { std::memset(at(cache, i...), int(number(i...)), 1); });
  const KvCache shared = cache;
  cache.reserve(40, 45, 5000);  // the other owner keeps rows 40 … 49
  each(5, [&](auto plane, auto head, auto row, auto scale) {
    std::memset(at(cache, plane, head, 40 + row, scale), 0, scale ? 4 : 32);
  });
  cache.reserve(45, 4097, 5000);  // outgrows its memory
  CHECK(cache.capacity() == 5056);
  each(50, [&](auto... i) { CHECK(*at(shared, i...) == number(i...)); });
  each(40, [&](auto... i) { CHECK(*at(cache, i...) == number(i...)); });
}

TEST(the_last_layer_is_skipped_where_nobody_reads_it) {
  static const test::TinyCheckpoint checkpoint;
  for (bool attention : {false, true}) {  // as the last layer's kind
    Config config = test::tiny_config();
    config.full_attention = attention ? std::vector<bool>{false, false, true}
                                      : std::vector<bool>{false, false, true, false};
    const auto with = Engine::load(make_device("cpu", 1), config, checkpoint.table,
                                   {.precision = Precision::float32, .chunk = 16}, nullptr);
    const std::vector<std::string> names{"last_layer_skip"};
    const auto without = with->without(Ablation(names));
    const uint32_t fewer = without->plan({.kind = PlanKind::prefill}).stats().dispatches -
                           with->plan({.kind = PlanKind::prefill}).stats().dispatches;
    CHECK(fewer == 9);  // attention or gated norm, its projection, the experts' seven
    Session a(with, 100), b(without, 100);
    for (Session* s : {&a, &b}) s->prefill(prompt(40), nullptr);
    CHECK(std::equal(a.logits(), a.logits() + config.vocab_size, b.logits()));
    CHECK(take(a, 8) == take(b, 8));
  }
}

TEST(a_context_beyond_131072_keys_takes_no_more_blocks_than_there_is_room_for) {
  const auto device = make_device("cpu", 1);
  const Tuning& t = device->tuning();
  CHECK(t.block(t.single_block) == t.single_block);
  for (uint32_t keys = t.single_block + 1; keys < 300000; ++keys)
    CHECK((keys - 1) / t.block(keys) + 1 <= t.max_blocks);
}

}  // namespace
}  // namespace lily
