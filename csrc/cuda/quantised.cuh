// The update of rows with quantised states (rules/quantised.h), a warp at a time: 256 elements, which are whole
// blocks. First each lane steps four neighbouring elements, twice, and leaves their new moments in shared memory; then
// each takes eight, so that a block of 32 to 256 elements belongs to 4 to 32 lanes, its largest magnitude is found by
// shuffles, and scales and codes are written. In registers eight elements' moments would not fit beside the update.
#pragma once

#include "cuda/quads.cuh"
#include "cuda/update_sums.cuh"
#include "rules/quantised.h"

namespace mo {

constexpr int kWarps = kThreads / 32, kTile = 256;
constexpr int kRun = 8;  // elements of a lane in the second part; in the first kQuad

// ---- codes and scales

// Calls body(Kind<t>()) for the QuantType t of a state that holds roots, or of one that does not.
template <int kType>
struct Kind {
  static constexpr int value = kType;
  static constexpr int bits = MO_ISA::Code<kType>::kBits;
};
template <bool kRoots, class Body>
__device__ __forceinline__ auto with_kind(int dtype, Body body) {
  if constexpr (kRoots) {
    return dtype == kQ8Root ? body(Kind<kQ8Root>()) : body(Kind<kQ4Root>());
  } else {
    return dtype == kQ8 ? body(Kind<kQ8>()) : body(Kind<kQ4>());
  }
}

// One state slot of a row. Its codes begin at any byte.
struct Codes {
  uint64_t address;
  float* scales;
  int shift;  // from an element's index to its block's
  int dtype;
  __device__ __forceinline__ Codes(const Row& row, int slot, int to_block)
      : address(row.state[slot]),
        scales(as<float>(row.scale[slot])),
        shift(to_block),
        dtype(row.dtype[kState0 + slot]) {}

  __device__ __forceinline__ bool small() const { return dtype == kQ4 || dtype == kQ4Root; }
  __device__ __forceinline__ float& scale(int64_t index) const { return scales[index >> shift]; }

  // The codes of N elements (1 or 4) from `index`, a multiple of N, in the lowest bits.
  template <int N>
  __device__ __forceinline__ uint32_t load(int64_t index) const {
    const uint8_t* at = as<const uint8_t>(address) + (small() ? index / 2 : index);
    if constexpr (N == 1) return uint32_t(*at) >> (small() ? int(index) % 2 * 4 : 0);
    if ((address & 3) == 0) {
      return small() ? *reinterpret_cast<const uint16_t*>(at) : load_words(reinterpret_cast<const uint32_t*>(at));
    }
    const uint32_t low = at[0] | uint32_t(at[1]) << 8;
    return small() ? low : low | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
  }

  // N of them, from the one at place `from`.
  template <bool kRoots, int N>
  __device__ __forceinline__ void decode(uint32_t word, int from, float scale, float (&value)[N]) const {
    with_kind<kRoots>(dtype, [&](auto kind) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const uint32_t upper = word << (32 - (from + k + 1) * kind.bits);
        const uint32_t code = kRoots ? upper >> (32 - kind.bits) : uint32_t(int32_t(upper) >> (32 - kind.bits));
        value[k] = MO_ISA::decode<kind.value>(code, scale);
      }
    });
  }

  // Encodes a run in a block with this largest magnitude. Random bits are 16 of each word, the lowest but for `skip`.
  template <bool kRoots>
  __device__ __forceinline__ void store(int64_t index, uint32_t largest, const uint32_t (&bits)[kRun],
                                        const uint32_t (&random)[kRun], int skip, bool first) const {
    with_kind<kRoots>(dtype, [&](auto kind) {
      const MO_ISA::BlockScale found = MO_ISA::block_scale<kind.value>(largest);
      uint32_t words[2] = {};
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const float value = MO_ISA::bits_float(bits[k]);
        const uint32_t code = MO_ISA::encode<kind.value>(value, found.inverse, random[k] >> skip & 0xffffu);
        words[k * kind.bits / 32] |= (code & ((1u << kind.bits) - 1u)) << (k * kind.bits % 32);
      }
      if (!found.valid) words[0] = words[1] = 0;
      uint8_t* at = as<uint8_t>(address) + index / (8 / kind.bits);
      if ((address & 7) != 0) {
#pragma unroll
        for (int b = 0; b < kind.bits; ++b) at[b] = uint8_t(words[b / 4] >> (b % 4 * 8));
      } else if (kind.bits == 8) {
        store_words(reinterpret_cast<uint2*>(at), uint2{words[0], words[1]});
      } else {
        store_words(reinterpret_cast<uint32_t*>(at), words[0]);
      }
      if (first) scale(index) = found.scale;
    });
  }
};

// The largest bits among the lanes that share a block. All lanes of the warp take part.
__device__ __forceinline__ uint32_t block_largest(uint32_t bits, int lanes) {
#pragma unroll 1
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    bits = Larger()(bits, __shfl_xor_sync(0xffffffffu, bits, distance));
  }
  return bits;
}

// ---- a chunk

// Bits of the new states of a warp's elements: slots 0 and 1. AMSGrad's running maximum is made again from its code
// and the root of slot 1.
template <int kKept>
struct WarpTile {
  alignas(16) uint32_t bits[kKept][kTile];
};
template <int kKept>
__device__ __forceinline__ WarpTile<kKept>& warp_tile() {
  __shared__ WarpTile<kKept> tiles[kWarps];
  return tiles[threadIdx.x / 32];
}

// The root of a running maximum: square roots keep the order of what they are taken of. A NaN that is there stays.
__device__ __forceinline__ float running_root(float old, float now) {
  const float root = MO_ISA::square_root(old * old);
  return root > now || root != root ? root : now;
}

// kSlots: the most state slots of a row, of which all but the first hold roots.
// rule(weight, grad, state) takes the step of one element and returns the update. State is as it is kept: not squared;
// the rule leaves slot 2 alone.
template <int kSlots, int kSums, class Rule>
struct Quantised {
  static constexpr int kKept = kSlots < 2 ? kSlots : 2;
  const Row& row;
  const int slots;
  const uint64_t &weight_key, &state_key;
  const int shift;  // of an element's index to its block's
  WarpTile<kKept>& tile;
  UpdateSums<kSums, float>& sums;
  Rule rule;

  __device__ __forceinline__ Codes codes(int slot) const { return Codes(row, slot, shift); }

  // N codes of each slot, and their scales.
  template <int N>
  __device__ __forceinline__ void load(int64_t index, uint32_t (&words)[kSlots], float (&scales)[kSlots]) const {
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      const bool there = n < slots;
      words[n] = there ? codes(n).template load<N>(index) : 0;
      scales[n] = there ? codes(n).scale(index) : 0.0f;
    }
  }

  // N elements whose codes begin at place `from` of the words; the first is number `at` of the tile.
  template <int N>
  __device__ __forceinline__ void step(const uint32_t (&words)[kSlots], const float (&scales)[kSlots], int from, int at,
                                       float* weight, const float* grad) {
    float state[kSlots][N];
    codes(0).template decode<false>(words[0], from, scales[0], state[0]);
#pragma unroll
    for (int n = 1; n < kSlots; ++n) codes(n).template decode<true>(words[n], from, scales[n], state[n]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float of_element[kSlots];
#pragma unroll
      for (int n = 0; n < kSlots; ++n) of_element[n] = state[n][k];
      sums.add_update(rule(weight[k], grad[k], of_element));
#pragma unroll
      for (int n = 0; n < kKept; ++n) state[n][k] = of_element[n];
    }
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
      uint32_t* to = &tile.bits[n][at];
      const auto bits = [&](int k) { return MO_ISA::float_bits(state[n][k]); };
      if constexpr (N == 2) *reinterpret_cast<uint2*>(to) = uint2{bits(0), bits(1)};
      else *to = bits(0);
    }
  }

  __device__ __forceinline__ void quad(int64_t index, int at) {
    float weight[kQuad], before[kQuad], grad[kQuad], scales[kSlots];
    uint32_t words[kSlots];
    load<kQuad>(index, words, scales);
    load_quads(row, index, weight, grad);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) before[k] = weight[k];
#pragma unroll
    for (int k = 0; k < kQuad; k += 2) step<2>(words, scales, k, at + k, weight + k, grad + k);
    store_weights(row, weight_key, index, weight);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) sums.add_kept(weight[k] - before[k], weight[k]);
  }

  __device__ __forceinline__ void single(int64_t index, int at) {
    // Places are found again rather than kept: registers are what is short here.
    const auto place_of = [&] { return WeightPlace{place(row, kParam, index), place(row, kMaster, index)}; };
    const float before = load_weight(row, place_of());
    const float grad = load_any<float>(row.grad, row.dtype[kGrad], place(row, kGrad, index));
    float weight = before, scales[kSlots];
    uint32_t words[kSlots];
    load<1>(index, words, scales);
    step<1>(words, scales, 0, at, &weight, &grad);
    const float kept = store_weight(row, weight_key, index, place_of(), weight);
    sums.add_kept(kept - before, kept);
  }

  // Scales and codes of the run that is number `lane` of the tile. All lanes of the warp take part.
  __device__ __forceinline__ void encode(int64_t index, int lane, bool there) {
    uint32_t random[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) random[k] = drawn(row, state_key, index + k);
    const bool first = (index & (row.block - 1)) == 0;
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      if (n >= slots) break;
      const uint4* quads = reinterpret_cast<const uint4*>(&tile.bits[n < 2 ? n : 1][lane * kRun]);
      const uint4 a = quads[0], b = quads[1];
      uint32_t bits[kRun] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      if (n == 2 && there) {
        const float scale = codes(n).scale(index);
#pragma unroll
        for (int q = 0; q < kRun; q += kQuad) {
          float old[kQuad];
          codes(n).template decode<true>(codes(n).template load<kQuad>(index + q), 0, scale, old);
#pragma unroll
          for (int k = 0; k < kQuad; ++k) {
            bits[q + k] = MO_ISA::float_bits(running_root(old[k], MO_ISA::bits_float(bits[q + k])));
            random[q + k] = 0x8000u;
          }
        }
      }
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < kRun; ++k) largest = Larger()(largest, bits[k] & 0x7fffffffu);
      largest = block_largest(largest, int(row.block) / kRun);
      if (!there) continue;
      if (n == 0) codes(n).template store<false>(index, largest, bits, random, 16, first);
      else codes(n).template store<true>(index, largest, bits, random, 0, first);
    }
  }
};

template <int kSlots, int kSums, class Rule>
__device__ __forceinline__ void quantised_chunk(const Row& row, const DeviceChunk& chunk, const RowScalars& rs,
                                                int slots, UpdateSums<kSums, float>& sums, Rule rule) {
  int shift = 5;
  while ((int64_t(1) << shift) < row.block) ++shift;
  Quantised<kSlots, kSums, Rule> work{row, slots, shared_key<kMaster>(row, rs), shared_key<kState0>(row, rs), shift,
                                      warp_tile<Quantised<kSlots, kSums, Rule>::kKept>(), sums, rule};
  const int lane = threadIdx.x % 32, length = int(chunk.length);  // whole blocks, and so whole quads and runs
  const bool quads = has_quads(row);
#pragma unroll 1
  for (int begin = int(threadIdx.x) / 32 * kTile; begin < length; begin += kWarps * kTile) {
    const int end = begin + kTile < length ? begin + kTile : length;
    __syncwarp();  // the tile before has been read
    if (quads) {
#pragma unroll 1
      for (int i = begin + lane * kQuad; i < end; i += 32 * kQuad) work.quad(chunk.start + i, i % kTile);
    } else {
#pragma unroll 1
      for (int i = begin + lane; i < end; i += 32) work.single(chunk.start + i, i % kTile);
    }
    __syncwarp();
    work.encode(chunk.start + begin + lane * kRun, lane, begin + lane * kRun < length);
  }
}

}  // namespace mo
