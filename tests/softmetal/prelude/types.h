// Address spaces, scalar types, constants and type traits.
#pragma once
#pragma clang system_header

// An object's address space is part of its type, as in Metal. `thread` is C++'s default space.
#define device __attribute__((address_space(1)))
#define threadgroup __attribute__((address_space(3)))
#define constant const __attribute__((address_space(4)))
#define thread

// A Metal function is inlined. Without debug information of its own, an access inside one counts as
// the line of the kernel that calls it.
#define SOFTMETAL_FUNC inline __attribute__((always_inline, nodebug))
#define METAL_FUNC inline __attribute__((always_inline))

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX half(65504.0f)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

namespace metal {

template <class T, T V> struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

template <class T, class U> struct is_same : false_type {};
template <class T> struct is_same<T, T> : true_type {};
template <class T, class U> constexpr bool is_same_v = is_same<T, U>::value;

template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_address_space { typedef T type; };
template <class T> struct remove_address_space<device T> { typedef T type; };
template <class T> struct remove_address_space<const device T> { typedef const T type; };
template <class T> struct remove_address_space<threadgroup T> { typedef T type; };
template <class T> struct remove_address_space<const threadgroup T> { typedef const T type; };
template <class T> struct remove_address_space<constant T> { typedef const T type; };
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T&> { typedef T type; };
template <class T> struct remove_reference<device T&> { typedef device T type; };
template <class T> struct remove_reference<threadgroup T&> { typedef threadgroup T type; };
template <class T> struct remove_reference<constant T&> { typedef constant T type; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t =
    remove_const_t<typename remove_address_space<remove_reference_t<T>>::type>;

template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> constexpr bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T> constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};

template <class T> struct numeric_limits;
#define SOFTMETAL_LIMITS(T, lowest_, min_, max_)        \
  template <> struct numeric_limits<T> {                \
    static constexpr T lowest() { return T(lowest_); }  \
    static constexpr T min() { return T(min_); }        \
    static constexpr T max() { return T(max_); }
#define SOFTMETAL_INTEGER(T, min_, max_) SOFTMETAL_LIMITS(T, min_, min_, max_) }
#define SOFTMETAL_FLOAT(T, min_, max_, epsilon_)                           \
  SOFTMETAL_LIMITS(T, -max_, min_, max_)                                   \
    static constexpr T epsilon() { return T(epsilon_); }                   \
    static constexpr T infinity() { return T(__builtin_inff()); }          \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }       \
  }
SOFTMETAL_INTEGER(char, -128, 127);
SOFTMETAL_INTEGER(int8_t, -128, 127);
SOFTMETAL_INTEGER(uchar, 0, 255);
SOFTMETAL_INTEGER(short, -32768, 32767);
SOFTMETAL_INTEGER(ushort, 0, 65535);
SOFTMETAL_INTEGER(int, -2147483647 - 1, 2147483647);
SOFTMETAL_INTEGER(uint, 0u, 4294967295u);
SOFTMETAL_INTEGER(long, -9223372036854775807L - 1, 9223372036854775807L);
SOFTMETAL_INTEGER(ulong, 0ul, 18446744073709551615ul);
SOFTMETAL_FLOAT(float, 1.17549435e-38f, 3.402823466e+38f, 1.1920929e-7f);
SOFTMETAL_FLOAT(half, 6.103515625e-05f, 65504.0f, 0.0009765625f);
SOFTMETAL_FLOAT(bfloat, 1.17549435e-38f, 3.38953139e38f, 0.0078125f);

}  // namespace metal
