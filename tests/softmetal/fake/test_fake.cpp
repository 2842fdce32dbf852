// The fake Metal tells what a host does wrong: each seeded bug is reported, the correct host is not.
#include <cstring>
#include <thread>

#include "check.h"
#include "device/metal/objc.h"
#include "fake.h"

namespace lily::metal {
namespace {

enum Access { reads, writes, updates };

std::string reports() {
  std::string all;
  for (uint32_t i = 0; i < fake_metal_report_count(); ++i) {
    all += fake_metal_report(i);
    all += '\n';
  }
  fake_metal_clear();
  return all;
}

bool reported(const std::string& part) {
  const std::string all = reports();
  if (all.find(part) != std::string::npos) return true;
  std::printf("  reported: %s\n", all.c_str());
  return false;
}

// A small host, written as it should be, of which each test spoils one thing.
struct Host {
  Pool pool;
  Ref<MTLDevice> device;
  Ref<MTLCommandQueue> queue;
  Ref<MTLFence> fence;
  Ref<MTLComputePipelineState> kernel;

  Host() {
    fake_metal_set("mode", "stub");
    fake_metal_set("system", nullptr);
    fake_metal_clear();
    device = Ref<MTLDevice>::taking(static_cast<MTLDevice*>(MTLCreateSystemDefaultDevice()));
    queue = Ref<MTLCommandQueue>::taking(device->newCommandQueue());
    fence = Ref<MTLFence>::taking(device->newFence());
    const auto library = compile();
    NSError* error = nullptr;
    const auto function = Ref<MTLFunction>::taking(library->newFunctionWithName(string("k")));
    kernel = Ref<MTLComputePipelineState>::taking(
        device->newComputePipelineStateWithFunction(function.get(), &error));
  }

  Ref<MTLLibrary> compile(bool version = true, bool math = true) {
    const auto options = Ref<MTLCompileOptions>::taking(MTLCompileOptions::make());
    if (version) options->setLanguageVersion(MTLLanguageVersion3_1);
    if (math) options->setMathMode(MTLMathModeSafe);
    NSError* error = nullptr;
    return Ref<MTLLibrary>::taking(
        device->newLibraryWithSource(string("kernel void k() {}"), options.get(), &error));
  }

  Ref<MTLBuffer> buffer() {
    auto b = Ref<MTLBuffer>::taking(device->newBufferWithLength(
        256, MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked));
    std::memset(b->contents(), 7, 256);
    return b;
  }

  Ref<MTLCommandBuffer> commands() {
    return Ref<MTLCommandBuffer>::sharing(queue->commandBufferWithUnretainedReferences());
  }
  MTLComputeCommandEncoder* encoder(const Ref<MTLCommandBuffer>& c) {
    return c->computeCommandEncoderWithDispatchType(MTLDispatchTypeConcurrent);
  }
  void dispatch(MTLComputeCommandEncoder* e, const Ref<MTLBuffer>& b, Access access,
                size_t offset = 0, size_t bytes = 64) {
    e->setComputePipelineState(kernel.get());
    e->setBuffer(b.get(), offset, 1);
    fake_metal_declare(1, access, bytes, 0);
    e->dispatchThreadgroups(MTLSize{1, 1, 1}, MTLSize{32, 1, 1});
  }
  bool finish(const Ref<MTLCommandBuffer>& c) {
    c->waitUntilCompleted();
    return c->status() == MTLCommandBufferStatusCompleted;
  }
};

uint8_t first_byte(const Ref<MTLBuffer>& b) { return *static_cast<uint8_t*>(b->contents()); }

TEST(fake_metal_is_silent_about_a_correct_host) {
  Host h;
  const auto a = h.buffer(), b = h.buffer();
  std::vector<Ref<MTLCommandBuffer>> in_flight;
  for (int i = 0; i < 3; ++i) {
    auto c = h.commands();
    auto* e = h.encoder(c);
    if (i) e->waitForFence(h.fence.get());
    h.dispatch(e, a, writes);
    h.dispatch(e, b, writes, 0);
    e->memoryBarrierWithScope(MTLBarrierScopeBuffers);
    h.dispatch(e, a, reads);
    h.dispatch(e, a, updates, 64);
    h.dispatch(e, b, updates);
    e->updateFence(h.fence.get());
    e->endEncoding();
    c->commit();
    in_flight.push_back(std::move(c));
  }
  for (const auto& c : in_flight) CHECK(h.finish(c));
  CHECK(in_flight[0]->GPUEndTime() >= in_flight[0]->GPUStartTime());
  CHECK(reports().empty());
}

TEST(fake_metal_reports_a_missing_barrier) {
  for (Access second : {reads, writes, updates}) {
    Host h;
    const auto a = h.buffer();
    const auto c = h.commands();
    auto* e = h.encoder(c);
    h.dispatch(e, a, writes);
    h.dispatch(e, a, second, 32);  // overlaps the upper half
    e->endEncoding();
    c->commit();
    CHECK(!h.finish(c));
    CHECK(text(c->error()).find("no barrier between them") != std::string::npos);
    CHECK(reported("hazard: k buffer 1 and k buffer 1"));
  }
}

TEST(fake_metal_reports_a_read_before_a_write_without_a_barrier) {
  Host h;
  const auto a = h.buffer();
  const auto c = h.commands();
  auto* e = h.encoder(c);
  h.dispatch(e, a, reads);
  h.dispatch(e, a, writes);
  e->endEncoding();
  c->commit();
  CHECK(!h.finish(c));
  CHECK(reported("read, then written"));
}

// Two command buffers, the second reading what the first wrote.
void two(bool wait_for, bool update, bool host_waits, const char* expected) {
  Host h;
  const auto a = h.buffer();
  const auto first = h.commands(), second = h.commands();
  auto* e = h.encoder(first);
  h.dispatch(e, a, writes);
  if (update) e->updateFence(h.fence.get());
  e->endEncoding();
  first->commit();
  if (host_waits) CHECK(h.finish(first));
  e = h.encoder(second);
  if (wait_for) e->waitForFence(h.fence.get());
  h.dispatch(e, a, reads);
  e->endEncoding();
  second->commit();
  const bool fine = h.finish(second);
  CHECK(h.finish(first));
  CHECK(fine == !expected);
  if (expected)
    CHECK(reported(expected));
  else
    CHECK(reports().empty());
}

TEST(fake_metal_reports_a_missing_fence) {
  two(true, true, false, nullptr);
  two(false, true, false, "no fence or wait between their command buffers");
  two(false, false, false, "no fence or wait between their command buffers");
  two(false, false, true, nullptr);
  // Two things are wrong here; that the wait is for nothing is seen when it is committed.
  two(true, false, false, "no fence or wait between their command buffers");
}

TEST(fake_metal_reports_a_fence_that_nothing_updated) {
  Host h;
  const auto c = h.commands();
  auto* e = h.encoder(c);
  e->waitForFence(h.fence.get());
  e->endEncoding();
  c->commit();
  CHECK(h.finish(c));
  CHECK(reported("waits for a fence that nothing has updated"));
}

TEST(fake_metal_reports_fences_in_the_wrong_place) {
  Host h;
  const auto a = h.buffer();
  const auto c = h.commands();
  auto* e = h.encoder(c);
  e->updateFence(h.fence.get());
  h.dispatch(e, a, writes);
  CHECK(reported("comes after updateFence"));
  e->waitForFence(h.fence.get());
  CHECK(reported("not the encoder's first command"));
  e->endEncoding();
  c->commit();
  h.finish(c);
}

TEST(fake_metal_shows_old_bytes_to_a_host_that_does_not_wait) {
  Host h;
  const auto a = h.buffer();
  const auto c = h.commands();
  auto* e = h.encoder(c);
  h.dispatch(e, a, writes);
  e->endEncoding();
  c->commit();
  CHECK(first_byte(a) == 7);
  CHECK(h.finish(c));
  CHECK(first_byte(a) == 0);
  CHECK(reports().empty());
}

TEST(fake_metal_reports_a_command_buffer_that_nobody_waited_for) {
  Host h;
  const auto a = h.buffer();
  {
    Pool pool;
    const auto c = h.commands(), last = h.commands();
    for (const auto* each : {&c, &last}) {
      auto* e = h.encoder(*each);
      h.dispatch(e, a, reads);
      e->endEncoding();
      (*each)->commit();
    }
    CHECK(h.finish(last));
  }
  CHECK(reported("nobody has looked at its status"));
}

TEST(fake_metal_reports_a_host_that_writes_too_early) {
  Host h;
  const auto a = h.buffer();
  const auto c = h.commands();
  auto* e = h.encoder(c);
  h.dispatch(e, a, reads);
  e->endEncoding();
  c->commit();
  std::memset(a->contents(), 1, 1);
  CHECK(!h.finish(c));
  CHECK(reported("host: changed what k buffer 1 reads"));
}

TEST(fake_metal_reports_a_buffer_released_in_flight) {
  Host h;
  const auto c = h.commands();
  {
    const auto a = h.buffer();
    auto* e = h.encoder(c);
    h.dispatch(e, a, writes);
    e->endEncoding();
    c->commit();
  }
  CHECK(reported("released while a command buffer that uses it was in flight"));
  h.finish(c);
}

TEST(fake_metal_reports_a_message_to_what_is_gone) {
  Host h;
  MTLBuffer* gone = h.buffer().get();
  CHECK(gone->contents() == nullptr);
  CHECK(reported("use after release: contents sent to a MTLBuffer that is gone"));
  gone->release();
  CHECK(reported("use after release: release sent to a MTLBuffer"));
  int nothing = 0;
  reinterpret_cast<MTLBuffer*>(&nothing)->contents();
  CHECK(reported("something that is no object"));
}

TEST(fake_metal_reports_an_unknown_selector) {
  Host h;
  CHECK(reinterpret_cast<MTLBuffer*>(h.queue.get())->contents() == nullptr);
  CHECK(reported("unknown selector: MTLCommandQueue has no contents"));
}

TEST(fake_metal_of_an_older_system_lacks_what_is_newer) {
  Host h;
  CHECK(h.device->responds(MTLDevice::newResidencySetWithDescriptor_selector));
  fake_metal_set("system", "14");
  const auto older =
      Ref<MTLDevice>::taking(static_cast<MTLDevice*>(MTLCreateSystemDefaultDevice()));
  CHECK(!older->responds(MTLDevice::newResidencySetWithDescriptor_selector));
  CHECK(h.device->responds(MTLDevice::newResidencySetWithDescriptor_selector));
  CHECK(objc_getClass("MTLResidencySetDescriptor") == nullptr);
  CHECK(objc_getClass("MTLCompileOptions") != nullptr);
  const auto options = Ref<MTLCompileOptions>::taking(MTLCompileOptions::make());
  options->setMathMode(MTLMathModeSafe);
  CHECK(reported("MTLCompileOptions has no setMathMode: in macOS 14"));
  fake_metal_set("system", nullptr);
}

TEST(fake_metal_reports_what_depends_on_the_sdk) {
  Host h;
  h.compile(false, true);
  CHECK(reported("no language version is set"));
  h.compile(true, false);
  CHECK(reported("the math mode is not set"));
  h.compile();
  CHECK(reports().empty());
}

TEST(fake_metal_reports_objects_without_a_pool) {
  Host h;
  std::thread([&] { h.queue->commandBufferWithUnretainedReferences(); }).join();
  CHECK(reported("leak: MTLCommandBuffer was returned where there is no autorelease pool"));
}

TEST(fake_metal_reports_pools_out_of_order) {
  Host h;
  void* outer = objc_autoreleasePoolPush();
  void* inner = objc_autoreleasePoolPush();
  objc_autoreleasePoolPop(outer);
  CHECK(reported("pools do not end in the order"));
  objc_autoreleasePoolPop(inner);
  objc_autoreleasePoolPop(outer);
  CHECK(reports().empty());
}

TEST(fake_metal_reports_misused_encoders) {
  Host h;
  const auto a = h.buffer();
  const auto c = h.commands();
  auto* e = h.encoder(c);
  e->dispatchThreadgroups(MTLSize{1, 1, 1}, MTLSize{32, 1, 1});
  CHECK(reported("a dispatch without a pipeline"));
  e->setComputePipelineState(h.kernel.get());
  e->dispatchThreadgroups(MTLSize{1, 0, 1}, MTLSize{32, 1, 1});
  CHECK(reported("a dispatch of no threadgroups"));
  e->setBuffer(a.get(), 256, 1);
  CHECK(reported("with offset 256 of 256 bytes"));
  e->setBuffer(a.get(), 2, 1);
  CHECK(reported("with offset 2"));
  e->setBuffer(a.get(), 0, 31);
  CHECK(reported("setBuffer at index 31"));
  std::vector<char> large(5000);
  e->setBytes(large.data(), large.size(), 0);
  CHECK(reported("setBytes of 5000 bytes"));
  e->memoryBarrierWithScope(2);
  CHECK(reported("a barrier that does not cover buffers"));
  e->setBuffer(a.get(), 200, 1);
  fake_metal_declare(1, reads, 100, 0);
  CHECK(reported("declares 100 bytes, 56 are bound"));
  c->commit();
  CHECK(reported("committed before endEncoding"));
  e->endEncoding();
  e->endEncoding();
  CHECK(reported("endEncoding after endEncoding"));
  c->commit();
  CHECK(reported("committed twice"));
  h.finish(c);
}

TEST(fake_metal_reports_buffers_of_another_kind) {
  Host h;
  const auto tracked = Ref<MTLBuffer>::taking(h.device->newBufferWithLength(16, 0));
  CHECK(reported("expected shared and untracked"));
}

TEST(fake_metal_fails_when_it_is_told_to) {
  Host h;
  fake_metal_set("fail_allocation", "2");
  const auto one = h.buffer();
  const NSUInteger options = MTLResourceHazardTrackingModeUntracked;
  CHECK(h.device->newBufferWithLength(16, options) == nullptr);
  const auto three = h.buffer();
  CHECK(three);
  fake_metal_set("fail_command_buffer", "2:8");
  for (int i = 1; i <= 3; ++i) {
    const auto c = h.commands();
    h.encoder(c)->endEncoding();
    c->commit();
    CHECK(h.finish(c) == (i != 2));
    CHECK((c->error() == nullptr) == (i != 2));
    if (i == 2) CHECK(c->error()->code() == MTLCommandBufferErrorOutOfMemory);
  }
  fake_metal_set("fail_command_buffer", "1:4");
  for (int i = 1; i <= 2; ++i) {  // the second is ignored
    const auto c = h.commands();
    h.encoder(c)->endEncoding();
    c->commit();
    CHECK(!h.finish(c) && c->error()->code() == MTLCommandBufferErrorAccessRevoked);
  }
  CHECK(!fake_metal_set("fail_something", "1"));
  CHECK(!fake_metal_set("mode", "fast"));
  CHECK(reports().empty());
}

TEST(fake_metal_has_each_method_of_the_list_with_its_types) {
  const std::string there = fake_metal_methods();
  for (const objc::Method& m : all_methods()) {
    std::string line = m.of_class ? "+" : "-";
    line.append(m.owner).append(" ").append(m.selector).append(" ").append(m.types).append("\n");
    if (there.find(line) == std::string::npos) throw std::runtime_error(line);
  }
}

}  // namespace
}  // namespace lily::metal
