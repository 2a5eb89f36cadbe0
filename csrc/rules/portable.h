// What the rules need of a compiler: one spelling for host, device and every instruction set.
#pragma once

#include <cstdint>

// Each instruction set compiles the same sources into a namespace of its own, so that no inline function built with
// wider instructions can stand in for the baseline one at link time.
#ifndef MO_ISA
#define MO_ISA base
#endif

#if defined(__CUDACC__)
#define MO_RULE __host__ __device__ __forceinline__
#else
#define MO_RULE inline __attribute__((always_inline))
#define MO_LAMBDA __attribute__((always_inline))  // after a lambda's parameters
#endif

namespace mo {
namespace MO_ISA {

// IEEE square root; the vector forms are in cpu/lanes.h, which has to come before the rules.
#if defined(__CUDA_ARCH__)
MO_RULE float square_root(float x) { return __fsqrt_rn(x); }
MO_RULE double square_root(double x) { return __dsqrt_rn(x); }
#else
MO_RULE float square_root(float x) { return __builtin_sqrtf(x); }
MO_RULE double square_root(double x) { return __builtin_sqrt(x); }
#endif

// A scalar in the compute type, rounded once. Every NaN becomes the plain one: bf16 kernels rely on NaNs with a lower half
// of zeros (cpu/lanes.h, store2).
template <class T>
MO_RULE T rounded(double x) {
  return T(x == x ? x : __builtin_nan(""));
}

// base^n by squaring, in double: the same multiplications in the same order on every backend (libm's pow differs).
MO_RULE double integer_power(double base, int64_t n) {
  double result = 1.0;
  while (n > 0) {
    if (n & 1) result *= base;
    base *= base;
    n >>= 1;
  }
  return result;
}

MO_RULE double bias_correction(double base, int64_t n) { return 1.0 - integer_power(base, n); }

}  // namespace MO_ISA
}  // namespace mo
