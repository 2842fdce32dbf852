// What a contract header says, and how C++ and Metal read it.
//
// A contract states a kernel's arguments once, as three lists beside the kernel:
//
//   struct Op_Params { ... };                 what may change from one dispatch to the next (slot 0)
//   #define Op_CONSTANTS(C) C(type, NAME) …   what is fixed when the plan is recorded
//   #define Op_SLOTS(READ, WRITE, UPDATE) …   READ(number, name, type, "[shape] meaning") …
//   LILY_CONTRACT(Op, kernel_name)
//
// Slots are numbered 1…n in order. UPDATE means read and written. A slot's type is float,
// uint32_t, ACT (activations: bfloat in the fast build, float in the float32 build), cache (rows of
// keys or values, see attend.h) or packed (weights, in whatever form the device's pack() gave them).
// Params hold 4- and 8-byte scalars, constants are uint32_t or float. A constant ROWS is how many
// rows of a weight a simdgroup makes at a time, 0 as many as the device likes; pairs of gate and up
// take two. This file is the only place with platform conditions.
#pragma once

#ifdef __METAL_VERSION__

#include <metal_stdlib>

namespace lily {}
using namespace metal;
using namespace lily;

// The Metal reading: a kernel's buffers, numbered like the slots, behind the params `p`.
//
//   kernel void embed(LILY_ARGUMENTS(Embed), uint3 group [[threadgroup_position_in_grid]])
//
// The host defines ACT and each constant as Op_NAME in front of the source. packed_weights.h says
// what is behind a packed slot.
#define LILY_ARGUMENTS(Op)              \
  constant Op##_Params& p [[buffer(0)]] \
      Op##_SLOTS(LILY_SLOT_CONST, LILY_SLOT_MUTABLE, LILY_SLOT_MUTABLE)
#define LILY_SLOT_CONST(number, name, type, shape) \
  , device const LILY_SLOT_TYPE_##type* name [[buffer(number)]]
#define LILY_SLOT_MUTABLE(number, name, type, shape) \
  , device LILY_SLOT_TYPE_##type* name [[buffer(number)]]
#define LILY_SLOT_TYPE_float float
#define LILY_SLOT_TYPE_uint32_t uint
#define LILY_SLOT_TYPE_ACT ACT
#define LILY_SLOT_TYPE_cache uchar
#define LILY_SLOT_TYPE_packed uchar
#define LILY_CONTRACT(Op, kernel)

#else

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace lily {

enum class Access : uint8_t { read, write, update };
enum class SlotType : uint8_t { f32, u32, act, cache, packed };

struct SlotInfo {
  uint32_t number;
  std::string_view name;
  SlotType type;
  Access access;
  std::string_view shape;
};

struct ConstantInfo {
  std::string_view name;
  bool is_float;
};

// One contract, as data: for devices, hazards, docs and tests.
struct Contract {
  std::string_view name;
  const SlotInfo* slots;
  uint32_t n_slots;
  const ConstantInfo* constants;
  uint32_t n_constants;
  uint32_t params_bytes;
};

namespace contract_detail {
struct ACT;
struct cache;
struct packed;
template <class T> inline constexpr SlotType slot_type = SlotType::packed;
template <> inline constexpr SlotType slot_type<float> = SlotType::f32;
template <> inline constexpr SlotType slot_type<uint32_t> = SlotType::u32;
template <> inline constexpr SlotType slot_type<ACT> = SlotType::act;
template <> inline constexpr SlotType slot_type<cache> = SlotType::cache;

template <size_t N>
consteval std::array<SlotInfo, N> numbered(std::array<SlotInfo, N> slots) {
  for (size_t i = 0; i < N; ++i)
    if (slots[i].number != i + 1) throw "slot numbers run 1…n";
  return slots;
}
}  // namespace contract_detail

}  // namespace lily

#define LILY_CONSTANT_FIELD(type, name) type name;
#define LILY_CONSTANT_INFO(type, name) ::lily::ConstantInfo{#name, std::is_same_v<type, float>},
#define LILY_SLOT_REF(number, name, type, shape) Ref name;
#define LILY_SLOT_REF_LIST(number, name, type, shape) &name,
#define LILY_SLOT_CONST(number, name, type, shape) const type* name;
#define LILY_SLOT_MUTABLE(number, name, type, shape) type* name;
#define LILY_SLOT_BIND(number, name, type, shape) \
  name = static_cast<decltype(name)>(slots[number - 1]);
#define LILY_SLOT_READ(number, name, type, shape) \
  ::lily::SlotInfo{number, #name, slot_type<type>, ::lily::Access::read, shape},
#define LILY_SLOT_WRITE(number, name, type, shape) \
  ::lily::SlotInfo{number, #name, slot_type<type>, ::lily::Access::write, shape},
#define LILY_SLOT_UPDATE(number, name, type, shape) \
  ::lily::SlotInfo{number, #name, slot_type<type>, ::lily::Access::update, shape},

// The C++ readings: `Op::Bind<Tensor>` names a dispatch's tensors, `Op::Host<bf16>` gives a CPU
// kernel typed pointers, `Op::contract` is the table.
#define LILY_CONTRACT(Op, kernel)                                                               \
  struct Op {                                                                                   \
    using Params = Op##_Params;                                                                 \
    struct Constants {                                                                          \
      Op##_CONSTANTS(LILY_CONSTANT_FIELD)                                                       \
    };                                                                                          \
    template <class Ref>                                                                        \
    struct Bind {                                                                               \
      Op##_SLOTS(LILY_SLOT_REF, LILY_SLOT_REF, LILY_SLOT_REF);                                  \
      auto list() const {                                                                       \
        return std::array{Op##_SLOTS(LILY_SLOT_REF_LIST, LILY_SLOT_REF_LIST, LILY_SLOT_REF_LIST)}; \
      }                                                                                         \
    };                                                                                          \
    template <class ACT>                                                                        \
    struct Host {                                                                               \
      using packed = std::byte;                                                                 \
      using cache = std::byte;                                                                  \
      Op##_SLOTS(LILY_SLOT_CONST, LILY_SLOT_MUTABLE, LILY_SLOT_MUTABLE);                        \
      Constants c;                                                                              \
      Params p;                                                                                 \
      Host(void* const* slots, const void* constants, const void* params)                       \
          : c(*static_cast<const Constants*>(constants)),                                       \
            p(*static_cast<const Params*>(params)) {                                            \
        Op##_SLOTS(LILY_SLOT_BIND, LILY_SLOT_BIND, LILY_SLOT_BIND)                              \
      }                                                                                         \
    };                                                                                          \
    static const Contract contract;                                                             \
  };                                                                                            \
  namespace contract_detail::Op##_table {                                                       \
  inline constexpr auto slots = numbered(                                                       \
      std::array{Op##_SLOTS(LILY_SLOT_READ, LILY_SLOT_WRITE, LILY_SLOT_UPDATE)});               \
  inline constexpr auto constants = std::array{Op##_CONSTANTS(LILY_CONSTANT_INFO)};             \
  }                                                                                             \
  inline const Contract Op::contract = {kernel,                                                 \
                                        contract_detail::Op##_table::slots.data(),              \
                                        contract_detail::Op##_table::slots.size(),              \
                                        contract_detail::Op##_table::constants.data(),          \
                                        contract_detail::Op##_table::constants.size(),          \
                                        sizeof(Op##_Params)};

#endif
