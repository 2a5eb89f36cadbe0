// Sum of squares, largest magnitude, non-finite and zero elements of one chunk of a gradient.
// Formula: sum g^2 by blocks of 2048, fp32 partial sums within a block and double across blocks; a block whose fp32 sum
//   overflows or nearly vanishes is summed again in double, a float64 block that does so with a power of two taken out.
// Reference: tests/test_clip.py and tests/test_grad_utilities.py, against float64.
// Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8); nothing is written.
// Assumes of the table: Row::grad, Row::dtype[kGrad], and Row::layout for its strides.
#include "cpu/kernels.h"
#include "cpu/span.h"
#include "rules/grad_stats.h"

namespace mo {
namespace MO_ISA {
namespace {

struct Totals {
  ScaledSum sum;
  double amax = 0.0;
  int64_t nonfinite = 0, zeros = 0;
};

template <class T>
struct Format;
template <>
struct Format<float> {
  static constexpr int32_t magnitude = 0x7fffffff;  // all bits but the sign
  static constexpr float largest = 3.40282347e+38f;
  // Below this the squares of a block may have lost bits to fp32's denormals.
  static constexpr double low = 1e-30;
};
template <>
struct Format<double> {
  static constexpr int64_t magnitude = 0x7fffffffffffffff;
  static constexpr double largest = 1.7976931348623157e308;
  static constexpr double low = 1e-280;
};

template <class T, class S>
inline T element(const S* g, int64_t i) {
  if constexpr (sizeof(S) == 2) {
    return T(widen(g[i]));
  } else {
    return T(g[i]);
  }
}

// A block whose plain sum is not to be trusted: once more, element by element, in double.
template <class T, class S>
void careful_sum(const S* g, int64_t n, double amax, ScaledSum& sum) {
  int k = 0;
  if (sizeof(T) == 8 && amax > 0.0 && amax <= Format<double>::largest) k = __builtin_ilogb(amax);
  double s = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    double x = double(element<T>(g, i));
    if (k) x = __builtin_ldexp(x, -k);
    s += x * x;
  }
  sum.add(s, 2 * int64_t(k));
}

// Running values of one block, kLanes elements at a time. Which element goes to which partial sum does not depend on the
// width of the vectors.
template <class T, class S>
struct Lanes {
  using V = typename Vec<T>::type;
  using B = typename Vec<T>::bits;
  using Magnitude = decltype(Format<T>::magnitude + 0);
  static constexpr int kLanes = 4 * Vec<T>::lanes;
  static constexpr int kVectors = kLanes / Vec<T>::width;
  static constexpr int kMagnitudes = kLanes;
  V sum[kVectors] = {};
  B largest[kVectors] = {};
  B zeros[kVectors] = {};

  MO_RULE void take(const S* from) {
    for (int k = 0; k < kVectors; ++k) {
      const V x = load(from + k * Vec<T>::width);
      const B magnitude = (B)x & Format<T>::magnitude;
      sum[k] += x * x;
      largest[k] = magnitude > largest[k] ? magnitude : largest[k];
      zeros[k] += magnitude == 0;  // a true lane is -1
    }
  }
  MO_RULE static T value(Magnitude magnitude) {
    T x;
    memcpy(&x, &magnitude, sizeof x);
    return x;
  }
};

// bf16: magnitudes and zeros are looked at two to a 32-bit lane, and the squares take even and odd elements apart.
template <>
struct Lanes<float, bf16> {
  typedef int16_t B __attribute__((vector_size(kVectorBytes)));
  using Magnitude = int16_t;
  static constexpr int kLanes = 4 * kLanesF32;
  static constexpr int kVectors = kLanes / Vec<float>::width;
  static constexpr int kMagnitudes = kLanes;
  f32v sum[kVectors] = {};
  B largest[kVectors / 2] = {};
  B zeros[kVectors / 2] = {};

  MO_RULE void take(const bf16* from) {
    for (int k = 0; k < kVectors / 2; ++k) {
      u32v pairs;
      memcpy(&pairs, from + 2 * k * Vec<float>::width, sizeof pairs);
      const f32v even = (f32v)(pairs << 16), odd = (f32v)(pairs & 0xffff0000u);
      const B magnitude = (B)pairs & int16_t(0x7fff);
      sum[k] += even * even;
      sum[kVectors / 2 + k] += odd * odd;
      largest[k] = magnitude > largest[k] ? magnitude : largest[k];
      zeros[k] += magnitude == 0;
    }
  }
  MO_RULE static float value(int16_t magnitude) { return widen(bf16{uint16_t(magnitude)}); }
};

template <class T, class S>
inline void grad_stats_block(const S* g, int64_t n, Totals& t) {
  using L = Lanes<T, S>;
  L lanes;
  int64_t i = 0;
  for (; i + L::kLanes <= n; i += L::kLanes) lanes.take(g + i);
  int64_t padding = 0;
  if (i < n) {
    S rest[L::kLanes] = {};
    memcpy(rest, g + i, size_t(n - i) * sizeof(S));
    padding = L::kLanes - (n - i);
    lanes.take(rest);
  }
  T sums[L::kLanes];
  typename L::Magnitude largest[L::kMagnitudes], zeros[L::kMagnitudes];
  memcpy(sums, lanes.sum, sizeof sums);
  memcpy(largest, lanes.largest, sizeof largest);
  memcpy(zeros, lanes.zeros, sizeof zeros);
  double wide[L::kLanes];
  for (int k = 0; k < L::kLanes; ++k) wide[k] = double(sums[k]);
  for (int half = L::kLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) wide[k] += wide[k + half];
  }
  const double sum = wide[0];
  typename L::Magnitude magnitude = 0;
  int64_t zero_count = 0;
  for (int k = 0; k < L::kMagnitudes; ++k) {
    magnitude = largest[k] > magnitude ? largest[k] : magnitude;
    zero_count -= zeros[k];
  }
  const T amax = L::value(magnitude);
  t.zeros += zero_count - padding;
  if (!(amax <= Format<T>::largest)) {
    for (int64_t j = 0; j < n; ++j) {
      const T x = element<T>(g, j);
      t.nonfinite += !(x - x == T(0));
    }
  }
  if (magnitude != 0 && !(sum >= Format<T>::low && sum <= Format<double>::largest)) {
    careful_sum<T>(g, n, double(amax), t.sum);
  } else {
    t.sum.add(sum, 0);
  }
  // A NaN compares false: once there, it stays.
  if (!(double(amax) <= t.amax)) t.amax = t.amax == t.amax ? double(amax) : t.amax;
}

template <class T, class S>
void grad_stats_kernel(const void* at, int64_t n, Totals& t) {
  const S* g = static_cast<const S*>(at);
  for (int64_t i = 0; i < n; i += kTile) grad_stats_block<T>(g + i, n - i < kTile ? n - i : kTile, t);
}

}  // namespace

void launch_grad_stats(const Row& row, const Chunk& chunk, ChunkStats& out) {
  Totals t;
  for_each_span(row, chunk, 1u << kGrad, 0, [&](const Span& a) {
    switch (row.dtype[kGrad]) {
      case kF32: return grad_stats_kernel<float, float>(a.at[kGrad], a.n, t);
      case kBF16: return grad_stats_kernel<float, bf16>(a.at[kGrad], a.n, t);
      case kF16: return grad_stats_kernel<float, f16>(a.at[kGrad], a.n, t);
      default: return grad_stats_kernel<double, double>(a.at[kGrad], a.n, t);
    }
  });
  out.sumsq = t.sum.sumsq;
  out.exponent = t.sum.exponent;
  out.amax = t.amax;
  out.nonfinite = t.nonfinite;
  out.zeros = t.zeros;
}

}  // namespace MO_ISA
}  // namespace mo
