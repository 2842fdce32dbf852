// C[M, N] = A[M, K] · B[K, N]. Four simdgroups make a tile of 32×32, each a quarter of it.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

// A tile of `rows`×`columns` from row-major memory; what lies outside the matrix is 0.
template <typename T, int ROWS, int COLUMNS, int STRIDE>
METAL_FUNC void load_tile(const device T* from, threadgroup T* to, uint width, int2 limit,
                          uint thread_in_group) {
  for (int i = int(thread_in_group); i < ROWS * COLUMNS; i += 128) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    const bool inside = row < limit.y && column < limit.x;
    to[row * STRIDE + column] = inside ? from[uint(row) * width + uint(column)] : T(0.0f);
  }
}

struct Size {
  int M, N, K;
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void matrix_product(
    constant Size& size [[buffer(0)]],
    const device T* a [[buffer(1)]],
    const device T* b [[buffer(2)]],
    device T* c [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_in_group [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int BM = 32, BN = 32, BK = 16, LDA = BK + 8, LDB = BN + 8;
  threadgroup T a_tile[BM * LDA], b_tile[BK * LDB];
  threadgroup float c_tile[BM * BN];
  const int M = size.M, N = size.N, K = size.K;
  const int row0 = int(group.y) * BM, column0 = int(group.x) * BN;
  const int row = int(simdgroup / 2) * 16, column = int(simdgroup % 2) * 16;
  simdgroup_float8x8 sum[2][2];
  for (int i = 0; i < 4; i++) sum[i / 2][i % 2] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k = 0; k < K; k += BK) {
    load_tile<T, BM, BK, LDA>(a + row0 * K + k, a_tile, uint(K), int2(K - k, M - row0),
                              thread_in_group);
    load_tile<T, BK, BN, LDB>(b + k * N + column0, b_tile, uint(N), int2(N - column0, K - k),
                              thread_in_group);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int kk = 0; kk < BK; kk += 8) {
      simdgroup_matrix<T, 8, 8> left[2], right[2];
      for (int i = 0; i < 2; i++) {
        simdgroup_load(left[i], a_tile + (row + 8 * i) * LDA + kk, LDA);
        simdgroup_load(right[i], b_tile + kk * LDB + column + 8 * i, LDB);
      }
      for (int i = 0; i < 4; i++)
        simdgroup_multiply_accumulate(sum[i / 2][i % 2], left[i / 2], right[i % 2],
                                      sum[i / 2][i % 2]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < 4; i++)
    simdgroup_store(sum[i / 2][i % 2], c_tile + (row + i / 2 * 8) * BN + column + i % 2 * 8, BN);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_in_group); i < BM * BN; i += 128)
    if (row0 + i / BN < M && column0 + i % BN < N)
      c[(row0 + i / BN) * N + column0 + i % BN] = T(c_tile[i]);
}

template [[host_name("matrix_product_float")]] kernel void matrix_product<float>(
    constant Size& size [[buffer(0)]], const device float* a [[buffer(1)]],
    const device float* b [[buffer(2)]], device float* c [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_in_group [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]);
#define INSTANTIATE(T)                                         \
  template [[host_name("matrix_product_" #T)]] [[kernel]]      \
  decltype(matrix_product<T>) matrix_product<T>;
INSTANTIATE(half)
INSTANTIATE(bfloat)
