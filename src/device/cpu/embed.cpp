// A token's row of the embedding. Sixteen rows share their memory, so a row is read with its
// neighbours; it is one block a token.
#include "metal/embed.h"

#include "device/cpu/kernels.h"
#include "device/cpu/pack.h"
#include "device/cpu/packed.h"

namespace lily::cpu::LILY_ISA {

template <class ACT>
void embed(const KernelCall& call) {
  Embed::Host<ACT> a(call.slots, call.constants, call.params);
  call.pool.parallel_for(a.p.rows, 8, [&](uint32_t begin, uint32_t end, uint32_t) {
    for (uint32_t t = begin; t < end; ++t)
      unpack_row(a.weight, 0, 0, a.tokens[a.p.first + t], a.x + size_t{t} * a.c.D);
  });
  call.count(a.p.rows * packed_header(a.weight).segments[0].block_bytes());
}

LILY_CPU_KERNEL(embed)

}  // namespace lily::cpu::LILY_ISA
