// Adafactor: a second moment kept as its row and column means.
//   Shazeer & Stern 2018 (arXiv:1804.04235), in the form of torch.optim.Adafactor or, by the flags of csrc/abi.h, of the
//   transformers library. mo_fused/reference.py is its twin, bit for bit where it is element-wise.
//   R, C <- means of g^2 over columns and rows, averaged over the steps; V = R C / mean(R); U = g / sqrt(V);
//   p <- p - step_size * U / max(1, RMS(U) / threshold), step_size scaled by max(eps2, RMS(p)).
#pragma once

#include "abi.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

// Slots of RowScalars::a. kRho is the step size before scaling; kFactorStep and kFactorDecay are known when the
// update's RMS is.
enum FactorSlot { kRho, kRest, kAdded, kFloor, kLimit, kBeta1Factor, kFactorStep, kFactorDecay };

// What torch.finfo(dtype).eps is.
MO_RULE double spacing(int dtype) {
  return dtype == kF32 ? 0x1p-23 : dtype == kBF16 ? 0x1p-7 : dtype == kF16 ? 0x1p-10 : 0x1p-52;
}

// a > b as Python's max: a NaN in b loses.
MO_RULE double larger_of(double a, double b) { return b > a ? b : a; }

MO_RULE void prepare_adafactor(const Hyper& h, int64_t step, int param_dtype, RowScalars& s) {
  const int flags = int(h.factor_flags), kind = int(h.step_kind);
  const double t = double(step), root = 1.0 / square_root(t);
  const double eps = h.eps == h.eps ? h.eps : spacing(param_dtype);
  double relative = h.lr;
  if (kind == kCapped) relative = root < h.lr ? root : h.lr;
  if (kind == kRelative) relative = root < 1e-2 ? root : 1e-2;
  if (kind == kWarmUp) relative = root < 1e-6 * t ? root : 1e-6 * t;
  s.a[kRho] = relative;
  s.a[kRest] = real_power(t, h.beta2);  // what a new value counts; 1 in the first step
  s.a[kAdded] = flags & kEpsAdded ? eps : 0.0;
  s.a[kFloor] = flags & kEpsAdded ? 0.0 : eps;
  s.a[kLimit] = flags & kEpsAdded ? __builtin_inf() : 1.0 / eps;
  s.a[kBeta1Factor] = h.beta1;
  s.a[kFactorStep] = 0.0;
  s.a[kFactorDecay] = flags & kDecayScaled ? h.weight_decay : h.lr * h.weight_decay;
}

// When the sums over the whole parameter are known: of squares of U and of the parameter before the step.
MO_RULE void size_adafactor(const Hyper& h, double numel, double update_sumsq, double param_sumsq, RowScalars& s) {
  const int flags = int(h.factor_flags);
  double size = s.a[kRho];
  if (flags & kScaleParameter) size *= larger_of(h.eps2, square_root(param_sumsq / numel));
  if (flags & kDecayScaled) s.a[kFactorDecay] *= size;
  s.a[kFactorStep] = size / larger_of(1.0, square_root(update_sumsq / numel) / h.threshold);
}

// Interpolation from the nearer end, as torch.lerp.
MO_RULE double toward(double from, double to, double weight) {
  return weight < 0.5 ? from + (to - from) * weight : to - (to - from) * (1.0 - weight);
}

// The new mean of a matrix's row means, from the old one and the mean of the gradient's squares: it is linear in them.
MO_RULE double mean_of_rows(double old, double square, double coef, double added, double weight) {
  return toward(old, square * coef * coef + added, weight);
}

template <class T>
struct FactorScalars {
  T coef, rest, keep, added, limit, beta1, one_minus_beta1, step, decay;
  bool from_old, first_from_old, decays;
  MO_RULE explicit FactorScalars(const RowScalars& s)
      : coef(rounded<T>(s.coef)),
        rest(rounded<T>(s.a[kRest])),
        keep(rounded<T>(1.0 - s.a[kRest])),
        added(rounded<T>(s.a[kAdded])),
        limit(rounded<T>(s.a[kLimit])),
        beta1(rounded<T>(s.a[kBeta1Factor])),
        one_minus_beta1(rounded<T>(1.0 - s.a[kBeta1Factor])),
        step(rounded<T>(s.a[kFactorStep])),
        decay(rounded<T>(s.a[kFactorDecay])),
        from_old(s.a[kRest] < 0.5),
        first_from_old(beta1 > T(0.5)),
        decays(decay != T(0)) {
    // An inverse root that is infinite must not meet a gradient of zero.
    const T largest = sizeof(T) == 8 ? T(1.7976931348623157e308) : T(3.40282347e+38f);
    if (limit > largest) limit = largest;
  }
};

// The second moment of one element of a vector.
template <class V, class T>
MO_RULE V vector_moment(const V& g, const V& v, const FactorScalars<T>& s) {
  const V scaled = g * s.coef;
  const V square = scaled * scaled + s.added;
  return s.from_old ? v + (square - v) * s.rest : square - (square - v) * s.keep;
}

// U of one element: r and c are the inverse roots of its row and column (of a vector: 1 and that of the element).
template <class V, class T>
MO_RULE V factored_update(const V& g, const V& r, const V& c, const FactorScalars<T>& s) {
  V root = r * c;
  root = root > s.limit ? V{} + s.limit : root;
  return (g * s.coef) * root;
}

// p, and with kMomentum the first moment m, are updated in place; `update` is what is subtracted from p.
template <bool kMomentum, class V, class T>
MO_RULE void adafactor_update(V& p, const V& g, const V& r, const V& c, V& m, V& update, const FactorScalars<T>& s) {
  update = factored_update(g, r, c, s) * s.step;
  if (kMomentum) {
    m = s.first_from_old ? m + (update - m) * s.one_minus_beta1 : update - (update - m) * s.beta1;
    update = m;
  }
  if (s.decays) update = update + p * s.decay;
  p = update == T(0) ? p : p - update;
}

}  // namespace MO_ISA
}  // namespace mo
