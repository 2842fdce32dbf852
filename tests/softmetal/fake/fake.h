// The fake Metal's controls, for tests. The production host code does not know of them.
//
// Command buffers run when somebody waits for them (or for a later one), so a host that reads too
// early reads what was there before.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FAKE_METAL_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Settings; null restores what the environment or the default says. Returns 0 if there is no such
// setting or value.
//   mode       detect, plain, stub (LILY_SOFTMETAL_MODE): of libraries compiled from now on. A stub
//              is not compiled: its kernels have any name and fill what they write with zeros
//   order      in_turn, reversed, random, ahead, mixed (LILY_SOFTMETAL_ORDER): of lanes
//   seed       (LILY_SOFTMETAL_SEED) of orders, those of dispatches between barriers among them
//   system     14, 15, 26, 26.2: the macOS whose classes and methods there are. 16.2 is 26.2 as a
//              process is told that was linked for a system before
//   chip       1 … 5: M1 … M5
//   memory     bytes of recommendedMaxWorkingSetSize
//   width, max_threads      what pipelines say
//   wrong_types      a selector whose types methodSignatureForSelector: tells wrong
//   fail_allocation, fail_library, fail_pipeline    n: the nth from now fails; 0: none
//   fail_command_buffer     n or n:code, an MTLCommandBufferError
FAKE_METAL_API int fake_metal_set(const char* name, const char* value);

// What was wrong since the last clear: one line each. A command buffer that ends after a report
// has failed, with the reports as its error.
FAKE_METAL_API uint32_t fake_metal_report_count(void);
FAKE_METAL_API const char* fake_metal_report(uint32_t i);  // valid until the next clear
FAKE_METAL_API void fake_metal_clear(void);

// objects, buffers (live); allocations, command_buffers, dispatches, barriers, compiled,
// residency_requests, devices (since the process began).
FAKE_METAL_API uint64_t fake_metal_number(const char* name);

// Bytes of one buffer index that the last dispatch of a detecting library accessed at all.
FAKE_METAL_API void fake_metal_counts(uint32_t index, uint64_t* read, uint64_t* written);

// Class, selector and types of each method there is, one a line: "-MTLDevice name @@:".
FAKE_METAL_API const char* fake_metal_methods(void);

// What the next dispatch declares of the buffer bound last to an index. access: 0 read, 1 write,
// 2 both. Without it, all of the buffer. kind: any number below fake_metal_kinds, to count by.
FAKE_METAL_API void fake_metal_declare(uint32_t index, int access, size_t bytes, uint32_t kind);

enum { fake_metal_kinds = 8 };

// What detecting libraries moved since the process began, in slots declared as of this kind: bytes
// of all loads; and different bytes of each dispatch and slot that were read, and written.
FAKE_METAL_API void fake_metal_moved(uint32_t kind, uint64_t* loaded, uint64_t* read,
                                     uint64_t* written);

#ifdef __cplusplus
}
#endif
