// Arena and recorder: lives that overlap never share bytes; a barrier stands where ranges conflict.
#include <random>

#include "base/error.h"
#include "check.h"
#include "graph/arena.h"
#include "graph/recorder.h"
#include "metal/prefill_norm.h"
#include "metal/prefill_project_add.h"
#include "metal/prefill_topk.h"

namespace lily {
namespace {

// Hands out kernels and memory, and notes what is asked of its command buffers.
struct FakeDevice : Device {
  struct FakeKernel : Kernel {};
  struct FakeBuffer : Buffer {
    std::vector<std::byte> memory;
  };
  struct Commands : CommandBuffer {
    explicit Commands(std::string& of_device) : history(of_device) {}
    std::string log, &history;
    void dispatch(const Dispatch&) override { log += 'd'; }
    void barrier() override { log += '|'; }
    void commit() override { history += log + 'c'; }
    Timing wait() override {
      history += 'w';
      return {};
    }
  };

  DeviceInfo info_;
  Tuning tuning_;
  std::string history;  // of all command buffers
  FakeKernel kernel_;

  const DeviceInfo& info() const override { return info_; }
  const Tuning& tuning() const override { return tuning_; }
  std::shared_ptr<Buffer> allocate(size_t bytes, const std::string&) override {
    auto b = std::make_shared<FakeBuffer>();
    b->memory.resize(bytes);
    b->data = b->memory.data();
    b->bytes = bytes;
    return b;
  }
  size_t packed_bytes(const PackSpec&) const override { return 0; }
  void pack_begin(const PackSpec&, std::byte*) const override {}
  void pack_rows(const PackSpec&, std::byte*, uint32_t, uint32_t, uint32_t, uint32_t,
                 const RawRows&) const override {}
  void unpack(const PackSpec&, const std::byte*, uint32_t, uint32_t, float*) const override {}
  const Kernel* kernel(const Contract&, std::span<const std::byte>, Precision,
                       std::span<const PackSpec* const>) override {
    return &kernel_;
  }
  std::unique_ptr<CommandBuffer> command_buffer() override {
    return std::make_unique<Commands>(history);
  }
};

Tensor weight() {
  Tensor t;
  t.place = Tensor::Place::buffer;
  t.type = SlotType::packed;
  return t;
}

Tensor gamma() {
  Tensor t;
  t.place = Tensor::Place::buffer;
  t.type = SlotType::f32;
  t.bytes = 64;
  return t;
}

void norm(Recorder& rec, const Tensor& x, const Tensor& y) {
  rec.dispatch<PrefillNorm>({.x = x, .gamma = gamma(), .y = y}, {.D = 16, .EPS = 1e-6f},
                            [](auto& p, const Step& s) { p.rows = s.rows; });
}

void add(Recorder& rec, const Tensor& u, const Tensor& x) {
  rec.dispatch<PrefillProjectAdd>({.u = u, .weight = weight(), .x = x}, {.K = 16, .N = 16},
                                  [](auto& p, const Step& s) { p.rows = s.rows; });
}

std::string replay(FakeDevice& device, const Plan& plan) {
  const auto commands = plan.replay(device, Bindings(1), Step{});
  return static_cast<FakeDevice::Commands&>(*commands).log;
}

TEST(arena_never_overlaps_two_living) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<Lifetime> lives;
    for (int i = 0; i < 40; ++i) {
      const uint32_t first = random() % 30;
      lives.push_back({random() % 5000, first, first + static_cast<uint32_t>(random() % 6)});
    }
    const Placement p = place(lives);
    size_t sum = 0;
    for (size_t i = 0; i < lives.size(); ++i) {
      sum += (lives[i].bytes + 255) / 256 * 256;
      CHECK(p.offsets[i] % 256 == 0 && p.offsets[i] + lives[i].bytes <= p.bytes);
      for (size_t j = 0; j < i; ++j) {
        const bool together = lives[i].first <= lives[j].last && lives[j].first <= lives[i].last;
        const bool overlap = p.offsets[i] < p.offsets[j] + lives[j].bytes &&
                             p.offsets[j] < p.offsets[i] + lives[i].bytes;
        CHECK(!(together && overlap));
      }
    }
    CHECK(p.bytes < sum);  // something was shared
  }
}

TEST(recorder_puts_a_barrier_only_between_conflicts) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  Tensor x = rec.temporary(SlotType::f32, {16}), z = rec.temporary(SlotType::f32, {16});
  Tensor y = rec.temporary(SlotType::act, {16}), w = rec.temporary(SlotType::act, {16});
  norm(rec, x, y);  // group 0
  norm(rec, x, w);  // group 0: reads the same, writes another
  add(rec, y, x);   // group 1: reads what was written, writes what was read
  add(rec, w, z);   // group 1: independent of the one before
  norm(rec, z, w);  // group 2: reads z, overwrites what add read
  const Plan plan = rec.finish();
  CHECK(replay(device, plan) == "dd|dd|d");
  CHECK(plan.stats().dispatches == 5 && plan.stats().stages == 3 && plan.stats().barriers == 2);
}

TEST(recorder_moves_an_independent_dispatch_forward) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  Tensor x = rec.temporary(SlotType::f32, {16}), z = rec.temporary(SlotType::f32, {16});
  Tensor y = rec.temporary(SlotType::act, {16}), w = rec.temporary(SlotType::act, {16});
  norm(rec, x, y);
  add(rec, y, x);
  norm(rec, z, w);  // recorded last, may run first
  CHECK(replay(device, rec.finish()) == "dd|d");
}

void add_one(const PrefillTopk::Host<float>& a) {
  CHECK(a.c.EXPERTS == 4 && a.c.TOP == 2 && a.p.rows == 1);
  a.shares[0] = a.logits[0] + 1;
}

TEST(the_host_waits_for_what_came_before_and_the_rest_for_the_host) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  auto choose = [&](const Tensor& logits, const Tensor& shares) {
    rec.on_host<PrefillTopk, add_one>(
        {.logits = logits, .ids = rec.temporary(SlotType::u32, {2}), .shares = shares},
        {.EXPERTS = 4, .TOP = 2}, [](auto& p, const Step& s) { p.rows = s.rows; });
  };
  Tensor x = rec.temporary(SlotType::f32, {16}), y = rec.temporary(SlotType::act, {16});
  Tensor shares = rec.temporary(SlotType::f32, {16}), more = rec.temporary(SlotType::f32, {16});
  add(rec, y, x);
  choose(x, shares);
  choose(shares, more);  // the device is idle already
  norm(rec, more, y);
  const Plan plan = rec.finish();
  CHECK(plan.stats().dispatches == 2 && plan.stats().host_steps == 2);
  plan.replay(device, Bindings(1), Step{});
  CHECK(device.history == "dcwdc");
  const auto memory = plan.entries().back().slots[0];
  CHECK(*reinterpret_cast<float*>(memory.buffer->data + memory.offset) == 2);
}

TEST(recorder_shares_bytes_only_across_groups) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  Tensor x = rec.temporary(SlotType::f32, {1024});
  for (int i = 0; i < 8; ++i) {
    Tensor y = rec.temporary(SlotType::act, {1024});
    norm(rec, x, y);
    add(rec, y, x);
  }
  const Plan plan = rec.finish();
  CHECK(plan.stats().temporary_bytes == 4096 + 2048);  // every y in the same place
}

TEST(recorder_separates_ranges_of_one_buffer) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  auto buffer = device.allocate(128, "both");
  auto half = [&](size_t offset) {
    Tensor t = gamma();
    t.buffer = buffer.get();
    t.offset = offset;
    return t;
  };
  Tensor u = rec.temporary(SlotType::act, {16});
  add(rec, u, half(0));
  add(rec, u, half(64));  // other bytes: may overlap with the first
  add(rec, u, half(32));  // shares bytes with both
  CHECK(replay(device, rec.finish()) == "dd|d");
}

TEST(a_wrong_slot_type_is_an_internal_error) {
  FakeDevice device;
  Recorder rec(device, Precision::fast);
  Tensor y = rec.temporary(SlotType::act, {16});
  CHECK(test::throws<InternalError>([&] { norm(rec, y, y); }, "slot.type"));
}

}  // namespace
}  // namespace lily
