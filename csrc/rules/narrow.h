// Half-precision storage: bf16 and fp16 to float and back, round to nearest even, denormals kept, NaN stays NaN.
// Integer operations only, so that every backend gives the same bits (the CPU's own bf16 instruction flushes denormals).
#pragma once

#include <cstdint>
#include <cstring>

#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

MO_RULE uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
MO_RULE float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

MO_RULE float widen(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }

MO_RULE bf16 narrow_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((u >> 16) | 0x40u)};
  return bf16{uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

MO_RULE float widen(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));
  // Denormal: magnitude * 2^-24, exact in float.
  const float tiny = float(int32_t(magnitude)) * 5.9604644775390625e-8f;
  return bits_float(sign | float_bits(tiny));
}

MO_RULE f16 narrow_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u)};
  if (a >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (a >= 0x38800000u) {                                      // normal in fp16
    const uint32_t r = a - 0x38000000u;
    return f16{uint16_t(sign | ((r + 0x0fffu + ((r >> 13) & 1u)) >> 13))};
  }
  // Denormal or zero: adding 0.5 puts the last fp16 bit at the last float bit, and the addition rounds to nearest even.
  const uint32_t r = float_bits(bits_float(a) + 0.5f) - 0x3f000000u;
  return f16{uint16_t(sign | r)};
}

}  // namespace MO_ISA
}  // namespace mo
