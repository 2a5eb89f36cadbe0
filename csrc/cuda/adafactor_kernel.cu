// Adafactor's third pass: the update itself, and the sum of squares of what it leaves of the parameter.
// Formula: rules/adafactor.h, adafactor_update. Reference: mo_fused/reference.py, bit for bit.
// Bytes per element, read + written: fp32 8 + 4, bf16 and fp16 4 + 2, fp64 16 + 8; a first moment its own size both ways,
//   the second moment of a vector 4 (fp64: 8), read.
// Assumes of the table: inverse roots in the scratch of the norms; row scalars with this step's size; no two rows share
//   written memory.
#include "cuda/tile.cuh"

namespace mo {
namespace {

using MO_ISA::FactorScalars;

// Parameter and gradient of one storage type, the first moment of M, all dense in the order of the shape.
template <class T, class P, class M, bool kVector, bool kMomentum, int kSums>
__device__ __forceinline__ void native(const Row& row, const DeviceChunk& chunk, const Tile& tile,
                                       const FactorScalars<T>& s, UpdateSums<kSums, T>& sums, ParamSum<T>& param_sum) {
  constexpr int N = kPackOf<P>, kParts = sizeof(P) == 2 && (kMomentum || kSums != 0) ? 2 : 1, W = N / kParts;
  const Roots<T> roots(row, chunk.start, tile);
  P* p = as<P>(row.param) + chunk.start;
  const P* g = as<const P>(row.grad) + chunk.start;
  M* m = kMomentum ? as<M>(row.state[2]) + chunk.start : nullptr;
  each_piece(N, factored_of(row), tile, [&](const Piece& all) {
#pragma unroll 1
    for (int part = 0; part < all.n; part += W) {
      const int left = all.n - part;
      const Piece piece{all.offset + part, all.row, all.col + part, left < W ? left : W};
      P* p_at = p + piece.offset;
      const P* g_at = g + piece.offset;
      M* m_at = m + (kMomentum ? piece.offset : 0);
      const bool whole =
          piece.n == W && is_aligned<W>(p_at) && is_aligned<W>(g_at) && (!kMomentum || is_aligned<W>(m_at));
      auto pp = load_part<P, W>(p_at, piece.n, whole);
      const auto gp = load_part<P, W>(g_at, piece.n, whole);
      Pack<M, W> mp = {};
      if (kMomentum) mp = load_part<M, W>(m_at, piece.n, whole);
      T root[W];
      roots.template many<kVector>(piece, root);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (k >= piece.n) continue;
        const T old = widened<T>(pp.at[k]), grad = widened<T>(gp.at[k]);
        T param = old, moment = kMomentum ? widened<T>(mp.at[k]) : T(0), update;
        MO_ISA::adafactor_update<kMomentum>(param, grad, T(1), root[k], moment, update, s);
        pp.at[k] = Narrow<P>::from(param);
        if (kMomentum) mp.at[k] = Narrow<M>::from(moment);
        const T kept = widened<T>(pp.at[k]);
        param_sum.add(kept);
        sums.add(grad, update, T(kept - old), kept);
      }
      store_part(p_at, pp, piece.n, whole);
      if (kMomentum) store_part(m_at, mp, piece.n, whole);
    }
    param_sum.end_piece();
  });
}

// Any mix of dtypes, any strides.
template <class T, int kSums>
__device__ __forceinline__ void general(const Row& row, const DeviceChunk& chunk, const Tile& tile,
                                        const FactorScalars<T>& s, UpdateSums<kSums, T>& sums, ParamSum<T>& param_sum) {
  each_piece(pack_of(row.dtype[kParam]), factored_of(row), tile, [&](const Piece& piece) {
#pragma unroll 1
    for (int k = 0; k < piece.n; ++k) {
      const T root = Roots<T>(row, chunk.start, tile).one(piece, k);
      const auto at = [&](int operand) { return place(row, operand, chunk.start + piece.offset + k); };
      const int64_t p_at = at(kParam);
      const T old = load_any<T>(row.param, row.dtype[kParam], p_at);
      const T grad = load_any<T>(row.grad, row.dtype[kGrad], at(kGrad));
      T param = old, moment = T(0), update;
      if (row.state[2] != 0) {
        const int64_t m_at = at(kState2);
        moment = load_any<T>(row.state[2], row.dtype[kState2], m_at);
        MO_ISA::adafactor_update<true>(param, grad, T(1), root, moment, update, s);
        store_any(row.state[2], row.dtype[kState2], m_at, moment);
      } else {
        MO_ISA::adafactor_update<false>(param, grad, T(1), root, moment, update, s);
      }
      store_any(row.param, row.dtype[kParam], p_at, param);
      const T kept = kept_any(row.dtype[kParam], param);
      param_sum.add(kept);
      sums.add(grad, update, T(kept - old), kept);
    }
    param_sum.end_piece();
  });
}

template <class T, bool kVector, bool kMomentum, int kSums>
__device__ __forceinline__ bool run_native(const Row& row, const DeviceChunk& chunk, const Tile& tile,
                                           const FactorScalars<T>& s, UpdateSums<kSums, T>& sums, ParamSum<T>& param_sum) {
  const int p = row.dtype[kParam], m = kMomentum ? row.dtype[kState2] : int(kF32);
  if (row.layout != 0 || row.dtype[kGrad] != p) return false;
  if constexpr (sizeof(T) == 8) {
    if (kMomentum && m != kF64) return false;
    native<T, double, double, kVector, kMomentum>(row, chunk, tile, s, sums, param_sum);
  } else if (m == kF32) {
    if (p == kF32) native<T, float, float, kVector, kMomentum>(row, chunk, tile, s, sums, param_sum);
    if (p == kBF16) native<T, bf16, float, kVector, kMomentum>(row, chunk, tile, s, sums, param_sum);
    if (p == kF16) native<T, f16, float, kVector, kMomentum>(row, chunk, tile, s, sums, param_sum);
  } else {
    if (p != kBF16 || m != kBF16) return false;
    native<T, bf16, bf16, kVector, kMomentum>(row, chunk, tile, s, sums, param_sum);
  }
  return true;
}

// T: double for the launch over float64 parameters, float for the one over all others.
template <int kSums, class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) adafactor_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  // Scalars in the compute type: shared, for there are no registers to keep them.
  alignas(8) __shared__ unsigned char room[sizeof(FactorScalars<T>)];
  FactorScalars<T>& mine = *reinterpret_cast<FactorScalars<T>*>(room);
  each_tile(s, [&](const Row& row, const DeviceChunk& chunk, const Tile& tile, const RowScalars& scalars) {
    UpdateSums<kSums, T> sums;
    if (row.flags & kActive) {
      if (threadIdx.x == 0) mine = FactorScalars<T>(scalars);
      __syncthreads();
      ParamSum<T> param_sum;
      const bool momentum = row.state[2] != 0;
      bool done;
      if (factored_of(row).factored) {
        done = momentum ? run_native<T, false, true>(row, chunk, tile, mine, sums, param_sum)
                        : run_native<T, false, false>(row, chunk, tile, mine, sums, param_sum);
      } else {
        done = momentum ? run_native<T, true, true>(row, chunk, tile, mine, sums, param_sum)
                        : run_native<T, true, false>(row, chunk, tile, mine, sums, param_sum);
      }
      if (!done) general<T>(row, chunk, tile, mine, sums, param_sum);
      const double sum = block_reduce(param_sum.sum, Add());
      if (threadIdx.x == 0) as<double>(s.param_sums)[chunk.slot] = sum;
    }
    sums.finish(s, row, chunk.slot);
  });
}

}  // namespace

cudaError_t launch_adafactor(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int(s.n_programs);
  if (s.wide) {
    if (s.sums == 0) MO_LAUNCH((adafactor_kernel<0, double>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((adafactor_kernel<1, double>), blocks, kThreads, stream, s);
  } else {
    if (s.sums == 0) MO_LAUNCH((adafactor_kernel<0, float>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((adafactor_kernel<1, float>), blocks, kThreads, stream, s);
  }
  return launched();
}

}  // namespace mo
