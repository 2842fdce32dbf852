// What lily asks of a device. `cpu` and `metal` implement this header and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metal/contract.h"

namespace lily {

// The build of every kernel: `fast` keeps activations in bf16, `float32` keeps all in float32.
enum class Precision : uint8_t { fast, float32 };

// Memory that host and device share. Zeroed when allocated.
struct Buffer {
  virtual ~Buffer() = default;
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// A byte range bound to a kernel's slot.
struct Slot {
  Buffer* buffer = nullptr;
  size_t offset = 0, bytes = 0;
};

// What a device knows of a kernel that is ready.
struct KernelFacts {
  uint32_t max_threads = 0;  // of a threadgroup; 0: no such limit
  double compile_s = 0;
};

struct Kernel {
  virtual ~Kernel() = default;
  // Devices may compile in the background. Returns when the kernel can run; throws DeviceError if
  // it never can.
  virtual void ready() const {}
  virtual KernelFacts facts() const { return {}; }
};

// One kernel launch. Its grid is the device's business: it follows from constants and params.
struct Dispatch {
  const Kernel* kernel;
  std::span<const Slot> slots;
  std::span<const std::byte> params;
  std::string_view stage = {};  // for messages
};

struct Timing {
  double start_s = 0, end_s = 0;  // on the device's clock
};

// Work recorded in order; dispatches between two barriers may overlap. Committed buffers of one
// device run one after the other, in the order of their commits.
struct CommandBuffer {
  virtual ~CommandBuffer() = default;
  virtual void dispatch(const Dispatch&) = 0;
  virtual void barrier() = 0;
  virtual void commit() = 0;
  // Throws DeviceError if any of its work failed. May be called again.
  virtual Timing wait() = 0;
};

// One matrix of a packed weight, in the checkpoint's form: affine codes of 4 or 8 bits with bf16
// scales and biases per group, or bf16 (bits = 16).
struct Segment {
  uint32_t bits, rows, cols, group;
};

// A weight that one kernel slot reads: `experts` times the same segments, one below the other.
struct PackSpec {
  std::vector<Segment> segments;
  uint32_t experts = 1;
};

// The checkpoint's bytes for some rows of a segment. They need no alignment.
struct RawRows {
  const std::byte* weight;            // [rows, cols · bits / 8]
  const std::byte* scales = nullptr;  // bf16 [rows, cols / group]
  const std::byte* biases = nullptr;  // bf16 [rows, cols / group]
};

// Numbers that a device chooses and contracts mention.
struct Tuning {
  uint32_t delta_partials = 1;   // PARTIALS of delta_step
  uint32_t head_maxima = 1;      // MAXIMA of head
  uint32_t chunk = 512;          // tokens of a prefill pass
  uint32_t single_block = 128;   // up to so many keys, attention is one block and needs no merge
  uint32_t max_blocks = 256;     // attention blocks of a decode step, at most
  uint32_t split_from = 32768;   // up to so many keys blocks stay small; then they grow
  // TILE_ROWS of the experts' products, for so many rows spread over so many experts; null where
  // one number serves all.
  uint32_t (*tile_rows)(uint32_t rows, uint32_t experts) = nullptr;

  // Keys of an attention block. Up to 64 single blocks, blocks small enough to share out; then
  // twice as many keys, and beyond `split_from` four times or more.
  uint32_t block(uint32_t keys) const;
};

struct DeviceInfo {
  std::string name;         // "cpu"
  std::string description;  // "cpu avx512_bf16 amx_bf16, 2 threads"
  size_t memory_bytes = 0;  // what weights and sessions may use together
  std::string warning;      // for the user: a better device that does not work
};

// One thing that a device says of itself.
struct Finding {
  std::string name, value;
  bool wrong = false;  // not as lily needs it
};

struct Device {
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  virtual const Tuning& tuning() const = 0;

  virtual std::shared_ptr<Buffer> allocate(size_t bytes, const std::string& label) = 0;

  // Weights are opaque: only the device knows the packed form. Rows arrive in any order.
  virtual size_t packed_bytes(const PackSpec&) const = 0;
  virtual void pack_begin(const PackSpec&, std::byte* packed) const = 0;
  virtual void pack_rows(const PackSpec&, std::byte* packed, uint32_t expert, uint32_t segment,
                         uint32_t first_row, uint32_t n_rows, const RawRows&) const = 0;
  // The weights as float32 [rows, cols], for tests.
  virtual void unpack(const PackSpec&, const std::byte* packed, uint32_t expert, uint32_t segment,
                      float* out) const = 0;

  // `constants` has the layout of the contract's Constants. `weights` are the forms of its packed
  // slots, in slot order; null for one that is not bound.
  virtual const Kernel* kernel(const Contract&, std::span<const std::byte> constants, Precision,
                               std::span<const PackSpec* const> weights) = 0;
  virtual std::unique_ptr<CommandBuffer> command_buffer() = 0;

  // What is known of the hardware and the system, for people.
  virtual std::vector<Finding> findings() { return {}; }

  // Packed weight bytes that kernels have read so far, on devices that count them.
  virtual uint64_t weight_bytes_read() const { return 0; }
};

// "auto", "cpu" or "metal". `threads` is for the CPU device; 0 means one for each physical core.
// Only who wants to know what is wrong with a device makes one without a self-check.
std::shared_ptr<Device> make_device(const std::string& name, uint32_t threads, bool checked = true);

// What "auto" means where Metal is part of the build: Metal if it passes its self-check, else the
// CPU device with a warning.
std::shared_ptr<Device> metal_or_cpu(uint32_t threads);

}  // namespace lily
