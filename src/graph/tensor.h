// A tensor of a recorded pass: element type, shape and the bytes it stands for. No arithmetic.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "device/device.h"

namespace lily {

// What a session binds when a plan is replayed. Those marked * exist once for each layer of a kind.
enum class Role : uint8_t {
  state_in,   // * recurrent state before and after the pass
  state_out,  // *
  ring,       // * conv ring
  keys,       // * KV cache
  values,     // *
  tokens,     // token ids of a prefill chunk; the two token slots of the decode loop
  residual,   // residual stream of one token, carried from `sample` into the next step
  logits,     // logits after the last token
  counts,     // penalty counts
  bias_ids,   // logit bias
  bias,
};
constexpr size_t n_roles = 11;

struct Shape {
  std::array<uint32_t, 3> dims{};
  uint32_t n = 0;

  Shape() = default;
  Shape(std::initializer_list<uint32_t> list) {
    for (uint32_t d : list) dims[n++] = d;
  }
  size_t count() const {
    size_t c = 1;
    for (uint32_t i = 0; i < n; ++i) c *= dims[i];
    return c;
  }
  bool operator==(const Shape&) const = default;
};

struct Tensor {
  enum class Place : uint8_t { none, temporary, buffer, binding };

  Place place = Place::none;
  SlotType type = SlotType::f32;
  Role role = Role::state_in;  // binding
  uint32_t id = 0;             // temporary: its number; binding: which layer of the kind
  Buffer* buffer = nullptr;    // buffer
  size_t offset = 0, bytes = 0;
  Shape shape;
  std::shared_ptr<const PackSpec> form;  // packed

  explicit operator bool() const { return place != Place::none; }
};

inline size_t element_bytes(SlotType type, Precision precision) {
  if (type == SlotType::packed) return 1;
  const bool activations = type == SlotType::act || type == SlotType::cache;
  return activations && precision == Precision::fast ? 2 : 4;
}

}  // namespace lily
