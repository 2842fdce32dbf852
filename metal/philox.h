// Random numbers. Only Metal reads this header.
#pragma once

// The first word of the Philox4x32-10 block `counter` under `key`.
METAL_FUNC uint philox(ulong key, ulong counter) {
  uint4 x = uint4(uint(counter), uint(counter >> 32), 0u, 0u);
  uint2 k = uint2(uint(key), uint(key >> 32));
  for (uint round = 0; round < 10; round++) {
    constexpr uint a = 0xd2511f53u, b = 0xcd9e8d57u;
    x = uint4(mulhi(b, x.z) ^ x.y ^ k.x, b * x.z, mulhi(a, x.x) ^ x.w ^ k.y, a * x.x);
    k += uint2(0x9e3779b9u, 0xbb67ae85u);
  }
  return x.x;
}
