// What the rules need of a compiler: one spelling for host, device and every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

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

// The larger, and y where they do not compare; the vector form is in cpu/lanes.h.
MO_RULE float larger(float x, float y) { return x > y ? x : y; }

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

// base^exponent for a normal base > 0 and a result that is a normal number, to about 1e-14: additions, multiplications and
// divisions alone, so that every machine has the same bits (libm's pow differs). log by the series of the inverse
// hyperbolic tangent, exp by Taylor's, each after taking out a power of two.
MO_RULE double real_power(double base, double exponent) {
  constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33, log2_e = 0x1.71547652b82fep+0;
  uint64_t bits;
  memcpy(&bits, &base, 8);
  int64_t k = int64_t(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
  double m;
  memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    k = k + 1;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 1.0 / 25.0;
  for (int i = 23; i > 0; i -= 2) series = series * z + 1.0 / double(i);
  const double log_m = (s + s) * series;
  const double x = exponent * (double(k) * ln2_high + (double(k) * ln2_low + log_m));
  const int64_t n = int64_t(x * log2_e + (x < 0.0 ? -0.5 : 0.5));
  const double r = (x - double(n) * ln2_high) - double(n) * ln2_low;
  double result = 1.0;
  for (int i = 15; i > 0; --i) result = 1.0 + r * result / double(i);
  bits = uint64_t(n + 1023) << 52;
  double scale;
  memcpy(&scale, &bits, 8);
  return result * scale;
}

MO_RULE double bias_correction(double base, int64_t n) { return 1.0 - integer_power(base, n); }

}  // namespace MO_ISA
}  // namespace mo
