// What compiled device code and the emulator know of each other.
//
// A kernel library is a shared object that links against nothing of the host. Its glue.cpp holds a
// pointer to a Runtime, which the host sets when it opens the library, and forwards through it. So
// one process may hold several emulators, and no __tsan_ symbol is visible outside the library.
// Read by prelude, glue.cpp and emulator: plain C types, no word of Metal's.
#ifndef SOFTMETAL_RUNTIME_H
#define SOFTMETAL_RUNTIME_H

enum {
  softmetal_abi = 1,
  softmetal_buffers = 31,  // Metal's limit on buffer indices, and on threadgroup ones
  softmetal_lanes = 32,    // of a simdgroup
};

extern "C" {

// What all lanes of a threadgroup are given.
struct softmetal_Group {
  void* buffer[softmetal_buffers];
  void* shared[softmetal_buffers];  // threadgroup memory
  unsigned groups[3], threads[3], group[3];
};

// What one lane is given. `index` counts lanes of the threadgroup, x first.
struct softmetal_Lane {
  const softmetal_Group* group;
  unsigned position[3];
  unsigned index;
};

// One lane's value in a collective: up to 16 bytes, so that it travels in registers.
struct softmetal_Bits {
  unsigned long lo, hi;
};

// Turns the values of the active lanes (bits of the mask) into one result for each. Run once, by
// the lane that arrives last.
typedef void (*softmetal_Combine)(const softmetal_Bits* in, softmetal_Bits* out, unsigned active);

enum softmetal_AccessKind { softmetal_read = 1, softmetal_write = 2, softmetal_atomic = 4 };

// `site` is a return address in the library: identity of a call, and its line.
struct softmetal_Runtime {
  void (*barrier)(int flags, const void* site);
  void (*simd_barrier)(int flags, const void* site);
  softmetal_Bits (*shuffle)(softmetal_Bits value, unsigned source, const void* site);
  softmetal_Bits (*combine)(softmetal_Bits value, softmetal_Combine, int full, const void* site);
  void* (*threadgroup_array)(unsigned id, unsigned bytes, const char* name);
  void (*arrays_done)(void);
  unsigned (*lane)(void);
  void (*access)(const volatile void* address, unsigned long bytes, int kind, const void* site);
};

// The tables that a library exports, as `softmetal_library`.
enum softmetal_ArgumentKind { softmetal_buffer, softmetal_threadgroup, softmetal_builtin };

struct softmetal_Argument {
  const char* name;
  int kind;
  unsigned index;     // of the buffer or threadgroup slot
  unsigned bytes;     // of a reference's type, 0 for a pointer
  unsigned writable;  // a device pointer or reference to non-const
};

struct softmetal_Kernel {
  const char* name;
  void (*entry)(const softmetal_Lane*);
  const softmetal_Argument* arguments;
  unsigned n_arguments;
  unsigned max_threads;  // [[max_total_threads_per_threadgroup]], 0 if not stated
  const char* file;      // of its definition
  unsigned line;
};

// Values live in thread-local variables of the library: each emulating thread sets its own.
struct softmetal_Constant {
  const char* name;
  const char* type;
  unsigned index, bytes;
  void (*set)(const void* value);  // null: not defined
};

struct softmetal_Library {
  unsigned abi;
  unsigned detecting;
  const softmetal_Kernel* const* kernels;
  unsigned n_kernels;
  const softmetal_Constant* const* constants;
  unsigned n_constants;
  const softmetal_Runtime** runtime;
};

}  // extern "C"

#endif
