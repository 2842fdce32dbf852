// What the translator's own code uses: arguments of a kernel's wrapper, threadgroup arrays.
#pragma once
#pragma clang system_header

extern "C" {
extern __attribute__((visibility("hidden"))) const softmetal_Runtime* softmetal_runtime;
void* softmetal_threadgroup_array(unsigned id, unsigned bytes, const char* name);
void softmetal_arrays_done();
}

// A kernel is instrumented, its wrapper is not: so neither is inlined in the other.
#define SOFTMETAL_KERNEL __attribute__((noinline))
#define SOFTMETAL_ENTRY static __attribute__((disable_sanitizer_instrumentation))

namespace softmetal {

template <class F> struct Parameters;
template <class... P> struct Parameters<void(P...)> {
  template <int I> using At = __type_pack_element<I, P...>;
};

// A pointer or reference parameter, from an address of the host. `bytes` is a reference's size.
template <class P> struct Memory;
#define SOFTMETAL_MEMORY(type, writable_)                                             \
  template <class T> struct Memory<type*> {                                           \
    static constexpr unsigned bytes = 0, writable = writable_;                        \
    static SOFTMETAL_FUNC type* at(void* p) { return (type*)p; }                      \
  };                                                                                  \
  template <class T> struct Memory<type&> {                                           \
    static constexpr unsigned bytes = sizeof(T), writable = writable_;                \
    static SOFTMETAL_FUNC type& at(void* p) { return *(type*)p; }                     \
  };
SOFTMETAL_MEMORY(device T, 1)
SOFTMETAL_MEMORY(const device T, 0)
SOFTMETAL_MEMORY(constant T, 0)
SOFTMETAL_MEMORY(threadgroup T, 1)

template <class P> SOFTMETAL_FUNC P position(unsigned x, unsigned y, unsigned z) {
  typedef metal::remove_const_t<P> T;
  static_assert(metal::is_integral_v<typename Shape<T>::Element>, "positions are whole numbers");
  if constexpr (Shape<T>::size == 1)
    return T(x);
  else if constexpr (Shape<T>::size == 2)
    return make<typename Shape<T>::Element, 2>(x, y);
  else
    return make<typename Shape<T>::Element, 3>(x, y, z);
}
template <class P> SOFTMETAL_FUNC P position(const unsigned (&v)[3]) {
  return position<P>(v[0], v[1], v[2]);
}

#define SOFTMETAL_BUILTIN(name, ...)                                                   \
  template <class P> SOFTMETAL_FUNC P name(const softmetal_Lane* lane) {               \
    const softmetal_Group* g = lane->group;                                            \
    return position<P>(__VA_ARGS__);                                                   \
  }
#define SOFTMETAL_EACH(expression) \
  expression(0), expression(1), expression(2)
#define SOFTMETAL_GRID(i) g->group[i] * g->threads[i] + lane->position[i]
#define SOFTMETAL_GRID_SIZE(i) g->groups[i] * g->threads[i]
SOFTMETAL_BUILTIN(thread_position_in_grid, SOFTMETAL_EACH(SOFTMETAL_GRID))
SOFTMETAL_BUILTIN(threads_per_grid, SOFTMETAL_EACH(SOFTMETAL_GRID_SIZE))
SOFTMETAL_BUILTIN(thread_position_in_threadgroup, lane->position)
SOFTMETAL_BUILTIN(threads_per_threadgroup, g->threads)
SOFTMETAL_BUILTIN(dispatch_threads_per_threadgroup, g->threads)
SOFTMETAL_BUILTIN(threadgroup_position_in_grid, g->group)
SOFTMETAL_BUILTIN(threadgroups_per_grid, g->groups)
SOFTMETAL_BUILTIN(thread_index_in_threadgroup, (void(g), lane->index), 0, 0)
SOFTMETAL_BUILTIN(thread_index_in_simdgroup, (void(g), lane->index % 32), 0, 0)
SOFTMETAL_BUILTIN(simdgroup_index_in_threadgroup, (void(g), lane->index / 32), 0, 0)
SOFTMETAL_BUILTIN(simdgroups_per_threadgroup,
                  (g->threads[0] * g->threads[1] * g->threads[2] + 31) / 32, 0, 0)
SOFTMETAL_BUILTIN(threads_per_simdgroup, (void(g), void(lane), 32), 0, 0)
SOFTMETAL_BUILTIN(thread_execution_width, (void(g), void(lane), 32), 0, 0)
SOFTMETAL_BUILTIN(thread_index_in_quadgroup, (void(g), lane->index % 4), 0, 0)
SOFTMETAL_BUILTIN(quadgroup_index_in_threadgroup, (void(g), lane->index / 4), 0, 0)

// A threadgroup variable of a kernel: a place in the emulator's arena.
template <class T>
SOFTMETAL_FUNC threadgroup T& threadgroup_variable(unsigned id, const char* name) {
  return *(threadgroup T*)softmetal_threadgroup_array(id, sizeof(T), name);
}

template <class T> SOFTMETAL_FUNC void set_constant(T& variable, bool& defined, const void* value) {
  defined = value != nullptr;
  if (defined)
    __builtin_memcpy(&variable, value, sizeof(T));
  else
    variable = T();
}

}  // namespace softmetal
