// Stochastic gradient descent with momentum, dampening and Nesterov's look-ahead (Sutskever et al. 2013, in the form
// of torch.optim.SGD: the first step copies the gradient into the buffer). mo_fused/reference.py is its twin.
#pragma once

#include "abi.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

// Slots of RowScalars::a.
enum SgdSlot { kLr, kMomentum, kOneMinusDampening, kWeightDecay, kNesterov };

MO_RULE void prepare_sgd(const Hyper& h, RowScalars& s) {
  s.a[kLr] = h.lr;
  s.a[kMomentum] = h.momentum;
  s.a[kOneMinusDampening] = 1.0 - h.dampening;
  s.a[kWeightDecay] = h.weight_decay;
  s.a[kNesterov] = h.nesterov;
}

template <class T>
struct SgdScalars {
  T coef, lr, momentum, one_minus_dampening, weight_decay;
  bool nesterov, penalizes;
  MO_RULE explicit SgdScalars(const RowScalars& s)
      : coef(rounded<T>(s.coef)),
        lr(rounded<T>(s.a[kLr])),
        momentum(rounded<T>(s.a[kMomentum])),
        one_minus_dampening(rounded<T>(s.a[kOneMinusDampening])),
        weight_decay(rounded<T>(s.a[kWeightDecay])),
        nesterov(s.a[kNesterov] != 0.0),
        penalizes(weight_decay != T(0)) {}
};

// Fresh: the buffer holds no value yet and takes the gradient. Momentum = false: buf is not touched.
template <bool Momentum, class V, class T>
MO_RULE void sgd_update(V& p, V g, V& buf, V& update, const SgdScalars<T>& s, bool fresh) {
  g = g * s.coef;
  if (s.penalizes) g = g + p * s.weight_decay;
  V direction = g;
  if (Momentum) {
    buf = fresh ? g : buf * s.momentum + g * s.one_minus_dampening;
    direction = s.nesterov ? g + buf * s.momentum : buf;
  }
  update = direction * s.lr;
  p = update == T(0) ? p : p - update;
}

}  // namespace MO_ISA
}  // namespace mo
