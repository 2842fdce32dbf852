// Products of 4-bit codes with whole numbers, for x86: where float32 needs a shift, a look-up and a
// multiplication for every 16 codes, bytes take 64 at a time.
//
// A number of 16 bits is split as 256 · high + low, signed bytes both, and each part is multiplied
// with the codes exactly. `Sums` are running sums, in 16 bits where the hardware has no dot product
// of bytes: a step adds at most 15 · 128 · 2, so there is room for eight.
#pragma once

#include "device/cpu/vec.h"

#if defined(__AVX2__)

namespace lily::cpu::LILY_ISA {

constexpr float largest_split = 32512;  // 256 · 127

#if defined(__AVX512F__)

struct Sums {
  __m512i v;
};

LILY_INLINE Sums no_sums() { return {_mm512_setzero_si512()}; }
// Every second code of each word, those at bits `shift`, `shift` + 8 …, as bytes.
LILY_INLINE U nibbles(U w, int shift) {
  return {_mm512_and_si512(_mm512_srli_epi32(w.v, shift), _mm512_set1_epi32(0x0f0f0f0f))};
}
// Adds codes · x, x being four signed bytes that all lanes share.
LILY_INLINE Sums add_products(U codes, const int8_t* x, Sums sums) {
  int four;
  std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sums.v, codes.v, _mm512_set1_epi32(four))};
#else
  return {_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(four)))};
#endif
}
LILY_INLINE F total(Sums a) {
#if defined(__AVX512VNNI__)
  return {_mm512_cvtepi32_ps(a.v)};
#else
  return {_mm512_cvtepi32_ps(_mm512_madd_epi16(a.v, _mm512_set1_epi16(1)))};
#endif
}
// Rounds to whole numbers and splits them; keeps the order.
LILY_INLINE void split(F x, __m128i& high, __m128i& low) {
  const __m512i n = _mm512_cvtps_epi32(x.v);
  low = _mm512_cvtepi32_epi8(n);
  high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8));
}

#else

struct Sums {
  __m256i a, b;
};

LILY_INLINE Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
LILY_INLINE U nibbles(U w, int shift) {
  const __m256i mask = _mm256_set1_epi32(0x0f0f0f0f);
  return {_mm256_and_si256(_mm256_srli_epi32(w.a, shift), mask),
          _mm256_and_si256(_mm256_srli_epi32(w.b, shift), mask)};
}
LILY_INLINE Sums add_products(U codes, const int8_t* x, Sums sums) {
  int four;
  std::memcpy(&four, x, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {_mm256_add_epi16(sums.a, _mm256_maddubs_epi16(codes.a, all)),
          _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(codes.b, all))};
}
LILY_INLINE F total(Sums x) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(x.a, one)),
          _mm256_cvtepi32_ps(_mm256_madd_epi16(x.b, one))};
}
LILY_INLINE __m128i low_bytes(__m256i a, __m256i b) {
  const __m256i mask = _mm256_set1_epi32(255);
  const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
  const __m256i sorted = _mm256_permute4x64_epi64(halves, 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1));
}
LILY_INLINE void split(F x, __m128i& high, __m128i& low) {
  const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  const __m256i half = _mm256_set1_epi32(128);
  low = low_bytes(a, b);
  high = low_bytes(_mm256_srai_epi32(_mm256_add_epi32(a, half), 8),
                   _mm256_srai_epi32(_mm256_add_epi32(b, half), 8));
}

#endif

// The 64 numbers of a group as bytes, high and low parts, in the order in which `nibbles` meets
// their columns in words of 4-bit and of 8-bit codes.
struct GroupBytes {
  struct Parts {
    int8_t high[64], low[64];
  };
  Parts by_4, by_8;
};

// Writes 16 numbers, those of columns col…col+15 of the group.
LILY_INLINE void store_split(GroupBytes& group, uint32_t col, F numbers) {
  const __m128i by_4 = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const __m128i by_8 = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  auto put = [](int8_t* to, __m128i bytes, __m128i order) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, order));
  };
  __m128i high, low;
  split(numbers, high, low);
  put(group.by_4.high + col, high, by_4);
  put(group.by_4.low + col, low, by_4);
  put(group.by_8.high + col, high, by_8);
  put(group.by_8.low + col, low, by_8);
}

// Σ codes · x over a record's 64 columns, for each of its 16 rows.
LILY_INLINE F whole_sum_4(const std::byte* record, const GroupBytes& x) {
  Sums high[2] = {no_sums(), no_sums()}, low[2] = {no_sums(), no_sums()};
  for (int j = 0; j < 8; ++j) {
    const U w = load_words(record + 64 * j);
    for (int i = 0; i < 2; ++i) {
      const U codes = nibbles(w, 4 * i);
      high[i] = add_products(codes, x.by_4.high + 8 * j + 4 * i, high[i]);
      low[i] = add_products(codes, x.by_4.low + 8 * j + 4 * i, low[i]);
    }
  }
  return fma(total(high[0]) + total(high[1]), set1(256.0f), total(low[0]) + total(low[1]));
}

// The same for 8-bit codes, 16 · upper + lower nibble.
LILY_INLINE F whole_sum_8(const std::byte* record, const GroupBytes& x) {
  F nibble_sum[2] = {zero(), zero()};
  for (int half = 0; half < 2; ++half) {
    Sums high[2] = {no_sums(), no_sums()}, low[2] = {no_sums(), no_sums()};
    for (int j = 8 * half; j < 8 * half + 8; ++j) {
      const U w = load_words(record + 64 * j);
      for (int i = 0; i < 2; ++i) {
        const U codes = nibbles(w, 4 * i);
        high[i] = add_products(codes, x.by_8.high + 4 * j, high[i]);
        low[i] = add_products(codes, x.by_8.low + 4 * j, low[i]);
      }
    }
    for (int i = 0; i < 2; ++i)
      nibble_sum[i] = nibble_sum[i] + fma(total(high[i]), set1(256.0f), total(low[i]));
  }
  return fma(nibble_sum[1], set1(16.0f), nibble_sum[0]);
}

}  // namespace lily::cpu::LILY_ISA

#endif
