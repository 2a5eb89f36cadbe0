// Sum of squares, largest magnitude, non-finite and zero elements of every chunk of a gradient.
// Formula: sum g^2, the squares of one 16-byte load in the compute type and everything above in double; a chunk whose sum
//   overflows or nearly vanishes is summed again in double, a float64 chunk that does so with a power of two taken out.
// Reference: tests/test_clip.py and tests/test_grad_utilities.py, against float64.
// Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8), a chunk that is summed again or has
//   non-finite elements twice; 48 written per chunk.
// Assumes of the table: Row::grad, Row::dtype[kGrad], and Row::layout for its strides.
#include "cuda/update_sums.cuh"

namespace mo {
namespace {

struct Seen {
  double sum = 0.0;
  uint64_t largest = 0;  // magnitude_bits in double
  int32_t zeros = 0;
};

// Calls visit(element) for each element of the chunk, in the compute type T.
template <class T, class S, class Visit>
__device__ __forceinline__ void each_element(const Row& row, const DeviceChunk& chunk, Visit visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
    visit(widened<T>(as<const S>(row.grad)[place(row, kGrad, chunk.start + i)]));
  }
}

template <class T, class S>
__device__ __forceinline__ Seen look(const Row& row, const DeviceChunk& chunk) {
  constexpr int N = 16 / sizeof(S);
  double sum = 0.0;
  typename Bits<T>::type largest = 0;
  int32_t zeros = 0;
  const auto take = [&](T x, T& squares) {
    squares += x * x;
    const auto bits = magnitude_bits(x);
    largest = bits > largest ? bits : largest;
    zeros += bits == 0;
  };
  const auto one = [&](T x) {
    T squares = T(0);
    take(x, squares);
    sum += double(squares);
  };
  if (row.layout != 0) {
    each_element<T, S>(row, chunk, one);
  } else {
    const S* g = as<const S>(row.grad) + chunk.start;
    walk<N>(
        int(chunk.length), head_of(g), [&](int i) { one(widened<T>(g[i])); },
        [&](int i) {
          const auto pack = load_pack<S, N>(g + i);
          T squares = T(0);
#pragma unroll
          for (int k = 0; k < N; ++k) take(widened<T>(pack.at[k]), squares);
          sum += double(squares);
        });
  }
  return Seen{block_reduce(sum, Add()), magnitude_bits(from_bits(block_reduce(largest, Larger()))),
              block_reduce(zeros, Add())};
}

template <class T, class S>
__device__ __forceinline__ void chunk_stats(const DeviceStep& s, const Row& row, const DeviceChunk& chunk) {
  // Below this the squares may have lost bits to denormal numbers.
  const double low = sizeof(T) == 8 ? 1e-280 : 1e-30;
  Seen seen = look<T, S>(row, chunk);
  int32_t nonfinite = 0;
  int64_t exponent = 0;
  if (seen.largest >= Bits<double>::infinity) {
    each_element<T, S>(row, chunk, [&](T x) { nonfinite += magnitude_bits(x) >= Bits<T>::infinity; });
    nonfinite = block_reduce(nonfinite, Add());
  } else if (seen.largest != 0 && !(seen.sum >= low && seen.sum <= 1.7976931348623157e308)) {
    if (sizeof(T) == 8) exponent = int64_t(seen.largest >> 52) - 1023;
    exponent = exponent < -1022 ? -1022 : exponent > 1022 ? 1022 : exponent;
    const double scale = from_bits(uint64_t(1023 - exponent) << 52);
    double sum = 0.0;
    each_element<T, S>(row, chunk, [&](T x) {
      const double scaled = double(x) * scale;
      sum += scaled * scaled;
    });
    seen.sum = block_reduce(sum, Add());
    exponent *= 2;
  }
  if (threadIdx.x != 0) return;
  const auto put = [&](int name, double x) { column(s.stats, s.n_chunks, name)[chunk.slot] = x; };
  put(kSumsq, seen.sum);
  put(kExponent, double(exponent));
  put(kAmax, from_bits(seen.largest));
  put(kNonfinites, double(nonfinite));
  put(kZeroCount, double(seen.zeros));
  put(kClips, settings_of(s, row).hyper.clip != 0.0 ? 1.0 : 0.0);
}

__global__ void __launch_bounds__(kThreads, 4) grad_stats_kernel(const DeviceStep s) {
  each_chunk(s, [&](const Row& row, const DeviceChunk& chunk, const DeviceScalars&) {
    if (!(row.flags & kActive)) {
      if (threadIdx.x < kUpdateSumsq) column(s.stats, s.n_chunks, threadIdx.x)[chunk.slot] = 0.0;
      return;
    }
    switch (row.dtype[kGrad]) {
      case kF32: return chunk_stats<float, float>(s, row, chunk);
      case kBF16: return chunk_stats<float, bf16>(s, row, chunk);
      case kF16: return chunk_stats<float, f16>(s, row, chunk);
      default: return chunk_stats<double, double>(s, row, chunk);
    }
  });
}

}  // namespace

cudaError_t launch_grad_stats(const DeviceStep& s, cudaStream_t stream) {
  MO_LAUNCH(grad_stats_kernel, int(s.n_programs), kThreads, stream, s);
  return launched();
}

}  // namespace mo
