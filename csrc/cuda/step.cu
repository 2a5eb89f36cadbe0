// The phases of a step on one device, in order, on the caller's stream. Host code only: nothing here waits.
// Bytes per element: pass 1 reads the gradient once, pass 2 moves what the update kernel states.
#include "cuda/step.h"

#include "cuda/launch.h"

namespace mo {
namespace {

cudaError_t run_phases(const DeviceStep& s, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const auto run = [&](int phase, cudaError_t (*launch)(const DeviceStep&, cudaStream_t)) {
    if (error == cudaSuccess && (s.phases & phase)) error = launch(s, stream);
  };
  run(kDeviceMeasure, s.tiles ? launch_factor_sums : launch_grad_stats);
  run(kDevicePartial, launch_partial);
  run(kDeviceFinish, launch_finish);
  run(kDeviceFactors, launch_factors);
  run(kDeviceFactoredRms, launch_factored_rms);
  run(kDeviceSizes, launch_sizes);
  run(kDeviceUpdate, s.rule == kAdam ? launch_adamw : s.rule == kAdafactor ? launch_adafactor : launch_sgd);
  run(kDeviceScale, launch_scale_grad);
  run(kDeviceNorms, launch_update_norms);
  return error;
}

}  // namespace

const char* run_device_step(const DeviceStep& s) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != s.device) error = cudaSetDevice(s.device);
  if (error == cudaSuccess) {
    error = run_phases(s, reinterpret_cast<cudaStream_t>(s.stream));
    if (before != s.device) {
      const cudaError_t back = cudaSetDevice(before);
      if (error == cudaSuccess) error = back;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

CudaVersions cuda_versions() {
  CudaVersions found = {CUDART_VERSION, 0, false};
#if defined(MO_CUDA_SHIM)
  found.shim = true;
#endif
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) {
    found.driver = 0;
    cudaGetLastError();  // not to be found by a later launch
  }
  return found;
}

}  // namespace mo
