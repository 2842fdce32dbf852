// A loaded model: its weights on a device, and the plans that sessions share.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "model/qwen3_6.h"
#include "runtime/kv_cache.h"

namespace lily {

struct EngineOptions {
  Precision precision = Precision::fast;
  uint32_t chunk = 0;         // tokens of a prefill pass; 0 takes the device's choice
  uint32_t io_threads = 2;    // that read the checkpoint
  size_t memory_bytes = 0;    // cap on weights and sessions together; 0 takes the device's
  Ablation ablation = {};     // techniques to leave out of the plans
  bool kv_int8 = false;       // keys and values as int8 with a scale for each row
  uint32_t attention_block = 0;  // keys of the smallest one; 0 takes the device's choice
};

const char* plan_name(PlanKind);

// The numbers of a pass over `rows` tokens after `position` others, but for what a session adds.
Step step_at(const Tuning&, uint32_t position, uint32_t rows);

// What a model takes, known before anything is read or allocated.
struct MemoryNeed {
  size_t weight_bytes = 0;
  size_t session_bytes = 0;      // recurrent states, conv rings, logits; whatever the context
  size_t position_bytes = 0;     // KV cache of one token
  size_t scratch_bytes = 0;      // temporaries of the plans
  size_t available_bytes = 0;
  uint32_t token_dispatches = 0, chunk_dispatches = 0;  // of a greedy token; of a prompt's last chunk

  // Tokens that fit beside the rest, at most 2^31 - 1.
  uint64_t largest_context() const;
};

class Engine {
 public:
  static MemoryNeed need(Device&, const Config&, const TensorTable&, const EngineOptions&);

  // What recording a plan for this configuration gives, without any weights.
  static PlanStats stats(Device&, const Config&, const TensorTable&, const EngineOptions&,
                         PlanOptions);

  // Throws DeviceError with both numbers if the weights, one session and the scratch do not fit.
  static std::shared_ptr<Engine> load(std::shared_ptr<Device>, const Config&, const TensorTable&,
                                      const EngineOptions&, const Loader::Progress&);

  // The same weights, with plans that leave other techniques out.
  std::shared_ptr<Engine> without(const Ablation&) const;

  const Plan& plan(PlanOptions);  // recorded at first use
  uint32_t max_rows(PlanKind) const;  // most tokens of one replay
  Device& device() { return *device_; }
  const Config& config() const { return model_.config(); }
  const EngineOptions& options() const { return options_; }
  const MemoryNeed& memory() const { return need_; }
  const Tuning& tuning() const { return tuning_; }
  KvShape kv_shape() const;
  size_t state_bytes() const;  // recurrent state of one layer
  size_t ring_bytes() const;   // conv ring of one layer

  // Throws DeviceError in a process forked from the one that loaded the model: its device threads
  // do not exist there.
  void check_process() const;

 private:
  Engine(std::shared_ptr<Device>, Qwen36, std::vector<std::shared_ptr<Buffer>>, EngineOptions,
         MemoryNeed);

  std::shared_ptr<Device> device_;
  Qwen36 model_;
  std::vector<std::shared_ptr<Buffer>> weights_;
  EngineOptions options_;
  Tuning tuning_;
  MemoryNeed need_;
  int process_;
  std::mutex mutex_;
  std::shared_ptr<Buffer> prefill_temporaries_;
  std::map<std::tuple<PlanKind, bool, bool, uint32_t, uint32_t>, Plan> plans_;
};

}  // namespace lily
