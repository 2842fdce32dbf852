// The vocabulary of the model file: one call is one stage of the decode chain.
//
// In a decode plan each stage is one dispatch; in a prefill plan it is several, over T rows. The
// kind of the plan decides, never the number of rows.
#pragma once

#include <map>
#include <vector>

#include "graph/recorder.h"
#include "ops/config.h"
#include "ops/techniques.h"

namespace lily {

// What a plan computes.
enum class PlanKind : uint8_t {
  prefill,      // append T tokens
  prompt,       // append T tokens, and leave the logits after the last one
  score,        // append T tokens, and leave the logits after each of them
  step,         // append one token that the host names, and leave its logits
  pick,         // draw a token from the logits that are there
  next_greedy,  // append the token drawn last, and take the likeliest next one
  next_drawn,   // append the token drawn last, and draw the next one
};

inline bool is_prefill(PlanKind k) { return k <= PlanKind::score; }

struct PlanOptions {
  PlanKind kind = PlanKind::prefill;
  bool single_block = false;  // attention over so few keys that one block does
  bool penalties = false;     // keep and apply penalty counts
  uint32_t max_rows = 1;      // most tokens of one replay
  bool kv_int8 = false;       // keys and values as int8
  uint32_t tile_rows = 64;    // of a tile of the experts' products: a prefill pass's load decides
  Ablation ablation = {};
  bool operator==(const PlanOptions&) const = default;
};

// A head-wise value on its way to the output projection: [T, K], and in a decode plan the Σ² of
// each head where the norm is still to be applied.
struct Heads {
  Tensor u, squares;
};

struct DeltaInputs {
  Tensor qkv, z, gates;  // qkv: prefill only; a decode step finds it in the conv ring
};

struct Routed {
  Tensor y;                                // prefill: the normed rows
  Tensor logits, shared;                   // router's logits, shared expert's activations
  Tensor ids, shares, h;                   // chosen experts, their weights, their activations
  Tensor offsets, inv;                     // prefill: grouped rows by expert, and the way back
};

class Ops {
 public:
  Ops(Recorder& rec, const Tuning& tuning, const Config& config, const PlanOptions& options)
      : rec_(rec), tuning_(tuning), c_(config), options_(options) {}

  PlanKind kind() const { return options_.kind; }
  // Nobody will read what the last layer adds to x.
  bool skips_last_layer() const {
    return options_.kind == PlanKind::prefill && !without(Technique::last_layer_skip);
  }
  void stage(const char* name, int layer = -1);

  // x = E[tokens]; in a decode plan the residual that the last `sample` left.
  Tensor embed(const Tensor& embedding);

  // The n-th Gated DeltaNet layer.
  DeltaInputs delta_project(const Tensor& x, const Tensor& norm, const Tensor& in, uint32_t n);
  Heads delta_step(const DeltaInputs&, const Tensor& conv, const Tensor& decay,
                   const Tensor& gamma, uint32_t n);

  // Prefill: all that later tokens need of the layer, its state and ring. Returns the read-out.
  Tensor delta_state(const DeltaInputs&, const Tensor& conv, const Tensor& decay, uint32_t n);

  // The n-th attention layer.
  Tensor attend_project(const Tensor& x, const Tensor& norm, const Tensor& in);
  Heads attend(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
               const Tensor& frequencies, uint32_t n);
  // Prefill: all that later tokens need of the layer, its keys and values.
  void attend_cache(const Tensor& x, const Tensor& norm, const Tensor& in, const Tensor& k_norm,
                    const Tensor& frequencies, uint32_t n);

  // x += W · u, after the head norm where one is pending.
  void project_add(const Heads& u, const Tensor& weight, const Tensor& x);

  Routed route_shared(const Tensor& x, const Tensor& norm, const Tensor& route);
  void experts_up(Routed&, const Tensor& x, const Tensor& norm, const Tensor& up);
  void experts_down_add(const Routed&, const Tensor& down, const Tensor& shared_down,
                        const Tensor& x);

  // Logits after the last token (or each), and the next token, as the plan's kind asks.
  void head(const Tensor& x, const Tensor& norm, const Tensor& head);
  void sample(const Tensor& embedding);

 private:
  bool prefill() const { return is_prefill(options_.kind); }
  bool without(Technique t) const { return options_.ablation.without(t); }
  uint32_t rows() const { return options_.max_rows; }
  // ROWS of a decode product; `least` is 2 where gate and up make a pair.
  uint32_t product_rows(uint32_t least) const {
    return without(Technique::row_parallel) ? least : 0;
  }
  Tensor f32(Shape s) { return rec_.temporary(SlotType::f32, s); }
  Tensor u32(Shape s) { return rec_.temporary(SlotType::u32, s); }
  Tensor act(Shape s) { return rec_.temporary(SlotType::act, s); }
  Tensor expanded(const Tensor& weight);  // what a product of a prefill pass reads
  Tensor normed(const Tensor& x, const Tensor& gamma);
  void choose(const Routed&);  // ids and shares
  void group(const Routed&, const Tensor& src);
  Tensor ring(uint32_t n);
  Tensor state(Role role, uint32_t n);
  Tensor cache(Role role, uint32_t n);
  Tensor project_rows(const Tensor& x, const Tensor& norm, const Tensor& in, uint32_t first);
  void prepare_rows(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                    const Tensor& frequencies, uint32_t n, const Tensor& q);
  Tensor residual();
  Tensor logits();

  Recorder& rec_;
  const Tuning& tuning_;
  const Config& c_;
  const PlanOptions& options_;
  Tensor maxima_;  // from head to sample
  std::map<std::vector<uint32_t>, Tensor> expanded_;  // by experts and rows × columns
};

}  // namespace lily
