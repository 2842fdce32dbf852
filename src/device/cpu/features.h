// What this processor and its operating system offer, asked once.
#pragma once

namespace lily::cpu {

struct Features {
  bool avx2 = false;         // with FMA
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_bf16 = false;  // with VNNI and all of the above
  bool amx_bf16 = false;     // with avx512_bf16; the operating system allows tiles
};

const Features& features();

}  // namespace lily::cpu
