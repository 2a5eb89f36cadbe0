// Which of the instruction sets in flags.txt this processor and its operating system have.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mo {

#if defined(__x86_64__)

// __builtin_cpu_supports includes that the operating system saves the wide registers. Of "f16c" not every compiler lets
// it be asked (clang 14 does not), hence the processor's own answer.
inline bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

inline bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c();
}

inline bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

inline bool runs_avx2() { return false; }
inline bool runs_avx512() { return false; }

#endif

}  // namespace mo
