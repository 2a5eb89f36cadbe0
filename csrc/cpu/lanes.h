// Vectors of the width that the instruction set has, as GCC vector types: + - * / and comparisons are the compiler's.
// Only what it does badly by itself is here: square root, and widening and narrowing of half-precision storage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rules/master.h"
#include "rules/narrow.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Reductions keep this many partial sums whatever the width, so that their order is the same on every machine.
constexpr int kLanesF32 = 16;
constexpr int kLanesF64 = 8;

typedef float f32v __attribute__((vector_size(kVectorBytes)));
typedef double f64v __attribute__((vector_size(kVectorBytes)));
typedef int32_t i32v __attribute__((vector_size(kVectorBytes)));
typedef uint32_t u32v __attribute__((vector_size(kVectorBytes)));
typedef int64_t i64v __attribute__((vector_size(kVectorBytes)));
typedef uint16_t u16v __attribute__((vector_size(kVectorBytes / 2)));  // as many elements as f32v

template <class T>
struct Vec;
template <>
struct Vec<float> {
  using type = f32v;
  using bits = i32v;
  static constexpr int width = kVectorBytes / 4;
  static constexpr int lanes = kLanesF32;
};
template <>
struct Vec<double> {
  using type = f64v;
  using bits = i64v;
  static constexpr int width = kVectorBytes / 8;
  static constexpr int lanes = kLanesF64;
};

// No explicit specialisation: clang gives it external linkage, so that two objects that include this would not link.
template <class V>
constexpr int kWidthOf = std::is_same<V, f64v>::value ? Vec<double>::width : Vec<float>::width;

MO_RULE f32v square_root(const f32v& x) {
#if defined(__AVX512F__)
  return (f32v)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (f32v)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
  return (f32v)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
  return (f32v)vsqrtq_f32((float32x4_t)x);
#else
  f32v r;
  for (int i = 0; i < Vec<float>::width; ++i) r[i] = __builtin_sqrtf(x[i]);
  return r;
#endif
}

MO_RULE f64v square_root(const f64v& x) {
#if defined(__AVX512F__)
  return (f64v)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  return (f64v)_mm256_sqrt_pd((__m256d)x);
#elif defined(__x86_64__)
  return (f64v)_mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
  return (f64v)vsqrtq_f64((float64x2_t)x);
#else
  f64v r;
  for (int i = 0; i < Vec<double>::width; ++i) r[i] = __builtin_sqrt(x[i]);
  return r;
#endif
}

MO_RULE f32v larger(const f32v& x, const f32v& y) {
#if defined(__AVX512F__)
  return (f32v)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (f32v)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

MO_RULE f32v load(const float* p) {
  f32v v;
  memcpy(&v, p, sizeof v);
  return v;
}
MO_RULE f64v load(const double* p) {
  f64v v;
  memcpy(&v, p, sizeof v);
  return v;
}
MO_RULE void store(float* p, const f32v& v) { memcpy(p, &v, sizeof v); }
MO_RULE void store(double* p, const f64v& v) { memcpy(p, &v, sizeof v); }

// The value that bf16 keeps, in the upper half of each 32-bit lane; the lower half is rubbish.
MO_RULE u32v round_number_bf16(const f32v& x) {
  const u32v u = (u32v)x;
  return u + (((u >> 16) & 1u) + 0x7fffu);
}
MO_RULE u32v round_bf16(const f32v& x) {
  const i32v nan = x != x;
  return nan ? ((u32v)x | 0x400000u) : round_number_bf16(x);
}

// __builtin_convertvector between 16 and 32 bits is right but slow (GCC 12 halves the vectors), hence the instructions.
MO_RULE f32v load(const bf16* p) {
#if defined(__AVX512F__)
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  u16v h;
  memcpy(&h, p, sizeof h);
  return (f32v)(__builtin_convertvector(h, u32v) << 16);
#endif
}

MO_RULE void store(bf16* p, const f32v& x) {
  const u32v upper = round_bf16(x) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)upper));
#else
  const u16v h = __builtin_convertvector(upper, u16v);
  memcpy(p, &h, sizeof h);
#endif
}

MO_RULE f32v load(const f16* p) {
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  f32v r = {};
  for (int i = 0; i < Vec<float>::width; ++i) r[i] = widen(p[i]);
  return r;
#endif
}

MO_RULE void store(f16* p, const f32v& x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < Vec<float>::width; ++i) p[i] = narrow_f16(x[i]);
#endif
}

// Two vectors at once. An element-wise rule does not mind in which order it sees its elements, as long as every operand
// has the same one: where all of them are bf16, even and odd elements are split by a shift and a mask, which costs a
// fraction of putting them in sequence.
enum class Order { kSequence, kEvenOdd };

template <Order order, class S, class V>
MO_RULE void load2(const S* p, V& a, V& b) {
  if constexpr (order == Order::kEvenOdd) {
    u32v pairs;
    memcpy(&pairs, p, sizeof pairs);
    a = (f32v)(pairs << 16);
    b = (f32v)(pairs & 0xffff0000u);
  } else {
    a = load(p);
    b = load(p + kWidthOf<V>);
  }
}

template <Order order, class S, class V>
MO_RULE void store2(S* p, const V& a, const V& b) {
  if constexpr (order == Order::kEvenOdd) {
    // Every operand was bf16 and scalars have plain NaNs, so a NaN here is quiet and has a lower half of zeros:
    // rounding cannot carry it over into another value, and the test for it falls away.
    const u32v pairs = (round_number_bf16(a) >> 16) | (round_number_bf16(b) & 0xffff0000u);
    memcpy(p, &pairs, sizeof pairs);
  } else {
    store(p, a);
    store(p + kWidthOf<V>, b);
  }
}

// Integers of 16 and 8 bits as 32, and the lower bits of 32 back. The instructions for the same reason as for bf16.
MO_RULE u32v load_wide(const uint16_t* p) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  u16v h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, u32v);
#endif
}
MO_RULE u32v load_wide(const int16_t* p) {
  return (u32v)((i32v)(load_wide(reinterpret_cast<const uint16_t*>(p)) << 16) >> 16);
}
MO_RULE u32v load_wide(const int8_t* p) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  u32v r = {};
  for (int i = 0; i < Vec<float>::width; ++i) r[i] = uint32_t(int32_t(p[i]));
  return r;
#endif
}
MO_RULE void store_low(uint16_t* p, const u32v& x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#else
  const u16v h = __builtin_convertvector(x, u16v);
  memcpy(p, &h, sizeof h);
#endif
}
MO_RULE void store_low(int16_t* p, const u32v& x) { store_low(reinterpret_cast<uint16_t*>(p), x); }
MO_RULE void store_low(int8_t* p, const u32v& x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int i = 0; i < Vec<float>::width; ++i) p[i] = int8_t(x[i]);
#endif
}
// The same of one number, so that loops over vectors can end with single elements.
MO_RULE uint32_t load_one(const uint16_t* p) { return *p; }
MO_RULE uint32_t load_one(const int16_t* p) { return uint32_t(int32_t(*p)); }
MO_RULE uint32_t load_one(const int8_t* p) { return uint32_t(int32_t(*p)); }

// Two integers of 4 bits a byte, the first in the lower half, as 32; and the lowest 4 bits of each back.
MO_RULE u32v load_nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
  return (u32v)_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)) & 0xfu;
#elif defined(__AVX2__)
  int32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  const __m256i pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
  return (u32v)_mm256_or_si256(pairs, _mm256_slli_epi64(pairs, 28)) & 0xfu;
#else
  u32v r = {};
  for (int i = 0; i < Vec<float>::width; ++i) r[i] = uint32_t(p[i / 2]) >> (i % 2 * 4) & 0xfu;
  return r;
#endif
}
MO_RULE void store_nibbles(uint8_t* p, const u32v& x) {
#if defined(__AVX512F__)
  const __m512i low = (__m512i)(x & 0xfu);
  _mm_storel_epi64((__m128i*)p, _mm512_cvtepi64_epi8(_mm512_or_si512(low, _mm512_srli_epi64(low, 28))));
#else
  for (int i = 0; i < Vec<float>::width; i += 2) p[i / 2] = uint8_t((x[i] & 0xfu) | x[i + 1] << 4);
#endif
}

// Whether any lane is at least `limit`.
MO_RULE bool any_at_least(const u32v& x, uint32_t limit) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask((__m512i)x, _mm512_set1_epi32(int32_t(limit))) != 0;
#elif defined(__AVX2__)
  const __m256i least = _mm256_set1_epi32(int32_t(limit));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32((__m256i)x, least), (__m256i)x)) != 0;
#else
  bool found = false;
  for (int i = 0; i < Vec<float>::width; ++i) found |= x[i] >= limit;
  return found;
#endif
}

// rules/master.h's split_join and its counterparts, a vector at a time, without what only few weights need where none of
// the vector is one of them. `low`: the remainder in the units of a weight's last bit.
MO_RULE f32v join_weights(const u32v& upper, const u32v& low) {
  // Zero, infinity (and NaN) in one comparison.
  if (any_at_least(u32v((upper & 0x7fffu) - 1u), 0x7f7fu)) return (f32v)split_join(upper, low);
  return (f32v)u32v((upper << 16) + low);
}
// Returns the weights that storage keeps.
MO_RULE u32v store_split8(uint16_t* upper, int8_t* low, const u32v& weights, const u32v& random) {
  if (any_at_least(u32v(weights & 0x7fffffffu), 0x7f000000u)) {  // what may round to infinity, infinity, NaN
    const u32v u = rounded_24(weights, random), above = rounded_away(u);
    store_low(upper, above);
    store_low(low, u32v(split_low(u, above) >> 8));
    return u;
  }
  const u32v u = weights + (random >> 24);
  store_low(upper, u32v((u + 0x8000u) >> 16));
  store_low(low, u32v(u >> 8));
  return u & 0xffffff00u;
}

// Weights of 32 bits in two arrays of 16 (rules/master.h, split), two vectors at once in the order of kEvenOdd.
MO_RULE void load2_split(const uint16_t* upper, const int16_t* low, f32v& a, f32v& b) {
  u32v u, l;
  memcpy(&u, upper, sizeof u);
  memcpy(&l, low, sizeof l);
  a = (f32v)split_join(u32v(u & 0xffffu), (u32v)((i32v)(l << 16) >> 16));
  b = (f32v)split_join(u32v(u >> 16), (u32v)((i32v)l >> 16));
}
MO_RULE void store2_split(uint16_t* upper, int16_t* low, const f32v& a, const f32v& b) {
  // As in store2, a NaN has a lower half of zeros: rounding does not carry it over, and its remainder is 0.
  const u32v ua = (u32v)a, ub = (u32v)b;
  const u32v u = ((ua + 0x8000u) >> 16) | ((ub + 0x8000u) & 0xffff0000u);
  const u32v l = (ua & 0xffffu) | (ub << 16);
  memcpy(upper, &u, sizeof u);
  memcpy(low, &l, sizeof l);
}

// What storage of type S keeps of a computed value, back in the compute type.
template <class S, class V>
MO_RULE V stored_value(const S*, const V& x) {
  return x;
}
MO_RULE f32v stored_value(const bf16*, const f32v& x) { return (f32v)(round_bf16(x) & 0xffff0000u); }
MO_RULE f32v stored_value(const f16*, const f32v& x) {
  f16 h[Vec<float>::width];
  store(h, x);
  return load(h);
}

}  // namespace MO_ISA
}  // namespace mo
