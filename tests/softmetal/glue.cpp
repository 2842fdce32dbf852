// The part of a kernel library that is not device code: forwards to the emulator, with the call's
// address. Compiled once per tool version, without instrumentation, all symbols hidden.
#include "runtime.h"

typedef __SIZE_TYPE__ size_t;

extern "C" {

const softmetal_Runtime* softmetal_runtime;

#define SITE __builtin_return_address(0)

void softmetal_barrier(int flags) { softmetal_runtime->barrier(flags, SITE); }
void softmetal_simd_barrier(int flags) { softmetal_runtime->simd_barrier(flags, SITE); }
softmetal_Bits softmetal_shuffle(softmetal_Bits value, unsigned source) {
  return softmetal_runtime->shuffle(value, source, SITE);
}
softmetal_Bits softmetal_combine(softmetal_Bits value, softmetal_Combine combine, int full) {
  return softmetal_runtime->combine(value, combine, full, SITE);
}
void* softmetal_threadgroup_array(unsigned id, unsigned bytes, const char* name) {
  return softmetal_runtime->threadgroup_array(id, bytes, name);
}
void softmetal_arrays_done() { softmetal_runtime->arrays_done(); }
unsigned softmetal_lane() { return softmetal_runtime->lane(); }

// The names that clang's thread sanitizer calls. All say the same: this address, so many bytes.
#define ACCESS(address, bytes, kind) softmetal_runtime->access(address, bytes, kind, SITE)

#define PLAIN(bytes)                                                                             \
  void __tsan_read##bytes(void* a) { ACCESS(a, bytes, softmetal_read); }                         \
  void __tsan_write##bytes(void* a) { ACCESS(a, bytes, softmetal_write); }                       \
  void __tsan_read_write##bytes(void* a) { ACCESS(a, bytes, softmetal_read | softmetal_write); } \
  void __tsan_unaligned_read##bytes(void* a) { ACCESS(a, bytes, softmetal_read); }               \
  void __tsan_unaligned_write##bytes(void* a) { ACCESS(a, bytes, softmetal_write); }             \
  void __tsan_unaligned_read_write##bytes(void* a) {                                             \
    ACCESS(a, bytes, softmetal_read | softmetal_write);                                          \
  }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  ACCESS(from, bytes, softmetal_read);
  ACCESS(to, bytes, softmetal_write);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  ACCESS(from, bytes, softmetal_read);
  ACCESS(to, bytes, softmetal_write);
  return __builtin_memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  ACCESS(to, bytes, softmetal_write);
  return __builtin_memset(to, value, bytes);
}

// A detecting library runs on one thread, so plain operations stand for the atomic ones.
#define MODIFY (softmetal_read | softmetal_write | softmetal_atomic)
#define FETCH(T, bits, name, expression)                                   \
  T __tsan_atomic##bits##_fetch_##name(volatile T* a, T value, int) {      \
    ACCESS(a, bits / 8, MODIFY);                                           \
    T old = *a;                                                            \
    *a = expression;                                                       \
    return old;                                                            \
  }
#define ATOMIC(T, bits)                                                                          \
  T __tsan_atomic##bits##_load(const volatile T* a, int) {                                       \
    ACCESS(a, bits / 8, softmetal_read | softmetal_atomic);                                      \
    return *a;                                                                                   \
  }                                                                                              \
  void __tsan_atomic##bits##_store(volatile T* a, T value, int) {                                \
    ACCESS(a, bits / 8, softmetal_write | softmetal_atomic);                                     \
    *a = value;                                                                                  \
  }                                                                                              \
  T __tsan_atomic##bits##_exchange(volatile T* a, T value, int) {                                \
    ACCESS(a, bits / 8, MODIFY);                                                                 \
    T old = *a;                                                                                  \
    *a = value;                                                                                  \
    return old;                                                                                  \
  }                                                                                              \
  FETCH(T, bits, add, old + value)                                                               \
  FETCH(T, bits, sub, old - value)                                                               \
  FETCH(T, bits, and, old & value)                                                               \
  FETCH(T, bits, or, old | value)                                                                \
  FETCH(T, bits, xor, old ^ value)                                                               \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* a, T expected, T value, int, int) {   \
    ACCESS(a, bits / 8, MODIFY);                                                                 \
    T old = *a;                                                                                  \
    if (old == expected) *a = value;                                                             \
    return old;                                                                                  \
  }                                                                                              \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* expected, T value, int,    \
                                                    int) {                                       \
    ACCESS(a, bits / 8, MODIFY);                                                                 \
    T old = *a;                                                                                  \
    if (old == *expected) {                                                                      \
      *a = value;                                                                                \
      return 1;                                                                                  \
    }                                                                                            \
    *expected = old;                                                                             \
    return 0;                                                                                    \
  }                                                                                              \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* expected, T value, int,      \
                                                  int) {                                         \
    ACCESS(a, bits / 8, MODIFY);                                                                 \
    T old = *a;                                                                                  \
    if (old == *expected) {                                                                      \
      *a = value;                                                                                \
      return 1;                                                                                  \
    }                                                                                            \
    *expected = old;                                                                             \
    return 0;                                                                                    \
  }
ATOMIC(unsigned, 32)
ATOMIC(unsigned long, 64)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
