#include "device/cpu/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace lily::cpu {

namespace {

#if defined(__x86_64__)
// Linux gives the 8 KB tile state only to processes that ask for it.
bool request_tiles() {
#if defined(__linux__)
  constexpr long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
  return false;
#endif
}

bool cpuid_edx7(unsigned bit) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> bit & 1);
}

Features detect() {
  Features f;
  __builtin_cpu_init();
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16") &&
                  __builtin_cpu_supports("avx512vnni");
  f.amx_bf16 = f.avx512_bf16 && cpuid_edx7(22) && cpuid_edx7(24) && request_tiles();
  return f;
}
#else
Features detect() { return {}; }
#endif

}  // namespace

const Features& features() {
  static const Features found = detect();
  return found;
}

}  // namespace lily::cpu
