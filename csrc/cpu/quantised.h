// Tiles of quantised moments (rules/quantised.h): decoded from codes and scales, encoded again block by block.
#pragma once

#include "abi.h"
#include "cpu/draws.h"
#include "cpu/lanes.h"
#include "cpu/span.h"

namespace mo {
namespace MO_ISA {

MO_RULE u32v float_bits(const f32v& x) { return (u32v)x; }
MO_RULE f32v bits_float(const u32v& u) { return (f32v)u; }
MO_RULE u32v absolute(const u32v& x) {
#if defined(__AVX512F__)
  return (u32v)_mm512_abs_epi32((__m512i)x);
#elif defined(__AVX2__)
  return (u32v)_mm256_abs_epi32((__m256i)x);
#else
  return (i32v)x < 0 ? u32v(0u - x) : x;
#endif
}

}  // namespace MO_ISA
}  // namespace mo

#include "rules/quantised.h"  // after the vector forms of what it calls

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

// Bytes that n codes take.
template <int kType>
constexpr int64_t code_bytes(int64_t n) {
  return n * Code<kType>::kBits / 8;
}

// A vector of codes from and to memory, sign-extended where they have a sign.
template <int kType>
MO_RULE u32v load_codes(const uint8_t* p) {
  if constexpr (kType == kQ8) {
    return load_wide(reinterpret_cast<const int8_t*>(p));
  } else if constexpr (kType == kQ8Root) {
    return load_wide(reinterpret_cast<const int8_t*>(p)) & 0xffu;
  } else {
    const u32v code = load_nibbles(p);
    return kType == kQ4 ? (u32v)((i32v)(code << 28) >> 28) : code;
  }
}
template <int kType>
MO_RULE void store_codes(uint8_t* p, const u32v& code) {
  if constexpr (Code<kType>::kBits == 8) {
    store_low(reinterpret_cast<int8_t*>(p), code);
  } else {
    store_nibbles(p, code);
  }
}

MO_RULE u32v larger(const u32v& a, const u32v& b) {  // of magnitudes
  const i32v x = (i32v)a, y = (i32v)b;
  return (u32v)(x > y ? x : y);
}
MO_RULE uint32_t largest_of(const u32v& a) {
  uint32_t largest = 0;
  for (int i = 0; i < Vec<float>::width; ++i) largest = a[i] > largest ? a[i] : largest;
  return largest;
}

// Random bits of 16 for the elements of a block: the upper half of a draw for the first state, the lower for the second,
// and for the third, a running maximum, what rounds to nearest.
template <int kOperand>
MO_RULE u32v rounding_bits(const u32v& drawn) {
  return kOperand == kState0 ? u32v(drawn >> 16) : kOperand == kState1 ? u32v(drawn & 0xffffu) : u32v(drawn * 0u + 0x8000u);
}

// Encodes the block of n values (roots, where the type is one) that begins at element `first` of the row.
template <int kType, int kOperand>
inline void encode_block(uint8_t* codes, float& scale, const float* values, uint32_t largest, const Draws& draws, int64_t n) {
  const BlockScale s = block_scale<kType>(largest);
  scale = s.scale;
  if (!s.valid) {
    memset(codes, 0, size_t(code_bytes<kType>(n)));
    return;
  }
  for (int64_t i = 0; i < n; i += Vec<float>::width) {
    const u32v drawn = kOperand == kState2 ? u32v{} : draws.vector(i);
    store_codes<kType>(codes + code_bytes<kType>(i),
                       encode<kType>(load(values + i), s.inverse, rounding_bits<kOperand>(drawn)));
  }
}

// Elements [first, first + n) of a state, whole blocks, in float; and back.
template <int kType>
inline void decode_tile(float* to, const Row& row, int operand, int64_t first, int64_t n) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(row.state[operand - kState0]) + code_bytes<kType>(first);
  const float* scale = reinterpret_cast<const float*>(row.scale[operand - kState0]) + first / row.block;
  for (int64_t b = 0; b < n; b += row.block, ++scale) {
    for (int64_t i = b; i < b + row.block; i += Vec<float>::width) {
      const f32v x = decode<kType>(load_codes<kType>(codes + code_bytes<kType>(i)), *scale);
      store(to + i, Code<kType>::kRoot ? f32v(x * x) : x);
    }
  }
}
template <int kType, int kOperand>
inline void encode_tile(float* from, const Row& row, uint64_t key, int64_t first, int64_t n) {
  uint8_t* codes = reinterpret_cast<uint8_t*>(row.state[kOperand - kState0]) + code_bytes<kType>(first);
  float* scale = reinterpret_cast<float*>(row.scale[kOperand - kState0]) + first / row.block;
  for (int64_t b = 0; b < n; b += row.block, ++scale) {
    u32v largest = {};
    for (int64_t i = b; i < b + row.block; i += Vec<float>::width) {
      f32v x = load(from + i);
      if (Code<kType>::kRoot) store(from + i, x = square_root(x));
      largest = larger(largest, u32v(float_bits(x) & 0x7fffffffu));
    }
    encode_block<kType, kOperand>(codes + code_bytes<kType>(b), *scale, from + b, largest_of(largest),
                                  Draws{key, row.offset + first + b}, row.block);
  }
}

inline void load_quantised(float* to, const Row& row, int operand, int64_t first, int64_t n) {
  switch (row.dtype[operand]) {
    case kQ8: return decode_tile<kQ8>(to, row, operand, first, n);
    case kQ8Root: return decode_tile<kQ8Root>(to, row, operand, first, n);
    case kQ4: return decode_tile<kQ4>(to, row, operand, first, n);
    default: decode_tile<kQ4Root>(to, row, operand, first, n);
  }
}
// `from` is rubbish afterwards.
template <int kOperand>
inline void store_quantised(float* from, const Row& row, uint64_t key, int64_t first, int64_t n) {
  switch (row.dtype[kOperand]) {
    case kQ8: return encode_tile<kQ8, kOperand>(from, row, key, first, n);
    case kQ8Root: return encode_tile<kQ8Root, kOperand>(from, row, key, first, n);
    case kQ4: return encode_tile<kQ4, kOperand>(from, row, key, first, n);
    default: encode_tile<kQ4Root, kOperand>(from, row, key, first, n);
  }
}
inline void store_quantised(int operand, float* from, const Row& row, uint64_t key, int64_t first, int64_t n) {
  if (operand == kState0) return store_quantised<kState0>(from, row, key, first, n);
  if (operand == kState1) return store_quantised<kState1>(from, row, key, first, n);
  store_quantised<kState2>(from, row, key, first, n);
}

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
