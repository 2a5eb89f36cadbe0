// CUDA on the CPU, for the tests: the .cu files compile against this with a C++ compiler, and every kernel runs, block
// after block, its threads as fibers in an order that a seed shuffles.
//
// What it catches: misaligned accesses of several elements at once, barriers and shuffles that not all threads of the
// block (the warp) reach, a thread that relies on the order of others between two barriers, and, with sanitizers, every
// access out of bounds. What it cannot show: races within a warp's instruction, memory ordering, speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// One block runs at a time, so its shared memory may be static. It is not cleared: what the last block left stands in for
// rubbish.
#define __shared__ static

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

namespace shim {

struct Index {
  int x = 0;
};

// Runs body() for every thread of every block. Returns when all are done.
void run(int blocks, int threads, void (*body)(void*), void* context);

void barrier();
// Gives each thread of a warp the bytes of the thread whose lane is `from`.
void exchange(void* value, size_t bytes, int from);
void check_aligned(const void* at, size_t bytes);

// For the tests: the order of threads; what a run found wrong ends the program unless a handler is set.
void set_seed(uint64_t seed);
using Handler = void (*)(const char* what);
void set_handler(Handler handler);

extern Index thread, block;

template <class Kernel, class... Args>
void launch(Kernel kernel, int blocks, int threads, Args... args) {
  auto call = [&] { kernel(args...); };
  run(blocks, threads, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}

}  // namespace shim

#define threadIdx ::shim::thread
#define blockIdx ::shim::block
inline void __syncthreads() { ::shim::barrier(); }
inline void __syncwarp() {
  char nothing = 0;
  ::shim::exchange(&nothing, 1, ::shim::thread.x % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  ::shim::exchange(&value, sizeof value, (::shim::thread.x % 32) ^ mask);
  return value;
}

template <class Words>
Words load_words(const Words* at) {
  ::shim::check_aligned(at, sizeof(Words));
  Words words;
  std::memcpy(&words, at, sizeof words);
  return words;
}
template <class Words>
void store_words(Words* at, Words words) {
  ::shim::check_aligned(at, sizeof(Words));
  std::memcpy(at, &words, sizeof words);
}

#define MO_LAUNCH(kernel, grid, block, stream, ...) ((void)(stream), ::shim::launch(kernel, grid, block, __VA_ARGS__))

// The few functions of the runtime that step.cu calls.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
#define CUDART_VERSION 0
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
