// Metal's methods, as far as lily's own list of them goes.
#include "metal.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "fake.h"
#include "settings.h"

namespace fake {

namespace {

constexpr size_t page = 16384;
constexpr uint64_t language_3_1 = (3 << 16) + 1, language_4_0 = 4 << 16;
constexpr uint64_t shared_untracked = 1 << 8;

String* string(const std::string& text) { return static_cast<String*>(autorelease(new String(text))); }

std::string text(const String* s) { return s ? s->text : ""; }

void fail(Object** error, const char* domain, int64_t code, const std::string& text) {
  if (error) *error = autorelease(new Error(domain, code, text));
}

// The encoder that calls on this thread go to, for fake_metal_declare.
thread_local Encoder* encoding = nullptr;

bool usable(Encoder* e, const char* what) {
  if (!e->ended) return true;
  report(std::string("encoder: ") + what + " after endEncoding");
  return false;
}

Binding* binding(Encoder* e, uint64_t index, const char* what) {
  if (!usable(e, what)) return nullptr;
  if (index >= e->bindings.size()) {
    report("encoder: " + std::string(what) + " at index " + std::to_string(index));
    return nullptr;
  }
  encoding = e;
  e->bindings[index] = Binding{};
  e->bindings[index].bound = e->bindings[index].fresh = true;
  return &e->bindings[index];
}

void add_foundation() {
  add("NSString", "stringWithUTF8String:",
      +[](Class*, Sel, const char* bytes) -> Object* { return string(bytes); });
  add("NSString", "UTF8String", +[](String* s, Sel) -> const char* { return s->text.c_str(); });
  add("NSError", "code", +[](Error* e, Sel) -> int64_t { return e->code; });
  add("NSError", "domain", +[](Error* e, Sel) -> Object* { return string(e->domain); });
  add("NSError", "localizedDescription", +[](Error* e, Sel) -> Object* { return string(e->text); });
  add("NSProcessInfo", "processInfo",
      +[](Class*, Sel) -> Object* { return autorelease(new Object("NSProcessInfo")); });
  add("NSProcessInfo", "operatingSystemVersionString", +[](Object*, Sel) -> Object* {
    return string("Version " + std::to_string(settings().told_major) + "." +
                  std::to_string(settings().told_minor) + " (software Metal)");
  });
  add("NSProcessInfo", "isOperatingSystemAtLeastVersion:", +[](Object*, Sel, Version v) -> bool {
    return std::pair<int64_t, int64_t>(settings().told_major, settings().told_minor) >=
           std::pair(v.major, v.minor);
  });
}

// --------------------------------------------------------------------------------------------
// Kernels
// --------------------------------------------------------------------------------------------

Object* new_library(Device*, Sel, String* source, CompileOptions* options, Object** error) {
  if (fails(settings().fail_library))
    return fail(error, "MTLLibraryErrorDomain", 3, "made to fail"), nullptr;
  std::string language = "metal3.1";
  if (!options || options->language == 0)
    report("library: no language version is set, so the linked SDK decides");
  else if (options->language == language_4_0)
    language = "metal4.0";
  else if (options->language != language_3_1)
    report("library: language version " + std::to_string(options->language) + " is not known");
  if (!options || !options->math) report("library: the math mode is not set, so it is fast");
  const Mode mode = settings().mode;
  const bool tensors = language == "metal4.0";
  if (tensors && system_version() < 26) report("library: Metal 4.0 before macOS 26");
  if (mode == Mode::stub) return new Library(nullptr, tensors);
  std::string messages;
  const std::string path =
      compile(text(source), language, mode == Mode::detect ? "detect" : "plain", messages);
  if (path.empty()) return fail(error, "MTLLibraryErrorDomain", 3, messages), nullptr;
  char why[512];
  SoftmetalLibrary* library = softmetal_open(path.c_str(), why, sizeof why);
  if (!library) return fail(error, "MTLLibraryErrorDomain", 2, why), nullptr;
  return new Library(library, tensors);
}

Object* make_pipeline(Function* f, Size threads, Object** error) {
  if (fails(settings().fail_pipeline))
    return fail(error, "AGXMetalFake", 3, "made to fail"), nullptr;
  if (f->tensors && !threads.width)
    report("pipeline: " + f->name + " has cooperative tensors and no required threads");
  auto* pipeline = new Pipeline(*f);
  pipeline->threads = threads;
  return pipeline;
}

Object* new_pipeline(Device*, Sel, Function* f, Object** error) {
  return make_pipeline(f, {}, error);
}

Object* new_described_pipeline(Device*, Sel, PipelineDescriptor* d, uint64_t, Object**,
                               Object** error) {
  return make_pipeline(d->function, d->threads, error);
}

void add_kernels() {
  add("MTLCompileOptions", "new", +[](Class*, Sel) -> Object* { return new CompileOptions; });
  add("MTLCompileOptions", "setLanguageVersion:",
      +[](CompileOptions* o, Sel, uint64_t version) { o->language = version; });
  add("MTLCompileOptions", "setFastMathEnabled:",
      +[](CompileOptions* o, Sel, bool) { o->math = true; });
  add("MTLCompileOptions", "setMathMode:", +[](CompileOptions* o, Sel, int64_t) { o->math = true; },
      15);
  add("MTLCompileOptions", "setMathFloatingPointFunctions:", +[](CompileOptions*, Sel, int64_t) {},
      15);
  add("MTLDevice", "newLibraryWithSource:options:error:", &new_library);
  add("MTLLibrary", "newFunctionWithName:", +[](Library* l, Sel, String* name) -> Object* {
    const bool stub = !l->library;
    const SoftmetalKernel* kernel = stub ? nullptr : softmetal_find(l->library, text(name).c_str());
    return kernel || stub ? new Function(*l, kernel, text(name)) : nullptr;
  });
  add("MTLComputePipelineDescriptor", "new",
      +[](Class*, Sel) -> Object* { return new PipelineDescriptor; });
  add("MTLComputePipelineDescriptor", "setComputeFunction:",
      +[](PipelineDescriptor* d, Sel, Function* f) {
        retain(f);
        release(d->function);
        d->function = f;
      });
  add("MTLComputePipelineDescriptor", "setRequiredThreadsPerThreadgroup:",
      +[](PipelineDescriptor* d, Sel, Size threads) { d->threads = threads; }, 26);
  add("MTLDevice", "newComputePipelineStateWithDescriptor:options:reflection:error:",
      &new_described_pipeline);
  add("MTLDevice", "newComputePipelineStateWithFunction:error:", &new_pipeline);
  add("MTLComputePipelineState", "threadExecutionWidth",
      +[](Pipeline*, Sel) -> uint64_t { return settings().width; });
  add("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup", +[](Pipeline* p, Sel) -> uint64_t {
    const uint64_t most = settings().max_threads;
    return p->kernel ? std::min<uint64_t>(most, p->kernel->max_threads) : most;
  });
}

// --------------------------------------------------------------------------------------------
// Memory
// --------------------------------------------------------------------------------------------

Object* new_buffer(Device*, Sel, uint64_t length, uint64_t options) {
  numbers().allocations++;
  if (fails(settings().fail_allocation) || length == 0 || length > settings().memory) return nullptr;
  if (options != shared_untracked)
    report("buffer: options " + std::to_string(options) + ", expected shared and untracked");
  try {
    return new Buffer(length);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void add_memory() {
  add("MTLDevice", "newBufferWithLength:options:", &new_buffer);
  add("MTLBuffer", "contents", +[](Buffer* b, Sel) -> void* { return b->memory; });
  add("MTLBuffer", "setLabel:", +[](Buffer* b, Sel, String* label) {
    b->label = text(label);
    // What a plan leaves there between two passes is nobody's business.
    if (b->label == "temporaries") std::memset(b->defined_map(), 0, b->length);
  });
  add("MTLDevice", "newFence", +[](Device*, Sel) -> Object* { return new Fence; });
  add("MTLResidencySetDescriptor", "new",
      +[](Class*, Sel) -> Object* { return new Object("MTLResidencySetDescriptor"); }, 15);
  add("MTLDevice", "newResidencySetWithDescriptor:error:",
      +[](Device*, Sel, Object*, Object**) -> Object* { return new ResidencySet; }, 15);
  add("MTLResidencySet", "addAllocation:",
      +[](ResidencySet* s, Sel, Buffer* b) { s->pending.insert(b); }, 15);
  add("MTLResidencySet", "removeAllocation:", +[](ResidencySet* s, Sel, Buffer* b) {
    auto found = s->pending.find(b);
    if (found == s->pending.end())
      report("residency: removes what is not there");
    else
      s->pending.erase(found);
  }, 15);
  add("MTLResidencySet", "commit", +[](ResidencySet* s, Sel) { s->committed = s->pending; }, 15);
  add("MTLResidencySet", "requestResidency",
      +[](ResidencySet*, Sel) { numbers().residency_requests++; }, 15);
  add("MTLResidencySet", "endResidency", +[](ResidencySet*, Sel) {}, 15);
  add("MTLCommandQueue", "addResidencySet:", +[](Queue*, Sel, ResidencySet*) {}, 15);
}

// --------------------------------------------------------------------------------------------
// Commands
// --------------------------------------------------------------------------------------------

Object* new_encoder(CommandBuffer* c, Sel, uint64_t type) {
  if (c->committed || c->encoding) {
    report("command buffer: another encoder, expected one for all dispatches");
    return nullptr;
  }
  if (type != 1) report("encoder: dispatch type is not concurrent");
  c->encoding = true;
  return autorelease(new Encoder(c));
}

void set_buffer(Encoder* e, Sel, Buffer* buffer, uint64_t offset, uint64_t index) {
  Binding* b = binding(e, index, "setBuffer");
  if (!b) return;
  if (!buffer || offset >= buffer->length || offset % 4) {
    report("encoder: setBuffer at index " + std::to_string(index) + " with offset " +
           std::to_string(offset) + " of " + std::to_string(buffer ? buffer->length : 0) + " bytes");
    b->bound = false;
    return;
  }
  b->buffer = buffer;
  b->offset = offset;
  b->declared_bytes = buffer->length - offset;
}

void set_bytes(Encoder* e, Sel, const void* bytes, uint64_t length, uint64_t index) {
  Binding* b = binding(e, index, "setBytes");
  if (!b) return;
  if (length == 0 || length > 4096) report("encoder: setBytes of " + std::to_string(length) + " bytes");
  b->bytes.assign(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + length);
  b->declared_bytes = length;
  b->declared = true;
  b->write = false;
}

void dispatch(Encoder* e, Sel, Size groups, Size threads) {
  if (!usable(e, "dispatchThreadgroups")) return;
  if (!e->pipeline) return report("encoder: a dispatch without a pipeline");
  if (e->fence_updated)
    report("fence: " + e->pipeline->name + " comes after updateFence");
  if (groups.width * groups.height * groups.depth == 0)
    return report("encoder: a dispatch of no threadgroups");
  const Size& required = e->pipeline->threads;
  if (required.width && (threads.width != required.width || threads.height != required.height ||
                         threads.depth != required.depth))
    report("encoder: " + e->pipeline->name + " has other threads than its pipeline requires");
  auto work = std::make_unique<Dispatch>();
  work->pipeline = e->pipeline;
  work->bindings = e->bindings;
  for (Binding& b : e->bindings) b.fresh = false;
  const uint64_t g[] = {groups.width, groups.height, groups.depth};
  const uint64_t t[] = {threads.width, threads.height, threads.depth};
  std::copy(g, g + 3, work->groups);
  std::copy(t, t + 3, work->threads);
  e->commands->steps.push_back({Step::dispatch, std::move(work)});
  numbers().dispatches++;
}

void wait_for_fence(Encoder* e, Sel, Fence* f) {
  if (!usable(e, "waitForFence")) return;
  if (e->fence_updated || !e->commands->steps.empty())
    report("fence: waitForFence is not the encoder's first command");
  e->commands->waits.push_back(f);
}

void update_fence(Encoder* e, Sel, Fence* f) {
  if (!usable(e, "updateFence")) return;
  e->fence_updated = true;
  e->commands->updates.push_back(f);
}

void add_commands() {
  add("MTLDevice", "newCommandQueue", +[](Device*, Sel) -> Object* { return new Queue; });
  add("MTLCommandQueue", "commandBufferWithUnretainedReferences",
      +[](Queue* q, Sel) -> Object* { return autorelease(new CommandBuffer(q)); });
  add("MTLCommandBuffer", "computeCommandEncoderWithDispatchType:", &new_encoder);
  add("MTLCommandBuffer", "commit", +[](CommandBuffer* c, Sel) { c->queue->commit(c); });
  add("MTLCommandBuffer", "waitUntilCompleted",
      +[](CommandBuffer* c, Sel) { c->queue->run_until(c); });
  add("MTLCommandBuffer", "status", +[](CommandBuffer* c, Sel) -> uint64_t {
    c->looked_at = c->done;
    return c->status;
  });
  add("MTLCommandBuffer", "error", +[](CommandBuffer* c, Sel) -> Object* {
    return c->error ? autorelease(retain(c->error)) : nullptr;
  });
  add("MTLCommandBuffer", "GPUStartTime", +[](CommandBuffer* c, Sel) -> double { return c->start; });
  add("MTLCommandBuffer", "GPUEndTime", +[](CommandBuffer* c, Sel) -> double { return c->end; });
  add("MTLComputeCommandEncoder", "setComputePipelineState:",
      +[](Encoder* e, Sel, Pipeline* p) { if (usable(e, "setComputePipelineState")) e->pipeline = p; });
  add("MTLComputeCommandEncoder", "setBuffer:offset:atIndex:", &set_buffer);
  add("MTLComputeCommandEncoder", "setBytes:length:atIndex:", &set_bytes);
  add("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", &dispatch);
  add("MTLComputeCommandEncoder", "memoryBarrierWithScope:", +[](Encoder* e, Sel, uint64_t scope) {
    if (!usable(e, "memoryBarrierWithScope")) return;
    if (scope != 1) report("encoder: a barrier that does not cover buffers");
    e->commands->steps.push_back({Step::barrier, nullptr});
    numbers().barriers++;
  });
  add("MTLComputeCommandEncoder", "waitForFence:", &wait_for_fence);
  add("MTLComputeCommandEncoder", "updateFence:", &update_fence);
  add("MTLComputeCommandEncoder", "endEncoding", +[](Encoder* e, Sel) {
    if (usable(e, "endEncoding")) e->ended = true;
    e->commands->encoding = false;
    encoding = nullptr;
  });
}

struct Methods {
  Methods() {
    add_foundation();
    add_kernels();
    add_memory();
    add_commands();
    add("MTLDevice", "name", +[](Device*, Sel) -> Object* { return string("software Metal"); });
    add("MTLDevice", "architecture",
        +[](Device*, Sel) -> Object* { return autorelease(new Object("MTLArchitecture")); });
    add("MTLArchitecture", "name", +[](Object*, Sel) -> Object* {
      return string("applegpu_g" + std::to_string(12 + settings().chip) + "s");
    });
    // M1 is Apple7, M2 Apple8, M3 and M4 Apple9, M5 Apple10.
    add("MTLDevice", "supportsFamily:", +[](Device*, Sel, int64_t f) -> bool {
      const int chip = settings().chip;
      if (f < 5000) return f <= 1006 + chip - (chip > 3);
      return f == 5001 || (f == 5002 && system_version() >= 26);
    });
    add("MTLDevice", "hasUnifiedMemory", +[](Device*, Sel) -> bool { return true; });
    add("MTLDevice", "recommendedMaxWorkingSetSize",
        +[](Device*, Sel) -> uint64_t { return settings().memory; });
    add("MTLDevice", "maxBufferLength",
        +[](Device*, Sel) -> uint64_t { return settings().memory * 3 / 4; });
  }
} const methods;

}  // namespace

Buffer::Buffer(size_t length) : Object("MTLBuffer"), length(length) {
  mapped_bytes_ = (length + page - 1) / page * page + 2 * page;
  void* at = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<uint8_t*>(at);
  memory = mapped_ + page;
  mprotect(memory, mapped_bytes_ - 2 * page, PROT_READ | PROT_WRITE);
  numbers().buffers++;
}

void Buffer::dispose() {
  if (in_flight)
    report("use after release: buffer \"" + label +
           "\" was released while a command buffer that uses it was in flight");
  // The command buffer may still run, and tell.
  if (!in_flight) munmap(mapped_, mapped_bytes_);
  defined.reset();
  numbers().buffers--;
}

uint8_t* Buffer::defined_map() {
  if (!defined) {
    defined.reset(new uint8_t[length]);
    std::memset(defined.get(), 1, length);
  }
  return defined.get();
}

void CommandBuffer::dispose() {
  if (encoding) report("encoder: released before endEncoding");
  if (committed && !looked_at)
    report("command buffer: released, and nobody has looked at its status");
  steps.clear();
  release(error);
}

}  // namespace fake

using namespace fake;

extern "C" __attribute__((visibility("default"))) void* MTLCreateSystemDefaultDevice() {
  numbers().devices++;
  return static_cast<Object*>(new Device);
}

void fake_metal_declare(uint32_t index, int access, size_t bytes, uint32_t kind) {
  if (!encoding || index >= encoding->bindings.size() || kind >= fake_metal_kinds) return;
  Binding& b = encoding->bindings[index];
  b.declared = true;
  b.kind = kind;
  b.read = access != 1;
  b.write = access != 0;
  if (bytes > b.declared_bytes)
    report("encoder: index " + std::to_string(index) + " declares " + std::to_string(bytes) +
           " bytes, " + std::to_string(b.declared_bytes) + " are bound");
  b.declared_bytes = std::min<uint64_t>(bytes, b.declared_bytes);
}
