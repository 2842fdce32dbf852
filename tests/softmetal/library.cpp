#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "base/threads.h"
#include "detector.h"
#include "emulator.h"

using namespace softmetal;

struct SoftmetalLibrary {
  std::string path;
  void* handle = nullptr;
  const softmetal_Library* tables = nullptr;
  std::vector<SoftmetalKernel> kernels;
  std::vector<std::vector<SoftmetalArgument>> arguments;
  std::vector<std::vector<Array>> arrays;  // of each kernel
  std::vector<SoftmetalConstant> constants;
  std::vector<Range> read_only;

  ~SoftmetalLibrary() {
    if (handle) dlclose(handle);
  }
};

struct SoftmetalResult {
  Reports reports;
  std::vector<SoftmetalReport> shown;
  std::vector<SoftmetalCounts> counts;
};

namespace {

// One dispatch at a time: the workers and their memory are used again.
struct Machine {
  std::mutex mutex;
  std::vector<std::unique_ptr<Worker>> workers;
  std::unique_ptr<lily::ThreadPool> pool;

  void provide(uint32_t n) {
    while (workers.size() < n) workers.push_back(std::make_unique<Worker>());
    if (n > 1 && (!pool || pool->size() < n)) pool = std::make_unique<lily::ThreadPool>(n);
  }
};

Machine& machine() {
  static Machine m;
  return m;
}

// dlopen gives the same library again for the same file. If another emulator of this process has
// it, this one opens a copy.
void* open_shared(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  const auto* tables = static_cast<const softmetal_Library*>(dlsym(handle, "softmetal_library"));
  if (!tables || tables->abi != softmetal_abi)
    throw std::runtime_error(path + ": not a kernel library of this version");
  if (!*tables->runtime || *tables->runtime == &Worker::runtime()) return handle;
  dlclose(handle);
  std::string copy = "/tmp/softmetal-XXXXXX";
  const int file = mkstemp(copy.data());
  if (file < 0) throw std::runtime_error("no temporary file");
  std::ofstream(copy, std::ios::binary) << std::ifstream(path, std::ios::binary).rdbuf();
  close(file);
  handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(copy.c_str());
  if (!handle) throw std::runtime_error(dlerror());
  return handle;
}

// The library's own data: constants that kernels read, and this thread's function constants.
std::vector<Range> data_of(const softmetal_Library* tables) {
  struct Search {
    uintptr_t within;
    std::vector<Range> found;
  } search{reinterpret_cast<uintptr_t>(tables), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* context) {
        auto& s = *static_cast<Search*>(context);
        std::vector<Range> ranges;
        bool here = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& p = info->dlpi_phdr[i];
          const Range range{info->dlpi_addr + p.p_vaddr, p.p_memsz};
          if (p.p_type == PT_LOAD) ranges.push_back(range);
          if (p.p_type == PT_LOAD && range.contains(s.within, 1)) here = true;
          if (p.p_type == PT_TLS && info->dlpi_tls_data)
            ranges.push_back({reinterpret_cast<uintptr_t>(info->dlpi_tls_data), p.p_memsz});
        }
        if (here) s.found = ranges;
        return here ? 1 : 0;
      },
      &search);
  return search.found;
}

void read_tables(SoftmetalLibrary& library) {
  const softmetal_Library& t = *library.tables;
  machine().provide(1);
  for (uint32_t i = 0; i < t.n_kernels; ++i) {
    const softmetal_Kernel& k = *t.kernels[i];
    std::vector<SoftmetalArgument> arguments;
    for (uint32_t j = 0; j < k.n_arguments; ++j) {
      const softmetal_Argument& a = k.arguments[j];
      arguments.push_back({a.name, a.kind, a.index, a.bytes, a.writable});
    }
    library.arguments.push_back(std::move(arguments));
    library.arrays.push_back(machine().workers[0]->probe(k.entry));
    uint32_t bytes = 0;
    for (const Array& array : library.arrays.back()) bytes += (array.bytes + 15) / 16 * 16;
    library.kernels.push_back({k.name, nullptr, k.n_arguments,
                               k.max_threads ? k.max_threads : max_lanes, bytes, k.file, k.line});
  }
  for (uint32_t i = 0; i < t.n_kernels; ++i)
    library.kernels[i].arguments = library.arguments[i].data();
  for (uint32_t i = 0; i < t.n_constants; ++i) {
    const softmetal_Constant& c = *t.constants[i];
    library.constants.push_back({c.name, c.type, c.index, c.bytes});
  }
}

class Run {
 public:
  Run(SoftmetalLibrary& library, const SoftmetalDispatch& dispatch, SoftmetalResult& result)
      : library_(library),
        dispatch_(dispatch),
        kernel_(static_cast<size_t>(dispatch.kernel - library.kernels.data())),
        result_(result) {}

  void operator()() {
    prepare();
    check();
    if (result_.reports.empty()) {
      if (library_.tables->detecting)
        detect();
      else
        plain();
    }
    finish();
  }

  void refuse(const std::string& what) {
    Report r{};
    r.kind = Kind::launch;
    r.what = what;
    result_.reports.add(r);
  }

  void finish() {
    result_.reports.finish(library_.kernels[kernel_].name, library_.path);
    result_.shown.clear();
    for (const Report& r : result_.reports.all())
      result_.shown.push_back({name(r.kind), r.text.c_str(), r.place.file.c_str(), r.place.line,
                               r.other.file.c_str(), r.other.line,
                               {r.group[0], r.group[1], r.group[2]}, r.lane, r.other_lane,
                               r.count});
  }

 private:
  void prepare() {
    task_.entry = library_.tables->kernels[kernel_]->entry;
    std::copy(dispatch_.groups, dispatch_.groups + 3, task_.group.groups);
    std::copy(dispatch_.threads, dispatch_.threads + 3, task_.group.threads);
    for (uint32_t i = 0; i < dispatch_.n_bindings; ++i)
      if (dispatch_.bindings[i].index < softmetal_buffers)
        task_.group.buffer[dispatch_.bindings[i].index] = dispatch_.bindings[i].base;
    task_.order = static_cast<Order>(dispatch_.order);
    task_.seed = dispatch_.seed;
    task_.statics = library_.arrays[kernel_];
    for (uint32_t i = 0; i < dispatch_.n_threadgroup_memory; ++i) {
      const SoftmetalThreadgroupMemory& m = dispatch_.threadgroup_memory[i];
      task_.dynamics.push_back({"[[threadgroup(" + std::to_string(m.index) + ")]]", 0, m.bytes});
      task_.dynamic_index.push_back(m.index);
    }
    const size_t gap = library_.tables->detecting ? Detector::arena_gap : 0;
    size_t at = gap;
    for (auto* arrays : {&task_.statics, &task_.dynamics})
      for (Array& array : *arrays) {
        array.offset = static_cast<uint32_t>(at);
        at = (at + array.bytes + 15) / 16 * 16 + gap;
        used_ += (array.bytes + 15) / 16 * 16;
      }
    task_.arena_bytes = static_cast<uint32_t>(at);
  }

  // What Metal refuses, or its validation layer.
  void check() {
    const SoftmetalKernel& k = library_.kernels[kernel_];
    const uint64_t threads =
        uint64_t{dispatch_.threads[0]} * dispatch_.threads[1] * dispatch_.threads[2];
    if (threads == 0 || threads > k.max_threads)
      refuse(std::to_string(threads) + " threads in a threadgroup, the kernel allows 1 to " +
             std::to_string(k.max_threads));
    if (used_ > threadgroup_memory)
      refuse(std::to_string(used_) + " bytes of threadgroup memory, there are " +
             std::to_string(threadgroup_memory));
    for (uint32_t i = 0; i < dispatch_.n_threadgroup_memory; ++i) {
      const SoftmetalThreadgroupMemory& m = dispatch_.threadgroup_memory[i];
      if (m.bytes % 16 || m.index >= softmetal_buffers)
        refuse("threadgroup memory " + std::to_string(m.index) + ": " + std::to_string(m.bytes) +
               " bytes is not a multiple of 16");
    }
    if (dispatch_.order < 0 || dispatch_.order > SOFTMETAL_AHEAD) refuse("no such order");
    for (uint32_t i = 0; i < k.n_arguments; ++i) check_argument(k.arguments[i]);
    for (uint32_t i = 0; i < dispatch_.n_bindings; ++i) {
      const SoftmetalBinding& b = dispatch_.bindings[i];
      const std::string name = "buffer " + std::to_string(b.index);
      if (b.index >= softmetal_buffers) refuse(name + ": no such index");
      for (const SoftmetalRange& r : {b.reads, b.writes})
        if (r.offset + r.bytes > b.length || r.offset + r.bytes < r.offset)
          refuse(name + ": declares bytes beyond its end");
    }
    for (const SoftmetalConstant& c : library_.constants)
      for (uint32_t i = 0; i < dispatch_.n_constants; ++i)
        if (dispatch_.constants[i].index == c.index && !dispatch_.constants[i].value)
          refuse(std::string("function constant ") + c.name + " has no value");
  }

  void check_argument(const SoftmetalArgument& a) {
    const std::string name = std::string(a.name) + " [[" +
                             (a.kind == softmetal_buffer ? "buffer(" : "threadgroup(") +
                             std::to_string(a.index) + ")]]";
    if (a.kind == softmetal_buffer) {
      const auto end = dispatch_.bindings + dispatch_.n_bindings;
      const auto b = std::find_if(dispatch_.bindings, end,
                                  [&](const SoftmetalBinding& x) { return x.index == a.index; });
      if (b == end)
        refuse(name + " is not bound");
      else if (b->length < a.bytes)
        refuse(name + " is of " + std::to_string(a.bytes) + " bytes, " +
               std::to_string(b->length) + " are bound");
      else if (b->writes.bytes && !a.writable)
        refuse(name + " is declared as written, the kernel cannot write it");
    }
    if (a.kind == softmetal_threadgroup &&
        std::find(task_.dynamic_index.begin(), task_.dynamic_index.end(), a.index) ==
            task_.dynamic_index.end())
      refuse(name + " has no length");
  }

  void set_constants() const {
    for (uint32_t i = 0; i < library_.tables->n_constants; ++i) {
      const softmetal_Constant& c = *library_.tables->constants[i];
      const void* value = nullptr;
      for (uint32_t k = 0; k < dispatch_.n_constants; ++k)
        if (dispatch_.constants[k].index == c.index) value = dispatch_.constants[k].value;
      c.set(value);
    }
  }

  uint64_t n_groups() const {
    return uint64_t{dispatch_.groups[0]} * dispatch_.groups[1] * dispatch_.groups[2];
  }

  void place(uint64_t serial, uint32_t (&group)[3]) const {
    group[0] = static_cast<uint32_t>(serial % dispatch_.groups[0]);
    group[1] = static_cast<uint32_t>(serial / dispatch_.groups[0] % dispatch_.groups[1]);
    group[2] = static_cast<uint32_t>(serial / dispatch_.groups[0] / dispatch_.groups[1]);
  }

  // The serial number of the threadgroup that runs as number i.
  uint64_t serial(uint64_t i) const { return shuffled_.empty() ? i : shuffled_[i]; }

  void shuffle() {
    if (task_.order == Order::in_turn || task_.order == Order::ahead) return;
    shuffled_.resize(n_groups());
    std::iota(shuffled_.begin(), shuffled_.end(), 0u);
    if (task_.order == Order::reversed)
      std::reverse(shuffled_.begin(), shuffled_.end());
    else
      std::shuffle(shuffled_.begin(), shuffled_.end(), std::mt19937_64(dispatch_.seed));
  }

  void plain() {
    shuffle();
    const uint64_t n = n_groups();
    constexpr uint64_t worthwhile = 256;  // lanes; below, waking a thread costs more
    const uint64_t lanes = n * dispatch_.threads[0] * dispatch_.threads[1] * dispatch_.threads[2];
    const uint32_t workers = lanes < worthwhile ? 1 : std::max(dispatch_.workers, 1u);
    machine().provide(workers);
    std::vector<Reports> reports(workers);
    std::atomic<bool> stopped = false;
    const auto body = [&](uint32_t begin, uint32_t end, uint32_t thread) {
      set_constants();
      uint32_t group[3];
      for (uint64_t i = begin; i < end && !stopped; ++i) {
        place(serial(i), group);
        if (!machine().workers[thread]->run(task_, group, reports[thread])) stopped = true;
      }
    };
    const auto count = static_cast<uint32_t>(n);
    if (workers == 1)
      body(0, count, 0);
    else
      machine().pool->parallel_for(count, std::max(1u, count / (workers * 8)), body);
    for (const Reports& of_thread : reports)
      for (const Report& r : of_thread.all()) result_.reports.add(r);
  }

  void detect() {
    shuffle();
    std::vector<Slot> slots;
    for (uint32_t i = 0; i < dispatch_.n_bindings; ++i) {
      const SoftmetalBinding& b = dispatch_.bindings[i];
      slots.push_back({.index = b.index,
                       .base = static_cast<char*>(b.base),
                       .reads = {b.reads.offset, b.reads.bytes},
                       .writes = {b.writes.offset, b.writes.bytes},
                       .defined = b.defined,
                       .defined_bytes = b.length});
    }
    machine().provide(1);
    set_constants();
    Detector detector(slots, task_.group, data_of(library_.tables));
    uint32_t group[3];
    for (uint64_t i = 0; i < n_groups(); ++i) {
      place(serial(i), group);
      if (!machine().workers[0]->run(task_, group, result_.reports, &detector)) break;
    }
    detector.finish();
    for (const Slot& s : slots)
      result_.counts.push_back(
          {s.index, s.read_bytes, s.written_bytes, s.distinct_read, s.distinct_written});
  }

  SoftmetalLibrary& library_;
  const SoftmetalDispatch& dispatch_;
  size_t kernel_;
  SoftmetalResult& result_;
  Task task_{};
  uint32_t used_ = 0;  // threadgroup memory without gaps
  std::vector<uint32_t> shuffled_;
};

}  // namespace

extern "C" {

SoftmetalLibrary* softmetal_open(const char* path, char* error, size_t error_bytes) try {
  std::lock_guard lock(machine().mutex);
  auto library = std::make_unique<SoftmetalLibrary>();
  library->path = path;
  library->handle = open_shared(path);
  library->tables =
      static_cast<const softmetal_Library*>(dlsym(library->handle, "softmetal_library"));
  *library->tables->runtime = &Worker::runtime();
  read_tables(*library);
  return library.release();
} catch (const std::exception& e) {
  std::snprintf(error, error_bytes, "%s", e.what());
  return nullptr;
}

void softmetal_close(SoftmetalLibrary* library) { delete library; }

int softmetal_detecting(const SoftmetalLibrary* library) {
  return static_cast<int>(library->tables->detecting);
}

uint32_t softmetal_kernel_count(const SoftmetalLibrary* library) {
  return static_cast<uint32_t>(library->kernels.size());
}

const SoftmetalKernel* softmetal_kernel(const SoftmetalLibrary* library, uint32_t i) {
  return &library->kernels[i];
}

const SoftmetalKernel* softmetal_find(const SoftmetalLibrary* library, const char* name) {
  for (const SoftmetalKernel& k : library->kernels)
    if (std::strcmp(k.name, name) == 0) return &k;
  return nullptr;
}

uint32_t softmetal_constant_count(const SoftmetalLibrary* library) {
  return static_cast<uint32_t>(library->constants.size());
}

const SoftmetalConstant* softmetal_constant(const SoftmetalLibrary* library, uint32_t i) {
  return &library->constants[i];
}

SoftmetalResult* softmetal_run(SoftmetalLibrary* library, const SoftmetalDispatch* dispatch) {
  std::lock_guard lock(machine().mutex);
  auto result = std::make_unique<SoftmetalResult>();
  Run run(*library, *dispatch, *result);
  try {
    run();
  } catch (const std::exception& e) {  // no memory, no thread
    run.refuse(e.what());
    run.finish();
  }
  return result.release();
}

uint32_t softmetal_report_count(const SoftmetalResult* result) {
  return static_cast<uint32_t>(result->shown.size());
}

const SoftmetalReport* softmetal_report(const SoftmetalResult* result, uint32_t i) {
  return &result->shown[i];
}

uint32_t softmetal_counts_count(const SoftmetalResult* result) {
  return static_cast<uint32_t>(result->counts.size());
}

const SoftmetalCounts* softmetal_counts(const SoftmetalResult* result, uint32_t i) {
  return &result->counts[i];
}

void softmetal_free(SoftmetalResult* result) { delete result; }

}  // extern "C"
