// simdgroup_matrix, 8×8. A lane holds two elements, in an order of this file's own: Metal documents
// none, so thread_elements() is not there. Products are sums in float, in order of k.
#pragma once
#pragma clang system_header

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8 by 8");
  static_assert(is_floating_point_v<T>, "simdgroup matrices are of float, half or bfloat");
  T softmetal_held[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (int i = 0; i < 2; ++i) softmetal_held[i] = row() == column(i) ? diagonal : T(0.0f);
  }
  static SOFTMETAL_FUNC uint row() { return softmetal_lane() / 4; }
  static SOFTMETAL_FUNC uint column(int i) { return softmetal_lane() % 4 * 2 + uint(i); }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
SOFTMETAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.softmetal_held[0] = m.softmetal_held[1] = value;
  return m;
}

#define SOFTMETAL_MATRIX_MEMORY(space)                                                           \
  template <class T>                                                                             \
  SOFTMETAL_FUNC void simdgroup_load(                                                            \
      thread simdgroup_matrix<T, 8, 8>& m, const space T* from, ulong elements_per_row = 8,      \
      ulong2 origin = ulong2(0), bool transpose = false) {                                       \
    for (int i = 0; i < 2; ++i) {                                                                \
      const ulong row = transpose ? m.column(i) : m.row();                                       \
      const ulong column = transpose ? m.row() : m.column(i);                                    \
      m.softmetal_held[i] = from[(row + origin.y) * elements_per_row + column + origin.x];       \
    }                                                                                            \
  }                                                                                              \
  template <class T>                                                                             \
  SOFTMETAL_FUNC void simdgroup_store(                                                           \
      simdgroup_matrix<T, 8, 8> m, space T* to, ulong elements_per_row = 8,                      \
      ulong2 origin = ulong2(0), bool transpose = false) {                                       \
    for (int i = 0; i < 2; ++i) {                                                                \
      const ulong row = transpose ? m.column(i) : m.row();                                       \
      const ulong column = transpose ? m.row() : m.column(i);                                    \
      to[(row + origin.y) * elements_per_row + column + origin.x] = m.softmetal_held[i];         \
    }                                                                                            \
  }
SOFTMETAL_MATRIX_MEMORY(device)
SOFTMETAL_MATRIX_MEMORY(threadgroup)

}  // namespace metal

namespace softmetal {

struct Factors {
  float a[2], b[2];
};

SOFTMETAL_UNCHECKED inline void multiply(const softmetal_Bits* in, softmetal_Bits* out, unsigned) {
  float a[64], b[64], product[64];
  for (int lane = 0; lane < 32; ++lane) {
    Factors own;
    __builtin_memcpy(&own, &in[lane], sizeof own);
    for (int i = 0; i < 2; ++i) a[2 * lane + i] = own.a[i], b[2 * lane + i] = own.b[i];
  }
  for (int row = 0; row < 8; ++row) {
    float sum[8] = {0};
    for (int k = 0; k < 8; ++k)
      for (int column = 0; column < 8; ++column) sum[column] += a[8 * row + k] * b[8 * k + column];
    __builtin_memcpy(product + 8 * row, sum, sizeof sum);
  }
  for (int lane = 0; lane < 32; ++lane) __builtin_memcpy(&out[lane], product + 2 * lane, 8);
}

}  // namespace softmetal

namespace metal {

template <class D, class A, class B, class C>
SOFTMETAL_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  const softmetal::Factors own = {
      {float(a.softmetal_held[0]), float(a.softmetal_held[1])},
      {float(b.softmetal_held[0]), float(b.softmetal_held[1])}};
  softmetal_Bits bits = __builtin_bit_cast(softmetal_Bits, own);
  bits = softmetal_combine(bits, softmetal::multiply, 1);
  const float2 product = softmetal::unpack<float2>(bits);
  for (int i = 0; i < 2; ++i)
    d.softmetal_held[i] = D(float(product[i]) + float(c.softmetal_held[i]));
}
template <class D, class A, class B>
SOFTMETAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                       simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}

}  // namespace metal
