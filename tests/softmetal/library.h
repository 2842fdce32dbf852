// The software Metal's C interface: open a kernel library, look at its kernels, run a dispatch.
//
// One dispatch runs at a time in a process; calls from several threads wait for each other.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SOFTMETAL_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SoftmetalLibrary SoftmetalLibrary;
typedef struct SoftmetalResult SoftmetalResult;

typedef struct {
  const char* name;
  int kind;          // 0 buffer, 1 threadgroup memory, 2 built-in value
  uint32_t index;    // of a buffer or of threadgroup memory
  uint32_t bytes;    // of the type of a reference, 0 for a pointer
  uint32_t writable; // the kernel may write through it
} SoftmetalArgument;

typedef struct {
  const char* name;
  const SoftmetalArgument* arguments;
  uint32_t n_arguments;
  uint32_t max_threads;        // [[max_total_threads_per_threadgroup]], or 1024
  uint32_t threadgroup_bytes;  // of its own arrays
  const char* file;
  uint32_t line;
} SoftmetalKernel;

typedef struct {
  const char* name;
  const char* type;  // "bool", "uint", …
  uint32_t index, bytes;
} SoftmetalConstant;

// Returns null and says why in `error` (of `error_bytes`).
SOFTMETAL_API SoftmetalLibrary* softmetal_open(const char* path, char* error, size_t error_bytes);
SOFTMETAL_API void softmetal_close(SoftmetalLibrary*);
SOFTMETAL_API int softmetal_detecting(const SoftmetalLibrary*);
SOFTMETAL_API uint32_t softmetal_kernel_count(const SoftmetalLibrary*);
SOFTMETAL_API const SoftmetalKernel* softmetal_kernel(const SoftmetalLibrary*, uint32_t i);
SOFTMETAL_API const SoftmetalKernel* softmetal_find(const SoftmetalLibrary*, const char* name);
SOFTMETAL_API uint32_t softmetal_constant_count(const SoftmetalLibrary*);
SOFTMETAL_API const SoftmetalConstant* softmetal_constant(const SoftmetalLibrary*, uint32_t i);

typedef struct {
  uint64_t offset, bytes;
} SoftmetalRange;

// What is bound to one buffer index, and what the dispatch declares of it.
typedef struct {
  uint32_t index;
  void* base;
  uint64_t length;               // bytes from base to the buffer's end
  SoftmetalRange reads, writes;  // relative to base; a detecting library is held to them
  uint8_t* defined;  // null, or a byte for each of `length`: 0 where nothing was written yet;
                     // set to 1 where this dispatch writes
} SoftmetalBinding;

typedef struct {
  uint32_t index;
  uint32_t bytes;
} SoftmetalThreadgroupMemory;

typedef struct {
  uint32_t index;
  const void* value;  // of the constant's type
} SoftmetalConstantValue;

enum SoftmetalOrder {
  SOFTMETAL_IN_TURN,
  SOFTMETAL_REVERSED,
  SOFTMETAL_RANDOM,
  SOFTMETAL_AHEAD,  // one simdgroup runs until it waits for the others
};

typedef struct {
  const SoftmetalKernel* kernel;
  uint32_t groups[3];   // threadgroups
  uint32_t threads[3];  // of each
  const SoftmetalBinding* bindings;
  uint32_t n_bindings;
  const SoftmetalThreadgroupMemory* threadgroup_memory;
  uint32_t n_threadgroup_memory;
  const SoftmetalConstantValue* constants;  // those not named are undefined
  uint32_t n_constants;
  int order;  // SoftmetalOrder
  uint64_t seed;
  uint32_t workers;  // threads that share the threadgroups, if the library is plain; 0: one
} SoftmetalDispatch;

typedef struct {
  const char* kind;  // "race", "out of bounds", … (report.cpp)
  const char* text;  // all of it on one line
  const char* file;
  uint32_t line;
  const char* other_file;  // of a race's earlier access
  uint32_t other_line;
  uint32_t group[3];
  uint32_t lane, other_lane;
  uint64_t count;
} SoftmetalReport;

// Of one binding; counted by a detecting library only.
typedef struct {
  uint32_t index;
  uint64_t read_bytes, written_bytes;        // of all accesses together
  uint64_t distinct_read, distinct_written;  // of bytes that were accessed at all
} SoftmetalCounts;

// Runs to the end, or until an error that lets nothing go on. The result is the caller's to free.
SOFTMETAL_API SoftmetalResult* softmetal_run(SoftmetalLibrary*, const SoftmetalDispatch*);
SOFTMETAL_API uint32_t softmetal_report_count(const SoftmetalResult*);
SOFTMETAL_API const SoftmetalReport* softmetal_report(const SoftmetalResult*, uint32_t i);
SOFTMETAL_API uint32_t softmetal_counts_count(const SoftmetalResult*);
SOFTMETAL_API const SoftmetalCounts* softmetal_counts(const SoftmetalResult*, uint32_t i);
SOFTMETAL_API void softmetal_free(SoftmetalResult*);

#ifdef __cplusplus
}
#endif
