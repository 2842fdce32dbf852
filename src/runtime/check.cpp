#include "runtime/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "base/bf16.h"
#include "base/error.h"

namespace lily {

namespace {

struct NamedPlan {
  std::string name;
  PlanOptions options;
};

// One of each kind and shape, and each technique left out; `rows` is the most of a prefill pass.
std::vector<NamedPlan> every_plan(uint32_t rows, const Tuning& tuning) {
  std::vector<NamedPlan> plans;
  auto add = [&](std::string name, PlanOptions options) {
    options.max_rows = is_prefill(options.kind) ? rows : 1;
    plans.push_back({std::move(name), options});
  };
  for (PlanKind kind : {PlanKind::prefill, PlanKind::prompt, PlanKind::score})
    add(plan_name(kind), {.kind = kind});
  if (tuning.tile_rows)
    for (uint32_t tile : {16u, 32u})
      add("prefill, tiles of " + std::to_string(tile) + " rows",
          {.kind = PlanKind::prefill, .tile_rows = tile});
  for (PlanKind kind : {PlanKind::step, PlanKind::pick, PlanKind::next_greedy, PlanKind::next_drawn})
    for (bool single : {true, false})
      for (bool penalties : {false, true}) {
        const bool draws = kind == PlanKind::pick || kind == PlanKind::next_drawn;
        if ((penalties && !draws) || (single && kind == PlanKind::pick)) continue;
        add(std::string(plan_name(kind)) + (single ? ", few keys" : "") +
                (penalties ? ", penalties" : ""),
            {.kind = kind, .single_block = single, .penalties = penalties});
      }
  for (PlanKind kind : {PlanKind::prompt, PlanKind::next_greedy})
    add(std::string(plan_name(kind)) + ", int8 cache", {.kind = kind, .kv_int8 = true});
  for (const TechniqueInfo& t : techniques()) {
    const std::string name(t.name);
    for (PlanKind kind : {PlanKind::prompt, PlanKind::next_greedy})
      add(std::string(plan_name(kind)) + ", no " + name,
          {.kind = kind, .ablation = Ablation(std::span(&name, 1))});
  }
  return plans;
}

Plan record(Device& device, const Tuning& tuning, const Qwen36& model, Precision precision,
            const PlanOptions& options) {
  Recorder recorder(device, precision);
  if (options.ablation.without(Technique::concurrent_dispatch)) recorder.serial();
  Ops ops(recorder, tuning, model.config(), options);
  model.forward(ops);
  return recorder.finish(false);
}

// The reports, each kernel's once.
class Reports {
 public:
  KernelReport& of(const Plan::Entry& e, const std::string& plan) {
    auto [found, is_new] = numbers_.try_emplace(e.kernel, list_.size());
    if (is_new) {
      KernelReport report;
      report.name = e.contract->name;
      report.plan = plan;
      report.stage = e.stage;
      list_.push_back(std::move(report));
    }
    return list_[found->second];
  }
  std::vector<KernelReport> take() { return std::move(list_); }

 private:
  std::map<const Kernel*, size_t> numbers_;
  std::vector<KernelReport> list_;
};

bool compiles(const Kernel& kernel, KernelReport& report) {
  try {
    kernel.ready();
    report.facts = kernel.facts();
  } catch (const DeviceError& e) {
    report.error = e.what();
  }
  return report.error.empty();
}

// A model of which only a few layers may be there, with its weights on a device.
struct Loaded {
  Loaded(Device& device, const Config& config, const TensorTable& table, uint32_t threads)
      : loader(device, table), measured(config, loader), model(placed(config, loader)) {
    loader.read(threads, nullptr);
  }

  Loader loader;
  Qwen36 measured, model;

 private:
  static Qwen36 placed(const Config& config, Loader& loader) {
    loader.allocate();
    return Qwen36(config, loader);
  }
};

// ---------------------------------------------------------------------------------------------
// Comparing slots
// ---------------------------------------------------------------------------------------------

// Rows of a cache have the activations' type where they are not int8.
SlotType elements(SlotType type) { return type == SlotType::cache ? SlotType::act : type; }

double number(const std::byte* p, SlotType type, Precision precision) {
  if (type == SlotType::act && precision == Precision::fast) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return std::bit_cast<float>(uint32_t{bits} << 16);
  }
  float value;
  std::memcpy(&value, p, 4);
  return value;
}

// What one slot holds on two devices. Bytes that nobody wrote are the same on both.
double difference(const SlotInfo& info, Precision precision, size_t bytes, const std::byte* a,
                  const std::byte* b) {
  const SlotType type = elements(info.type);
  const size_t step = element_bytes(type, precision);
  double worst = 0, largest = 0;
  for (size_t i = 0; i + step <= bytes; i += step) {
    const bool same = std::memcmp(a + i, b + i, step) == 0;
    if (type == SlotType::u32) {
      if (!same) return INFINITY;
      continue;
    }
    const double x = number(a + i, type, precision), y = number(b + i, type, precision);
    if (std::isfinite(y)) largest = std::max(largest, std::abs(y));
    if (same) continue;
    if (!std::isfinite(x - y)) return INFINITY;
    worst = std::max(worst, std::abs(x - y));
  }
  return worst == 0 ? 0 : worst / largest;
}

// Rows of an int8 cache, then their scales. A code may be rounded to either of its neighbours.
double difference_of_codes(size_t bytes, uint32_t width, const std::byte* a, const std::byte* b) {
  const size_t rows = bytes / (width + sizeof(float)), codes = rows * width;
  for (size_t i = 0; i < codes; ++i)
    if (std::abs(static_cast<int8_t>(a[i]) - static_cast<int8_t>(b[i])) > 1) return INFINITY;
  const SlotInfo scales{0, "", SlotType::f32, Access::update, ""};
  return difference(scales, Precision::float32, bytes - codes, a + codes, b + codes);
}

// Devices share out the vocabulary in their own ways: only the largest of the maxima is one number.
double difference_of_maxima(size_t bytes, const std::byte* a, const std::byte* b) {
  auto largest = [&](const std::byte* p) {
    std::pair<double, uint32_t> best{-INFINITY, UINT32_MAX};
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const double value = number(p + i, SlotType::f32, Precision::float32);
      uint32_t index;
      std::memcpy(&index, p + i + 4, 4);
      if (value > best.first || (value == best.first && index < best.second)) best = {value, index};
    }
    return best;
  };
  const auto [x, i] = largest(a);
  const auto [y, j] = largest(b);
  return i != j ? INFINITY : x == y ? 0 : std::abs(x - y) / std::abs(y);
}

// ---------------------------------------------------------------------------------------------
// One plan on two devices
// ---------------------------------------------------------------------------------------------

constexpr std::byte unwritten{0xff};

class Comparison {
 public:
  Comparison(Device& device, Device& reference, const Config& config, Precision precision)
      : device_(device), reference_(reference), config_(config), precision_(precision) {}

  void run(const Plan& plan, const Plan& expected, const Step& step, const NamedPlan& named,
           Reports& reports) {
    kv_int8_ = named.options.kv_int8;
    LILY_CHECK(plan.entries().size() == expected.entries().size());
    bindings_.clear();
    expanded_.clear();
    temporaries_ = device_.allocate(plan.stats().temporary_bytes, "temporaries");
    for (size_t i = 0; i < plan.entries().size(); ++i) {
      const Plan::Entry& e = plan.entries()[i];
      if (e.host)
        run_on_host(e, step);
      else
        compare(e, expected.entries()[i], step, reports.of(e, named.name));
    }
  }

 private:
  // The host's part is the same function on both; what comes behind it needs the results.
  void run_on_host(const Plan::Entry& e, const Step& step) {
    std::vector<std::byte> params = e.params;
    e.fill(params.data(), step);
    std::vector<void*> memory;
    for (const Tensor& t : e.slots) {
      const Slot slot = resolve(t, step);
      memory.push_back(slot.buffer ? slot.buffer->data + slot.offset : nullptr);
    }
    e.host(memory.data(), e.constants.data(), params.data());
  }

  struct Pair {
    std::vector<Slot> here, there;
    std::vector<std::shared_ptr<Buffer>> copies;  // the reference's, one a slot
  };

  void compare(const Plan::Entry& e, const Plan::Entry& expected, const Step& step,
               KernelReport& report) {
    std::vector<std::byte> params = e.params;
    e.fill(params.data(), step);
    Pair pair = slots(e, expected, step);
    auto run = [&](Device& device, const Kernel* kernel, std::span<const Slot> slots) {
      auto commands = device.command_buffer();
      commands->dispatch({kernel, slots, params, e.stage});
      commands->commit();
      const Timing timing = commands->wait();
      return timing.end_s - timing.start_s;
    };
    run(reference_, expected.kernel, pair.there);
    bool ran = false;
    if (report.dispatches > 0 ? report.error.empty() : compiles(*e.kernel, report)) {
      try {
        const double seconds = run(device_, e.kernel, pair.here);
        report.seconds = report.seconds > 0 ? std::min(report.seconds, seconds) : seconds;
        ran = check(e, pair, report);
      } catch (const DeviceError& error) {
        report.error = error.what();
      }
    }
    ++report.dispatches;
    if (ran) return;
    for (uint32_t i = 0; i < e.contract->n_slots; ++i)
      if (pair.copies[i] && e.contract->slots[i].access != Access::read)
        std::memcpy(pair.here[i].buffer->data + pair.here[i].offset, pair.copies[i]->data,
                    pair.here[i].bytes);
  }

  // Both devices start from the same bytes, and from marked ones where they only write.
  Pair slots(const Plan::Entry& e, const Plan::Entry& expected, const Step& step) {
    Pair pair;
    for (uint32_t i = 0; i < e.contract->n_slots; ++i) {
      const Tensor& t = e.slots[i];
      pair.copies.push_back(nullptr);
      if (t.place == Tensor::Place::none) {
        pair.here.push_back({});
        pair.there.push_back({});
        continue;
      }
      if (t.place == Tensor::Place::buffer) {
        const Tensor& weight = expected.slots[i];
        pair.here.push_back({t.buffer, t.offset, t.bytes});
        pair.there.push_back({weight.buffer, weight.offset, weight.bytes});
        continue;
      }
      const Slot slot = resolve(t, step);
      if (t.type == SlotType::packed) {  // each device's own form
        const Tensor& form = expected.slots[i];
        std::shared_ptr<Buffer>& buffer = expanded_[t.id];
        if (!buffer) buffer = reference_.allocate(form.bytes, "a comparison");
        pair.here.push_back(slot);
        pair.there.push_back({buffer.get(), 0, form.bytes});
        continue;
      }
      std::byte* bytes = slot.buffer->data + slot.offset;
      if (e.contract->slots[i].access == Access::write) std::fill_n(bytes, slot.bytes, unwritten);
      pair.copies[i] = reference_.allocate(slot.bytes, "a comparison");
      std::memcpy(pair.copies[i]->data, bytes, slot.bytes);
      pair.here.push_back(slot);
      pair.there.push_back({pair.copies[i].get(), 0, slot.bytes});
    }
    return pair;
  }

  Slot resolve(const Tensor& t, const Step& step) {
    switch (t.place) {
      case Tensor::Place::none:
        return {};
      case Tensor::Place::temporary:
        return {temporaries_.get(), t.offset, t.bytes};
      case Tensor::Place::binding:
        return binding(t, step);
      default:
        return {t.buffer, t.offset, t.bytes};
    }
  }

  bool check(const Plan::Entry& e, const Pair& pair, KernelReport& report) const {
    for (uint32_t i = 0; i < e.contract->n_slots; ++i) {
      const SlotInfo& info = e.contract->slots[i];
      if (!pair.here[i].buffer || info.access == Access::read || info.shape.ends_with("scratch"))
        continue;
      const Slot &slot = pair.here[i], &other = pair.there[i];
      const std::byte* found = slot.buffer->data + slot.offset;
      const std::byte* expected = other.buffer->data + other.offset;
      const double d =
          info.type == SlotType::packed ? difference_of_weights(*e.slots[i].form, found, expected)
          : info.type == SlotType::cache && kv_int8_
              ? difference_of_codes(slot.bytes, config_.head_dim, found, expected)
          : info.name == "maxima"       ? difference_of_maxima(slot.bytes, found, expected)
                                        : difference(info, precision_, slot.bytes, found, expected);
      if (d >= report.difference) report.difference = d, report.slot = info.name;
    }
    const double allowed = allowed_difference(precision_);
    if (report.difference <= allowed) return true;
    char text[200];
    std::snprintf(text, sizeof text, "%s differs by %.2g of its largest number, expected at most %.2g",
                  report.slot.c_str(), report.difference, allowed);
    report.error = text;
    return false;
  }

  // The first and the last expert's, as numbers.
  double difference_of_weights(const PackSpec& spec, const std::byte* a, const std::byte* b) const {
    double worst = 0;
    for (uint32_t expert : {0u, spec.experts - 1})
      for (uint32_t s = 0; s < spec.segments.size(); ++s) {
        std::vector<float> x(size_t{spec.segments[s].rows} * spec.segments[s].cols), y(x.size());
        device_.unpack(spec, a, expert, s, x.data());
        reference_.unpack(spec, b, expert, s, y.data());
        const SlotInfo info{0, "", SlotType::f32, Access::write, ""};
        auto bytes = [](const std::vector<float>& v) {
          return reinterpret_cast<const std::byte*>(v.data());
        };
        worst = std::max(worst, difference(info, Precision::float32, 4 * x.size(), bytes(x), bytes(y)));
      }
    return worst;
  }

  // What a session would hold: made at first use, random, of numbers that a model could meet.
  Slot binding(const Tensor& t, const Step& step) {
    std::shared_ptr<Buffer>& buffer = bindings_[{t.role, t.id}];
    if (!buffer) {
      const size_t row = kv_int8_
                             ? config_.kv_width() + config_.num_key_value_heads * sizeof(float)
                             : config_.kv_width() * element_bytes(SlotType::act, precision_);
      const size_t bytes = t.type == SlotType::cache ? step.capacity * row : t.bytes;
      buffer = device_.allocate(bytes, "a comparison");
      fill(t, *buffer);
    }
    return {buffer.get(), 0, buffer->bytes};
  }

  void fill(const Tensor& t, Buffer& buffer) {
    if (t.type == SlotType::cache && kv_int8_) {
      const size_t rows = buffer.bytes / (config_.head_dim + sizeof(float));
      const size_t codes = rows * config_.head_dim;
      for (size_t i = 0; i < codes; ++i)
        buffer.data[i] = static_cast<std::byte>(static_cast<int>(random_() % 255) - 127);
      for (size_t i = 0; i < rows; ++i) {
        const float scale = 0.01f + 0.001f * static_cast<float>(random_() % 20);
        std::memcpy(buffer.data + codes + 4 * i, &scale, 4);
      }
      return;
    }
    const size_t step = element_bytes(elements(t.type), precision_);
    std::normal_distribution<float> normal(0, t.role == Role::logits ? 3.0f : 1.0f);
    std::uniform_int_distribution<uint32_t> token(0, config_.n_tokens - 1), count(0, 3);
    for (size_t i = 0; i + step <= buffer.bytes; i += step) {
      uint32_t bits = std::bit_cast<uint32_t>(normal(random_));
      if (t.type == SlotType::u32) bits = t.role == Role::counts ? count(random_) : token(random_);
      if (step == 2) bits >>= 16;
      std::memcpy(buffer.data + i, &bits, step);
    }
  }

  Device &device_, &reference_;
  const Config& config_;
  Precision precision_;
  bool kv_int8_ = false;
  std::mt19937 random_{1};
  std::shared_ptr<Buffer> temporaries_;
  std::map<std::pair<Role, uint32_t>, std::shared_ptr<Buffer>> bindings_;
  std::map<uint32_t, std::shared_ptr<Buffer>> expanded_;  // the reference's, by temporary
};

// Tiles with tails in prefill, and in decode a context on the plan's side of `single_block`.
Step step_of(const PlanOptions& options, const Tuning& tuning) {
  Step step = is_prefill(options.kind) ? step_at(tuning, 70, options.max_rows)
              : options.single_block   ? step_at(tuning, tuning.single_block - 20, 1)
                                       : step_at(tuning, 2 * tuning.single_block + 44, 1);
  step.capacity = step.position + step.rows + 3;
  step.slot = 1;
  step.draw_step = 7;
  step.draw = {.temperature = 0.7f,
               .top_p = 0.95f,
               .min_p = 0.001f,
               .repetition = options.penalties ? 1.1f : 1.0f,
               .presence = options.penalties ? 0.5f : 0.0f,
               .top_k = 20,
               .n_bias = 1,
               .seed = 3};
  return step;
}

}  // namespace

// Each device is within 1e-5 (float32), or two units in the last place of a bf16, of exact sums.
double allowed_difference(Precision precision) {
  return precision == Precision::float32 ? 2e-5 : 4.0 / 256;
}

std::vector<KernelReport> compile_kernels(Device& device, const Config& config,
                                          const TensorTable& table, const EngineOptions& options) {
  config.check();
  Loader loader(device, table);
  const Qwen36 model(config, loader);
  const uint32_t rows = options.chunk ? options.chunk : device.tuning().chunk;
  // All are asked for before any is waited for: devices compile in the background.
  std::vector<std::pair<std::string, Plan>> plans;
  for (const NamedPlan& p : every_plan(rows, device.tuning()))
    plans.emplace_back(p.name, record(device, device.tuning(), model, options.precision, p.options));
  Reports reports;
  for (const auto& [name, plan] : plans)
    for (const Plan::Entry& e : plan.entries()) {
      if (!e.kernel) continue;  // the host's part
      KernelReport& report = reports.of(e, name);
      if (report.dispatches++ == 0) compiles(*e.kernel, report);
    }
  return reports.take();
}

std::vector<KernelReport> compare_kernels(Device& device, Device& reference, const Config& config,
                                          const TensorTable& table, const EngineOptions& options) {
  config.check();
  table.check();
  const Loaded here(device, config, table, options.io_threads);
  const Loaded there(reference, config, table, options.io_threads);
  Comparison comparison(device, reference, config, options.precision);
  Reports reports;
  constexpr uint32_t rows = 37;
  for (const NamedPlan& p : every_plan(rows, device.tuning())) {
    const Plan plan = record(device, device.tuning(), here.model, options.precision, p.options);
    // The device's numbers, so that the plans are one for one the same.
    const Plan expected =
        record(reference, device.tuning(), there.model, options.precision, p.options);
    comparison.run(plan, expected, step_of(p.options, device.tuning()), p, reports);
  }
  return reports.take();
}

}  // namespace lily
