// What this device's gradients add to the norm, when other devices hold some too: five numbers for their finish.
// Formula: totals.cuh. Reference: tests/test_both_sides.py, host and device in one optimizer.
// Bytes: per chunk of the gradients 48 read; 40 written.
// Assumes of the table: the statistics of this step.
#include "cuda/totals.cuh"

namespace mo {
namespace {

__global__ void __launch_bounds__(kThreads) partial_kernel(const DeviceStep s) {
  const Totals t = gradient_totals(s, 0);
  if (threadIdx.x != 0) return;
  double* out = as<double>(s.partial);
  out[0] = t.sumsq;
  out[1] = double(t.exponent);
  out[2] = t.amax;
  out[3] = t.nonfinite;
  out[4] = t.zeros;
}

}  // namespace

cudaError_t launch_partial(const DeviceStep& s, cudaStream_t stream) {
  MO_LAUNCH(partial_kernel, 1, kThreads, stream, s);
  return launched();
}

}  // namespace mo
