// Adafactor's second pass: sum of squares of every tile's update before it is limited. Of a vector the second moment,
// which is kept element by element, is brought up to date as well.
// Formula: rules/adafactor.h, factored_update and vector_moment, bit for bit as mo_fused/reference.py; the squares of one
//   pack in the compute type, everything above in double.
// Bytes per element: matrices read the gradient (fp32 4, 16 bits 2, fp64 8); vectors also read and write the moment
//   (4 + 4; fp64 8 + 8).
// Assumes of the table: inverse roots in the scratch of the norms; row scalars prepared by the finish.
#include "cuda/tile.cuh"

namespace mo {
namespace {

using MO_ISA::FactorScalars;

// Gradients of storage type G, dense in the order of the shape.
template <class T, class G>
__device__ __forceinline__ double native(const Row& row, const Factored& f, int64_t start, const Tile& tile,
                                         const RowScalars& rs) {
  constexpr int N = kPackOf<G>;
  const FactorScalars<T> s(rs);
  const Roots<T> roots(row, start, tile);
  const G* g = as<const G>(row.grad) + start;
  T* second = f.factored ? nullptr : as<T>(row.state[0]) + start;
  double sum = 0.0;
  each_piece(N, f, tile, [&](const Piece& piece) {
    const G* from = g + piece.offset;
    const auto gp = load_part<G, N>(from, piece.n, piece.n == N && is_aligned<N>(from));
    T root[N];
    if (second) {
      T* at = second + piece.offset;
      const bool whole = piece.n == N && is_aligned<N>(at);
      auto moments = load_part<T, N>(at, piece.n, whole);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        moments.at[k] = MO_ISA::vector_moment(widened<T>(gp.at[k]), moments.at[k], s);
        root[k] = T(1) / MO_ISA::square_root(moments.at[k]);
      }
      store_part(at, moments, piece.n, whole);
    } else {
      roots.template many<false>(piece, root);
    }
    T squares = T(0);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= piece.n) break;
      const T update = MO_ISA::factored_update(widened<T>(gp.at[k]), T(1), root[k], s);
      squares += update * update;
    }
    sum += double(squares);
  });
  return sum;
}

// Gradients of any dtype and strides.
template <class T>
__device__ __forceinline__ double general(const Row& row, const Factored& f, int64_t start, const Tile& tile,
                                          const RowScalars& rs) {
  const FactorScalars<T> s(rs);
  const Roots<T> roots(row, start, tile);
  T* second = f.factored ? nullptr : as<T>(row.state[0]) + start;
  double sum = 0.0;
  each_piece(kPackOf<T>, f, tile, [&](const Piece& piece) {
#pragma unroll 1
    for (int k = 0; k < piece.n; ++k) {
      const int64_t i = piece.offset + k;
      const T grad = load_any<T>(row.grad, row.dtype[kGrad], place(row, kGrad, start + i));
      if (second) second[i] = MO_ISA::vector_moment(grad, second[i], s);
      const T update = MO_ISA::factored_update(grad, T(1), roots.one(piece, k), s);
      sum += double(update * update);
    }
  });
  return sum;
}

template <class T>
__device__ __forceinline__ double tile_sum(const Row& row, int64_t start, const Tile& tile, const RowScalars& rs) {
  const Factored& f = factored_of(row);
  const int dtype = row.dtype[kGrad];
  if (row.layout == 0) {
    if constexpr (sizeof(T) == 8) {
      if (dtype == kF64) return native<double, double>(row, f, start, tile, rs);
    } else {
      if (dtype == kF32) return native<float, float>(row, f, start, tile, rs);
      if (dtype == kBF16) return native<float, bf16>(row, f, start, tile, rs);
      if (dtype == kF16) return native<float, f16>(row, f, start, tile, rs);
    }
  }
  return general<T>(row, f, start, tile, rs);
}

// T: double for the launch over float64 parameters, float for the one over all others.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) factored_rms_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  each_tile(s, [&](const Row& row, const DeviceChunk& chunk, const Tile& tile, const RowScalars& scalars) {
    if (!(row.flags & kActive)) return;
    const double sum = block_reduce(tile_sum<T>(row, chunk.start, tile, scalars), Add());
    if (threadIdx.x == 0) as<double>(s.update_sums)[chunk.slot] = sum;
  });
}

}  // namespace

cudaError_t launch_factored_rms(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int(s.n_programs);
  if (s.wide) {
    MO_LAUNCH(factored_rms_kernel<double>, blocks, kThreads, stream, s);
  } else {
    MO_LAUNCH(factored_rms_kernel<float>, blocks, kThreads, stream, s);
  }
  return launched();
}

}  // namespace mo
