// Barriers and the functions that a simdgroup or a quad computes together. All of them rest on two
// primitives of the emulator: every lane gives a value and takes another lane's, or the last lane
// to arrive combines all values.
#pragma once
#pragma clang system_header

#define SOFTMETAL_COLLECTIVE __attribute__((convergent, nomerge))
extern "C" {
SOFTMETAL_COLLECTIVE void softmetal_barrier(int flags);
SOFTMETAL_COLLECTIVE void softmetal_simd_barrier(int flags);
SOFTMETAL_COLLECTIVE softmetal_Bits softmetal_shuffle(softmetal_Bits value, unsigned source);
SOFTMETAL_COLLECTIVE softmetal_Bits softmetal_combine(softmetal_Bits value, softmetal_Combine,
                                                      int full);
unsigned softmetal_lane();
}

namespace softmetal {

template <class T> SOFTMETAL_FUNC softmetal_Bits pack(T value) {
  static_assert(sizeof(T) <= 16, "a collective takes at most 16 bytes");
  static_assert(!metal::is_same_v<typename Shape<T>::Element, bfloat>,
                "no simdgroup function takes bfloat: convert to float");
  softmetal_Bits bits = {0, 0};
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T> SOFTMETAL_FUNC T unpack(softmetal_Bits bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T> SOFTMETAL_FUNC T from_lane(T value, uint source) {
  return unpack<T>(softmetal_shuffle(pack(value), source));
}

// A lane whose source lies beyond the simdgroup keeps its own value.
template <class T> SOFTMETAL_FUNC T from_lane_or_own(T value, int source) {
  return from_lane(value, source < 0 || source > 31 ? softmetal_lane() : uint(source));
}

#define SOFTMETAL_OPERATOR(name, result) \
  struct name {                          \
    template <class T> static T apply(T a, T b) { return T(result); } \
  };
SOFTMETAL_OPERATOR(Sum, a + b)
SOFTMETAL_OPERATOR(Product, a * b)
SOFTMETAL_OPERATOR(Max, b > a || a != a ? b : a)
SOFTMETAL_OPERATOR(Min, b < a || a != a ? b : a)
SOFTMETAL_OPERATOR(And, a & b)
SOFTMETAL_OPERATOR(Or, a | b)
SOFTMETAL_OPERATOR(Xor, a ^ b)

// The emulator's memory is not the kernel's: accesses to it are not checked.
#define SOFTMETAL_UNCHECKED __attribute__((noinline, disable_sanitizer_instrumentation, nodebug))

// All active lanes of each `Width` lanes, added up as a tree of neighbours.
template <class T, class Op, int Width>
SOFTMETAL_UNCHECKED void reduce(const softmetal_Bits* in, softmetal_Bits* out, unsigned active) {
  for (int base = 0; base < 32; base += Width) {
    T value[Width];
    int n = 0;
    for (int i = base; i < base + Width; ++i)
      if (active >> i & 1) __builtin_memcpy(&value[n++], &in[i], sizeof(T));
    for (; n > 1; n = (n + 1) / 2)
      for (int i = 0; i < n; i += 2)
        value[i / 2] = i + 1 < n ? Op::template apply<T>(value[i], value[i + 1]) : value[i];
    for (int i = base; i < base + Width; ++i) __builtin_memcpy(&out[i], value, sizeof(T));
  }
}

template <class T, class Op, bool Inclusive>
SOFTMETAL_UNCHECKED void prefix(const softmetal_Bits* in, softmetal_Bits* out, unsigned active) {
  T running = metal::is_same_v<Op, Product> ? T(1) : T(0);
  for (int i = 0; i < 32; ++i) {
    if (!(active >> i & 1)) continue;
    T own;
    __builtin_memcpy(&own, &in[i], sizeof(T));
    const T before = running;
    running = Op::template apply<T>(running, own);
    __builtin_memcpy(&out[i], Inclusive ? &running : &before, sizeof(T));
  }
}

SOFTMETAL_UNCHECKED inline void ballot(const softmetal_Bits* in, softmetal_Bits* out,
                                       unsigned active) {
  ulong votes = 0;
  for (int i = 0; i < 32; ++i)
    if (active >> i & 1) votes |= (in[i].lo & 1) << i;
  for (int i = 0; i < 32; ++i) out[i].lo = votes;
}

template <class T, class Op, int Width> SOFTMETAL_FUNC T reduced(T value) {
  return unpack<T>(softmetal_combine(pack(value), reduce<T, Op, Width>, 0));
}
template <class T, class Op, bool Inclusive> SOFTMETAL_FUNC T prefixed(T value) {
  return unpack<T>(softmetal_combine(pack(value), prefix<T, Op, Inclusive>, 0));
}

}  // namespace softmetal

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
SOFTMETAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
SOFTMETAL_FUNC void threadgroup_barrier(mem_flags flags) { softmetal_barrier(int(flags)); }
SOFTMETAL_FUNC void simdgroup_barrier(mem_flags flags) { softmetal_simd_barrier(int(flags)); }

// One overload for each scalar type; vectors go component by component.
#define SOFTMETAL_REDUCTION(T, name, Op)                                                \
  SOFTMETAL_FUNC T simd_##name(T v) { return softmetal::reduced<T, softmetal::Op, 32>(v); } \
  SOFTMETAL_FUNC T quad_##name(T v) { return softmetal::reduced<T, softmetal::Op, 4>(v); }
#define SOFTMETAL_PREFIX(T, name, Op)                                      \
  SOFTMETAL_FUNC T simd_prefix_inclusive_##name(T v) {                     \
    return softmetal::prefixed<T, softmetal::Op, true>(v);                 \
  }                                                                        \
  SOFTMETAL_FUNC T simd_prefix_exclusive_##name(T v) {                     \
    return softmetal::prefixed<T, softmetal::Op, false>(v);                \
  }
#define SOFTMETAL_ARITHMETIC(T)              \
  SOFTMETAL_REDUCTION(T, sum, Sum)           \
  SOFTMETAL_REDUCTION(T, product, Product)   \
  SOFTMETAL_REDUCTION(T, max, Max)           \
  SOFTMETAL_REDUCTION(T, min, Min)           \
  SOFTMETAL_PREFIX(T, sum, Sum)              \
  SOFTMETAL_PREFIX(T, product, Product)
#define SOFTMETAL_BITWISE(T)        \
  SOFTMETAL_REDUCTION(T, and, And)  \
  SOFTMETAL_REDUCTION(T, or, Or)    \
  SOFTMETAL_REDUCTION(T, xor, Xor)
#define SOFTMETAL_SIMD_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint)
SOFTMETAL_SIMD_INTEGERS(SOFTMETAL_ARITHMETIC)
SOFTMETAL_SIMD_INTEGERS(SOFTMETAL_BITWISE)
SOFTMETAL_ARITHMETIC(half)
SOFTMETAL_ARITHMETIC(float)

#define SOFTMETAL_VECTOR_REDUCTION(name)                                  \
  template <class T, int N> SOFTMETAL_FUNC vec<T, N> name(vec<T, N> v) {  \
    for (int i = 0; i < N; ++i) v[i] = name(T(v[i]));                     \
    return v;                                                             \
  }
SOFTMETAL_VECTOR_REDUCTION(simd_sum)
SOFTMETAL_VECTOR_REDUCTION(simd_max)
SOFTMETAL_VECTOR_REDUCTION(simd_min)

template <class T> SOFTMETAL_FUNC T simd_shuffle(T v, ushort lane) {
  return softmetal::from_lane(v, lane);
}
template <class T> SOFTMETAL_FUNC T simd_broadcast(T v, ushort lane) {
  return softmetal::from_lane(v, lane);
}
template <class T> SOFTMETAL_FUNC T simd_broadcast_first(T v) {
  return softmetal::from_lane(v, 0u);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_xor(T v, ushort mask) {
  return softmetal::from_lane(v, softmetal_lane() ^ mask);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_up(T v, ushort delta) {
  return softmetal::from_lane_or_own(v, int(softmetal_lane()) - delta);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_down(T v, ushort delta) {
  return softmetal::from_lane_or_own(v, int(softmetal_lane()) + delta);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_rotate_up(T v, ushort delta) {
  return softmetal::from_lane(v, (softmetal_lane() - delta) & 31);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_rotate_down(T v, ushort delta) {
  return softmetal::from_lane(v, (softmetal_lane() + delta) & 31);
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_and_fill_up(T v, T fill, ushort delta) {
  const T moved = simd_shuffle_rotate_up(v, delta), filled = simd_shuffle_rotate_up(fill, delta);
  return softmetal_lane() >= delta ? moved : filled;
}
template <class T> SOFTMETAL_FUNC T simd_shuffle_and_fill_down(T v, T fill, ushort delta) {
  const T moved = simd_shuffle_rotate_down(v, delta);
  const T filled = simd_shuffle_rotate_down(fill, delta);
  return softmetal_lane() + delta < 32 ? moved : filled;
}

template <class T> SOFTMETAL_FUNC T quad_shuffle(T v, ushort lane) {
  return softmetal::from_lane(v, (softmetal_lane() & ~3u) + (lane & 3u));
}
template <class T> SOFTMETAL_FUNC T quad_broadcast(T v, ushort lane) {
  return quad_shuffle(v, lane);
}
template <class T> SOFTMETAL_FUNC T quad_shuffle_xor(T v, ushort mask) {
  return softmetal::from_lane(v, softmetal_lane() ^ (mask & 3u));
}
template <class T> SOFTMETAL_FUNC T quad_shuffle_up(T v, ushort delta) {
  const uint lane = softmetal_lane();
  return softmetal::from_lane(v, (lane & 3u) < delta ? lane : lane - delta);
}
template <class T> SOFTMETAL_FUNC T quad_shuffle_down(T v, ushort delta) {
  const uint lane = softmetal_lane();
  return softmetal::from_lane(v, (lane & 3u) + delta > 3u ? lane : lane + delta);
}

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t votes) : votes_(votes) {}
  explicit constexpr operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == 0xffffffffu; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};
SOFTMETAL_FUNC simd_vote simd_ballot(bool vote) {
  return simd_vote(softmetal_combine({ulong(vote), 0}, softmetal::ballot, 0).lo);
}
SOFTMETAL_FUNC bool simd_any(bool vote) { return simd_ballot(vote).any(); }
SOFTMETAL_FUNC bool simd_all(bool vote) { return !simd_ballot(!vote).any(); }
SOFTMETAL_FUNC bool simd_is_first() { return softmetal_lane() == 0; }

}  // namespace metal
