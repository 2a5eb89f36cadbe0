// Weights that are finer than their 16-bit parameter (rules/master.h), one element at a time.
#pragma once

#include "cuda/chunk.cuh"
#include "rules/master.h"

namespace mo {

// Where an element of a row lies in the parameter and in the rest of the weights.
struct WeightPlace {
  int64_t param, rest;
};

__device__ __forceinline__ float load_weight(const Row& row, WeightPlace at) {
  const auto upper = [&] { return uint32_t(as<const uint16_t>(row.param)[at.param]); };
  switch (row.master_mode) {
    case kMaster32: {
      const float master = as<const float>(row.master)[at.rest];
      if (row.dtype[kParam] == kBF16) {
        return MO_ISA::bits_float(MO_ISA::followed_master(MO_ISA::float_bits(master), upper()));
      }
      return MO_ISA::narrow_f16(master).bits == upper() ? master : load_any<float>(row.param, kF16, at.param);
    }
    case kSplit: {
      const uint32_t low = uint32_t(int32_t(as<const int16_t>(row.master)[at.rest]));
      return MO_ISA::bits_float(MO_ISA::split_join(upper(), low));
    }
    case kSplit8: {
      const uint32_t low = uint32_t(int32_t(as<const int8_t>(row.master)[at.rest]) * 256);
      return MO_ISA::bits_float(MO_ISA::split_join(upper(), low));
    }
    case kKahan: {
      const int dtype = row.dtype[kParam];
      const float p = load_any<float>(row.param, dtype, at.param), lost = load_any<float>(row.master, dtype, at.rest);
      return MO_ISA::kahan_join(p, lost, dtype == kBF16);
    }
    default: return load_any<float>(row.param, row.dtype[kParam], at.param);
  }
}

// The key of the row's random numbers in this step, in shared memory: a register less in the loops. All threads call it.
__device__ __forceinline__ const uint64_t& shared_key(const Row& row, const RowScalars& rs) {
  __shared__ uint64_t key;
  __syncthreads();  // the chunk before may still be drawing
  if (threadIdx.x == 0) key = MO_ISA::step_key(row.stream, rs.step, kMaster);
  __syncthreads();
  return key;
}

// Stores element `index` of the row; returns what storage keeps of it.
__device__ __forceinline__ float store_weight(const Row& row, const uint64_t& key, int64_t index, WeightPlace at, float x) {
  const int dtype = row.dtype[kParam];
  uint16_t* p = as<uint16_t>(row.param) + at.param;
  uint32_t u = MO_ISA::float_bits(x);
  const auto random = [&] { return MO_ISA::draw(uint32_t(index), uint32_t(uint64_t(index) >> 32), key); };
  switch (row.master_mode) {
    case kMaster32:
      as<float>(row.master)[at.rest] = x;
      *p = dtype == kBF16 ? uint16_t(MO_ISA::rounded_away(u)) : MO_ISA::narrow_f16(x).bits;
      return x;
    case kSplit:
      *p = uint16_t(MO_ISA::rounded_away(u));
      as<int16_t>(row.master)[at.rest] = int16_t(MO_ISA::split_low(u, uint32_t(*p)));
      return x;
    case kSplit8:
      u = MO_ISA::rounded_24(u, random());
      *p = uint16_t(MO_ISA::rounded_away(u));
      as<int8_t>(row.master)[at.rest] = int8_t(MO_ISA::split_low(u, uint32_t(*p)) >> 8);
      return MO_ISA::bits_float(u);
    case kKahan: {
      const float kept = kept_any(dtype, x), lost = x - kept;
      store_any(row.param, dtype, at.param, x);
      store_any(row.master, dtype, at.rest, lost - lost == 0.0f ? lost : 0.0f);
      return load_weight(row, at);
    }
    default:
      *p = dtype == kBF16 ? uint16_t(MO_ISA::stochastic_bf16(u, random())) : MO_ISA::stochastic_f16(x, random()).bits;
      return load_weight(row, at);
  }
}

}  // namespace mo
