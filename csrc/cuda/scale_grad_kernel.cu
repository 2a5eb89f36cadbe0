// Multiplies every chunk of a gradient by its row's factor, in place, where that is not 1.
// Formula: g = g * scale in the compute type (double for float64, else float), rounded once.
// Reference: torch.nn.utils.clip_grads_with_norm_.
// Bytes per element, read + written: fp32 4 + 4, bf16 and fp16 2 + 2, fp64 8 + 8; nothing where the factor is 1.
// Assumes of the table: row scalars prepared by the finish; of rows that share a gradient one is marked to scale it.
#include "cuda/chunk.cuh"

namespace mo {
namespace {

template <class T, class S>
__device__ __forceinline__ void scale_chunk(const Row& row, const DeviceChunk& chunk, double scale) {
  constexpr int N = 16 / sizeof(S);
  const T factor = MO_ISA::rounded<T>(scale);
  const auto scaled = [&](S x) { return Narrow<S>::from(T(widened<T>(x) * factor)); };
  if (row.layout != 0) {
    S* g = as<S>(row.grad);
#pragma unroll 1
    for (int i = threadIdx.x; i < int(chunk.length); i += kThreads) {
      const int64_t at = place(row, kGrad, chunk.start + i);
      g[at] = scaled(g[at]);
    }
    return;
  }
  S* g = as<S>(row.grad) + chunk.start;
  walk<N>(
      int(chunk.length), head_of(g), [&](int i) { g[i] = scaled(g[i]); },
      [&](int i) {
        auto pack = load_pack<S, N>(g + i);
#pragma unroll
        for (int k = 0; k < N; ++k) pack.at[k] = scaled(pack.at[k]);
        store_pack(g + i, pack);
      });
}

__global__ void __launch_bounds__(kThreads) scale_grad_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  each_chunk(s, [&](const Row& row, const DeviceChunk& chunk, const DeviceScalars& scalars) {
    const double scale = scalars.scalars.scale;
    const bool mine = !(row.flags & kGradShared) || (row.flags & kScalesShared);
    if (!(row.flags & kActive) || !mine || scale == 1.0) return;
    switch (row.dtype[kGrad]) {
      case kF32: return scale_chunk<float, float>(row, chunk, scale);
      case kBF16: return scale_chunk<float, bf16>(row, chunk, scale);
      case kF16: return scale_chunk<float, f16>(row, chunk, scale);
      default: return scale_chunk<double, double>(row, chunk, scale);
    }
  });
}

}  // namespace

cudaError_t launch_scale_grad(const DeviceStep& s, cudaStream_t stream) {
  MO_LAUNCH(scale_grad_kernel, int(s.n_programs), kThreads, stream, s);
  return launched();
}

}  // namespace mo
