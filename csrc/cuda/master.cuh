// Weights that are finer than their 16-bit parameter (rules/master.h), one element at a time.
#pragma once

#include "cuda/chunk.cuh"
#include "rules/master.h"

namespace mo {

// Where an element of a row lies in the parameter and in the rest of the weights.
struct WeightPlace {
  int64_t param, rest;
};

// Calls body(Mode<m>()) for the MasterMode m of the row.
template <int kMode>
struct Mode {
  static constexpr int value = kMode;
};
template <class Body>
__device__ __forceinline__ auto with_mode(const Row& row, Body body) {
  switch (row.master_mode) {
    case kNoMaster: return body(Mode<kNoMaster>());
    case kMaster32: return body(Mode<kMaster32>());
    case kSplit: return body(Mode<kSplit>());
    case kSplit8: return body(Mode<kSplit8>());
    case kKahan: return body(Mode<kKahan>());
    default: return body(Mode<kStochastic>());
  }
}

// Bytes of an element of the rest.
__device__ __forceinline__ int rest_size(const Row& row) {
  switch (row.master_mode) {
    case kMaster32: return 4;
    case kSplit: case kKahan: return 2;
    case kSplit8: return 1;
    default: return 0;
  }
}

// An element of any dtype but float64 from its bits, and its bits.
__device__ __forceinline__ float widened_bits(int dtype, uint32_t bits) {
  return dtype == kF32    ? MO_ISA::bits_float(bits)
         : dtype == kBF16 ? MO_ISA::bits_float(bits << 16)
                          : MO_ISA::widen(f16{uint16_t(bits)});
}
__device__ __forceinline__ uint32_t narrowed_bits(int dtype, float x) {
  return dtype == kF32    ? MO_ISA::float_bits(x)
         : dtype == kBF16 ? uint32_t(MO_ISA::narrow_bf16(x).bits)
                          : uint32_t(MO_ISA::narrow_f16(x).bits);
}

// The weight that the bits of a parameter and of its rest (zeros above its size) stand for.
template <int kMode>
__device__ __forceinline__ float join_weight(int dtype, uint32_t param, uint32_t rest) {
  if constexpr (kMode == kMaster32) {
    if (dtype == kBF16) return MO_ISA::bits_float(MO_ISA::followed_master(rest, param));
    const float master = MO_ISA::bits_float(rest);
    return MO_ISA::narrow_f16(master).bits == param ? master : widened_bits(kF16, param);
  } else if constexpr (kMode == kSplit) {
    return MO_ISA::bits_float(MO_ISA::split_join(param, uint32_t(int32_t(int16_t(rest)))));
  } else if constexpr (kMode == kSplit8) {
    return MO_ISA::bits_float(MO_ISA::split_join(param, uint32_t(int32_t(int8_t(rest)) * 256)));
  } else if constexpr (kMode == kKahan) {
    return MO_ISA::kahan_join(widened_bits(dtype, param), widened_bits(dtype, rest), dtype == kBF16);
  } else {
    return widened_bits(dtype, param);
  }
}

// The other way: what storage keeps of a weight. random(): 32 bits, called where they are needed.
struct WeightParts {
  uint32_t param, rest;
  float kept;
};
template <int kMode, class Draw>
__device__ __forceinline__ WeightParts split_weight(int dtype, float x, Draw random) {
  uint32_t u = MO_ISA::float_bits(x);
  if constexpr (kMode == kNoMaster) {
    const uint32_t param = narrowed_bits(dtype, x);
    return {param, 0, widened_bits(dtype, param)};
  } else if constexpr (kMode == kMaster32) {
    return {dtype == kBF16 ? MO_ISA::rounded_away(u) : uint32_t(MO_ISA::narrow_f16(x).bits), u, x};
  } else if constexpr (kMode == kSplit) {
    const uint32_t param = MO_ISA::rounded_away(u) & 0xffffu;
    return {param, MO_ISA::split_low(u, param), x};
  } else if constexpr (kMode == kSplit8) {
    u = MO_ISA::rounded_24(u, random());
    const uint32_t param = MO_ISA::rounded_away(u) & 0xffffu;
    return {param, MO_ISA::split_low(u, param) >> 8, MO_ISA::bits_float(u)};
  } else if constexpr (kMode == kKahan) {
    const uint32_t param = narrowed_bits(dtype, x);
    const float lost = x - widened_bits(dtype, param);
    const uint32_t rest = narrowed_bits(dtype, lost - lost == 0.0f ? lost : 0.0f);
    return {param, rest, join_weight<kKahan>(dtype, param, rest)};
  } else {
    const uint32_t param = dtype == kBF16 ? MO_ISA::stochastic_bf16(u, random()) & 0xffffu
                                          : uint32_t(MO_ISA::stochastic_f16(x, random()).bits);
    return {param, 0, widened_bits(dtype, param)};
  }
}

// An element of 1, 2 or 4 bytes, by its bits.
__device__ __forceinline__ uint32_t load_bits(uint64_t address, int size, int64_t i) {
  switch (size) {
    case 4: return as<const uint32_t>(address)[i];
    case 2: return as<const uint16_t>(address)[i];
    case 1: return as<const uint8_t>(address)[i];
    default: return 0;
  }
}
__device__ __forceinline__ void store_bits(uint64_t address, int size, int64_t i, uint32_t bits) {
  switch (size) {
    case 4: as<uint32_t>(address)[i] = bits; return;
    case 2: as<uint16_t>(address)[i] = uint16_t(bits); return;
    case 1: as<uint8_t>(address)[i] = uint8_t(bits); return;
    default: return;
  }
}

__device__ __forceinline__ float load_weight(const Row& row, WeightPlace at) {
  const int size = row.dtype[kParam] == kF32 ? 4 : 2;
  const uint32_t param = load_bits(row.param, size, at.param), rest = load_bits(row.master, rest_size(row), at.rest);
  return with_mode(row, [&](auto mode) { return join_weight<mode.value>(row.dtype[kParam], param, rest); });
}

// The key of a slot's random numbers in this step, in shared memory: a register less in the loops. All threads call it.
template <int kSlot>
__device__ __forceinline__ const uint64_t& shared_key(const Row& row, const RowScalars& rs) {
  __shared__ uint64_t key;
  __syncthreads();  // the chunk before may still be drawing
  if (threadIdx.x == 0) key = MO_ISA::step_key(row.stream, rs.step, kSlot);
  __syncthreads();
  return key;
}

// 32 random bits for element `index` of the row.
__device__ __forceinline__ uint32_t drawn(const Row& row, const uint64_t& key, int64_t index) {
  index += row.offset;
  return MO_ISA::draw(uint32_t(index), uint32_t(uint64_t(index) >> 32), key);
}

// Stores element `index` of the row; returns what storage keeps of it.
__device__ __forceinline__ float store_weight(const Row& row, const uint64_t& key, int64_t index, WeightPlace at,
                                              float x) {
  const int dtype = row.dtype[kParam];
  const WeightParts parts = with_mode(row, [&](auto mode) {
    return split_weight<mode.value>(dtype, x, [&] { return drawn(row, key, index); });
  });
  store_bits(row.param, dtype == kF32 ? 4 : 2, at.param, parts.param);
  store_bits(row.master, rest_size(row), at.rest, parts.rest);
  return parts.kept;
}

}  // namespace mo
