// Moments in 8 or 4 bits: a code for each element and a float32 scale for each block of 32 to 256 consecutive elements.
// mo_fused/quantised.py is the twin, bit for bit.
//   value = scale * sign * ((1 + f) 2^e - 1)   with the code's magnitude = 2^M e + (2^M f), 0 <= f < 1
// so that steps are even around zero and grow with the value, as in the mu-law of ITU-T G.711; the largest magnitude of a
// block has the largest code. M (kMantissa) was chosen by the error of moments of a real run: bench/state_formats.py.
// Second moments are kept as their square roots, whose codes are never 0 but for a root of 0: a small second moment that
// became 0 would make the update huge.
//
// Rounding. An average that moves by less than half a step would never move at all, rounded to the nearest code. Roots
// (which move by 1 - beta2 of the difference) are therefore rounded stochastically, and so are signed values in the lowest
// segment, where a gradient that has become 0 leaves them; above it, where gradients move them by more than a step,
// rounding to nearest has half the variance. A running maximum (AMSGrad) is rounded to nearest: it only has to stay.
#pragma once

#include "abi.h"
#include "rules/narrow.h"
#include "rules/random.h"

namespace mo {
namespace MO_ISA {

constexpr int kLargestBlock = 256;

// What one QuantType (csrc/abi.h) is made of. kReach: the value of the largest code, before it is scaled.
template <int kType>
struct Code;
template <>
struct Code<kQ8> {
  static constexpr int kMantissa = 5, kBits = 8;
  static constexpr uint32_t kTop = 127, kLimit = 0x7f7fffffu;
  static constexpr float kReach = 14.75f;
  static constexpr bool kRoot = false;
};
template <>
struct Code<kQ8Root> {
  static constexpr int kMantissa = 7, kBits = 8;
  static constexpr uint32_t kTop = 255, kLimit = 0x5f7fffffu;  // the largest root whose square is finite
  static constexpr float kReach = 2.984375f;
  static constexpr bool kRoot = true;
};
template <>
struct Code<kQ4> {
  static constexpr int kMantissa = 2, kBits = 4;
  static constexpr uint32_t kTop = 7, kLimit = 0x7f7fffffu;
  static constexpr float kReach = 2.5f;
  static constexpr bool kRoot = false;
};
template <>
struct Code<kQ4Root> {
  static constexpr int kMantissa = 2, kBits = 4;
  static constexpr uint32_t kTop = 15, kLimit = 0x5f7fffffu;
  static constexpr float kReach = 13.0f;
  static constexpr bool kRoot = true;
};

// Of a number in two's complement; the vector form is in cpu/quantised.h.
MO_RULE uint32_t absolute(uint32_t x) { return int32_t(x) < 0 ? 0u - x : x; }

// `scale` is stored; values are multiplied by `inverse`, which is 2 / scale, before they are encoded. A NaN in a block makes
// it NaN: scale NaN, all codes 0 (valid = false). An infinite value counts as the largest finite one.
struct BlockScale {
  float scale, inverse;
  bool valid;
};
template <int kType>
MO_RULE BlockScale block_scale(uint32_t largest) {  // bits of the largest magnitude: finite < inf < NaN
  using C = Code<kType>;
  if (largest > 0x7f800000u) return BlockScale{bits_float(0x7fc00000u), 0.0f, false};
  const uint32_t least = 0x0d800000u;  // 2^-100: below it the inverse would overflow
  const float size = bits_float(largest < least ? least : largest > C::kLimit ? C::kLimit : largest);
  return BlockScale{size / C::kReach, C::kReach / size * 2.0f, true};
}

// The bits of 2 + 2 x, x >= 0 in units of the scale, hold the magnitude's code, which is that of x: its exponent, counted from
// that of 2, and M bits of its fraction are consecutive bits. (Of 1 + x the exponent would begin with an odd number.)
constexpr uint32_t kTwo = 0x40000000u;

// `random`: 16 random bits, or 2^15 for rounding to nearest. Bits above the code's are rubbish.
template <int kType, class V, class U>
MO_RULE U magnitude_code(const V& doubled, const U& random) {
  using C = Code<kType>;
  const V most = V{} + 2.0f * C::kReach;
  return (float_bits(V((doubled < most ? doubled : most) + 2.0f)) + (random << (7 - C::kMantissa))) >> (23 - C::kMantissa);
}

// The code of a value (of a root, where the type is one) in the lowest bits; those above are rubbish.
template <int kType, class V, class U>
MO_RULE U encode(const V& value, float inverse, const U& random) {
  using C = Code<kType>;
  if constexpr (C::kRoot) {
    const V least = V{} + 2.0f / (1 << C::kMantissa), x = value * inverse;
    return magnitude_code<kType>(value == 0.0f ? V{} : larger(x, least), random);
  } else {
    const U bits = float_bits(value);
    const V x = bits_float(U(bits & 0x7fffffffu)) * inverse;
    const U nearest = bits * 0u + 0x8000u;
    const U code = magnitude_code<kType>(x, x < 2.0f ? random : nearest) & C::kTop;
    const U negative = U(bits * 0u) - (bits >> 31);  // all ones or zero
    return (code ^ negative) - negative;
  }
}

// `code`: sign-extended where it has a sign. The value, or the root.
template <int kType, class U>
MO_RULE auto decode(const U& code, float scale) {
  using C = Code<kType>;
  const U magnitude = C::kRoot ? code : absolute(code);
  const auto x = (bits_float(U((magnitude << (23 - C::kMantissa)) | kTwo)) - 2.0f) * (scale * 0.5f);
  return C::kRoot ? x : bits_float(U(float_bits(x) ^ (code & 0x80000000u)));
}

}  // namespace MO_ISA
}  // namespace mo
