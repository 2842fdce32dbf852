#include "device/metal/tier.h"

#include <cstdlib>
#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "device/metal/compiler.h"
#include "device/metal/source.h"

namespace lily::metal {

namespace {

constexpr int m5_generation = 17;

// 26.2, or 16.2 to 16.x: what a process is told that was linked for a system before 26. There never
// was a 16 or 17 otherwise.
bool is_26_2() {
  const NSProcessInfo* process = NSProcessInfo::processInfo();
  auto at_least = [&](NSInteger major, NSInteger minor) {
    return process->isOperatingSystemAtLeastVersion(NSOperatingSystemVersion{major, minor, 0});
  };
  return at_least(26, 2) || (at_least(16, 2) && !at_least(17, 0));
}

// 17 of "applegpu_g17s"; 0 if it is no such name.
int generation(const std::string& architecture) {
  const std::string family = "applegpu_g";
  return architecture.starts_with(family) ? std::atoi(architecture.c_str() + family.size()) : 0;
}

// Small numbers, so that bf16 has them and float32 their sums.
int left(int row, int k) { return (7 * row + 3 * k) % 17 - 8; }
int right(int column, int k) { return (5 * column + 11 * k) % 13 - 6; }

// Throws DeviceError if the probe does not compile, run, or multiply correctly.
void probe(MTLDevice* device, MTLCommandQueue* queue) {
  constexpr int m = 16, n = 32, k = 32, some = 21, products = 4;
  constexpr const char* ways[] = {"in bf16", "in half", "over columns that end", "over rows that end"};
  const Ref<MTLComputePipelineState> pipeline = build_pipeline(
      device, "tensor_probe", kernel_text("tensor_probe"), MTLLanguageVersion4_0, 32);
  auto buffer = [&](size_t bytes) {
    auto b = Ref<MTLBuffer>::taking(device->newBufferWithLength(
        bytes, MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked));
    if (!b) throw DeviceError("no memory");
    return b;
  };
  const auto a = buffer(m * k * sizeof(bf16)), b = buffer(n * k * sizeof(bf16)),
             out = buffer(products * m * n * sizeof(float));
  bf16* rows = static_cast<bf16*>(a->contents());
  bf16* columns = static_cast<bf16*>(b->contents());
  for (int i = 0; i < m * k; ++i) rows[i] = bf16(static_cast<float>(left(i / k, i % k)));
  for (int i = 0; i < n * k; ++i) columns[i] = bf16(static_cast<float>(right(i / k, i % k)));

  const auto commands = Ref<MTLCommandBuffer>::sharing(queue->commandBufferWithUnretainedReferences());
  MTLComputeCommandEncoder* encoder =
      commands ? commands->computeCommandEncoderWithDispatchType(MTLDispatchTypeConcurrent) : nullptr;
  if (!encoder) throw DeviceError("no command buffer");
  encoder->setComputePipelineState(pipeline.get());
  NSUInteger index = 0;
  for (MTLBuffer* each : {a.get(), b.get(), out.get()})
    encoder->setBuffer(each, NSUInteger{0}, index++);
  encoder->dispatchThreadgroups(MTLSize{1, 1, 1}, MTLSize{32, 1, 1});
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  if (commands->status() != MTLCommandBufferStatusCompleted)
    throw DeviceError(text(commands->error()));

  const float* found = static_cast<const float*>(out->contents());
  for (int i = 0; i < products * m * n; ++i) {
    const int way = i / (m * n), row = i / n % m, column = i % n;
    int expected = 0;
    for (int j = 0; j < (way == 3 ? some : k); ++j)
      expected += left(row, j) * (way == 3 ? right(j, column) : right(column, j));
    if (way == 2 && column >= some) expected = 0;
    if (found[i] != static_cast<float>(expected))
      throw DeviceError("gives " + std::to_string(found[i]) + " at " + std::to_string(row) + ", " +
                        std::to_string(column) + " " + ways[way] + ", expected " +
                        std::to_string(expected));
  }
}

// Why tensor operations are not even tried; empty if they are.
std::string closed(MTLDevice* device) {
  if (std::getenv("LILY_METAL_NO_TENSORS")) return "LILY_METAL_NO_TENSORS is set";
  if (!is_26_2()) return "they need macOS 26.2";
  if (!device->supportsFamily(MTLGPUFamilyMetal4)) return "the GPU is not of family Metal4";
  const MTLArchitecture* architecture = device->architecture();
  const std::string name = architecture ? text(architecture->name()) : "";
  if (generation(name) < m5_generation)
    return "the GPU is \"" + name + "\", which has no units for them";
  return "";
}

}  // namespace

Tier find_tier(MTLDevice* device, MTLCommandQueue* queue) {
  Pool pool;
  Tier tier;
  tier.half_tiles = !device->supportsFamily(MTLGPUFamilyApple9);
  tier.tensors_reason = closed(device);
  if (!tier.tensors_reason.empty()) return tier;
  try {
    probe(device, queue);
    tier.tensors = true;
    tier.tensors_reason = "the probe multiplies correctly";
  } catch (const std::exception& e) {
    tier.tensors_reason = std::string("the probe fails: ") + e.what();
  }
  return tier;
}

}  // namespace lily::metal
