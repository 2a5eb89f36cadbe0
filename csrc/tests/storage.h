// Storage formats as arithmetic says they are, in double: what csrc/rules/narrow.h is measured against. Nothing here
// shares code or method with it: that file shifts bits, this one scales by powers of two and rounds with nearbyint.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"

namespace storage {

struct Format {
  int precision;  // significand bits, the implied one included
  int min_exponent, max_exponent;
};
constexpr Format kBfloat16{8, -126, 127};
constexpr Format kHalf{11, -14, 15};

// The number that 16 bits stand for.
inline double decode(uint16_t bits, const Format& f) {
  const int fraction_bits = f.precision - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int field = (bits & 0x7fff) >> fraction_bits;
  const int all_ones = (1 << (15 - fraction_bits)) - 1;
  double magnitude;
  if (field == all_ones) {
    magnitude = fraction ? std::nan("") : INFINITY;
  } else if (field == 0) {
    magnitude = std::ldexp(fraction, f.min_exponent - fraction_bits);
  } else {
    magnitude = std::ldexp(fraction + (1 << fraction_bits), f.min_exponent + field - 1 - fraction_bits);
  }
  return std::copysign(magnitude, bits & 0x8000 ? -1.0 : 1.0);
}

// The nearest 16-bit number, ties to even (the rounding mode in force); every NaN becomes one.
inline uint16_t encode(double x, const Format& f) {
  const int fraction_bits = f.precision - 1;
  const int all_ones = (1 << (15 - fraction_bits)) - 1;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return uint16_t(all_ones << fraction_bits | 1 << (fraction_bits - 1));
  const double magnitude = std::fabs(x);
  if (magnitude == 0.0) return sign;
  int exponent = std::isinf(x) ? f.max_exponent + 1 : std::ilogb(magnitude);
  if (exponent < f.min_exponent) exponent = f.min_exponent;
  if (exponent > f.max_exponent) return uint16_t(sign | all_ones << fraction_bits);
  // A whole number of units in the last place; both steps are exact but for the rounding that is asked for.
  const int units = int(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  // Units of a denormal number are its bits; adding them also carries into the next exponent, and into infinity.
  return uint16_t(sign | (units + ((exponent - f.min_exponent) << fraction_bits)));
}

inline int64_t size_of(mo::DType dtype) { return dtype == mo::kF64 ? 8 : dtype == mo::kF32 ? 4 : 2; }

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

inline const std::vector<double>& decoded(const Format& f) {
  static const auto table = [](const Format& format) {
    std::vector<double> values(65536);
    for (int i = 0; i < 65536; ++i) values[size_t(i)] = decode(uint16_t(i), format);
    return values;
  };
  static const std::vector<double> bfloat16 = table(kBfloat16), half = table(kHalf);
  return f.precision == kHalf.precision ? half : bfloat16;
}

// One element of any storage type.
inline double read(const void* at, mo::DType dtype) {
  if (dtype == mo::kF64) {
    double x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  if (dtype == mo::kF32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return double(x);
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return decoded(dtype == mo::kBF16 ? kBfloat16 : kHalf)[bits];
}

// Half precision is reached through float, as a cast in torch does.
inline void write(void* at, double x, mo::DType dtype) {
  if (dtype == mo::kF64) {
    std::memcpy(at, &x, sizeof x);
    return;
  }
  const float rounded = float(x);
  if (dtype == mo::kF32) {
    std::memcpy(at, &rounded, sizeof rounded);
    return;
  }
  const uint16_t bits = encode(double(rounded), dtype == mo::kBF16 ? kBfloat16 : kHalf);
  std::memcpy(at, &bits, sizeof bits);
}

// Bits of an element in which all NaNs are one; two elements are the same when these are.
inline uint64_t comparable(const void* at, mo::DType dtype) {
  const double x = read(at, dtype);
  return x != x ? ~uint64_t(0) : bits_as<uint64_t>(x);
}

}  // namespace storage
