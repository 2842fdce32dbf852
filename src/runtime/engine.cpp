#include "runtime/engine.h"

#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace lily {

namespace {

// The device's choice, as the options change it.
Tuning tuning_of(const Device& device, const EngineOptions& options) {
  Tuning t = device.tuning();
  if (options.attention_block) {
    t.split_from = t.split_from / t.single_block * options.attention_block;
    t.single_block = options.attention_block;
  }
  if (options.ablation.without(Technique::split_kv)) {
    t.split_from = UINT32_MAX;
    t.max_blocks = 4096;
  }
  return t;
}

Plan record(Device& device, const Qwen36& model, const EngineOptions& engine, PlanOptions options,
            bool allocate, std::shared_ptr<Buffer>* shared = nullptr) {
  options.ablation = engine.ablation;
  options.kv_int8 = engine.kv_int8;
  Recorder recorder(device, engine.precision);
  if (options.ablation.without(Technique::concurrent_dispatch)) recorder.serial();
  const Tuning tuning = tuning_of(device, engine);
  Ops ops(recorder, tuning, model.config(), options);
  model.forward(ops);
  return recorder.finish(allocate, shared);
}

EngineOptions completed(EngineOptions options, const Device& device) {
  constexpr uint32_t most = 16384;
  if (options.ablation.without(Technique::chunked_prompts)) options.chunk = most;
  if (options.chunk == 0) options.chunk = device.tuning().chunk;
  if (options.chunk > most)
    throw ArgumentError("chunk: expected at most " + std::to_string(most) + " tokens, found " +
                        std::to_string(options.chunk));
  if (options.attention_block > 4096)
    throw ArgumentError("attention_block: expected at most 4096 keys, found " +
                        std::to_string(options.attention_block));
  if (options.memory_bytes == 0) options.memory_bytes = device.info().memory_bytes;
  return options;
}

// Scoring keeps the logits of every row: a smaller chunk bounds them.
uint32_t rows_of(PlanKind kind, const EngineOptions& options, const Config& config) {
  if (!is_prefill(kind)) return 1;
  if (kind != PlanKind::score) return options.chunk;
  constexpr uint32_t score_values = 16u << 20;
  return std::clamp(score_values / config.vocab_size, 1u, options.chunk);
}

std::string gigabytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

KvShape shape_of_kv(const Config& c, const EngineOptions& options) {
  return {c.n_attention_layers(), c.num_key_value_heads, c.head_dim,
          options.kv_int8 ? 1 : element_bytes(SlotType::act, options.precision),
          options.kv_int8 ? sizeof(float) : 0};
}

size_t layer_state_bytes(const Config& c) {
  return size_t{c.linear_num_value_heads} * c.linear_value_head_dim * c.linear_key_head_dim *
         sizeof(float);
}

size_t layer_ring_bytes(const Config& c, const EngineOptions& options) {
  return size_t{conv_taps} * c.conv_channels() * element_bytes(SlotType::act, options.precision);
}

MemoryNeed needed(Device& device, const Qwen36& model, size_t weight_bytes,
                  const EngineOptions& options) {
  const Config& c = model.config();
  MemoryNeed need;
  need.weight_bytes = weight_bytes;
  need.session_bytes =
      c.n_delta_layers() * (2 * layer_state_bytes(c) + layer_ring_bytes(c, options)) +
      c.vocab_size * sizeof(float) + c.hidden_size * sizeof(float) +
                       options.chunk * sizeof(uint32_t);
  need.position_bytes = shape_of_kv(c, options).position_bytes();
  auto stats = [&](PlanKind kind) {
    const PlanOptions plan{.kind = kind, .max_rows = rows_of(kind, options, c)};
    return record(device, model, options, plan, false).stats();
  };
  const PlanStats chunk = stats(PlanKind::prompt), token = stats(PlanKind::next_greedy);
  need.scratch_bytes = chunk.temporary_bytes + token.temporary_bytes;
  need.chunk_dispatches = chunk.dispatches;
  need.token_dispatches = token.dispatches;
  need.available_bytes = options.memory_bytes;
  return need;
}

}  // namespace

const char* plan_name(PlanKind kind) {
  constexpr const char* names[] = {"prefill", "prompt", "score", "step", "pick", "next_greedy",
                                   "next_drawn"};
  return names[static_cast<size_t>(kind)];
}

Step step_at(const Tuning& tuning, uint32_t position, uint32_t rows) {
  const uint32_t keys = position + 1;
  Step step;
  step.rows = rows;
  step.position = position;
  step.block = tuning.block(keys);
  step.blocks = (keys + step.block - 1) / step.block;
  return step;
}

uint64_t MemoryNeed::largest_context() const {
  const size_t fixed = weight_bytes + session_bytes + scratch_bytes;
  if (fixed >= available_bytes) return 0;
  const uint64_t most = INT32_MAX;
  return position_bytes ? std::min<uint64_t>(most, (available_bytes - fixed) / position_bytes) : most;
}

MemoryNeed Engine::need(Device& device, const Config& config, const TensorTable& table,
                        const EngineOptions& options) {
  config.check();
  Loader loader(device, table);
  Qwen36 model(config, loader);
  return needed(device, model, loader.bytes(), completed(options, device));
}

PlanStats Engine::stats(Device& device, const Config& config, const TensorTable& table,
                        const EngineOptions& options, PlanOptions plan) {
  config.check();
  Loader loader(device, table);
  Qwen36 model(config, loader);
  const EngineOptions complete = completed(options, device);
  plan.max_rows = rows_of(plan.kind, complete, config);
  return record(device, model, complete, plan, false).stats();
}

std::shared_ptr<Engine> Engine::load(std::shared_ptr<Device> device, const Config& config,
                                     const TensorTable& table, const EngineOptions& options,
                                     const Loader::Progress& progress) {
  config.check();
  table.check();
  const EngineOptions complete = completed(options, *device);
  Loader loader(*device, table);
  const Qwen36 measured(config, loader);
  const MemoryNeed need = needed(*device, measured, loader.bytes(), complete);
  if (need.largest_context() == 0)
    throw DeviceError(
        "weights take " + gigabytes(need.weight_bytes) + ", a session and scratch " +
        gigabytes(need.session_bytes + need.scratch_bytes) + ", expected at most " +
        gigabytes(need.available_bytes) + " in all");
  loader.allocate();
  Qwen36 model(config, loader);
  loader.read(complete.io_threads, progress);
  return std::shared_ptr<Engine>(
      new Engine(std::move(device), std::move(model), loader.take_buffers(), complete, need));
}

Engine::Engine(std::shared_ptr<Device> device, Qwen36 model,
               std::vector<std::shared_ptr<Buffer>> weights, EngineOptions options, MemoryNeed need)
    : device_(std::move(device)),
      model_(std::move(model)),
      weights_(std::move(weights)),
      options_(options),
      tuning_(tuning_of(*device_, options_)),
      need_(need),
      process_(getpid()) {}

std::shared_ptr<Engine> Engine::without(const Ablation& ablation) const {
  EngineOptions options = options_;
  if (options.ablation.without(Technique::chunked_prompts)) options.chunk = 0;
  options.ablation = ablation;
  options = completed(options, *device_);
  const MemoryNeed need = needed(*device_, model_, need_.weight_bytes, options);
  return std::shared_ptr<Engine>(new Engine(device_, model_, weights_, options, need));
}

KvShape Engine::kv_shape() const { return shape_of_kv(config(), options_); }
size_t Engine::state_bytes() const { return layer_state_bytes(config()); }
size_t Engine::ring_bytes() const { return layer_ring_bytes(config(), options_); }

uint32_t Engine::max_rows(PlanKind kind) const { return rows_of(kind, options_, config()); }

const Plan& Engine::plan(PlanOptions options) {
  options.max_rows = max_rows(options.kind);
  std::lock_guard lock(mutex_);
  const auto key = std::tuple(options.kind, options.single_block, options.penalties,
                              options.max_rows, options.tile_rows);
  auto found = plans_.find(key);
  // Those of prefill are large, and one for each size of tiles.
  std::shared_ptr<Buffer>* shared = is_prefill(options.kind) ? &prefill_temporaries_ : nullptr;
  if (found == plans_.end())
    found = plans_.emplace(key, record(*device_, model_, options_, options, true, shared)).first;
  return found->second;
}

void Engine::check_process() const {
  if (getpid() != process_)
    throw DeviceError(
        "this process was forked after the model was loaded, expected the process that loaded it\n"
        "hint: start workers with the \"spawn\" method and load the model in each");
}

}  // namespace lily
