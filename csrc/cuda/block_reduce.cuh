// Reductions over the threads of a block, in a fixed order: within a warp by halves, then across warps by halves.
#pragma once

#include "cuda/launch.h"
#include "rules/portable.h"

namespace mo {

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

// Every thread gets the result. All threads of the block must call it.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, Op op) {
  constexpr unsigned all = 0xffffffffu;
  constexpr int warps = kThreads / 32;
  __shared__ T of_warp[warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 16; distance > 0; distance /= 2) x = op(x, __shfl_xor_sync(all, x, distance));
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  T parts[warps];
  for (int i = 0; i < warps; ++i) parts[i] = of_warp[i];
  for (int half = warps / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] = op(parts[i], parts[i + half]);
  }
  __syncthreads();  // of_warp is used again by the next call
  return parts[0];
}

}  // namespace mo
