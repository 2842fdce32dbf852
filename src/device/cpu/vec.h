// Sixteen float32 lanes on every instruction set: one 512-bit register, two 256-bit ones, or an
// array that the compiler vectorises. Compiled once per instruction set, in namespace LILY_ISA.
//
// Sums of one row must not depend on what surrounds it: `fma` is always one fused operation where
// the hardware has it, and kernels spell it out instead of leaving the choice to the compiler.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/bf16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef LILY_ISA
#error "LILY_ISA names the namespace of this build"
#endif

#define LILY_INLINE inline __attribute__((always_inline))

namespace lily::cpu::LILY_ISA {

constexpr int lanes = 16;

#if defined(__AVX512F__)

struct F {
  __m512 v;
};
struct U {
  __m512i v;
};

LILY_INLINE F zero() { return {_mm512_setzero_ps()}; }
LILY_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
LILY_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
LILY_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
LILY_INLINE F load(const bf16* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
LILY_INLINE void store(bf16* p, F a) {
#if defined(__AVX512BF16__)
  __m256i h = (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
}
LILY_INLINE F load(const int8_t* p) {
  __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}
LILY_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
LILY_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
LILY_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
LILY_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
LILY_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LILY_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
LILY_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
LILY_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, 8)}; }
LILY_INLINE F pow2(F n) { return {_mm512_scalef_ps(_mm512_set1_ps(1), n.v)}; }
LILY_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a.v); }
LILY_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }
// Lane i is the sum of a[i]: each step halves the vectors, and adds halves of what is left of each.
LILY_INLINE F reduce_add_each(const F (&a)[lanes]) {
  __m512 b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i].v, a[2 * i + 1].v),
                         _mm512_unpackhi_ps(a[2 * i].v, a[2 * i + 1].v));
  for (int i = 0; i < 4; ++i) {
    const __m512d even = _mm512_castps_pd(b[2 * i]), odd = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
  }
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88),
                        _mm512_shuffle_f32x4(d[0], d[1], 0xdd))};
}
// Rows become columns: m[i] receives lane i of each row.
LILY_INLINE void transpose(F (&m)[lanes]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int s = 1; s < lanes; s *= 2) {
    // Rows i and i + s exchange the lanes that are off the diagonal of each 2s × 2s block.
    const __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
    const __m512i upper = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(lanes - s));
    const __m512i lower = _mm512_add_epi32(upper, _mm512_set1_epi32(s));
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      if (i & s) continue;
      __m512 a = m[i].v, b = m[i + s].v;
      m[i].v = _mm512_permutex2var_ps(a, upper, b);
      m[i + s].v = _mm512_permutex2var_ps(a, lower, b);
    }
  }
}

LILY_INLINE U load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
// The codes at bit `shift` of each word, as numbers.
LILY_INLINE F code4(U w, int shift) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, shift), table)};
}
LILY_INLINE F code8(U w, int shift) {
  return {_mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(w.v, shift), _mm512_set1_epi32(255)))};
}
// The two bf16 of each word.
LILY_INLINE F low_half(U w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
LILY_INLINE F high_half(U w) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

#elif defined(__AVX2__)

struct F {
  __m256 a, b;
};
struct U {
  __m256i a, b;
};

LILY_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LILY_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LILY_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LILY_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
LILY_INLINE __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
LILY_INLINE F load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
LILY_INLINE __m256i round_bf16(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(r, quiet, nan), 16);
}
LILY_INLINE void store(bf16* p, F x) {
  __m256i h = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(h, 0xd8));
}
LILY_INLINE __m256 widen_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
LILY_INLINE F load(const int8_t* p) { return {widen_int8(p), widen_int8(p + 8)}; }
LILY_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
LILY_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LILY_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
LILY_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
LILY_INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
LILY_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
LILY_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
LILY_INLINE F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
LILY_INLINE __m256 pow2_half(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
LILY_INLINE F pow2(F n) { return {pow2_half(n.a), pow2_half(n.b)}; }
LILY_INLINE float reduce_add(F x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
LILY_INLINE float reduce_max(F x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

LILY_INLINE U load_words(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
LILY_INLINE __m256 code_half(__m256i w, int shift, int mask) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, shift), _mm256_set1_epi32(mask)));
}
LILY_INLINE F code4(U w, int shift) { return {code_half(w.a, shift, 15), code_half(w.b, shift, 15)}; }
LILY_INLINE F code8(U w, int shift) {
  return {code_half(w.a, shift, 255), code_half(w.b, shift, 255)};
}
LILY_INLINE F low_half(U w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
LILY_INLINE F high_half(U w) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
}

#else  // portable

// Four vectors of four: as wide as every processor has, and held in registers by every compiler.
typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint16_t H4 __attribute__((vector_size(8)));
typedef int8_t B4 __attribute__((vector_size(4)));
struct F {
  F4 a, b, c, d;
};
struct U {
  U4 a, b, c, d;
};

LILY_INLINE F set1(float x) {
  const F4 v = {x, x, x, x};
  return {v, v, v, v};
}
LILY_INLINE F zero() { return set1(0.0f); }
LILY_INLINE F load(const float* p) {
  F r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
LILY_INLINE void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
LILY_INLINE F4 widen_bf16(const bf16* p) {
  H4 h;
  std::memcpy(&h, p, sizeof h);
  return (F4)(__builtin_convertvector(h, U4) << 16);
}
LILY_INLINE F load(const bf16* p) {
  return {widen_bf16(p), widen_bf16(p + 4), widen_bf16(p + 8), widen_bf16(p + 12)};
}
LILY_INLINE void round_bf16(bf16* p, F4 x) {
  const U4 u = (U4)x;
  const U4 r = x == x ? u + 0x7fffu + (u >> 16 & 1u) : u | 0x400000u;
  const H4 h = __builtin_convertvector(r >> 16, H4);
  std::memcpy(static_cast<void*>(p), &h, sizeof h);
}
LILY_INLINE void store(bf16* p, F x) {
  round_bf16(p, x.a);
  round_bf16(p + 4, x.b);
  round_bf16(p + 8, x.c);
  round_bf16(p + 12, x.d);
}
LILY_INLINE F4 widen_int8(const int8_t* p) {
  B4 codes;
  std::memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(codes, F4);
}
LILY_INLINE F load(const int8_t* p) {
  return {widen_int8(p), widen_int8(p + 4), widen_int8(p + 8), widen_int8(p + 12)};
}
LILY_INLINE F operator+(F x, F y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
LILY_INLINE F operator-(F x, F y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
LILY_INLINE F operator*(F x, F y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
LILY_INLINE F operator/(F x, F y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
LILY_INLINE F4 fma(F4 x, F4 y, F4 z) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < 4; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#else
  return x * y + z;
#endif
}
LILY_INLINE F fma(F x, F y, F z) {
  return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b), fma(x.c, y.c, z.c), fma(x.d, y.d, z.d)};
}
LILY_INLINE F4 max(F4 x, F4 y) { return x > y ? x : y; }
LILY_INLINE F max(F x, F y) { return {max(x.a, y.a), max(x.b, y.b), max(x.c, y.c), max(x.d, y.d)}; }
LILY_INLINE F4 min(F4 x, F4 y) { return x < y ? x : y; }
LILY_INLINE F min(F x, F y) { return {min(x.a, y.a), min(x.b, y.b), min(x.c, y.c), min(x.d, y.d)}; }
// Adding 2^23 leaves no room for a fraction; larger numbers have none.
LILY_INLINE F4 round(F4 x) {
  const U4 sign = (U4)x & 0x80000000u;
  const F4 shift = (F4)(sign | 0x4b000000u);
  const F4 whole = (F4)((U4)(x + shift - shift) | sign);
  return (F4)((U4)x & 0x7fffffffu) < 8388608.0f ? whole : x;
}
LILY_INLINE F round(F x) { return {round(x.a), round(x.b), round(x.c), round(x.d)}; }
LILY_INLINE F4 pow2(F4 n) { return (F4)((__builtin_convertvector(n, I4) + 127) << 23); }
LILY_INLINE F pow2(F n) { return {pow2(n.a), pow2(n.b), pow2(n.c), pow2(n.d)}; }
LILY_INLINE float reduce_add(F x) {
  const F4 s = (x.a + x.c) + (x.b + x.d);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
LILY_INLINE float reduce_max(F x) {
  const F4 m = max(max(x.a, x.b), max(x.c, x.d));
  const float even = m[0] > m[2] ? m[0] : m[2], odd = m[1] > m[3] ? m[1] : m[3];
  return even > odd ? even : odd;
}
LILY_INLINE U load_words(const void* p) {
  U r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
LILY_INLINE F4 code(U4 w, int shift, uint32_t mask) {
  return __builtin_convertvector((I4)(w >> shift & mask), F4);
}
LILY_INLINE F code4(U w, int shift) {
  return {code(w.a, shift, 15), code(w.b, shift, 15), code(w.c, shift, 15), code(w.d, shift, 15)};
}
LILY_INLINE F code8(U w, int shift) {
  return {code(w.a, shift, 255), code(w.b, shift, 255), code(w.c, shift, 255),
          code(w.d, shift, 255)};
}
LILY_INLINE F low_half(U w) {
  return {(F4)(w.a << 16), (F4)(w.b << 16), (F4)(w.c << 16), (F4)(w.d << 16)};
}
LILY_INLINE F high_half(U w) {
  const U4 upper = U4{} + 0xffff0000u;
  return {(F4)(w.a & upper), (F4)(w.b & upper), (F4)(w.c & upper), (F4)(w.d & upper)};
}

#endif

#if !defined(__AVX512F__)
LILY_INLINE void transpose(F (&m)[lanes]) {
  float rows[lanes][lanes], columns[lanes][lanes];
  for (int i = 0; i < lanes; ++i) store(rows[i], m[i]);
  for (int i = 0; i < lanes; ++i)
    for (int j = 0; j < lanes; ++j) columns[j][i] = rows[i][j];
  for (int i = 0; i < lanes; ++i) m[i] = load(columns[i]);
}
#endif

// Σ x² over n elements, n a multiple of 32.
template <class T>
LILY_INLINE float sum_squares(const T* x, uint32_t n) {
  F even = zero(), odd = zero();
  for (uint32_t i = 0; i < n; i += 2 * lanes) {
    F a = load(x + i), b = load(x + i + lanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  return reduce_add(even + odd);
}

#if !defined(__AVX512F__)
// Lane i is the sum of a[i].
LILY_INLINE F reduce_add_each(const F (&a)[lanes]) {
  float sums[lanes];
  for (int i = 0; i < lanes; ++i) sums[i] = reduce_add(a[i]);
  return load(sums);
}
#endif

// The first n < 16 elements; the other lanes are 0.
template <class T>
LILY_INLINE F load_first(const T* p, int n) {
  T padded[lanes] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}
template <class T>
LILY_INLINE void store_first(T* p, F a, int n) {
  T padded[lanes];
  store(padded, a);
  for (int i = 0; i < n; ++i) p[i] = padded[i];
}

// e^x to about 1 ulp in [-87, 88]; inputs outside are clamped to it.
LILY_INLINE F exp(F x) {
  x = min(max(x, set1(-87.0f)), set1(88.0f));
  F n = round(x * set1(1.44269504f));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return p * pow2(n);
}
LILY_INLINE F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
LILY_INLINE F silu(F x) { return x * sigmoid(x); }

#if defined(__AVX512BF16__)
// Sixteen pairs of bf16, for products of two at a time.
struct P {
  __m512bh v;
};
LILY_INLINE P as_pairs(__m512i v) { return {(__m512bh)v}; }
// acc += a.even · b.even + a.odd · b.odd
LILY_INLINE F dot(P a, P b, F acc) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }
// The codes w >> 4i & 0x000f000f as pairs of bf16; exact.
LILY_INLINE P code4_pairs(U w, int i) {
  alignas(64) static constexpr uint16_t table[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  return as_pairs(
      _mm512_permutexvar_epi16(_mm512_srli_epi16(w.v, 4 * i), _mm512_load_si512(table)));
}
// The pairs even[i], odd[i], rounded to nearest, ties away from zero: a fifth faster here than the
// conversion instruction and a shuffle. NaN must have come from a bf16.
LILY_INLINE void store_pairs(bf16* p, F even, F odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i e = _mm512_add_epi32(_mm512_castps_si512(even.v), half);
  const __m512i o = _mm512_add_epi32(_mm512_castps_si512(odd.v), half);
  const __m512i pairs = _mm512_ternarylogic_epi32(_mm512_srli_epi32(e, 16), o, upper, 0xf8);
  _mm512_storeu_si512(p, pairs);  // e >> 16 | (o & upper)
}
#endif

}  // namespace lily::cpu::LILY_ISA
