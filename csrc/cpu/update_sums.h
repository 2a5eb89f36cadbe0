// Sums of squares that fall out of the registers of an update: what the rule asked for, what storage kept of it, and the
// new parameter. In double, sixteen partial sums whatever the vector width, so every instruction set gives the same bits.
#pragma once

#include "abi.h"
#include "cpu/lanes.h"

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

class UpdateSums {
 public:
  static constexpr int kLanes = 16;

  // `lane`: the place of the vector's first element among the sixteen, known when compiling so that the sums stay in
  // registers; `kept`: how many of the vector's lanes are elements (all and more: none is padding).
  template <class V>
  MO_RULE void add(const V& update, const V& stored, const V& param, int lane, int kept) {
    add_to(update_, update, lane, kept);
    add_to(stored_, stored, lane, kept);
    add_to(param_, param, lane, kept);
  }

  inline void finish(ChunkStats& out) const {
    out.update_sumsq = total(update_);
    out.stored_sumsq = total(stored_);
    out.param_sumsq = total(param_);
  }

 private:
  static constexpr int kWidth = Vec<double>::width;
  typedef float half_v __attribute__((vector_size(kVectorBytes / 2)));

  // As for bf16, __builtin_convertvector would cut the vectors in halves.
  MO_RULE static f64v to_double(const half_v& x) {
#if defined(__AVX512F__)
    return (f64v)_mm512_cvtps_pd((__m256)x);
#elif defined(__AVX2__)
    return (f64v)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, f64v);
#endif
  }

  MO_RULE static void add_to(f64v* acc, const f64v& x, int lane, int kept) {
    f64v sq = x * x;
    for (int i = kept < 0 ? 0 : kept; i < kWidth; ++i) sq[i] = 0.0;
    acc[lane / kWidth] += sq;
  }
  MO_RULE static void add_to(f64v* acc, const f32v& x, int lane, int kept) {
    half_v half[2];
    memcpy(half, &x, sizeof x);
    add_to(acc, to_double(half[0]), lane, kept);
    add_to(acc, to_double(half[1]), lane + kWidth, kept - kWidth);
  }
  inline static double total(const f64v* acc) {
    double sum = 0.0;
    for (int i = 0; i < kLanes; ++i) sum += acc[i / kWidth][i % kWidth];
    return sum;
  }

  f64v update_[kLanes / kWidth] = {};
  f64v stored_[kLanes / kWidth] = {};
  f64v param_[kLanes / kWidth] = {};
};

// The same of whole arrays: of the update, of the parameter before it, and of what storage keeps.
template <class T>
inline void add_sums(UpdateSums& sums, const T* update, const T* old, const T* kept, int64_t n) {
  using V = typename Vec<T>::type;
  constexpr int lanes = UpdateSums::kLanes, width = Vec<T>::width;
  const auto one = [&](const T* u, const T* o, const T* k, int lane, int there) MO_LAMBDA {
    const V now = load(k);
    sums.add(V(load(u)), V(now - load(o)), now, lane, there);
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int k = 0; k < lanes; k += width) one(update + i + k, old + i + k, kept + i + k, k, width);
  }
  if (i == n) return;
  T rest[3][lanes] = {};
  const T* from[3] = {update, old, kept};
  for (int k = 0; k < 3; ++k) memcpy(rest[k], from[k] + i, size_t(n - i) * sizeof(T));
  for (int k = 0; k < lanes; k += width) one(rest[0] + k, rest[1] + k, rest[2] + k, k, int(n - i) - k);
}

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
