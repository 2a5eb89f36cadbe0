// How the CUDA sources reach a device. nvcc compiles them for GPUs; with MO_CUDA_SHIM a C++ compiler compiles the same
// files for the CPU, against tests/shim.h, so that every kernel runs in the tests.
#pragma once

#if defined(MO_CUDA_SHIM)
#include "cuda/tests/shim.h"
#else
#include <cuda_runtime.h>
#define MO_LAUNCH(kernel, grid, block, stream, ...) (kernel)<<<grid, block, 0, stream>>>(__VA_ARGS__)
// Every access of several elements at once (4, 8, 16 bytes); the shim's assert that they are aligned. The compiler cannot
// know that an address from the table is one of global memory, and would ask at run time.
template <class Words>
__device__ __forceinline__ Words load_words(const Words* at) {
  return __ldca(at);
}
template <class Words>
__device__ __forceinline__ void store_words(Words* at, Words words) {
  __stwb(at, words);
}
#endif

#include "abi.h"

namespace mo {

#if !defined(MO_THREADS)
#define MO_THREADS 256
#endif
constexpr int kThreads = MO_THREADS;  // at least kRows of finish_kernel.cu

// Three blocks of 256 threads on a multiprocessor of 65536 registers: at most 80 a thread. float64 takes two for each
// value, so two blocks.
template <class T>
constexpr int kBlocks = sizeof(T) == 8 ? 2 : 3;

// The error of a launch that was just made; launchers return it.
inline cudaError_t launched() { return cudaGetLastError(); }

cudaError_t launch_grad_stats(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_partial(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_finish(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_adamw(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_sgd(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_scale_grad(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_update_norms(const DeviceStep& step, cudaStream_t stream);
// Adafactor's passes.
cudaError_t launch_factor_sums(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_factors(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_factored_rms(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_sizes(const DeviceStep& step, cudaStream_t stream);
cudaError_t launch_adafactor(const DeviceStep& step, cudaStream_t stream);

}  // namespace mo
