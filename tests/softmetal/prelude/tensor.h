// Metal 4's tensors over memory and their product by one simdgroup, as far as lily's kernels use
// them.
//
// Metal does not document which lane holds which element of a cooperative tensor, that each of a
// lane's elements stands for one, or in which order a product is summed. Here the map is scattered,
// some of a lane's elements stand for none and begin as NaN like all others, and sums run from the
// last column on, so a kernel that takes any of it for granted computes something else.
//
// Of an operand with fewer rows or columns than the product nothing beyond is read, and the sums
// that would need it become NaN. Where the descriptor says how many terms a sum has, all of them
// have to be there: those that are not are NaN. Where it says dynamic_extent, the operands say it.
#pragma once
#pragma clang system_header

#if __cplusplus >= 201703L

namespace metal {

static constexpr ulong dynamic_extent = ~0ul;

template <class Index, Index... Extents> struct extents {
  static constexpr int softmetal_rank = sizeof...(Extents);
  static constexpr Index softmetal_static(int i) {
    const Index all[] = {Extents...};
    return all[i];
  }
  Index softmetal_extent(int i) const { return softmetal_static(i); }
};

// Matrices whose extents are known when the kernel runs.
template <class Index, int Rank> struct dextents {
  static constexpr int softmetal_rank = Rank;
  static constexpr Index softmetal_static(int) { return -1; }
  static_assert(Rank == 2, "tensors are matrices here");
  dextents(Index x, Index y) : softmetal_held{x, y} {}
  Index softmetal_extent(int i) const { return softmetal_held[i]; }
  Index softmetal_held[2];
};

struct tensor_inline {};

// Element (x, y) stands x · strides[0] + y · strides[1] behind the first.
template <class Element, class Extents, class Descriptor> struct tensor {
  static_assert(is_same_v<Descriptor, tensor_inline>, "tensors are inline here");
  static_assert(Extents::softmetal_rank == 2, "tensors are matrices here");
  typedef Element softmetal_element;
  typedef Extents softmetal_extents;
  tensor(Element* first, Extents extents, array<int, 2> strides)
      : softmetal_first(first),
        softmetal_size{int(extents.softmetal_extent(0)), int(extents.softmetal_extent(1))},
        softmetal_strides{strides[0], strides[1]} {}
  SOFTMETAL_FUNC float softmetal_at(int x, int y) const {
    if (x >= softmetal_size[0] || y >= softmetal_size[1]) return NAN;
    return float(softmetal_first[x * softmetal_strides[0] + y * softmetal_strides[1]]);
  }
  Element* softmetal_first;
  int softmetal_size[2], softmetal_strides[2];
};

template <int N> struct execution_simdgroups {};
typedef execution_simdgroups<1> execution_simdgroup;

// M × N sums of a product, shared out among 32 lanes.
template <class T, int M, int N> struct softmetal_cooperative_tensor {
  static constexpr int valid = M * N / 32, capacity = valid + 3;
  static_assert(M * N % 32 == 0, "lanes share evenly");
  T softmetal_held[capacity];
  softmetal_cooperative_tensor() {
    for (int i = 0; i < capacity; ++i) softmetal_held[i] = T(NAN);
  }
  // The place of a lane's element, row by row, or -1.
  static constexpr int place(int lane, int i) {
    const int number = (i + lane) % capacity;
    return number < valid ? int((uint(number * 32 + lane) * 4093u + 7u) % uint(M * N)) : -1;
  }
  constexpr ushort get_capacity() const { return ushort(capacity); }
  SOFTMETAL_FUNC bool is_valid_element(ushort i) const {
    return place(int(softmetal_lane()), i) >= 0;
  }
  // Column, row. Far outside where there is no element.
  SOFTMETAL_FUNC array<int, 2> get_multidimensional_index(ushort i) const {
    const int at = place(int(softmetal_lane()), i);
    return at < 0 ? array<int, 2>{1 << 20, 1 << 20} : array<int, 2>{at % N, at / N};
  }
  SOFTMETAL_FUNC T& operator[](ushort i) { return softmetal_held[i]; }
};

}  // namespace metal

namespace softmetal {

// What a lane brings to a product, and where its sums are.
struct TensorShare {
  const float *left, *right;
  float* sums;
  int k;  // terms of a sum
  // The i-th element that a lane brings, row by row: not the one that it is likely to have written
  // itself, so that a missing barrier is a race.
  static constexpr int element(int i, int lane) { return 32 * i + (lane + 11) % 32; }
};

constexpr int most_terms = 256;  // of a product whose operands say it

template <class Sums, int M, int N, int MOST, bool Accumulate>
SOFTMETAL_UNCHECKED void tensor_product(const softmetal_Bits* in, softmetal_Bits*, unsigned active) {
  if (active != ~0u) return;  // reported
  static thread_local float left[M * MOST], right[N * MOST];
  const TensorShare* share[32];
  int k = 0;
  for (int lane = 0; lane < 32; ++lane) {
    share[lane] = reinterpret_cast<const TensorShare*>(in[lane].lo);
    k = share[lane]->k;
    for (int i = 0, e; (e = TensorShare::element(i, lane)) < M * k + 32; ++i)
      if (e < M * k) left[e] = share[lane]->left[i];
    for (int i = 0, e; (e = TensorShare::element(i, lane)) < N * k + 32; ++i)
      if (e < N * k) right[e] = share[lane]->right[i];
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < Sums::capacity; ++i) {
      const int at = Sums::place(lane, i);
      if (at < 0) continue;
      float sum = 0;
      for (int j = k - 1; j >= 0; --j) sum += left[at / N * k + j] * right[at % N * k + j];
      share[lane]->sums[i] = Accumulate ? share[lane]->sums[i] + sum : sum;
    }
}

}  // namespace softmetal

namespace mpp {
namespace tensor_ops {

// Metal's matmul2d has the descriptor itself as a template argument, which C++17 has not: here it
// is converted to a number.
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left = false,
                                bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
        relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
  constexpr operator ulong() const {
    return ulong(m) | ulong(n) << 16 | ulong(k & 0xffff) << 32 | ulong(transpose_left) << 48 |
           ulong(transpose_right) << 49 | ulong(matmul_mode) << 50;
  }
};

template <ulong Descriptor, class Scope> struct matmul2d {
  static constexpr int M = Descriptor & 0xffff, N = Descriptor >> 16 & 0xffff,
                       K = Descriptor >> 32 & 0xffff;
  static constexpr bool transposed = Descriptor >> 49 & 1, accumulates = Descriptor >> 50;
  static constexpr bool told = K == 0xffff;  // by the operands how many terms there are
  static constexpr int most = told ? softmetal::most_terms : K;
  static_assert(metal::is_same_v<Scope, metal::execution_simdgroup>,
                "one simdgroup makes a product here");
  static_assert(M % 16 == 0 && N % 16 == 0 && (told || K % 16 == 0) && M && N && K,
                "a product's extents are multiples of 16");
  static_assert(!(Descriptor >> 48 & 1), "the left operand is not transposed here");

  template <class Left, class Right, class T>
  SOFTMETAL_FUNC metal::softmetal_cooperative_tensor<T, M, N> get_destination_cooperative_tensor()
      const {
    return {};
  }

  template <class Left, class Right, class Sums>
  SOFTMETAL_FUNC void run(Left& left, Right& right, Sums& sums) const {
    typedef metal::decay_t<typename Left::softmetal_element> Element;
    static_assert(metal::is_same_v<Element, metal::decay_t<typename Right::softmetal_element>>,
                  "both operands have one type");
    static_assert(metal::is_same_v<Element, bfloat> || metal::is_same_v<Element, half>,
                  "operands are bfloat or half");
    static_assert(fits<Left>(0, K) && fits<Left>(1, M),
                  "the left operand is not of the descriptor's extents");
    static_assert(fits<Right>(transposed ? 0 : 1, K) && fits<Right>(transposed ? 1 : 0, N),
                  "the right operand is not of the descriptor's extents");
    static_assert(metal::is_same_v<Sums, metal::softmetal_cooperative_tensor<float, M, N>>,
                  "the sums are not of this operation");
    const int k = told ? left.softmetal_size[0] : K;
    if (k < 0 || k > most || (told && k != right.softmetal_size[transposed ? 0 : 1]))
      __builtin_trap();
    float l[M * most / 32 + 1], r[N * most / 32 + 1];
    const int lane = int(softmetal_lane());
    for (int i = 0, e; (e = softmetal::TensorShare::element(i, lane)) < M * k + 32; ++i)
      if (e < M * k) l[i] = left.softmetal_at(e % k, e / k);
    for (int i = 0, e; (e = softmetal::TensorShare::element(i, lane)) < N * k + 32; ++i)
      if (e < N * k)
        r[i] = transposed ? right.softmetal_at(e % k, e / k) : right.softmetal_at(e / k, e % k);
    const softmetal::TensorShare own = {l, r, sums.softmetal_held, k};
    softmetal_combine({reinterpret_cast<ulong>(&own), 0},
                      softmetal::tensor_product<Sums, M, N, most, accumulates>, 1);
  }

 private:
  // Whether an operand has this extent, as far as is known when it compiles.
  template <class Operand> static constexpr bool fits(int i, int extent) {
    const int known = Operand::softmetal_extents::softmetal_static(i);
    return known == -1 || extent == 0xffff || known == extent;
  }
};

}  // namespace tensor_ops
}  // namespace mpp

#endif
