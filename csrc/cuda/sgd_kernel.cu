// SGD update of every chunk, with or without a momentum buffer.
// Formula: rules/sgd.h; of weights finer than their parameter rules/master.h, of quantised buffers rules/quantised.h.
// Reference: mo_fused/reference.py, mo_fused/masters.py and mo_fused/quantised.py, bit for bit.
// Bytes per element, read + written: with momentum fp32 12 + 8, bf16 and fp16 6 + 4; without 8 + 4 and 4 + 2;
//   master weights add the rest's own size each way. A quantised buffer is 1 + 1 (4 bits: half) and 4 / block each way
//   for scales: bf16 with 8 bits 5 + 3.
// Assumes of the table: row scalars prepared by the finish of this step; a row without momentum has no state address;
//   the contents of a buffer that the finish called fresh are ignored; Row::stream where random bits are drawn.
#include "cuda/quantised.cuh"
#include "rules/sgd.h"

namespace mo {
namespace {

using MO_ISA::SgdScalars;

template <class T, class P, bool kMomentum, int kSums>
__device__ __forceinline__ void native(const Row& row, const DeviceChunk& chunk, const DeviceScalars& rs,
                                       UpdateSums<kSums, T>& sums) {
  constexpr int N = PackSize<P, P, kSums>::value;
  P* p = as<P>(row.param) + chunk.start;
  const P* g = as<const P>(row.grad) + chunk.start;
  P* buf = kMomentum ? as<P>(row.state[0]) + chunk.start : p;
  const SgdScalars<T> s(rs.scalars);
  const bool fresh = rs.fresh != 0;
  const auto step = [&](P& pe, P ge, P& be) {
    const T old = widened<T>(pe), grad = widened<T>(ge);
    T param = old, momentum = kMomentum ? widened<T>(be) : T(0), update;
    MO_ISA::sgd_update<kMomentum>(param, grad, momentum, update, s, fresh);
    pe = Narrow<P>::from(param);
    if (kMomentum) be = Narrow<P>::from(momentum);
    const T kept = widened<T>(pe);
    sums.add(grad, update, T(kept - old), kept);
  };
  const int head = head_of(p);
  walk<N>(
      int(chunk.length), head_of(g) == head && head_of(buf) == head ? head : -1,
      [&](int i) {
        P unused = {};
        step(p[i], g[i], kMomentum ? buf[i] : unused);
      },
      [&](int i) {
        auto pp = load_pack<P, N>(p + i);
        const auto gp = load_pack<P, N>(g + i);
        auto bp = pp;
        if (kMomentum) bp = load_pack<P, N>(buf + i);
#pragma unroll
        for (int k = 0; k < N; ++k) step(pp.at[k], gp.at[k], bp.at[k]);
        store_pack(p + i, pp);
        if (kMomentum) store_pack(buf + i, bp);
      });
}

// Any mix of dtypes, any strides.
template <class T, int kSums>
__device__ __forceinline__ void general(const Row& row, const DeviceChunk& chunk, const DeviceScalars& rs,
                                        UpdateSums<kSums, T>& sums) {
  const SgdScalars<T> s(rs.scalars);
  const bool fresh = rs.fresh != 0, has_momentum = row.state[0] != 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
    const auto at = [&](int operand) { return place(row, operand, chunk.start + i); };
    const int64_t p_at = at(kParam), b_at = has_momentum ? at(kState0) : 0;
    const T old = load_any<T>(row.param, row.dtype[kParam], p_at);
    const T grad = load_any<T>(row.grad, row.dtype[kGrad], at(kGrad));
    T param = old, momentum = T(0), update;
    if (has_momentum) {
      momentum = load_any<T>(row.state[0], row.dtype[kState0], b_at);
      MO_ISA::sgd_update<true>(param, grad, momentum, update, s, fresh);
      store_any(row.state[0], row.dtype[kState0], b_at, momentum);
    } else {
      MO_ISA::sgd_update<false>(param, grad, momentum, update, s, fresh);
    }
    store_any(row.param, row.dtype[kParam], p_at, param);
    const T kept = kept_any(row.dtype[kParam], param);
    sums.add(grad, update, T(kept - old), kept);
  }
}

// Weights that are finer than their parameter; any dtypes of gradient and buffer, any strides.
template <int kSums>
__device__ __forceinline__ void weighted(const Row& row, const DeviceChunk& chunk, const DeviceScalars& rs,
                                         UpdateSums<kSums, float>& sums) {
  const SgdScalars<float> s(rs.scalars);
  const uint64_t& key = shared_key<kMaster>(row, rs.scalars);
  const bool fresh = rs.fresh != 0, has_momentum = row.state[0] != 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
    const int64_t index = chunk.start + i;
    const WeightPlace at = {place(row, kParam, index), place(row, kMaster, index)};
    const float old = load_weight(row, at), grad = load_any<float>(row.grad, row.dtype[kGrad], place(row, kGrad, index));
    float param = old, momentum = 0.0f, update;
    if (has_momentum) {
      const int64_t b_at = place(row, kState0, index);
      momentum = load_any<float>(row.state[0], row.dtype[kState0], b_at);
      MO_ISA::sgd_update<true>(param, grad, momentum, update, s, fresh);
      store_any(row.state[0], row.dtype[kState0], b_at, momentum);
    } else {
      MO_ISA::sgd_update<false>(param, grad, momentum, update, s, fresh);
    }
    const float kept = store_weight(row, key, index, at, param);
    sums.add(grad, update, kept - old, kept);
  }
}

// A quantised momentum buffer; any weights and gradients.
template <int kSums>
__device__ __forceinline__ void quantised(const Row& row, const DeviceChunk& chunk, const DeviceScalars& rs,
                                          UpdateSums<kSums, float>& sums) {
  const SgdScalars<float> s(rs.scalars);
  const bool fresh = rs.fresh != 0;
  const auto rule = [&](float& p, float g, float (&state)[1]) {
    float update;
    MO_ISA::sgd_update<true>(p, g, state[0], update, s, fresh);
    return update;
  };
  quantised_chunk<1>(row, chunk, rs.scalars, 1, sums, rule);
}

template <class T, bool kMomentum, int kSums>
__device__ __forceinline__ bool run_native(const Row& row, const DeviceChunk& chunk, const DeviceScalars& rs,
                                           UpdateSums<kSums, T>& sums) {
  const int p = row.dtype[kParam];
  if (row.layout != 0 || row.dtype[kGrad] != p || (kMomentum && row.dtype[kState0] != p)) return false;
  if constexpr (sizeof(T) == 8) {
    native<double, double, kMomentum>(row, chunk, rs, sums);
  } else {
    if (p == kF32) native<float, float, kMomentum>(row, chunk, rs, sums);
    if (p == kBF16) native<float, bf16, kMomentum>(row, chunk, rs, sums);
    if (p == kF16) native<float, f16, kMomentum>(row, chunk, rs, sums);
  }
  return true;
}

// T: double for the launch over float64 parameters, float for the one over all others.
template <int kSums, class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) sgd_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  each_chunk(s, [&](const Row& row, const DeviceChunk& chunk, const DeviceScalars& scalars) {
    UpdateSums<kSums, T> sums;
    if (row.flags & kActive) {
      if constexpr (sizeof(T) == 4 && kSums != 2) {  // gradients of such rows are measured before: device_part.py
        if (row.block != 0) {
          quantised(row, chunk, scalars, sums);
          return sums.finish(s, row, chunk.slot);
        }
        if (row.master_mode != kNoMaster) {
          weighted(row, chunk, scalars, sums);
          return sums.finish(s, row, chunk.slot);
        }
      }
      const bool done = row.state[0] != 0 ? run_native<T, true>(row, chunk, scalars, sums)
                                          : run_native<T, false>(row, chunk, scalars, sums);
      if (!done) general<T>(row, chunk, scalars, sums);
    }
    sums.finish(s, row, chunk.slot);
  });
}

}  // namespace

cudaError_t launch_sgd(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int(s.n_programs);
  if (s.wide) {
    if (s.sums == 0) MO_LAUNCH((sgd_kernel<0, double>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((sgd_kernel<1, double>), blocks, kThreads, stream, s);
    if (s.sums == 2) MO_LAUNCH((sgd_kernel<2, double>), blocks, kThreads, stream, s);
  } else {
    if (s.sums == 0) MO_LAUNCH((sgd_kernel<0, float>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((sgd_kernel<1, float>), blocks, kThreads, stream, s);
    if (s.sums == 2) MO_LAUNCH((sgd_kernel<2, float>), blocks, kThreads, stream, s);
  }
  return launched();
}

}  // namespace mo
