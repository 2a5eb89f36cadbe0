// See lanes_kernel.h. Compiled once per instruction set, like the kernels themselves.
#include "lanes_kernel.h"

#include "cpu/span.h"

#define MO_STRING_OF(x) #x
#define MO_STRING(x) MO_STRING_OF(x)

namespace mo {
namespace MO_ISA {
namespace {

constexpr int kWidth = Vec<float>::width;

template <class S>
const S* stored_as(const uint16_t* p) {
  return reinterpret_cast<const S*>(p);
}
template <class S>
S* stored_as(uint16_t* p) {
  return reinterpret_cast<S*>(p);
}

bf16 narrow_one(const bf16*, float x) { return narrow_bf16(x); }
f16 narrow_one(const f16*, float x) { return narrow_f16(x); }

template <class S>
void widen_vectors(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(to + i, load(stored_as<S>(from) + i));
}
template <class S>
void narrow_vectors(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(stored_as<S>(to) + i, load(from + i));
}
template <class S>
void widen_scalars(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(S{from[i]});
}
template <class S>
void narrow_scalars(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow_one(static_cast<const S*>(nullptr), from[i]).bits;
}
template <class S>
void widen_any(const uint16_t* from, float* to, int64_t n) {
  widen_span(to, stored_as<S>(from), n);
}
template <class S>
void narrow_any(const float* from, uint16_t* to, int64_t n) {
  narrow_span(stored_as<S>(to), from, n);
}
template <class S>
void stored(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(to + i, stored_value(static_cast<const S*>(nullptr), load(from + i)));
}

void widen_pairs(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kWidth) {
    f32v even, odd;
    load2<Order::kEvenOdd>(stored_as<bf16>(from) + i, even, odd);
    for (int k = 0; k < kWidth; ++k) {
      to[i + 2 * k] = even[k];
      to[i + 2 * k + 1] = odd[k];
    }
  }
}
void narrow_pairs(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * kWidth) {
    f32v even, odd;
    for (int k = 0; k < kWidth; ++k) {
      even[k] = from[i + 2 * k];
      odd[k] = from[i + 2 * k + 1];
    }
    store2<Order::kEvenOdd>(stored_as<bf16>(to) + i, even, odd);
  }
}

void root_f32(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(to + i, square_root(load(from + i)));
}
void root_f64(const double* from, double* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec<double>::width) store(to + i, square_root(load(from + i)));
}

}  // namespace

extern const lanes_test::Table lanes_table;
const lanes_test::Table lanes_table = {
    MO_STRING(MO_ISA),
    kWidth,
    {widen_vectors<bf16>, widen_vectors<f16>},
    {narrow_vectors<bf16>, narrow_vectors<f16>},
    {widen_scalars<bf16>, widen_scalars<f16>},
    {narrow_scalars<bf16>, narrow_scalars<f16>},
    {widen_any<bf16>, widen_any<f16>},
    {narrow_any<bf16>, narrow_any<f16>},
    {stored<bf16>, stored<f16>},
    widen_pairs,
    narrow_pairs,
    root_f32,
    root_f64,
};

}  // namespace MO_ISA
}  // namespace mo
