// Adam / AdamW / AMSGrad update of every chunk.
// Formula: rules/adamw.h; of weights finer than their parameter rules/master.h, of quantised moments rules/quantised.h.
// Reference: mo_fused/reference.py, mo_fused/masters.py and mo_fused/quantised.py, bit for bit.
// Bytes per element, read + written: fp32 16 + 12, bf16 and fp16 8 + 6, bf16 with fp32 moments 12 + 10, fp64 32 + 24;
//   AMSGrad adds one moment each way, master weights the rest's own size. Quantised moments are 1 + 1 each (4 bits:
//   half) and 4 / block each way for scales: bf16 with 8-bit moments 6 + 4. The gradient is read once, never written.
// Assumes of the table: row scalars prepared by the finish of this step, no two rows share written memory; Row::stream
//   where random bits are drawn.
#include "cuda/quantised.cuh"
#include "rules/adamw.h"

namespace mo {
namespace {

using MO_ISA::AdamScalars;

template <class T, class P, class G, class S, bool kAmsgrad, int kSums>
__device__ __forceinline__ void native(const Row& row, const DeviceChunk& chunk, const RowScalars& rs,
                                       UpdateSums<kSums, T>& sums) {
  constexpr int N = PackSize<P, S, kSums>::value;
  P* p = as<P>(row.param) + chunk.start;
  const G* g = as<const G>(row.grad) + chunk.start;
  S* m = as<S>(row.state[0]) + chunk.start;
  S* v = as<S>(row.state[1]) + chunk.start;
  S* w = kAmsgrad ? as<S>(row.state[2]) + chunk.start : v;
  const AdamScalars<T> s(rs);
  const auto step = [&](P& pe, G ge, S& me, S& ve, S& we) {
    const T old = widened<T>(pe), grad = widened<T>(ge);
    T param = old, first = widened<T>(me), second = widened<T>(ve), largest = kAmsgrad ? widened<T>(we) : T(0), update;
    MO_ISA::adamw_update<kAmsgrad>(param, grad, first, second, largest, update, s);
    pe = Narrow<P>::from(param);
    me = Narrow<S>::from(first);
    ve = Narrow<S>::from(second);
    if (kAmsgrad) we = Narrow<S>::from(largest);
    const T kept = widened<T>(pe);
    sums.add(grad, update, T(kept - old), kept);
  };
  const int head = head_of(p);
  const bool together = head_of(g) == head && head_of(m) == head && head_of(v) == head && head_of(w) == head;
  walk<N>(
      int(chunk.length), together ? head : -1, [&](int i) { step(p[i], g[i], m[i], v[i], w[i]); },
      [&](int i) {
        auto pp = load_pack<P, N>(p + i);
        const auto gp = load_pack<G, N>(g + i);
        auto mp = load_pack<S, N>(m + i), vp = load_pack<S, N>(v + i), wp = vp;
        if (kAmsgrad) wp = load_pack<S, N>(w + i);
#pragma unroll
        for (int k = 0; k < N; ++k) step(pp.at[k], gp.at[k], mp.at[k], vp.at[k], wp.at[k]);
        store_pack(p + i, pp);
        store_pack(m + i, mp);
        store_pack(v + i, vp);
        if (kAmsgrad) store_pack(w + i, wp);
      });
}

// Any mix of dtypes, any strides.
template <class T, int kSums>
__device__ __forceinline__ void general(const Row& row, const DeviceChunk& chunk, const RowScalars& rs, bool amsgrad,
                                        UpdateSums<kSums, T>& sums) {
  const AdamScalars<T> s(rs);
#pragma unroll 1
  for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
    const auto at = [&](int operand) { return place(row, operand, chunk.start + i); };
    const int64_t p_at = at(kParam), m_at = at(kState0), v_at = at(kState1), w_at = amsgrad ? at(kState2) : 0;
    const T old = load_any<T>(row.param, row.dtype[kParam], p_at);
    const T grad = load_any<T>(row.grad, row.dtype[kGrad], at(kGrad));
    T param = old, first = load_any<T>(row.state[0], row.dtype[kState0], m_at);
    T second = load_any<T>(row.state[1], row.dtype[kState1], v_at), largest = T(0), update;
    if (amsgrad) {
      largest = load_any<T>(row.state[2], row.dtype[kState2], w_at);
      MO_ISA::adamw_update<true>(param, grad, first, second, largest, update, s);
      store_any(row.state[2], row.dtype[kState2], w_at, largest);
    } else {
      MO_ISA::adamw_update<false>(param, grad, first, second, largest, update, s);
    }
    store_any(row.param, row.dtype[kParam], p_at, param);
    store_any(row.state[0], row.dtype[kState0], m_at, first);
    store_any(row.state[1], row.dtype[kState1], v_at, second);
    const T kept = kept_any(row.dtype[kParam], param);
    sums.add(grad, update, T(kept - old), kept);
  }
}

// Weights that are finer than their parameter; any dtypes of gradient and moments, any strides.
template <int kSums>
__device__ __forceinline__ void weighted(const Row& row, const DeviceChunk& chunk, const RowScalars& rs, bool amsgrad,
                                         UpdateSums<kSums, float>& sums) {
  const AdamScalars<float> s(rs);
  const uint64_t& key = shared_key<kMaster>(row, rs);
#pragma unroll 1
  for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
    const int64_t index = chunk.start + i;
    // Places are found again rather than kept: registers are what is short here.
    const auto weight_at = [&] { return WeightPlace{place(row, kParam, index), place(row, kMaster, index)}; };
    const auto at = [&](int operand) { return place(row, operand, index); };
    const float old = load_weight(row, weight_at()), grad = load_any<float>(row.grad, row.dtype[kGrad], at(kGrad));
    float param = old, first = load_any<float>(row.state[0], row.dtype[kState0], at(kState0));
    float second = load_any<float>(row.state[1], row.dtype[kState1], at(kState1)), largest = 0.0f, update;
    if (amsgrad) {
      largest = load_any<float>(row.state[2], row.dtype[kState2], at(kState2));
      MO_ISA::adamw_update<true>(param, grad, first, second, largest, update, s);
      store_any(row.state[2], row.dtype[kState2], at(kState2), largest);
    } else {
      MO_ISA::adamw_update<false>(param, grad, first, second, largest, update, s);
    }
    store_any(row.state[0], row.dtype[kState0], at(kState0), first);
    store_any(row.state[1], row.dtype[kState1], at(kState1), second);
    const float kept = store_weight(row, key, index, weight_at(), param);
    sums.add(grad, update, kept - old, kept);
  }
}

// Quantised states; any weights and gradients.
template <int kSums>
__device__ __forceinline__ void quantised(const Row& row, const DeviceChunk& chunk, const RowScalars& rs, bool amsgrad,
                                          UpdateSums<kSums, float>& sums) {
  const AdamScalars<float> s(rs);
  const auto rule = [&](float& p, float g, float (&state)[3]) {
    float second = state[1] * state[1];
    MO_ISA::adamw_moments(p, g, state[0], second, s);
    state[1] = MO_ISA::square_root(second);
    return MO_ISA::adamw_weight(p, state[0], amsgrad ? running_root(state[2], state[1]) : state[1], s);
  };
  quantised_chunk<3>(row, chunk, rs, amsgrad ? 3 : 2, sums, rule);
}

template <class T, bool kAmsgrad, int kSums>
__device__ __forceinline__ bool run_native(const Row& row, const DeviceChunk& chunk, const RowScalars& rs,
                                           UpdateSums<kSums, T>& sums) {
  const int p = row.dtype[kParam], m = row.dtype[kState0];
  const bool one_state = row.dtype[kState1] == m && (!kAmsgrad || row.dtype[kState2] == m);
  if (row.layout != 0 || !one_state || row.dtype[kGrad] != p) return false;
  if constexpr (sizeof(T) == 8) {
    if (m != kF64) return false;
    native<double, double, double, double, kAmsgrad>(row, chunk, rs, sums);
    return true;
  } else {
    if (p == kF32 && m == kF32) native<float, float, float, float, kAmsgrad>(row, chunk, rs, sums);
    else if (p == kBF16 && m == kBF16) native<float, bf16, bf16, bf16, kAmsgrad>(row, chunk, rs, sums);
    else if (p == kF16 && m == kF16) native<float, f16, f16, f16, kAmsgrad>(row, chunk, rs, sums);
    else if (p == kBF16 && m == kF32) native<float, bf16, bf16, float, kAmsgrad>(row, chunk, rs, sums);
    else return false;
    return true;
  }
}

// T: double for the launch over float64 parameters, float for the one over all others.
template <int kSums, class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) adamw_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  each_chunk(s, [&](const Row& row, const DeviceChunk& chunk, const DeviceScalars& scalars) {
    UpdateSums<kSums, T> sums;
    if (row.flags & kActive) {
      const bool amsgrad = settings_of(s, row).hyper.amsgrad != 0.0;
      if constexpr (sizeof(T) == 4 && kSums != 2) {  // gradients of such rows are measured before: device_part.py
        if (row.block != 0) {
          quantised(row, chunk, scalars.scalars, amsgrad, sums);
          return sums.finish(s, row, chunk.slot);
        }
        if (row.master_mode != kNoMaster) {
          weighted(row, chunk, scalars.scalars, amsgrad, sums);
          return sums.finish(s, row, chunk.slot);
        }
      }
      const bool done = amsgrad ? run_native<T, true>(row, chunk, scalars.scalars, sums)
                                : run_native<T, false>(row, chunk, scalars.scalars, sums);
      if (!done) general<T>(row, chunk, scalars.scalars, amsgrad, sums);
    }
    sums.finish(s, row, chunk.slot);
  });
}

}  // namespace

cudaError_t launch_adamw(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int(s.n_programs);
  if (s.wide) {
    if (s.sums == 0) MO_LAUNCH((adamw_kernel<0, double>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((adamw_kernel<1, double>), blocks, kThreads, stream, s);
    if (s.sums == 2) MO_LAUNCH((adamw_kernel<2, double>), blocks, kThreads, stream, s);
  } else {
    if (s.sums == 0) MO_LAUNCH((adamw_kernel<0, float>), blocks, kThreads, stream, s);
    if (s.sums == 1) MO_LAUNCH((adamw_kernel<1, float>), blocks, kThreads, stream, s);
    if (s.sums == 2) MO_LAUNCH((adamw_kernel<2, float>), blocks, kThreads, stream, s);
  }
  return launched();
}

}  // namespace mo
