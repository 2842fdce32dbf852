// Does this GPU, with this system's compiler, compute what it should?
#include <cstring>
#include <vector>

#include "base/error.h"
#include "device/metal/device.h"
#include "metal/embed.h"

namespace lily::metal {

// Two rows of a 4-bit table with known codes, read in the other order.
void self_check(MetalDevice& device) {
  constexpr uint32_t rows = 2, cols = 128, groups = cols / 64;
  constexpr uint16_t half = 0x3f00, minus_one = 0xbf80;  // bf16 0.5, -1
  const PackSpec spec{{{4, rows, cols, 64}}, 1};
  auto buffer = [&](size_t bytes) { return device.allocate(bytes, "self-check"); };
  const auto weight = buffer(device.packed_bytes(spec)), tokens = buffer(rows * 4),
             x = buffer(rows * cols * 4);

  std::vector<uint32_t> codes(rows * cols / 8);
  for (uint32_t i = 0; i < codes.size(); ++i) codes[i] = 0x9e3779b9u * (i + 1);
  const std::vector<uint16_t> scales(rows * groups, half), biases(rows * groups, minus_one);
  auto bytes = [](const auto& v) { return reinterpret_cast<const std::byte*>(v.data()); };
  device.pack_rows(spec, weight->data, 0, 0, 0, rows, {bytes(codes), bytes(scales), bytes(biases)});
  const uint32_t ids[rows] = {1, 0};
  std::memcpy(tokens->data, ids, sizeof ids);

  const Embed::Constants constants{.D = cols};
  const Embed::Params params{.rows = rows, .first = 0};
  const PackSpec* forms[] = {&spec};
  const Slot slots[] = {{tokens.get(), 0, tokens->bytes},
                        {weight.get(), 0, weight->bytes},
                        {x.get(), 0, x->bytes}};
  const Kernel* kernel = device.kernel(Embed::contract, std::as_bytes(std::span(&constants, 1)),
                                       Precision::float32, forms);
  const auto commands = device.command_buffer();
  commands->dispatch({kernel, slots, std::as_bytes(std::span(&params, 1)), "self-check"});
  commands->commit();
  commands->wait();

  const float* found = reinterpret_cast<const float*>(x->data);
  for (uint32_t i = 0; i < rows * cols; ++i) {
    const uint32_t at = ids[i / cols] * cols + i % cols;
    const float expected = 0.5f * static_cast<float>(codes[at / 8] >> at % 8 * 4 & 15) - 1.0f;
    if (found[i] != expected)
      throw DeviceError(device.info().description + ": self-check: embed gives " +
                        std::to_string(found[i]) + " at " + std::to_string(i) + ", expected " +
                        std::to_string(expected));
  }
}

}  // namespace lily::metal
