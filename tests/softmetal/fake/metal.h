// The fake Metal's objects.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "library.h"
#include "runtime.h"

namespace fake {

struct Size {
  static constexpr const char* type_code = "{?=QQQ}";
  uint64_t width, height, depth;
};

struct Version {
  static constexpr const char* type_code = "{?=qqq}";
  int64_t major, minor, patch;
};

struct String final : Object {
  explicit String(std::string text) : Object("NSString"), text(std::move(text)) {}
  std::string text;
};

struct Error final : Object {
  Error(std::string domain, int64_t code, std::string text)
      : Object("NSError"), domain(std::move(domain)), text(std::move(text)), code(code) {}
  std::string domain, text;
  int64_t code;
};

struct CompileOptions final : Object {
  CompileOptions() : Object("MTLCompileOptions") {}
  uint64_t language = 0;
  bool math = false;  // was chosen
};

struct Library final : Object {
  Library(SoftmetalLibrary* library, bool tensors)
      : Object("MTLLibrary"), library(library), tensors(tensors) {}
  SoftmetalLibrary* library;  // stays open: kernels and reports point into it
  bool tensors;               // of Metal 4
};

// `library` is null in a stub.
struct Function final : Object {
  Function(const Library& l, const SoftmetalKernel* kernel, std::string name)
      : Object("MTLFunction"),
        library(l.library),
        kernel(kernel),
        name(std::move(name)),
        tensors(l.tensors) {}
  SoftmetalLibrary* library;
  const SoftmetalKernel* kernel;
  std::string name;
  bool tensors;
};

struct PipelineDescriptor final : Object {
  PipelineDescriptor() : Object("MTLComputePipelineDescriptor") {}
  void dispose() override { release(function); }
  Function* function = nullptr;
  Size threads{};
};

struct Pipeline final : Object {
  explicit Pipeline(const Function& f)
      : Object("MTLComputePipelineState"), library(f.library), kernel(f.kernel), name(f.name) {}
  SoftmetalLibrary* library;
  const SoftmetalKernel* kernel;
  std::string name;
  Size threads{};  // of all its dispatches; none if 0
};

struct Buffer final : Object {
  explicit Buffer(size_t length);  // throws std::bad_alloc
  void dispose() override;
  uint8_t* defined_map();  // made at first use: 1 for each byte

  uint8_t* memory;
  size_t length;
  std::string label;
  std::unique_ptr<uint8_t[]> defined;  // null: all of it is
  std::atomic<int> in_flight{0};       // command buffers not yet run that use it

 private:
  uint8_t* mapped_;
  size_t mapped_bytes_;
};

struct Fence final : Object {
  Fence() : Object("MTLFence") {}
  bool updated = false;
  std::set<uint64_t> covers;  // command buffers that are done once it is reached
};

struct ResidencySet final : Object {
  ResidencySet() : Object("MTLResidencySet") {}
  std::multiset<const Buffer*> pending, committed;
};

// What is bound to one index.
struct Binding {
  Buffer* buffer = nullptr;
  std::vector<uint8_t> bytes;  // of setBytes
  uint64_t offset = 0;
  bool bound = false;
  bool fresh = false;  // bound for this dispatch, not for one before
  bool declared = false, read = true, write = true;
  uint64_t declared_bytes = 0;
  uint32_t kind = 0;  // of what is declared
};

// An index that a dispatch uses, and how.
struct Use {
  uint32_t index;
  std::string name;  // "embed x"
  bool write;
};

struct Dispatch {
  Pipeline* pipeline;
  std::vector<Binding> bindings;  // by index
  uint32_t groups[3], threads[3];

  std::vector<Use> uses() const;
};

struct Step {
  enum Kind { dispatch, barrier } kind;
  std::unique_ptr<Dispatch> work;
};

struct Queue;

struct CommandBuffer final : Object {
  explicit CommandBuffer(Queue* queue) : Object("MTLCommandBuffer"), queue(queue) {}
  void dispose() override;

  Queue* queue;
  std::vector<Step> steps;
  std::vector<Fence*> waits, updates;
  bool encoding = false, committed = false, done = false, looked_at = false;
  uint64_t number = 0;
  std::set<uint64_t> after;  // those that are done before this one begins

  struct Seen {  // what the host must leave alone until the buffer has run
    const uint8_t* bytes;
    size_t length;
    uint64_t sum;
    std::string name;
  };
  std::vector<Seen> seen;

  uint64_t status = 0;
  Error* error = nullptr;
  double start = 0, end = 0;
};

struct Encoder final : Object {
  explicit Encoder(CommandBuffer* commands)
      : Object("MTLComputeCommandEncoder"), commands(commands) {}
  CommandBuffer* commands;
  Pipeline* pipeline = nullptr;
  std::vector<Binding> bindings = std::vector<Binding>(31);
  bool ended = false, fence_updated = false;
};

// A piece of memory that a dispatch touches.
struct Access {
  const uint8_t *begin, *end;
  bool write;
  std::string name;  // "embed x"
};

struct Queue final : Object {
  Queue() : Object("MTLCommandQueue") {}
  void commit(CommandBuffer*);
  void run_until(CommandBuffer*);

 private:
  struct Past {
    uint64_t number;
    std::vector<Access> accesses;
  };
  void run(CommandBuffer&);
  void check_order(const CommandBuffer&);
  uint64_t oldest_open() const;
  void run_group(CommandBuffer&, std::vector<Dispatch*>&);
  void run_dispatch(Dispatch&);

  std::mutex mutex_;
  std::deque<CommandBuffer*> waiting_;
  std::deque<Past> past_;             // that nobody has waited for, or that others may overlap
  std::set<uint64_t> known_done_;     // to the host
  uint64_t committed_ = 0;
  bool refuses_ = false;              // after an error that does not recover
  std::mt19937_64 random_{1};
};

struct Device final : Object {
  Device() : Object("MTLDevice") {}
};

// The path of a kernel library; else `error` says why. mode: plain or detect.
std::string compile(const std::string& source, const std::string& language,
                    const std::string& mode, std::string& error);

}  // namespace fake
