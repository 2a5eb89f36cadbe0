// Sums over the columns of the statistics, in an order that depends on the number of chunks alone. All threads of the
// block take part, and each gets the result.
#pragma once

#include "cuda/update_sums.cuh"

namespace mo {

__device__ __forceinline__ double power_of_two(int64_t exponent) {  // below -1022: 0
  return exponent < -1022 ? 0.0 : from_bits(uint64_t(exponent + 1023) << 52);
}

// x * 2^exponent for exponents <= 0: in two steps, because a sum of 1e308 still counts beside one of 2^1030.
__device__ __forceinline__ double scaled(double x, int64_t exponent) {
  const int64_t first = exponent >> 1;
  return x * power_of_two(first) * power_of_two(exponent - first);
}

struct Totals {
  double sumsq = 0.0;  // of what is clipped, times 2^exponent
  int64_t exponent = 0;
  double amax = 0.0, nonfinite = 0.0, zeros = 0.0;

  __device__ __forceinline__ double norm() const {  // exponents are even
    const int64_t half = exponent / 2, first = half / 2;
    return MO_ISA::square_root(sumsq) * power_of_two(first) * power_of_two(half - first);
  }
};

// Of this device's chunks, unless s.elsewhere says that the extras contain them, and of `n_extras` records of five numbers
// in the order of Totals, from gradients that other devices hold.
__device__ __forceinline__ Totals gradient_totals(const DeviceStep& s, int64_t n_extras) {
  constexpr int64_t none = -(int64_t(1) << 20);  // smaller than any exponent
  const auto at = [&](int name, int64_t c) { return column(s.stats, s.n_chunks, name)[c]; };
  const double* extras = as<const double>(s.extras);
  const int64_t own = s.elsewhere ? 0 : s.n_chunks;
  int64_t exponent = none;
  for (int64_t c = threadIdx.x; c < own; c += kThreads) {
    if (at(kClips, c) == 0.0 || at(kSumsq, c) == 0.0) continue;
    const int64_t e = int64_t(at(kExponent, c));
    exponent = e > exponent ? e : exponent;
  }
  for (int64_t k = 0; k < n_extras; ++k) {
    if (extras[5 * k] != 0.0 && int64_t(extras[5 * k + 1]) > exponent) exponent = int64_t(extras[5 * k + 1]);
  }
  exponent = block_reduce(exponent, Larger());
  Totals t;
  t.exponent = exponent == none ? 0 : exponent;
  uint64_t largest = 0;
  for (int64_t c = threadIdx.x; c < own; c += kThreads) {
    if (at(kClips, c) != 0.0) t.sumsq += scaled(at(kSumsq, c), int64_t(at(kExponent, c)) - t.exponent);
    const uint64_t bits = magnitude_bits(at(kAmax, c));
    largest = bits > largest ? bits : largest;
    t.nonfinite += at(kNonfinites, c);
    t.zeros += at(kZeroCount, c);
  }
  t.sumsq = block_reduce(t.sumsq, Add());
  largest = block_reduce(largest, Larger());
  t.nonfinite = block_reduce(t.nonfinite, Add());
  t.zeros = block_reduce(t.zeros, Add());
  for (int64_t k = 0; k < n_extras; ++k) {
    const double* e = extras + 5 * k;
    t.sumsq += scaled(e[0], int64_t(e[1]) - t.exponent);
    const uint64_t bits = magnitude_bits(e[2]);
    largest = bits > largest ? bits : largest;
    t.nonfinite += e[3];
    t.zeros += e[4];
  }
  t.amax = from_bits(largest);
  return t;
}

}  // namespace mo
