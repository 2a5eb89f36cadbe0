// Sums of squares that fall out of registers during an update, in double: of the update, of what storage kept of it, of
// the new parameter; with kSums = 2 also the gradient's own sums, when no pass before the update has read it.
#pragma once

#include "cuda/block_reduce.cuh"
#include "cuda/chunk.cuh"

namespace mo {

// |x| as an integer that orders like it: finite < inf < NaN.
__device__ __forceinline__ uint64_t magnitude_bits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits & 0x7fffffffffffffffull;
}
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return MO_ISA::float_bits(x) & 0x7fffffffu; }
__device__ __forceinline__ double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}
__device__ __forceinline__ double from_bits(uint32_t bits) { return double(MO_ISA::bits_float(bits)); }

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = uint32_t;
  static constexpr type infinity = 0x7f800000u;
};
template <>
struct Bits<double> {
  using type = uint64_t;
  static constexpr type infinity = 0x7ff0000000000000ull;
};

// T: the compute type of the rows.
template <int kSums, class T>
struct UpdateSums {
  double update = 0.0, stored = 0.0, param = 0.0, grad = 0.0;
  typename Bits<T>::type largest = 0;
  int32_t nonfinite = 0;

  __device__ __forceinline__ void add_update(T u) {
    if (kSums != 0) update += double(u) * double(u);
  }
  __device__ __forceinline__ void add_kept(T difference, T p) {
    if (kSums == 0) return;
    stored += double(difference) * double(difference);
    param += double(p) * double(p);
  }
  __device__ __forceinline__ void add(T g, T u, T difference, T p) {
    if (kSums == 0) return;
    add_update(u);
    add_kept(difference, p);
    if (kSums == 2) {
      grad += double(g) * double(g);
      const auto bits = magnitude_bits(g);
      largest = bits > largest ? bits : largest;
      nonfinite += bits >= Bits<T>::infinity;
    }
  }

  // All threads of the block take part; the chunk's place among the statistics is written.
  __device__ __forceinline__ void finish(const DeviceStep& s, const Row& row, int64_t slot) {
    if (kSums == 0) return;
    const auto put = [&](int name, double x) {
      if (threadIdx.x == 0) column(s.stats, s.n_chunks, name)[slot] = x;
    };
    put(kUpdateSumsq, block_reduce(update, Add()));
    put(kStoredSumsq, block_reduce(stored, Add()));
    put(kParamSumsq, block_reduce(param, Add()));
    if (kSums == 2) {
      put(kSumsq, block_reduce(grad, Add()));
      put(kAmax, from_bits(block_reduce(largest, Larger())));
      put(kNonfinites, double(block_reduce(nonfinite, Add())));
      put(kExponent, 0.0);
      put(kZeroCount, 0.0);
      put(kClips, settings_of(s, row).hyper.clip != 0.0 ? 1.0 : 0.0);
    }
  }
};

}  // namespace mo
