// The two products of attention, for a block of 32 query rows and a tile of keys:
//   scores = K Qᵀ,   output += Vᵀ P
// Query rows are the lanes of vectors throughout, in two groups of 16. So the softmax needs no sum
// across lanes, and no row's numbers meet those of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/cpu/tiles.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t groups = 2, row_block = groups * lanes;
constexpr uint32_t tile_keys = 128;
constexpr uint32_t key_step = 32;  // products take keys in multiples of this

// Registers hold the sums of so many keys or columns by so many groups.
#if defined(__AVX512F__)
constexpr uint32_t micro_rows = 8, micro_groups = 2;
#else
constexpr uint32_t micro_rows = 4, micro_groups = 1;
#endif

// In float32, for either type of activations.
template <class ACT>
class FloatProducts {
 public:
  using Cell = float;  // a query value or probability of one row

  static size_t query_cells(uint32_t DH) { return size_t{DH} * row_block; }
  static size_t probability_cells() { return tile_keys * row_block; }
  static size_t tile_bytes(uint32_t DH) { return 2 * sizeof(float) * tile_keys * DH; }

  // `memory` holds the tile, tile_bytes() of it.
  FloatProducts(uint32_t DH, std::byte* memory)
      : DH_(DH), keys_(reinterpret_cast<float*>(memory)), values_(keys_ + tile_keys * DH) {}

  // A group's rows become columns of q.
  void read_queries(const ACT* const (&rows)[lanes], uint32_t group, Cell* q) const {
    F m[lanes];
    for (uint32_t d = 0; d < DH_; d += lanes) {
      for (uint32_t i = 0; i < lanes; ++i) m[i] = load(rows[i] + d);
      transpose(m);
      for (uint32_t i = 0; i < lanes; ++i) store(q + (d + i) * row_block + group * lanes, m[i]);
    }
  }
  // n keys and values; the rest of the tile becomes zero.
  void read_tile(const ACT* keys, const ACT* values, uint32_t n) {
    widen(keys, n, keys_);
    widen(values, n, values_);
  }

  // s[group][key][lane] for the first n keys
  void score(const Cell* q, uint32_t n, float* s) const {
    multiply<false>(keys_, DH_, 1, n, DH_, q, s, tile_keys);
  }
  // o[group][column][lane] += …
  void accumulate(const Cell* p, uint32_t n, float* o) const {
    multiply<true>(values_, 1, DH_, DH_, n, p, o, DH_);
  }

  // e^(score - largest), exactly 0 where exp reaches its least value.
  struct Weigh {
    F largest, least = exp(set1(-100.0f));
    LILY_INLINE F operator()(F score) const { return exp(score - largest) - least; }
  };
  // Adds the probabilities of keys `key` and `key` + 1 to `sum`, and keeps them, each by a factor
  // where there are any.
  static LILY_INLINE void put(Cell* p, uint32_t group, uint32_t key, F even, F odd,
                              const float* factors, F& sum) {
    sum = sum + (even + odd);
    if (factors) even = even * set1(factors[key]), odd = odd * set1(factors[key + 1]);
    store(p + key * row_block + group * lanes, even);
    store(p + (key + 1) * row_block + group * lanes, odd);
  }

 private:
  void widen(const ACT* from, uint32_t n, float* to) const {
    for (size_t i = 0; i < size_t{n} * DH_; i += lanes) store(to + i, load(from + i));
    std::memset(to + size_t{n} * DH_, 0, size_t{tile_keys - n} * DH_ * sizeof(float));
  }

  // c[group][i][lane] = (add ? c : 0) + Σ_k a[i · i_step + k · k_step] · b[k][group][lane]
  template <bool add>
  static void multiply(const float* a, size_t i_step, size_t k_step, uint32_t n_i, uint32_t n_k,
                       const float* b, float* c, uint32_t i_room) {
    const size_t c_group = size_t{i_room} * lanes;
    for (uint32_t g = 0; g < groups; g += micro_groups)
      for (uint32_t i = 0; i < n_i; i += micro_rows)
        multiply_micro<add>(a + i * i_step, i_step, k_step, n_k, b + g * lanes,
                            c + g * c_group + i * lanes, c_group);
  }
  template <bool add>
  static void multiply_micro(const float* a, size_t i_step, size_t k_step, uint32_t n_k,
                             const float* b, float* c, size_t c_group) {
    F sum[micro_rows][micro_groups];
    for (uint32_t i = 0; i < micro_rows; ++i)
      for (uint32_t g = 0; g < micro_groups; ++g)
        sum[i][g] = add ? load(c + g * c_group + i * lanes) : zero();
    for (uint32_t k = 0; k < n_k; ++k, a += k_step, b += row_block) {
      F right[micro_groups];
      for (uint32_t g = 0; g < micro_groups; ++g) right[g] = load(b + g * lanes);
      for (uint32_t i = 0; i < micro_rows; ++i) {
        const F left = set1(a[i * i_step]);
        for (uint32_t g = 0; g < micro_groups; ++g) sum[i][g] = fma(left, right[g], sum[i][g]);
      }
    }
    for (uint32_t i = 0; i < micro_rows; ++i)
      for (uint32_t g = 0; g < micro_groups; ++g) store(c + g * c_group + i * lanes, sum[i][g]);
  }

  uint32_t DH_;
  float *keys_, *values_;
};

#if defined(__AVX512BF16__)

// In bf16 with float32 sums. A cell is a pair of bf16. All but the sums lie in tiles of 16 lines of
// 16 cells, as the matrix unit takes them, and pairs of tiles side by side: of keys and values,
// [16 keys or columns][16 pairs of what is summed over], 32 keys or columns; of queries and
// probabilities, [16 pairs][16 rows], two groups.
class PairProducts {
 public:
  using Cell = uint32_t;

  static size_t query_cells(uint32_t DH) { return size_t{DH} / 2 * row_block; }
  static size_t probability_cells() { return tile_keys / 2 * row_block; }
  static size_t tile_bytes(uint32_t DH) { return 2 * sizeof(bf16) * tile_keys * DH; }

  PairProducts(uint32_t DH, std::byte* memory)
      : DH_(DH), keys_(reinterpret_cast<Cell*>(memory)), values_(keys_ + tile_keys * DH / 2) {}

  void read_queries(const bf16* const (&rows)[lanes], uint32_t group, Cell* q) const {
    F m[lanes];
    for (uint32_t d = 0; d < DH_; d += two) {
      for (uint32_t i = 0; i < lanes; ++i) m[i] = load_pairs(rows[i] + d);
      transpose(m);
      store_tile(m, tile(q, d / two, group));
    }
  }
  void read_tile(const bf16* keys, const bf16* values, uint32_t n) {
    for (uint32_t key = 0; key < tile_keys; ++key)
      for (uint32_t d = 0; d < DH_; d += two)
        store_pairs(tile(keys_, (key / two * DH_ + d) / two, key / lanes % 2) + key % lanes * lanes,
                    key < n ? load_pairs(keys + size_t{key} * DH_ + d) : zero());
    for (uint32_t d = 0; d < DH_; d += lanes)
      for (uint32_t key = 0; key < tile_keys; key += two)
        transpose_values(values + d, key, n,
                         tile(values_, (d / two * tile_keys + key) / two, d / lanes % 2));
  }

  void score(const Cell* q, uint32_t n, float* s) const {
    multiply<false>(keys_, DH_, n, DH_, q, s, tile_keys);
  }
  void accumulate(const Cell* p, uint32_t n, float* o) const {
    multiply<true>(values_, tile_keys, DH_, n, p, o, DH_);
  }

  // e^(score - largest) to 8e-5, which is small beside the rounding to bf16: 2^n times the cubic
  // that is closest to 2^r in [-1/2, 1/2].
  struct Weigh {
    F largest;
    LILY_INLINE F operator()(F score) const {
      const F x = (score - largest) * set1(1.44269504f), n = round(x), r = x - n;
      F p = fma(set1(0.05517167f), r, set1(0.24261112f));
      p = fma(p, r, set1(0.69326099f));
      p = fma(p, r, set1(0.99992807f));
      return {_mm512_scalef_ps(p.v, n.v)};
    }
  };
  // What is summed is what was rounded, so that the weights of a row add up to 1.
  static LILY_INLINE void put(Cell* p, uint32_t group, uint32_t key, F even, F odd,
                              const float* factors, F& sum) {
    __m512i pairs = to_pairs(even, odd);
    sum = dot(as_pairs(pairs), as_pairs(_mm512_set1_epi16(0x3f80)), sum);
    if (factors) pairs = to_pairs(even * set1(factors[key]), odd * set1(factors[key + 1]));
    _mm512_store_si512(tile(p, key / two, group) + key % two / 2 * lanes, pairs);
  }

 private:
  static constexpr uint32_t two = 2 * lanes, tile_cells = lanes * lanes;

  // The left or right one of a pair of tiles.
  static LILY_INLINE Cell* tile(Cell* tiles, uint32_t pair, uint32_t side) {
    return tiles + (2 * pair + side) * tile_cells;
  }
  // Pairs of bf16 pass through a vector of float32 unchanged.
  static LILY_INLINE F load_pairs(const bf16* p) { return {_mm512_loadu_ps(p)}; }
  static LILY_INLINE void store_pairs(Cell* p, F pairs) { _mm512_store_ps(p, pairs.v); }
  static LILY_INLINE void store_tile(const F (&m)[lanes], Cell* p) {
    for (uint32_t i = 0; i < lanes; ++i) store_pairs(p + i * lanes, m[i]);
  }
  // Sixteen bf16 and sixteen more, to pairs of one of each.
  static LILY_INLINE __m512i interleave(__m512i halves) {
    alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
  }
  static LILY_INLINE __m512i to_pairs(F even, F odd) {
    return interleave((__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v));
  }
  // A tile of Vᵀ: 16 columns of keys first … first + 31; those from n on are zero.
  void transpose_values(const bf16* values, uint32_t first, uint32_t n, Cell* to) const {
    auto row = [&](uint32_t key) {
      return key < n ? _mm256_loadu_si256(
                           reinterpret_cast<const __m256i*>(values + size_t{key} * DH_))
                     : _mm256_setzero_si256();
    };
    F m[lanes];
    for (uint32_t i = 0; i < lanes; ++i) {
      const __m512i even = _mm512_castsi256_si512(row(first + 2 * i));
      m[i].v = _mm512_castsi512_ps(
          interleave(_mm512_inserti64x4(even, row(first + 2 * i + 1), 1)));
    }
    transpose(m);
    store_tile(m, to);
  }

  // c[group][i][lane] = (add ? c : 0) + Σ_k a[i][k] · b[k][group][lane]; k_room and i_room are the
  // sizes of a and c, n_k and n_i what takes part.
  template <bool add>
  static void multiply(const Cell* a, uint32_t k_room, uint32_t n_i, uint32_t n_k, const Cell* b,
                       float* c, uint32_t i_room) {
    const auto multiply_32 = tiles_usable() ? multiply_tiles<add> : multiply_dots<add>;
    for (uint32_t i = 0; i < n_i; i += two)
      multiply_32(a + size_t{i} * k_room / 2, n_k / two, b, c + i * lanes, i_room * lanes);
  }

  // Tile registers 0 to 3 hold sums [group][half of the 32 rows of a], 4 and 5 tiles of a, 6 and 7
  // of b: four products for four loads.
  template <bool add>
  static void multiply_tiles(const Cell* a, uint32_t n_pairs, const Cell* b, float* c,
                             size_t c_group) {
    constexpr long line = 64;
    TileScope::fence();
    if constexpr (add) {
      _tile_loadd(0, c, line);
      _tile_loadd(1, c + tile_cells, line);
      _tile_loadd(2, c + c_group, line);
      _tile_loadd(3, c + c_group + tile_cells, line);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (uint32_t t = 0; t < n_pairs; ++t, a += 2 * tile_cells, b += 2 * tile_cells) {
      _tile_loadd(4, a, line);
      _tile_loadd(6, b, line);
      _tile_loadd(7, b + tile_cells, line);
      _tile_loadd(5, a + tile_cells, line);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, line);
    _tile_stored(1, c + tile_cells, line);
    _tile_stored(2, c + c_group, line);
    _tile_stored(3, c + c_group + tile_cells, line);
  }

  // The same with bf16 dot products, eight rows of a at a time.
  template <bool add>
  static void multiply_dots(const Cell* a, uint32_t n_pairs, const Cell* b, float* c,
                            size_t c_group) {
    for (uint32_t i = 0; i < two; i += micro_rows) {
      F sum[micro_rows][groups];
      for (uint32_t r = 0; r < micro_rows; ++r)
        for (uint32_t g = 0; g < groups; ++g)
          sum[r][g] = add ? load(c + g * c_group + (i + r) * lanes) : zero();
      const Cell* left = a + i * lanes;
      for (uint32_t k = 0; k < n_pairs * lanes; ++k) {
        const Cell* right = b + (k / lanes * groups * lanes + k % lanes) * lanes;
        const P low = as_pairs(_mm512_load_si512(right));
        const P high = as_pairs(_mm512_load_si512(right + tile_cells));
        for (uint32_t r = 0; r < micro_rows; ++r) {
          const Cell pair = left[(k / lanes * 2 * lanes + r) * lanes + k % lanes];
          const P both = as_pairs(_mm512_set1_epi32(static_cast<int>(pair)));
          sum[r][0] = dot(both, low, sum[r][0]);
          sum[r][1] = dot(both, high, sum[r][1]);
        }
      }
      for (uint32_t r = 0; r < micro_rows; ++r)
        for (uint32_t g = 0; g < groups; ++g) store(c + g * c_group + (i + r) * lanes, sum[r][g]);
    }
  }

  uint32_t DH_;
  Cell *keys_, *values_;
  TileScope scope_;
};

template <class ACT>
using Products = std::conditional_t<std::is_same_v<ACT, bf16>, PairProducts, FloatProducts<ACT>>;

#else

template <class ACT>
using Products = FloatProducts<ACT>;

#endif

}  // namespace lily::cpu::LILY_ISA
