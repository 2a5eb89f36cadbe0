// After the update, with statistics on: norms of the update, of what storage kept of it, and of the parameters.
// Formula: sqrt(sum over chunks), double, fixed order. A skipped step has update 0 and the parameters of the step before.
// Reference: tests/test_clip.py, tests/test_device_step.py.
// Bytes: per chunk 24 read (72 when the gradient was measured during the update).
// Assumes of the table: the statistics of this step, and those of the step before or 0.
#include "cuda/totals.cuh"

namespace mo {
namespace {

__device__ __forceinline__ void skipped_step(const DeviceStep& s, Result& out) {
  const double nan = from_bits(uint64_t(0x7ff8) << 48);
  const bool known = s.before != 0 && as<const Result>(s.before)->updated != 0.0;
  const auto put = [&](int name, int64_t c, double x) { column(s.stats, s.n_chunks, name)[c] = x; };
  for (int64_t c = threadIdx.x; c < s.n_chunks; c += kThreads) {
    put(kUpdateSumsq, c, 0.0);
    put(kStoredSumsq, c, 0.0);
    put(kParamSumsq, c, known ? column(s.before, s.n_chunks, kParamSumsq)[c] : nan);
    if (s.sums == 2) {  // the update that would have read the gradients did not run
      put(kSumsq, c, nan);
      put(kAmax, c, nan);
      put(kNonfinites, c, 0.0);
    }
  }
  __syncthreads();  // `updated` is read above, and s.before may be this step's own
  if (threadIdx.x != 0) return;
  out.update_norm = out.stored_norm = 0.0;
  out.param_norm = known ? as<const Result>(s.before)->param_norm : nan;
  if (s.sums == 2) out.grad_norm = out.grad_amax = out.nonfinite = nan;
  out.updated = 1.0;
}

__global__ void __launch_bounds__(kThreads) update_norms_kernel(const DeviceStep s) {
  Result& out = *as<Result>(s.stats);
  if (was_skipped(s)) return skipped_step(s, out);
  double update = 0.0, stored = 0.0, param = 0.0;
  for (int64_t c = threadIdx.x; c < s.n_chunks; c += kThreads) {
    update += column(s.stats, s.n_chunks, kUpdateSumsq)[c];
    stored += column(s.stats, s.n_chunks, kStoredSumsq)[c];
    param += column(s.stats, s.n_chunks, kParamSumsq)[c];
  }
  update = block_reduce(update, Add());
  stored = block_reduce(stored, Add());
  param = block_reduce(param, Add());
  Totals t;
  if (s.sums == 2) t = gradient_totals(s, 0);
  if (threadIdx.x != 0) return;
  out.update_norm = MO_ISA::square_root(update);
  out.stored_norm = MO_ISA::square_root(stored);
  out.param_norm = MO_ISA::square_root(param);
  if (s.sums == 2) {
    out.grad_norm = t.norm() / out.grad_scale;
    out.grad_amax = t.amax / out.grad_scale;
    out.nonfinite = t.nonfinite;
  }
  out.updated = 1.0;
}

}  // namespace

cudaError_t launch_update_norms(const DeviceStep& s, cudaStream_t stream) {
  MO_LAUNCH(update_norms_kernel, 1, kThreads, stream, s);
  return launched();
}

}  // namespace mo
