// Vectors are clang's: swizzles, also as lvalues, and element-wise operators come with them. The
// translator turns `float4(…)` and `vec<T, 4>(…)` into calls of make<T, N>.
#pragma once
#pragma clang system_header

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define SOFTMETAL_VECTORS(T) \
  typedef vec<T, 2> T##2;    \
  typedef vec<T, 3> T##3;    \
  typedef vec<T, 4> T##4;
#define SOFTMETAL_INTEGERS(X) \
  X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
SOFTMETAL_INTEGERS(SOFTMETAL_VECTORS)
SOFTMETAL_VECTORS(bool)
SOFTMETAL_VECTORS(half)
SOFTMETAL_VECTORS(bfloat)
SOFTMETAL_VECTORS(float)

}  // namespace metal

namespace softmetal {

template <class T> struct Shape {
  typedef T Element;
  static constexpr int size = 1;
};
template <class T, int N> struct Shape<metal::vec<T, N>> {
  typedef T Element;
  static constexpr int size = N;
};

template <int At, class V> SOFTMETAL_FUNC constexpr void fill(V&) {}
template <int At, class V, class First, class... Rest>
SOFTMETAL_FUNC constexpr void fill(V& out, First first, Rest... rest) {
  typedef typename Shape<V>::Element T;
  if constexpr (Shape<First>::size == 1)
    out[At] = static_cast<T>(first);
  else
    for (int i = 0; i < Shape<First>::size; ++i) out[At + i] = static_cast<T>(first[i]);
  fill<At + Shape<First>::size>(out, rest...);
}

template <class T, int N> SOFTMETAL_FUNC constexpr metal::vec<T, N> make() {
  return metal::vec<T, N>(T(0));
}
// One scalar fills the vector, one vector of the same size is converted, several are joined.
template <class T, int N, class First, class... Rest>
SOFTMETAL_FUNC constexpr metal::vec<T, N> make(First first, Rest... rest) {
  constexpr int given = (Shape<First>::size + ... + Shape<Rest>::size);
  static_assert(given == N || given == 1, "a vector constructor with a wrong number of components");
  metal::vec<T, N> out = metal::vec<T, N>(T(0));
  if constexpr (given == 1)
    for (int i = 0; i < N; ++i) out[i] = static_cast<T>(first);
  else
    fill<0>(out, first, rest...);
  return out;
}

}  // namespace softmetal

namespace metal {

template <class To, class From> SOFTMETAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, value);
}

template <class T, int N> SOFTMETAL_FUNC bool all(vec<T, N> v) {
  bool result = true;
  for (int i = 0; i < N; ++i) result = result && v[i] != 0;
  return result;
}
template <class T, int N> SOFTMETAL_FUNC bool any(vec<T, N> v) {
  bool result = false;
  for (int i = 0; i < N; ++i) result = result || v[i] != 0;
  return result;
}

template <class T, enable_if_t<softmetal::Shape<T>::size == 1, int> = 0>
SOFTMETAL_FUNC T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
template <class T, int N, class C>
SOFTMETAL_FUNC vec<T, N> select(vec<T, N> if_false, vec<T, N> if_true, vec<C, N> condition) {
  for (int i = 0; i < N; ++i) if_false[i] = condition[i] ? if_true[i] : if_false[i];
  return if_false;
}

template <class T, int N> SOFTMETAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  static_assert(is_same_v<T, float> || is_same_v<T, half>, "dot takes float or half vectors");
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T, int N> SOFTMETAL_FUNC T length_squared(vec<T, N> v) { return dot(v, v); }

template <class T, size_t N> struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
};

}  // namespace metal
