// Does this GPU, with this system's compiler, compute what it should?
//
// Three kernels stand for the ways in which the others work: one that only reads a weight, a product
// with one row in float32, and one with several rows in bf16, through simdgroup_matrix. All numbers
// are small multiples of a half, so that every sum is exact in any order.
#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "device/metal/device.h"
#include "metal/embed.h"
#include "metal/prefill_project_add.h"
#include "metal/project_add.h"

namespace lily::metal {

namespace {

constexpr uint32_t rows = 5;                // of activations
constexpr uint32_t outputs = 72, cols = 128;  // of the weight
constexpr float scale = 0.5f, bias = -1.0f;

class SelfCheck {
 public:
  explicit SelfCheck(MetalDevice& device)
      : device_(device),
        tokens_(buffer(rows * sizeof(uint32_t))),
        weight_(buffer(device.packed_bytes(spec_))),
        u_(buffer(rows * cols * sizeof(float))),
        x_(buffer(rows * cols * sizeof(float))) {
    for (uint32_t i = 0; i < codes_.size(); ++i) codes_[i] = 0x9e3779b9u * (i + 1);
    const uint16_t half = 0x3f00, minus_one = 0xbf80;  // bf16
    const std::vector<uint16_t> scales(outputs * cols / 64, half), biases(scales.size(), minus_one);
    auto bytes = [](const auto& v) { return reinterpret_cast<const std::byte*>(v.data()); };
    device.pack_rows(spec_, weight_->data, 0, 0, 0, outputs,
                     {bytes(codes_), bytes(scales), bytes(biases)});
    for (uint32_t t = 0; t < rows; ++t) put(*tokens_, t, outputs - 1 - 3 * t);
    // Compiled beside each other, before the first is waited for.
    kernels_[0] = kernel(Embed::Constants{.D = cols}, Embed::contract, Precision::float32);
    kernels_[1] = kernel(ProjectAdd::Constants{.K = cols,
                                               .N = outputs,
                                               .HEADS = 0,
                                               .PARTIALS = 0,
                                               .ROWS = 0,
                                               .EPS = 1e-6f},
                         ProjectAdd::contract, Precision::float32);
    kernels_[2] = kernel(PrefillProjectAdd::Constants{.K = cols, .N = outputs},
                         PrefillProjectAdd::contract, Precision::fast);
  }

  void run() {
    const Slot tokens{tokens_.get(), 0, tokens_->bytes}, weight{weight_.get(), 0, weight_->bytes};
    const Slot x{x_.get(), 0, x_->bytes};
    dispatch(kernels_[0], {tokens, weight, x}, Embed::Params{.rows = rows, .first = 0});
    for (uint32_t t = 0; t < rows; ++t)
      for (uint32_t k = 0; k < cols; ++k)
        expect("embed", t * cols + k, value(outputs - 1 - 3 * t, k));

    for (uint32_t i = 0; i < cols; ++i) put(*u_, i, std::bit_cast<uint32_t>(activation(0, i)));
    product("project_add", kernels_[1], {{u_.get(), 0, cols * 4}, {}, weight, {x_.get(), 0, outputs * 4}},
            ProjectAdd::Params{.rows = 1}, 1);

    // bf16 is the upper half of a float.
    for (uint32_t i = 0; i < rows * cols; i += 2)
      put(*u_, i / 2, std::bit_cast<uint32_t>(activation(i / cols, i % cols)) >> 16 |
                          (std::bit_cast<uint32_t>(activation(i / cols, i % cols + 1)) & 0xffff0000u));
    product("prefill_project_add", kernels_[2],
            {{u_.get(), 0, rows * cols * 2}, weight, {x_.get(), 0, rows * outputs * 4}},
            PrefillProjectAdd::Params{.rows = rows}, rows);
  }

 private:
  std::shared_ptr<Buffer> buffer(size_t bytes) { return device_.allocate(bytes, "self-check"); }

  static void put(Buffer& buffer, uint32_t i, uint32_t bits) {
    std::memcpy(buffer.data + 4 * size_t{i}, &bits, 4);
  }

  float value(uint32_t row, uint32_t col) const {
    const uint32_t at = row * cols + col;
    return scale * static_cast<float>(codes_[at / 8] >> at % 8 * 4 & 15) + bias;
  }

  static float activation(uint32_t row, uint32_t col) {
    return static_cast<float>((row * 7 + col * 5) % 9) - 4.0f;
  }

  template <class Constants>
  const Kernel* kernel(const Constants& constants, const Contract& contract, Precision precision) {
    const PackSpec* forms[] = {&spec_};
    return device_.kernel(contract, std::as_bytes(std::span(&constants, 1)), precision, forms);
  }

  template <class Params>
  void dispatch(const Kernel* kernel, std::vector<Slot> slots, const Params& params) {
    const auto commands = device_.command_buffer();
    commands->dispatch({kernel, slots, std::as_bytes(std::span(&params, 1)), "self-check"});
    commands->commit();
    commands->wait();
  }

  template <class Params>
  void product(const char* name, const Kernel* kernel, std::vector<Slot> slots, const Params& params,
               uint32_t n) {
    for (uint32_t i = 0; i < n * outputs; ++i) put(*x_, i, std::bit_cast<uint32_t>(1.0f));
    dispatch(kernel, std::move(slots), params);
    for (uint32_t t = 0; t < n; ++t)
      for (uint32_t row = 0; row < outputs; ++row) {
        float sum = 1;
        for (uint32_t k = 0; k < cols; ++k) sum += value(row, k) * activation(t, k);
        expect(name, t * outputs + row, sum);
      }
  }

  void expect(const char* name, uint32_t i, float expected) const {
    float found;
    std::memcpy(&found, x_->data + 4 * size_t{i}, 4);
    if (found != expected)
      throw DeviceError(device_.info().description + ": self-check: " + name + " gives " +
                        std::to_string(found) + " at " + std::to_string(i) + ", expected " +
                        std::to_string(expected));
  }

  MetalDevice& device_;
  const PackSpec spec_{{{4, outputs, cols, 64}}, 1};
  std::vector<uint32_t> codes_ = std::vector<uint32_t>(outputs * cols / 8);
  std::shared_ptr<Buffer> tokens_, weight_, u_, x_;
  const Kernel* kernels_[3] = {};
};

}  // namespace

void self_check(MetalDevice& device) { SelfCheck(device).run(); }

}  // namespace lily::metal
