// Weights and gradients of four neighbouring elements, in whole accesses.
#pragma once

#include "cuda/master.cuh"

namespace mo {

constexpr int kQuad = 4;

// Bits of elements of `size` bytes (4, 2, 1; 0: there are none), whose first lies at a multiple of four of them.
__device__ __forceinline__ void load_quad(uint64_t address, int size, int64_t i, uint32_t (&bits)[kQuad]) {
  const uint64_t at = address + i * size;
  if (size == 4) {
    const uint4 words = load_words(as<const uint4>(at));
    bits[0] = words.x, bits[1] = words.y, bits[2] = words.z, bits[3] = words.w;
  } else if (size == 2) {
    const uint2 words = load_words(as<const uint2>(at));
    bits[0] = words.x & 0xffffu, bits[1] = words.x >> 16, bits[2] = words.y & 0xffffu, bits[3] = words.y >> 16;
  } else if (size == 1) {
    const uint32_t word = load_words(as<const uint32_t>(at));
#pragma unroll
    for (int k = 0; k < kQuad; ++k) bits[k] = word >> (8 * k) & 0xffu;
  }
}
__device__ __forceinline__ void store_quad(uint64_t address, int size, int64_t i, const uint32_t (&bits)[kQuad]) {
  const uint64_t at = address + i * size;
  const auto pair = [&](int k) { return (bits[k] & 0xffffu) | bits[k + 1] << 16; };
  if (size == 4) store_words(as<uint4>(at), uint4{bits[0], bits[1], bits[2], bits[3]});
  if (size == 2) store_words(as<uint2>(at), uint2{pair(0), pair(2)});
  if (size == 1) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) word |= (bits[k] & 0xffu) << (8 * k);
    store_words(as<uint32_t>(at), word);
  }
}

// Whether all operands but the states can be accessed four at a time.
__device__ __forceinline__ bool has_quads(const Row& row) {
  return row.layout == 0 && ((row.param | row.grad | row.master) & 15) == 0 && row.dtype[kGrad] != kF64;
}
__device__ __forceinline__ int param_size(const Row& row) { return row.dtype[kParam] == kF32 ? 4 : 2; }

// `index`: of the first of the four.
__device__ __forceinline__ void load_quads(const Row& row, int64_t index, float (&weight)[kQuad],
                                           float (&grad)[kQuad]) {
  const int of_param = row.dtype[kParam], of_grad = row.dtype[kGrad];
  uint32_t param[kQuad], rest[kQuad] = {}, bits[kQuad];
  load_quad(row.param, param_size(row), index, param);
  load_quad(row.grad, of_grad == kF32 ? 4 : 2, index, bits);
  load_quad(row.master, rest_size(row), index, rest);
  with_mode(row, [&](auto mode) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) weight[k] = join_weight<mode.value>(of_param, param[k], rest[k]);
  });
#pragma unroll
  for (int k = 0; k < kQuad; ++k) grad[k] = widened_bits(of_grad, bits[k]);
}

// What storage keeps of the weights comes back.
__device__ __forceinline__ void store_weights(const Row& row, const uint64_t& key, int64_t index,
                                              float (&weight)[kQuad]) {
  uint32_t param[kQuad], rest[kQuad];
  with_mode(row, [&](auto mode) {
    const int dtype = row.dtype[kParam];
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const auto parts = split_weight<mode.value>(dtype, weight[k], [&] { return drawn(row, key, index + k); });
      param[k] = parts.param, rest[k] = parts.rest, weight[k] = parts.kept;
    }
  });
  store_quad(row.param, param_size(row), index, param);
  store_quad(row.master, rest_size(row), index, rest);
}

}  // namespace mo
