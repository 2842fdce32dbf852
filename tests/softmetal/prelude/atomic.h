// Atomics: relaxed, 32 bits (float: addition and exchange, in device memory), as every M chip has
// them.
#pragma once
#pragma clang system_header

namespace metal {

enum memory_order { memory_order_relaxed };

// Not copyable in Metal; here a struct without operators, so that it cannot be used plainly.
template <class T> struct atomic {
  static_assert(sizeof(T) == 4, "atomics of 32 bits only");
  T value_;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

}  // namespace metal

namespace softmetal {
template <class T> struct Same { typedef T type; };
template <class T> using NotDeduced = typename Same<T>::type;
}  // namespace softmetal

namespace metal {

#define SOFTMETAL_FETCH(space, name)                                                            \
  template <class T>                                                                            \
  SOFTMETAL_FUNC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object,             \
                                                  softmetal::NotDeduced<T> value, memory_order) { \
    static_assert(is_integral_v<T>, "an integer operation on atomic_float");                    \
    return __atomic_fetch_##name((volatile space T*)&object->value_, value, __ATOMIC_RELAXED);  \
  }

// min, max and floating-point addition go through compare and exchange.
#define SOFTMETAL_FETCH_BY_EXCHANGE(space, name, result)                                        \
  template <class T>                                                                            \
  SOFTMETAL_FUNC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object,             \
                                                  softmetal::NotDeduced<T> value,               \
                                                  memory_order order) {                         \
    T old = atomic_load_explicit(object, order);                                                \
    while (!atomic_compare_exchange_weak_explicit(object, &old, T(result), order, order)) {     \
    }                                                                                           \
    return old;                                                                                 \
  }

#define SOFTMETAL_ATOMICS(space)                                                                \
  template <class T>                                                                            \
  SOFTMETAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) { \
    return __builtin_bit_cast(                                                                  \
        T, __atomic_load_n((const volatile space uint*)&object->value_, __ATOMIC_RELAXED));     \
  }                                                                                             \
  template <class T>                                                                            \
  SOFTMETAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object,                   \
                                            softmetal::NotDeduced<T> value, memory_order) {     \
    __atomic_store_n((volatile space uint*)&object->value_, __builtin_bit_cast(uint, value),    \
                     __ATOMIC_RELAXED);                                                         \
  }                                                                                             \
  template <class T>                                                                            \
  SOFTMETAL_FUNC T atomic_exchange_explicit(volatile space atomic<T>* object,                   \
                                            softmetal::NotDeduced<T> value, memory_order) {     \
    return __builtin_bit_cast(T, __atomic_exchange_n((volatile space uint*)&object->value_,     \
                                                     __builtin_bit_cast(uint, value),           \
                                                     __ATOMIC_RELAXED));                        \
  }                                                                                             \
  template <class T>                                                                            \
  SOFTMETAL_FUNC bool atomic_compare_exchange_weak_explicit(                                    \
      volatile space atomic<T>* object, thread T* expected, softmetal::NotDeduced<T> value,     \
      memory_order, memory_order) {                                                             \
    uint old = __builtin_bit_cast(uint, *expected);                                             \
    const bool done = __atomic_compare_exchange_n(                                              \
        (volatile space uint*)&object->value_, &old, __builtin_bit_cast(uint, value), false,    \
        __ATOMIC_RELAXED, __ATOMIC_RELAXED);                                                    \
    *expected = __builtin_bit_cast(T, old);                                                     \
    return done;                                                                                \
  }                                                                                             \
  SOFTMETAL_FETCH(space, sub)                                                                   \
  SOFTMETAL_FETCH(space, and)                                                                   \
  SOFTMETAL_FETCH(space, or)                                                                    \
  SOFTMETAL_FETCH(space, xor)                                                                   \
  SOFTMETAL_FETCH_BY_EXCHANGE(space, min, (value < old ? value : old))                          \
  SOFTMETAL_FETCH_BY_EXCHANGE(space, max, (value > old ? value : old))
SOFTMETAL_ATOMICS(device)
SOFTMETAL_ATOMICS(threadgroup)

SOFTMETAL_FETCH(threadgroup, add)
template <class T>
SOFTMETAL_FUNC T atomic_fetch_add_explicit(volatile device atomic<T>* object,
                                           softmetal::NotDeduced<T> value, memory_order order) {
  if constexpr (is_integral_v<T>) {
    return __atomic_fetch_add((volatile device T*)&object->value_, value, __ATOMIC_RELAXED);
  } else {
    T old = atomic_load_explicit(object, order);
    while (!atomic_compare_exchange_weak_explicit(object, &old, T(old + value), order, order)) {
    }
    return old;
  }
}

}  // namespace metal
