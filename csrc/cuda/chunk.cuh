// From a block to its chunks, and from a chunk to its elements: 16 bytes at a time where every operand allows it, one by
// one at the head and the tail, and one by one everywhere for operands that are strided or of mixed dtypes.
#pragma once

#include "cuda/launch.h"
#include "rules/narrow.h"

namespace mo {

using MO_ISA::bf16;
using MO_ISA::f16;

template <class T>
__device__ __forceinline__ T* as(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

__device__ __forceinline__ double* result_of(const DeviceStep& s) { return as<double>(s.stats); }
__device__ __forceinline__ double* column(uint64_t stats, int64_t n_chunks, int name) {
  return as<double>(stats) + sizeof(Result) / sizeof(double) + name * n_chunks;
}
__device__ __forceinline__ const Settings& settings_of(const DeviceStep& s, const Row& row) {
  return as<const Settings>(s.settings)[1 + row.group];
}
__device__ __forceinline__ bool was_skipped(const DeviceStep& s) { return as<const Result>(s.stats)->skipped != 0.0; }

// Calls body(row, chunk, scalars) for each chunk of this block.
template <class Body>
__device__ __forceinline__ void each_chunk(const DeviceStep& s, Body body) {
  const int32_t* edges = as<const int32_t>(s.programs);
  // The last edge is read again rather than kept: a register less in the loops of the body.
  for (int32_t c = edges[blockIdx.x]; c < edges[blockIdx.x + 1]; ++c) {
    const DeviceChunk chunk = as<const DeviceChunk>(s.chunks)[c];
    body(as<const Row>(s.rows)[chunk.row], chunk, as<const DeviceScalars>(s.scalars)[chunk.row]);
  }
}

__device__ __forceinline__ uint64_t address_of(const Row& row, int operand) {
  return operand == kParam    ? row.param
         : operand == kGrad   ? row.grad
         : operand == kMaster ? row.master
                              : row.state[operand - kState0];
}

// ---- one element of any storage type, in the compute type

template <class T>
__device__ __forceinline__ T widened(float x) { return T(x); }
template <class T>
__device__ __forceinline__ T widened(double x) { return T(x); }
template <class T>
__device__ __forceinline__ T widened(bf16 x) { return T(MO_ISA::widen(x)); }
template <class T>
__device__ __forceinline__ T widened(f16 x) { return T(MO_ISA::widen(x)); }

// float64 reaches 16 bits through float32, as in a cast of torch.
template <class S>
struct Narrow;
template <>
struct Narrow<float> {
  template <class T>
  __device__ static __forceinline__ float from(T x) { return float(x); }
};
template <>
struct Narrow<double> {
  template <class T>
  __device__ static __forceinline__ double from(T x) { return double(x); }
};
template <>
struct Narrow<bf16> {
  template <class T>
  __device__ static __forceinline__ bf16 from(T x) { return MO_ISA::narrow_bf16(float(x)); }
};
template <>
struct Narrow<f16> {
  template <class T>
  __device__ static __forceinline__ f16 from(T x) { return MO_ISA::narrow_f16(float(x)); }
};

template <class T>
__device__ __forceinline__ T load_any(uint64_t address, int dtype, int64_t i) {
  switch (dtype) {
    case kF32: return widened<T>(as<const float>(address)[i]);
    case kBF16: return widened<T>(as<const bf16>(address)[i]);
    case kF16: return widened<T>(as<const f16>(address)[i]);
    default: return widened<T>(as<const double>(address)[i]);
  }
}
template <class T>
__device__ __forceinline__ void store_any(uint64_t address, int dtype, int64_t i, T x) {
  switch (dtype) {
    case kF32: as<float>(address)[i] = Narrow<float>::from(x); return;
    case kBF16: as<bf16>(address)[i] = Narrow<bf16>::from(x); return;
    case kF16: as<f16>(address)[i] = Narrow<f16>::from(x); return;
    default: as<double>(address)[i] = Narrow<double>::from(x);
  }
}
// What storage keeps of a value.
template <class T>
__device__ __forceinline__ T kept_any(int dtype, T x) {
  switch (dtype) {
    case kF32: return widened<T>(Narrow<float>::from(x));
    case kBF16: return widened<T>(Narrow<bf16>::from(x));
    case kF16: return widened<T>(Narrow<f16>::from(x));
    default: return widened<T>(Narrow<double>::from(x));
  }
}

// Where element i of the row lies in an operand.
__device__ __forceinline__ int64_t place(const Row& row, int operand, int64_t i) {
  if (row.layout == 0) return i;
  const Layout& l = *as<const Layout>(row.layout);
  int64_t offset = 0;
#pragma unroll 1  // the divisions are long
  for (int64_t d = l.dims - 1; d >= 0; --d) {
    offset += i % l.size[d] * l.stride[operand][d];
    i /= l.size[d];
  }
  return offset;
}

// ---- 16 bytes at a time

// N elements of one storage type in whole accesses of 16 bytes, or in one of 8.
template <class S, int N>
struct alignas(16) Pack {
  static_assert(N * sizeof(S) == 8 || N * sizeof(S) % 16 == 0, "a pack is made of whole accesses");
  S at[N];
};
template <class S, int N>
__device__ __forceinline__ Pack<S, N> load_pack(const S* from) {
  Pack<S, N> pack;
  if constexpr (N * sizeof(S) == 8) {
    reinterpret_cast<uint2*>(&pack)[0] = load_words(reinterpret_cast<const uint2*>(from));
  } else {
    const uint4* words = reinterpret_cast<const uint4*>(from);
    for (unsigned k = 0; k < N * sizeof(S) / 16; ++k) reinterpret_cast<uint4*>(&pack)[k] = load_words(words + k);
  }
  return pack;
}
template <class S, int N>
__device__ __forceinline__ void store_pack(S* to, const Pack<S, N>& pack) {
  if constexpr (N * sizeof(S) == 8) {
    store_words(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2*>(&pack)[0]);
  } else {
    uint4* words = reinterpret_cast<uint4*>(to);
    for (unsigned k = 0; k < N * sizeof(S) / 16; ++k) store_words(words + k, reinterpret_cast<const uint4*>(&pack)[k]);
  }
}

// How many elements a thread takes at a time: 16 bytes of the smallest type. With sums in double, 16-bit and float64
// tensors go by 8 bytes: twice as much would not fit into 80 registers.
template <class A, class B, int kSums>
struct PackSize {
  static constexpr int smallest = sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B);
  static constexpr int value = (kSums != 0 && smallest != 4 ? 8 : 16) / smallest;
};

// Elements before the first that lies at a multiple of 16 bytes: -1 when no element does.
template <class S>
__device__ __forceinline__ int head_of(const S* at) {
  const unsigned past = unsigned(reinterpret_cast<uint64_t>(at) & 15);
  if (past % sizeof(S) != 0) return -1;
  return past == 0 ? 0 : int((16 - past) / sizeof(S));
}

// Calls one(i) for single elements and many(i) for N elements that begin at element i, 16-byte aligned in every operand.
// `head`: elements before those; -1: there are none, all go one by one. A chunk has less than 2^31 elements; not unrolled,
// because registers are what limits the number of blocks at work.
template <int N, class One, class Many>
__device__ __forceinline__ void walk(int n, int head, One one, Many many) {
  const int first = head < 0 || head > n ? n : head;
  const int last = first + (n - first) / N * N;
#pragma unroll 1
  for (int i = first + int(threadIdx.x) * N; i < last; i += kThreads * N) many(i);
#pragma unroll 1
  for (int i = threadIdx.x; i < first + (n - last); i += kThreads) one(i < first ? i : i - first + last);
}

}  // namespace mo
