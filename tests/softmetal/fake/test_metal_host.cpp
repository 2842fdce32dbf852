// The Metal device's host code under a whole model: what it allocates, encodes and waits for, and
// what it does when Metal fails. Kernels are stubs, so this runs under sanitizers, and fast.
#include <sstream>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "device/metal/device.h"
#include "device/metal/source.h"
#include "fake.h"
#include "metal/contracts.h"
#include "runtime/session.h"
#include "tiny.h"

namespace lily {
namespace {

using test::throws;

void check_silent() {
  for (uint32_t i = 0; i < fake_metal_report_count(); ++i)
    std::printf("  reported: %s\n", fake_metal_report(i));
  CHECK(fake_metal_report_count() == 0);
}

// Stub kernels and no reports, before and after.
struct Stubs {
  Stubs() {
    fake_metal_set("mode", "stub");
    fake_metal_clear();
  }
  ~Stubs() {
    for (const char* name : {"mode", "system", "chip", "memory", "width", "max_threads",
                             "fail_allocation", "fail_library", "fail_pipeline", "fail_command_buffer"})
      fake_metal_set(name, nullptr);
    fake_metal_clear();
  }
};

const test::TinyCheckpoint& checkpoint() {
  static const test::TinyCheckpoint c;
  return c;
}

std::shared_ptr<Engine> load(std::shared_ptr<Device> device) {
  return Engine::load(std::move(device), test::tiny_config(), checkpoint().table, {.chunk = 16},
                      nullptr);
}

std::shared_ptr<Engine> load() { return load(std::make_shared<metal::MetalDevice>()); }

std::vector<uint32_t> prompt(uint32_t n) { return std::vector<uint32_t>(n, 5); }

void use(Session& s) {
  s.prefill(prompt(20), nullptr);
  s.decode(3);
  std::vector<float> scores(5 * 200);
  s.score(prompt(5), scores.data(), nullptr);
  s.start({}, {}, 30);
  while (s.next()) {
  }
  const uint32_t id = 4;
  const float less = -1;
  s.start({.temperature = 1, .repetition = 1.1f}, {{&id, 1}, {&less, 1}}, 30);
  for (int i = 0; i < 5; ++i) s.next();
  s.stop();
}

// Each line of the text is the line of the file that the compiler's messages will name.
TEST(metal_has_every_kernel_and_keeps_its_lines) {
  for (const Contract* contract : all_contracts()) {
    CHECK(metal::has_kernel(contract->name) && metal::find_launch(contract->name));
    std::istringstream text(metal::kernel_text(contract->name));
    std::vector<std::string> file;
    size_t next = 0, compared = 0;
    for (std::string line; std::getline(text, line);) {
      char name[100];
      if (std::sscanf(line.c_str(), "#line %zu \"%99[^\"]\"", &next, name) == 2) {
        std::istringstream whole{std::string(metal::embedded_file(name))};
        file = {""};
        for (std::string l; std::getline(whole, l);) file.push_back(l);
        continue;
      }
      CHECK(line.find("#include \"") == std::string::npos);
      CHECK(line == file.at(next) || file.at(next) == "#pragma once");
      ++next;
      ++compared;
    }
    CHECK(compared > 100);
  }
  CHECK(!metal::has_kernel("no_such"));
}

TEST(metal_runs_a_session_without_a_complaint) {
  const Stubs stubs;
  for (const char* system : {"14", "15", "26"}) {
    fake_metal_set("system", system);
    const uint64_t requests = fake_metal_number("residency_requests");
    Session s(load(), 400);
    use(s);
    const Snapshot at = s.snapshot();
    s.decode(1);
    s.restore(at);
    use(s);
    CHECK((fake_metal_number("residency_requests") > requests) == (std::string(system) != "14"));
    CHECK(s.engine().device().info().description.find(system) != std::string::npos);
  }
  check_silent();
}

TEST(metal_gives_back_what_it_took) {
  const Stubs stubs;
  const uint64_t buffers = fake_metal_number("buffers"), objects = fake_metal_number("objects");
  {
    Session s(load(), 400);
    use(s);
    s.start({}, {}, 30);
    s.next();  // left in the middle, two steps in flight
    CHECK(fake_metal_number("buffers") > buffers);
  }
  CHECK(fake_metal_number("buffers") == buffers);
  CHECK(fake_metal_number("objects") == objects);
  check_silent();
}

TEST(metal_takes_sessions_from_several_threads) {
  const Stubs stubs;
  const auto engine = load();
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      try {
        Session s(engine, 400);
        for (int round = 0; round < 5; ++round) {
          use(s);
          s.reset();
        }
      } catch (const std::exception& e) {
        std::printf("  said: %s\n", e.what());
        ++failed;
      }
    });
  for (auto& t : threads) t.join();
  CHECK(failed == 0);
  check_silent();
}

// Leaves out one barrier of the passes that it sees.
struct Thinned final : Device {
  struct Commands final : CommandBuffer {
    Commands(std::unique_ptr<CommandBuffer> inner, Thinned& device)
        : inner(std::move(inner)), device(device) {}
    void dispatch(const Dispatch& d) override { inner->dispatch(d); }
    void barrier() override {
      if (device.seen++ != device.left_out) inner->barrier();
    }
    void commit() override { inner->commit(); }
    Timing wait() override { return inner->wait(); }
    std::unique_ptr<CommandBuffer> inner;
    Thinned& device;
  };

  metal::MetalDevice inner;
  uint32_t seen = 0, left_out = UINT32_MAX;

  const DeviceInfo& info() const override { return inner.info(); }
  const Tuning& tuning() const override { return inner.tuning(); }
  std::shared_ptr<Buffer> allocate(size_t bytes, const std::string& label) override {
    return inner.allocate(bytes, label);
  }
  size_t packed_bytes(const PackSpec& s) const override { return inner.packed_bytes(s); }
  void pack_begin(const PackSpec& s, std::byte* p) const override { inner.pack_begin(s, p); }
  void pack_rows(const PackSpec& s, std::byte* p, uint32_t e, uint32_t i, uint32_t first,
                 uint32_t n, const RawRows& raw) const override {
    inner.pack_rows(s, p, e, i, first, n, raw);
  }
  void unpack(const PackSpec& s, const std::byte* p, uint32_t e, uint32_t i,
              float* out) const override {
    inner.unpack(s, p, e, i, out);
  }
  const Kernel* kernel(const Contract& c, std::span<const std::byte> constants, Precision p,
                       std::span<const PackSpec* const> weights) override {
    return inner.kernel(c, constants, p, weights);
  }
  std::unique_ptr<CommandBuffer> command_buffer() override {
    return std::make_unique<Commands>(inner.command_buffer(), *this);
  }
};

TEST(metal_needs_every_barrier_of_every_plan) {
  const Stubs stubs;
  const auto device = std::make_shared<Thinned>();
  const auto engine = load(device);
  const std::function<void(Session&)> passes[] = {
      [](Session& s) { s.prefill(prompt(5), nullptr); },
      [](Session& s) { s.decode(3); },
      [](Session& s) {
        s.start({}, {}, 2);
        while (s.next()) {
        }
      },
  };
  for (const auto& pass : passes) {
    auto begin = [&] {
      auto s = std::make_unique<Session>(engine, 400);
      device->left_out = UINT32_MAX;
      s->prefill(prompt(5), nullptr);
      device->seen = 0;
      return s;
    };
    auto whole = begin();
    pass(*whole);
    const uint32_t barriers = device->seen;
    CHECK(barriers > 20);
    check_silent();
    for (uint32_t i = 0; i < barriers; ++i) {
      auto s = begin();
      device->left_out = i;
      CHECK(throws<DeviceError>([&] { pass(*s); }, "and no barrier between them"));
    }
    fake_metal_clear();
  }
}

// Everything that can be refused, one refusal after the other: an error of the right type, and the
// same work succeeds afterwards.
TEST(metal_survives_every_failed_allocation) {
  const Stubs stubs;
  uint32_t n = 1;
  for (bool failed = true; failed; ++n) {
    failed = false;
    fake_metal_set("fail_allocation", std::to_string(n).c_str());
    try {
      Session s(load(), 400);
      use(s);
    } catch (const DeviceError& e) {
      failed = true;
      CHECK(std::string(e.what()).find("metal: cannot allocate") == 0);
    }
  }
  CHECK(n > 15);
  check_silent();
}

TEST(metal_survives_every_failed_command_buffer) {
  const Stubs stubs;
  const auto engine = load();
  Session s(engine, 400);
  uint32_t n = 1;
  for (bool failed = true; failed; ++n) {
    failed = false;
    s.reset();
    fake_metal_set("fail_command_buffer", (std::to_string(n) + ":2").c_str());
    try {
      use(s);
    } catch (const DeviceError& e) {
      failed = true;
      const std::string what = e.what();
      CHECK(what.find("metal: command buffer of ") == 0);
      CHECK(what.find("failed: made to fail (MTLCommandBufferErrorDomain 2)") != std::string::npos);
      CHECK(throws<DeviceError>([&] { s.decode(1); }, "state was lost"));
    }
    fake_metal_set("fail_command_buffer", nullptr);
  }
  CHECK(n > 30);
  s.reset();
  use(s);
  check_silent();
}

TEST(metal_says_where_a_command_buffer_failed) {
  const Stubs stubs;
  Session s(load(), 400);
  fake_metal_set("fail_command_buffer", "1:8");
  CHECK(throws<DeviceError>([&] { s.prefill(prompt(3), nullptr); }, "(embed: embed to "));
  s.reset();
  s.prefill(prompt(3), nullptr);
  fake_metal_set("fail_command_buffer", "3:8");
  CHECK(throws<DeviceError>(
      [&] { s.observe(prompt(1), false, [](auto&, auto, auto) {}); },
      "of 1 dispatch (layer.0/delta: delta_step) failed: made to fail"));
  s.reset();
  fake_metal_set("fail_command_buffer", "1:8");
  CHECK(throws<DeviceError>([&] { s.prefill(prompt(3), nullptr); },
                            "\nhint: open the session with a smaller context"));
}

// A pass that computes much becomes several of Metal's command buffers, and attention over many keys
// several dispatches; each failure names its own part of the pass.
TEST(metal_cuts_long_passes) {
  const Stubs stubs;
  const auto device = std::make_shared<metal::MetalDevice>();
  const auto engine = load(device);
  Session s(engine, 400);
  auto counted = [&](const char* what, auto&& work) {
    const uint64_t before = fake_metal_number(what);
    work();
    return fake_metal_number(what) - before;
  };
  auto pass = [&] {
    s.reset();
    s.prefill(prompt(16), nullptr);
  };
  CHECK(counted("command_buffers", pass) == 1);
  const uint64_t dispatches = counted("dispatches", pass);
  device->budget = {.flops = 1, .attention_flops = 1, .attention_rows = 5};
  CHECK(counted("dispatches", pass) == dispatches + 3);  // 16 rows of the one attention layer
  const uint64_t parts = counted("command_buffers", pass);
  CHECK(parts > 20 && parts < dispatches);
  CHECK(counted("command_buffers", [&] { s.decode(3); }) == 1);
  check_silent();

  s.reset();
  fake_metal_set("fail_command_buffer", "2:2");
  CHECK(throws<DeviceError>([&] { s.prefill(prompt(16), nullptr); },
                            "of 3 dispatches (layer.0/delta: prefill_delta_prep to "));
  CHECK(throws<DeviceError>([&] { s.decode(3); }, "state was lost"));
  fake_metal_set("fail_command_buffer", nullptr);
  pass();
  check_silent();
}

TEST(metal_says_when_the_process_has_to_go) {
  const Stubs stubs;
  for (const char* code : {"1:4", "1:11"}) {
    Session s(load(), 400);
    fake_metal_set("fail_command_buffer", code);
    CHECK(throws<DeviceError>([&] { s.prefill(prompt(3), nullptr); }, "made to fail"));
    s.reset();
    CHECK(throws<DeviceError>([&] { s.prefill(prompt(3), nullptr); }, "hint: restart the process"));
  }
}

TEST(metal_names_a_kernel_that_does_not_work) {
  const Stubs stubs;
  for (uint32_t n = 1; n < 12; ++n)
    for (const char* which : {"fail_library", "fail_pipeline"}) {
      const auto engine = load();
      fake_metal_set(which, std::to_string(n).c_str());
      Session s(engine, 400);
      try {
        s.prefill(prompt(3), nullptr);
        CHECK(s.position() == 3);  // what fails was compiled before
      } catch (const DeviceError& e) {
        const std::string what = e.what();
        CHECK(what.find("metal: kernel ") == 0 && what.find("made to fail") != std::string::npos);
        CHECK(s.position() == 0);
      }
      fake_metal_set(which, nullptr);
    }
  fake_metal_set("width", "16");
  CHECK(throws<DeviceError>([&] { Session(load(), 400).prefill(prompt(3), nullptr); },
                            "simdgroups of 16, expected 32"));
  fake_metal_set("width", nullptr);
  fake_metal_set("max_threads", "64");
  CHECK(throws<DeviceError>([&] { Session(load(), 400).prefill(prompt(3), nullptr); },
                            "threads, this GPU allows it 64"));
}

TEST(metal_refuses_a_model_beyond_its_memory) {
  const Stubs stubs;
  fake_metal_set("memory", "100000");
  CHECK(throws<DeviceError>([&] { load(); }, "weights take"));
  metal::MetalDevice device;
  CHECK(device.info().memory_bytes == 100000);
  CHECK(throws<DeviceError>([&] { device.allocate(80000, "a test"); },
                            "metal: cannot allocate 80000 bytes for a test"));
}

TEST(metal_gives_way_to_the_cpu_with_a_warning) {
  const Stubs stubs;
  fake_metal_set("fail_library", "1");
  const auto device = metal_or_cpu(1);
  CHECK(device->info().name == "cpu");
  CHECK(device->info().warning.find(": does not compile: made to fail") != std::string::npos);
  // A stub does not compute what it should.
  CHECK(throws<DeviceError>([&] { make_device("metal", 1); }, "self-check: embed gives"));
  CHECK(make_device("auto", 1)->info().name == "cpu");
  CHECK(make_device("auto", 1)->info().warning.empty());
}

TEST(metal_never_takes_more_attention_blocks_than_it_says) {
  const Stubs stubs;
  const metal::MetalDevice device;
  const Tuning& t = device.tuning();
  for (uint32_t keys = t.single_block + 1; keys < 300000; keys += 7) {
    const uint32_t block = t.block(keys);
    CHECK((keys - 1) / block + 1 <= t.max_blocks);
  }
}

TEST(metal_uses_tensor_operations_only_where_they_work) {
  const Stubs stubs;
  auto reason = [](const char* system, const char* chip) {
    fake_metal_set("system", system);
    fake_metal_set("chip", chip);
    const metal::MetalDevice device;
    CHECK(!device.tier().tensors);
    CHECK(device.info().description.find("tensor") == std::string::npos);
    return device.tier().tensors_reason;
  };
  for (const char* old : {"15", "26", "26.1", "16.1"})
    CHECK(reason(old, "5") == "they need macOS 26.2");
  CHECK(reason("26.2", "4") == "the GPU is \"applegpu_g16s\", which has no units for them");
  // A stub does not multiply.
  for (const char* now : {"26.2", "26.3", "16.2"})
    CHECK(reason(now, "5").starts_with("the probe fails: gives 0.0"));
  for (const char* what : {"fail_library", "fail_pipeline", "fail_command_buffer"}) {
    fake_metal_set(what, "1");
    CHECK(reason("26.2", "5").starts_with("the probe fails: "));
    fake_metal_set(what, nullptr);
  }
  check_silent();
}

TEST(metal_stages_half_on_chips_without_bf16) {
  const Stubs stubs;
  for (int chip = 1; chip <= 5; ++chip) {
    fake_metal_set("chip", std::to_string(chip).c_str());
    CHECK(metal::MetalDevice().tier().half_tiles == (chip < 3));
  }
}

TEST(metal_takes_small_tiles_for_few_rows) {
  const Stubs stubs;
  const metal::MetalDevice device;
  const auto rows = device.tuning().tile_rows;
  CHECK(rows(1, 256) == 16 && rows(24 * 256 - 1, 256) == 16);
  CHECK(rows(24 * 256, 256) == 32 && rows(96 * 256 - 1, 256) == 32);
  CHECK(rows(96 * 256, 256) == 64 && rows(16384 * 64, 1) == 64);
}

TEST(metal_gives_prefill_plans_one_buffer) {
  const Stubs stubs;
  const auto engine = load();
  engine->plan({.kind = PlanKind::prompt});
  const uint64_t buffers = fake_metal_number("buffers");
  for (uint32_t rows : {16u, 32u}) engine->plan({.kind = PlanKind::prompt, .tile_rows = rows});
  engine->plan({.kind = PlanKind::prefill});
  CHECK(fake_metal_number("buffers") == buffers);
  engine->plan({.kind = PlanKind::step});
  CHECK(fake_metal_number("buffers") == buffers + 1);
}

TEST(metal_encodes_nothing_before_the_commit) {
  const Stubs stubs;
  metal::MetalDevice device;
  const uint64_t before = fake_metal_number("dispatches");
  {
    const PackSpec spec{{{4, 8, 64, 64}}, 1};
    const PackSpec* forms[] = {&spec};
    const Embed::Constants constants{.D = 64};
    const Embed::Params params{.rows = 1, .first = 0};
    const auto memory = device.allocate(4096, "a test");
    const Slot slots[] = {{memory.get(), 0, 4}, {memory.get(), 1024, 64}, {memory.get(), 512, 256}};
    const auto commands = device.command_buffer();
    commands->dispatch({device.kernel(Embed::contract, std::as_bytes(std::span(&constants, 1)),
                                      Precision::fast, forms),
                        slots, std::as_bytes(std::span(&params, 1)), {}});
    commands->barrier();
    CHECK(throws<InternalError>([&] { commands->wait(); }, "expected"));
  }
  CHECK(fake_metal_number("dispatches") == before);
  check_silent();
}

}  // namespace
}  // namespace lily
