// Adam and AdamW, one element (or one vector of elements) at a time.
//   Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (decoupled decay), Reddi et al. 2018 (AMSGrad).
// Written once for double, float and GCC vectors of both; mo_fused/reference.py is its twin, bit for bit.
#pragma once

#include "abi.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

// Slots of RowScalars::a.
enum AdamSlot { kBeta1, kBeta2, kOneMinusBeta2, kEps, kInvSqrtBc2, kStepSize, kDecay, kL2 };

MO_RULE void prepare_adamw(const Hyper& h, int64_t step, RowScalars& s) {
  const double bc1 = bias_correction(h.beta1, step);
  const double bc2 = bias_correction(h.beta2, step);
  s.a[kBeta1] = h.beta1;
  s.a[kBeta2] = h.beta2;
  s.a[kOneMinusBeta2] = 1.0 - h.beta2;
  s.a[kEps] = h.eps;
  s.a[kInvSqrtBc2] = 1.0 / square_root(bc2);
  s.a[kStepSize] = h.lr / bc1;
  s.a[kDecay] = h.decoupled != 0.0 ? h.lr * h.weight_decay : 0.0;
  s.a[kL2] = h.decoupled != 0.0 ? 0.0 : h.weight_decay;
}

template <class T>
struct AdamScalars {
  T coef, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, inv_sqrt_bc2, step_size, decay, l2;
  bool first_from_old, second_from_old, decays, penalizes;  // which of the branches below, the same for every element
  MO_RULE explicit AdamScalars(const RowScalars& s)
      : coef(rounded<T>(s.coef)),
        beta1(rounded<T>(s.a[kBeta1])),
        one_minus_beta1(rounded<T>(1.0 - s.a[kBeta1])),
        beta2(rounded<T>(s.a[kBeta2])),
        one_minus_beta2(rounded<T>(s.a[kOneMinusBeta2])),
        eps(rounded<T>(s.a[kEps])),
        inv_sqrt_bc2(rounded<T>(s.a[kInvSqrtBc2])),
        step_size(rounded<T>(s.a[kStepSize])),
        decay(rounded<T>(s.a[kDecay])),
        l2(rounded<T>(s.a[kL2])),
        first_from_old(beta1 > T(0.5)),
        second_from_old(beta2 > T(0.5)),
        decays(decay != T(0)),
        penalizes(l2 != T(0)) {}
};

// The moments alone. p is looked at where weight decay belongs to the gradient (s.penalizes).
template <class V, class T>
MO_RULE void adamw_moments(const V& p, V g, V& m, V& v, const AdamScalars<T>& s) {
  g = g * s.coef;
  if (s.penalizes) g = g + p * s.l2;
  // Linear interpolation from the nearer end: beta = 0 gives the new value itself, and a constant gradient is a fixed
  // point (v * beta2 + g^2 * (1 - beta2) with rounded factors that do not add up to 1 is off by 3e-6 at 0.999).
  m = s.first_from_old ? m + (g - m) * s.one_minus_beta1 : g - (g - m) * s.beta1;
  const V square = g * g;
  const V average = s.second_from_old ? v + (square - v) * s.one_minus_beta2 : square - (square - v) * s.beta2;
  v = v == T(__builtin_inf()) ? v : average;  // an average that has overflown stays so, and the update 0, as in torch
}

// The parameter, from its first moment and the root of its second; returns the update.
template <class V, class T>
MO_RULE V adamw_weight(V& p, const V& m, const V& root, const AdamScalars<T>& s) {
  V update = (m / (root * s.inv_sqrt_bc2 + s.eps)) * s.step_size;
  if (s.decays) update = update + p * s.decay;
  // An update of zero leaves p as it is, also the sign of -0.0: a step with lr = 0 changes no bit.
  p = update == T(0) ? p : p - update;
  return update;
}

// p, m, v (and the running maximum w when Amsgrad) are updated in place; `update` is what the rule subtracts from p.
template <bool Amsgrad, class V, class T>
MO_RULE void adamw_update(V& p, V g, V& m, V& v, V& w, V& update, const AdamScalars<T>& s) {
  adamw_moments(p, g, m, v, s);
  V second = v;
  if (Amsgrad) {
    w = ((w > v) | (w != w)) ? w : v;  // a NaN that is already there stays, as in torch.maximum
    second = w;
  }
  update = adamw_weight(p, m, V(square_root(second)), s);
}

}  // namespace MO_ISA
}  // namespace mo
