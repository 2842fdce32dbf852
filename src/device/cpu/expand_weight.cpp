// Weights as bf16 in a buffer of their own, for plans without dequantise_in_product.
#include "metal/expand_weight.h"

#include <cstring>

#include "device/cpu/kernels.h"
#include "device/cpu/pack.h"
#include "device/cpu/packed.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

namespace {

// Two columns of 16 rows, as a record of 16 bits has them.
LILY_INLINE void store_pairs(std::byte* to, F even, F odd) {
  bf16 columns[2][block_rows], pairs[2 * block_rows];
  store(columns[0], even);
  store(columns[1], odd);
  for (uint32_t r = 0; r < block_rows; ++r) {
    pairs[2 * r] = columns[0][r];
    pairs[2 * r + 1] = columns[1][r];
  }
  std::memcpy(to, pairs, sizeof pairs);
}

// 64 columns of 16 rows.
template <uint32_t bits>
void expand_record(const std::byte* record, std::byte* to) {
  const bf16* affine = reinterpret_cast<const bf16*>(record + record_bytes(bits)) - 2 * block_rows;
  const F scales = load(affine), biases = load(affine + block_rows);
  for (uint32_t j = 0; j < 2 * bits; ++j) {
    const U words = load_words(record + 64 * j);
    for (uint32_t i = 0; i < 16 / bits; ++i, to += 64) {
      const int shift = static_cast<int>(i * bits);
      const F even = bits == 4 ? code4(words, shift) : code8(words, shift);
      const F odd = bits == 4 ? code4(words, shift + 16) : code8(words, shift + 16);
      store_pairs(to, fma(scales, even, biases), fma(scales, odd, biases));
    }
  }
}

void expand_block(const PackedSegment& segment, const std::byte* from, std::byte* to) {
  if (segment.bits == 16) {
    std::memcpy(to, from, segment.block_bytes());
    return;
  }
  for (uint32_t g = 0; g < segment.groups(); ++g, to += record_bytes(16)) {
    const std::byte* record = from + g * record_bytes(segment.bits);
    if (segment.bits == 4)
      expand_record<4>(record, to);
    else
      expand_record<8>(record, to);
  }
}

}  // namespace

// Threads take blocks of 16 rows.
template <class ACT>
void expand_weight(const KernelCall& call) {
  ExpandWeight::Host<ACT> a(call.slots, call.constants, call.params);
  const PackedHeader& in = packed_header(a.weight);
  PackSpec spec{.segments = {}, .experts = in.experts};
  for (uint32_t s = 0; s < in.n_segments; ++s)
    spec.segments.push_back({16, in.segments[s].rows, in.segments[s].cols, group_cols});
  pack_begin(spec, a.out);
  const PackedHeader& out = packed_header(a.out);
  for (uint32_t s = 0; s < in.n_segments; ++s) {
    const uint32_t blocks = in.segments[s].blocks;
    call.pool.parallel_for(in.experts * blocks, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
      for (uint32_t i = begin; i < end; ++i)
        expand_block(in.segments[s], in.block(i / blocks, s, i % blocks),
                     const_cast<std::byte*>(out.block(i / blocks, s, i % blocks)));
    });
  }
  call.count(in.experts * in.expert_bytes);
}

LILY_CPU_KERNEL(expand_weight)

}  // namespace lily::cpu::LILY_ISA
