// Weights that are finer than the 16-bit parameter that stands for them, and stochastic rounding: one element at a time, by
// its bits. MasterMode (csrc/abi.h) says where the rest of the weight lies. mo_fused/masters.py is the twin.
//   fp32        in the state, whole; the parameter is its rounded copy
//   split       bf16: a signed 16-bit remainder; with the parameter's bits it is the weight's, exactly
//   split8      bf16: a signed 8-bit remainder, whose last bit is rounded stochastically
//   kahan       a second number of the parameter's dtype: what rounding has lost (Kahan 1965)
//   stochastic  nowhere: the parameter is rounded up or down by chance, and right on average
// A bf16 parameter with a rest is rounded half away from zero (to even would leave 65,537 remainders for 16 bits).
#pragma once

#include "abi.h"
#include "rules/narrow.h"
#include "rules/random.h"

namespace mo {
namespace MO_ISA {

// U: uint32_t, or a vector of it. Comparisons of vectors are masks, so the branches are selections.
template <class U>
MO_RULE U nan_or(U u, U of_nan, U otherwise) {
  return (u & 0x7fffffffu) > 0x7f800000u ? of_nan : otherwise;
}

// bf16 bits of a weight, half away from zero.
template <class U>
MO_RULE U rounded_away(U u) {
  return nan_or(u, U((u >> 16) | 0x40u), U((u + 0x8000u) >> 16));
}

// The weight that an fp32 master and its bf16 parameter stand for: the master, unless somebody else has written the parameter,
// which is then no longer its rounded copy.
template <class U>
MO_RULE U followed_master(U master, U upper) {
  return rounded_away(master) == upper ? master : upper << 16;
}

// The weight of a parameter's bits and a remainder (its two's complement), and the remainder of a weight. A remainder that no
// weight has left beside this parameter, because somebody else has written the parameter, is none: below zero, above infinity.
template <class U>
MO_RULE U split_join(U upper, U low) {
  const U magnitude = upper & 0x7fffu, negative = low >> 31, none = low ^ low;
  const U above = negative == 0u ? low : none, below = negative == 0u ? none : low;
  const U kept = magnitude == 0u ? above : magnitude == 0x7f80u ? below : low;
  return (upper << 16) + kept;
}
template <class U>
MO_RULE U split_low(U u, U upper) {
  return nan_or(u, U(u ^ u), U(u - (upper << 16)));
}

// The 24 bits that split8 keeps of a weight, in place; the other eight are 0. Never from a finite number to infinity.
template <class U>
MO_RULE U rounded_24(U u, U random) {
  const U down = u & 0xffffff00u, kept = (u + (random >> 24)) & 0xffffff00u;
  return (kept & 0x7f800000u) == 0x7f800000u ? down : kept;
}

// What Kahan's second number adds to a parameter: at most half of the parameter's spacing, or somebody else has written that.
template <class V>
MO_RULE V kahan_join(const V& p, const V& lost, bool is_bf16) {
  const float half = is_bf16 ? 0x1p-8f : 0x1p-11f, least = is_bf16 ? 0x1p-134f : 0x1p-25f;
  const V size = p < 0.0f ? V(-p) : p, off = lost < 0.0f ? V(-lost) : lost;
  return off <= size * half + least ? V(p + lost) : p;
}

template <class U>
MO_RULE U stochastic_bf16(U u, U random) {
  const U up = (u & 0x7f800000u) == 0x7f800000u ? U(u ^ u) : U(random >> 16);
  return nan_or(u, U((u >> 16) | 0x40u), U((u + up) >> 16));
}

// fp16: 13 bits of a float are cut off, of a denormal more: those are counted in units of 2^-24.
MO_RULE f16 stochastic_f16(float x, uint32_t random) {
  const uint32_t u = float_bits(x), a = u & 0x7fffffffu;
  if (a >= 0x477fe000u) return narrow_f16(x);  // 65504 and above, infinite, NaN
  if (a >= 0x38800000u) return narrow_f16(bits_float((u & 0x80000000u) | ((a + (random >> 19)) & 0xffffe000u)));
  const float units = bits_float(a) * 0x1p24f;  // below 1024, exact
  const float down = float(int32_t(units));
  const float up = (units - down) * 0x1p24f > float(random >> 8) ? 1.0f : 0.0f;
  return narrow_f16(bits_float((u & 0x80000000u) | float_bits((down + up) * 0x1p-24f)));
}

}  // namespace MO_ISA
}  // namespace mo
