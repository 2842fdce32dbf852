// Arithmetic functions. As in Metal there is one overload for each type, so a call with mixed types
// is ambiguous here too; bfloat has to be converted first. `fast::` gives the exact functions: what
// Apple's approximations do is not known here.
#pragma once
#pragma clang system_header

namespace metal {

#define SOFTMETAL_UNARY(name, builtin)                                    \
  SOFTMETAL_FUNC float name(float x) { return builtin(x); }               \
  SOFTMETAL_FUNC half name(half x) { return half(builtin(float(x))); }    \
  bfloat name(bfloat) = delete;                                           \
  template <class T, int N> SOFTMETAL_FUNC vec<T, N> name(vec<T, N> v) {  \
    for (int i = 0; i < N; ++i) v[i] = name(T(v[i]));                     \
    return v;                                                             \
  }
#define SOFTMETAL_BINARY(name, builtin)                                                      \
  SOFTMETAL_FUNC float name(float a, float b) { return builtin(a, b); }                      \
  SOFTMETAL_FUNC half name(half a, half b) { return half(builtin(float(a), float(b))); }     \
  bfloat name(bfloat, bfloat) = delete;                                                      \
  template <class T, int N> SOFTMETAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {        \
    for (int i = 0; i < N; ++i) a[i] = name(T(a[i]), T(b[i]));                               \
    return a;                                                                                \
  }
#define SOFTMETAL_RSQRT(x) (1.0f / __builtin_sqrtf(x))
#define SOFTMETAL_EXP10(x) __builtin_powf(10.0f, x)
#define SOFTMETAL_DIVIDE(a, b) ((a) / (b))
#define SOFTMETAL_FRACT(x) __builtin_fminf((x)-__builtin_floorf(x), 0x1.fffffep-1f)
#define SOFTMETAL_SIGN(x) ((x) > 0.0f ? 1.0f : (x) < 0.0f ? -1.0f : (x) == 0.0f ? (x) : 0.0f)
#define SOFTMETAL_SATURATE(x) __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f)

#define SOFTMETAL_TRANSCENDENTAL                                                                 \
  SOFTMETAL_UNARY(exp, __builtin_expf)                                                           \
  SOFTMETAL_UNARY(exp2, __builtin_exp2f)                                                         \
  SOFTMETAL_UNARY(exp10, SOFTMETAL_EXP10)                                                        \
  SOFTMETAL_UNARY(log, __builtin_logf)                                                           \
  SOFTMETAL_UNARY(log2, __builtin_log2f)                                                         \
  SOFTMETAL_UNARY(log10, __builtin_log10f)                                                       \
  SOFTMETAL_UNARY(sin, __builtin_sinf)                                                           \
  SOFTMETAL_UNARY(cos, __builtin_cosf)                                                           \
  SOFTMETAL_UNARY(tan, __builtin_tanf)                                                           \
  SOFTMETAL_UNARY(asin, __builtin_asinf)                                                         \
  SOFTMETAL_UNARY(acos, __builtin_acosf)                                                         \
  SOFTMETAL_UNARY(atan, __builtin_atanf)                                                         \
  SOFTMETAL_UNARY(sinh, __builtin_sinhf)                                                         \
  SOFTMETAL_UNARY(cosh, __builtin_coshf)                                                         \
  SOFTMETAL_UNARY(tanh, __builtin_tanhf)                                                         \
  SOFTMETAL_UNARY(sqrt, __builtin_sqrtf)                                                         \
  SOFTMETAL_UNARY(rsqrt, SOFTMETAL_RSQRT)                                                        \
  SOFTMETAL_BINARY(pow, __builtin_powf)                                                          \
  SOFTMETAL_BINARY(powr, __builtin_powf)                                                         \
  SOFTMETAL_BINARY(atan2, __builtin_atan2f)                                                      \
  SOFTMETAL_BINARY(divide, SOFTMETAL_DIVIDE)

#define SOFTMETAL_COMMON                          \
  SOFTMETAL_UNARY(fabs, __builtin_fabsf)          \
  SOFTMETAL_UNARY(floor, __builtin_floorf)        \
  SOFTMETAL_UNARY(ceil, __builtin_ceilf)          \
  SOFTMETAL_UNARY(trunc, __builtin_truncf)        \
  SOFTMETAL_UNARY(rint, __builtin_rintf)          \
  SOFTMETAL_UNARY(round, __builtin_roundf)        \
  SOFTMETAL_UNARY(fract, SOFTMETAL_FRACT)         \
  SOFTMETAL_UNARY(sign, SOFTMETAL_SIGN)           \
  SOFTMETAL_UNARY(saturate, SOFTMETAL_SATURATE)   \
  SOFTMETAL_BINARY(fmin, __builtin_fminf)         \
  SOFTMETAL_BINARY(fmax, __builtin_fmaxf)         \
  SOFTMETAL_BINARY(fmod, __builtin_fmodf)         \
  SOFTMETAL_BINARY(copysign, __builtin_copysignf)

SOFTMETAL_TRANSCENDENTAL
SOFTMETAL_COMMON

// min, max, clamp and abs: every type but bfloat. Of a number and a NaN, the number.
#define SOFTMETAL_ORDER(T)                                                             \
  SOFTMETAL_FUNC T min(T a, T b) { return b < a || a != a ? b : a; }                   \
  SOFTMETAL_FUNC T max(T a, T b) { return b > a || a != a ? b : a; }                   \
  SOFTMETAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
SOFTMETAL_INTEGERS(SOFTMETAL_ORDER)
SOFTMETAL_ORDER(half)
SOFTMETAL_ORDER(float)
bfloat min(bfloat, bfloat) = delete;
bfloat max(bfloat, bfloat) = delete;
bfloat clamp(bfloat, bfloat, bfloat) = delete;
bool isnan(bfloat) = delete;
bool isinf(bfloat) = delete;
bool isfinite(bfloat) = delete;
#define SOFTMETAL_ABS(T) \
  SOFTMETAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; }
SOFTMETAL_ABS(char) SOFTMETAL_ABS(short) SOFTMETAL_ABS(int) SOFTMETAL_ABS(long)
SOFTMETAL_UNARY(abs, __builtin_fabsf)

template <class T, int N> SOFTMETAL_FUNC vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = min(T(a[i]), T(b[i]));
  return a;
}
template <class T, int N> SOFTMETAL_FUNC vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = max(T(a[i]), T(b[i]));
  return a;
}
template <class T, int N>
SOFTMETAL_FUNC vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N> SOFTMETAL_FUNC vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}

SOFTMETAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SOFTMETAL_FUNC half fma(half a, half b, half c) {
  return half(__builtin_fmaf(float(a), float(b), float(c)));
}
template <class T, int N>
SOFTMETAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; ++i) c[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return c;
}
SOFTMETAL_FUNC float mix(float a, float b, float t) { return a + (b - a) * t; }
SOFTMETAL_FUNC half mix(half a, half b, half t) { return a + (b - a) * t; }
template <class T, int N> SOFTMETAL_FUNC vec<T, N> mix(vec<T, N> a, vec<T, N> b, vec<T, N> t) {
  return a + (b - a) * t;
}
SOFTMETAL_FUNC float sincos(float x, thread float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
SOFTMETAL_FUNC float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
SOFTMETAL_FUNC float frexp(float x, thread int& e) { return __builtin_frexpf(x, &e); }
SOFTMETAL_FUNC float modf(float x, thread float& whole) { return __builtin_modff(x, &whole); }

#define SOFTMETAL_CLASSIFY(T)                                                   \
  SOFTMETAL_FUNC bool isnan(T x) { return __builtin_isnan(float(x)); }          \
  SOFTMETAL_FUNC bool isinf(T x) { return __builtin_isinf(float(x)); }          \
  SOFTMETAL_FUNC bool isfinite(T x) { return __builtin_isfinite(float(x)); }    \
  SOFTMETAL_FUNC bool signbit(T x) { return __builtin_signbit(float(x)); }
SOFTMETAL_CLASSIFY(half)
SOFTMETAL_CLASSIFY(float)

#define SOFTMETAL_BITS(T)                                                                   \
  SOFTMETAL_FUNC T popcount(T x) { return T(__builtin_popcountg(unsigned_of(x))); }         \
  SOFTMETAL_FUNC T clz(T x) { return T(__builtin_clzg(unsigned_of(x), int(8 * sizeof(T)))); } \
  SOFTMETAL_FUNC T ctz(T x) { return T(__builtin_ctzg(unsigned_of(x), int(8 * sizeof(T)))); } \
  SOFTMETAL_FUNC T reverse_bits(T x) { return T(__builtin_elementwise_bitreverse(x)); }     \
  SOFTMETAL_FUNC T rotate(T x, T by) {                                                      \
    constexpr uint width = 8 * sizeof(T);                                                   \
    const uint n = uint(by) & (width - 1);                                                  \
    const ulong bits = unsigned_of(x);                                                      \
    return n == 0 ? x : T(bits << n | bits >> (width - n));                                 \
  }                                                                                         \
  SOFTMETAL_FUNC T extract_bits(T x, uint offset, uint n) {                                 \
    constexpr uint width = 8 * sizeof(T);                                                   \
    return n == 0 ? T(0) : T(T(x << (width - offset - n)) >> (width - n));                  \
  }
SOFTMETAL_FUNC uchar unsigned_of(char x) { return uchar(x); }
SOFTMETAL_FUNC uchar unsigned_of(uchar x) { return x; }
SOFTMETAL_FUNC ushort unsigned_of(short x) { return ushort(x); }
SOFTMETAL_FUNC ushort unsigned_of(ushort x) { return x; }
SOFTMETAL_FUNC uint unsigned_of(int x) { return uint(x); }
SOFTMETAL_FUNC uint unsigned_of(uint x) { return x; }
SOFTMETAL_FUNC ulong unsigned_of(long x) { return ulong(x); }
SOFTMETAL_FUNC ulong unsigned_of(ulong x) { return x; }
SOFTMETAL_INTEGERS(SOFTMETAL_BITS)

SOFTMETAL_FUNC uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
SOFTMETAL_FUNC int mulhi(int a, int b) { return int((long(a) * b) >> 32); }
SOFTMETAL_FUNC ulong mulhi(ulong a, ulong b) {
  return ulong((static_cast<unsigned __int128>(a) * b) >> 64);
}

namespace precise {
SOFTMETAL_TRANSCENDENTAL
SOFTMETAL_COMMON
}  // namespace precise

namespace fast {
SOFTMETAL_TRANSCENDENTAL
SOFTMETAL_COMMON
SOFTMETAL_ORDER(float)
SOFTMETAL_ORDER(half)
}  // namespace fast

}  // namespace metal
