// What a step has to do to one row, element by element, in the row's compute type: written from the description of the
// rules, one operation a line, without vectors, tiles or threads.
#pragma once

#include <cmath>

#include "abi.h"
#include "step_table.h"

namespace expected {

// Multiplying along the binary digits of n, lowest first: the order that the promise of equal bits fixes.
inline double power(double base, int64_t n) {
  double product = 1.0;
  for (double square = base; n > 0; n /= 2, square *= square) {
    if (n % 2 == 1) product *= square;
  }
  return product;
}

struct Sums {
  long double update = 0, stored = 0, param = 0;
};

template <class T>
T root(T x) {
  return std::sqrt(x);
}

// beta parts of `old` and the rest of `now`, from whichever of the two counts for more.
template <class T>
T between(T old, T now, T beta, T rest) {
  const T distance = now - old;
  if (beta > T(0.5)) {
    const T move = distance * rest;
    return old + move;
  }
  const T remains = distance * beta;
  return now - remains;
}

template <class T>
struct Adam {
  T coef, beta1, rest1, beta2, rest2, eps, root_correction, step_size, decay, l2;

  Adam(const mo::Hyper& h, int64_t step, double gradient_coef) {
    coef = T(gradient_coef);
    beta1 = T(h.beta1);
    rest1 = T(1.0 - h.beta1);
    beta2 = T(h.beta2);
    rest2 = T(1.0 - h.beta2);
    eps = T(h.eps);
    root_correction = T(1.0 / std::sqrt(1.0 - power(h.beta2, step)));
    step_size = T(h.lr / (1.0 - power(h.beta1, step)));
    decay = h.decoupled != 0.0 ? T(h.lr * h.weight_decay) : T(0);
    l2 = h.decoupled != 0.0 ? T(0) : T(h.weight_decay);
  }

  T operator()(T& p, T g, T& m, T& v, T* largest) const {
    g *= coef;
    if (l2 != T(0)) {
      const T penalty = p * l2;
      g += penalty;
    }
    m = between(m, g, beta1, rest1);
    if (v != T(INFINITY)) v = between(v, T(g * g), beta2, rest2);  // an average that has overflown stays so
    T second = v;
    if (largest) {
      const bool stays = *largest > v || std::isnan(*largest);
      if (!stays) *largest = v;
      second = *largest;
    }
    T denominator = root(second) * root_correction;
    denominator += eps;
    T update = m / denominator;
    update *= step_size;
    if (decay != T(0)) {
      const T shrink = p * decay;
      update += shrink;
    }
    if (update != T(0)) p -= update;
    return update;
  }
};

template <class T>
struct Sgd {
  T coef, lr, momentum, undamped, weight_decay;
  bool nesterov;

  Sgd(const mo::Hyper& h, double gradient_coef)
      : coef(T(gradient_coef)),
        lr(T(h.lr)),
        momentum(T(h.momentum)),
        undamped(T(1.0 - h.dampening)),
        weight_decay(T(h.weight_decay)),
        nesterov(h.nesterov != 0.0) {}

  T operator()(T& p, T g, T* buffer, bool fresh) const {
    g *= coef;
    if (weight_decay != T(0)) {
      const T penalty = p * weight_decay;
      g += penalty;
    }
    T direction = g;
    if (buffer) {
      if (fresh) {
        *buffer = g;
      } else {
        const T keeps = *buffer * momentum;
        const T takes = g * undamped;
        *buffer = keeps + takes;
      }
      if (nesterov) {
        const T ahead = *buffer * momentum;
        direction = g + ahead;
      } else {
        direction = *buffer;
      }
    }
    const T update = direction * lr;
    if (update != T(0)) p -= update;
    return update;
  }
};

template <class T>
Sums step_as(TestRow& row, const mo::Hyper& h, int rule, double clip_coef, double grad_scale) {
  Sums sums;
  const double scale = (h.clip != 0.0 ? clip_coef : 1.0) / grad_scale;
  const double coef = h.maximize != 0.0 ? -scale : scale;
  if (row.has_step && row.flags & mo::kStepF64) row.wide_step += 1.0;
  if (row.has_step && !(row.flags & mo::kStepF64)) row.step += 1.0f;
  const Adam<T> adam(h, int64_t(row.steps()), coef);
  const Sgd<T> sgd(h, coef);
  const bool amsgrad = rule == mo::kAdam && h.amsgrad != 0.0;
  const bool momentum = rule == mo::kSGD && row.op[mo::kState0].there();
  for (int64_t i = 0; i < row.numel; ++i) {
    T p = T(row.get(mo::kParam, i));
    const T old = p;
    const T g = T(row.get(mo::kGrad, i));
    const auto keep = [&](int o, T x) { row.op[o].set(row.offset(o, i), double(x)); };
    T update;
    if (rule == mo::kAdam) {
      T m = T(row.get(mo::kState0, i)), v = T(row.get(mo::kState1, i));
      T w = amsgrad ? T(row.get(mo::kState2, i)) : T(0);
      update = adam(p, g, m, v, amsgrad ? &w : nullptr);
      keep(mo::kState0, m);
      keep(mo::kState1, v);
      if (amsgrad) keep(mo::kState2, w);
    } else {
      T buffer = momentum ? T(row.get(mo::kState0, i)) : T(0);
      update = sgd(p, g, momentum ? &buffer : nullptr, row.flags & mo::kFresh);
      if (momentum) keep(mo::kState0, buffer);
    }
    keep(mo::kParam, p);
    const T kept = T(row.get(mo::kParam, i));
    const T change = kept - old;
    sums.update += (long double)update * update;
    sums.stored += (long double)change * change;
    sums.param += (long double)kept * kept;
  }
  return sums;
}

// Takes the step on `row`; float64 parameters are computed in double, all others in float.
inline Sums step(TestRow& row, const mo::Hyper& h, int rule, double clip_coef = 1.0, double grad_scale = 1.0) {
  if (row.op[mo::kParam].dtype() == mo::kF64) return step_as<double>(row, h, rule, clip_coef, grad_scale);
  return step_as<float>(row, h, rule, clip_coef, grad_scale);
}

// The whole table: every row that has a gradient. Sums are compared to 1e-12, elements and step counters exactly.
inline void check_step(const char* what, const TestTable& before, const TestTable& after) {
  TestTable want(before);
  Sums total;
  const auto close = [](double got, long double sum) {
    const double norm = double(sqrtl(sum));
    return std::isnan(norm) ? std::isnan(got) : got == norm || std::fabs(got - norm) <= 1e-12 * norm;
  };
  for (size_t r = 0; r < want.rows.size(); ++r) {
    TestRow& row = *want.rows[r];
    const TestRow& got = *after.rows[r];
    if (row.flags & mo::kActive) {
      const Sums sums = step(row, before.hyper[size_t(row.group)], before.control.rule, after.result.clip_coef,
                             before.control.grad_scale);
      if (before.control.update_stats) {
        const mo::RowStats& s = after.row_stats[r];
        CHECK_SAYS(close(s.update_norm, sums.update), "%s row %zu: %.17g", what, r, s.update_norm);
        CHECK_SAYS(close(s.stored_norm, sums.stored), "%s row %zu: %.17g", what, r, s.stored_norm);
        CHECK_SAYS(close(s.param_norm, sums.param), "%s row %zu: %.17g", what, r, s.param_norm);
        total.update += sums.update;
        total.stored += sums.stored;
        total.param += sums.param;
      }
    }
    CHECK_SAYS(got.steps() == row.steps(), "%s row %zu: step %g, not %g", what, r, got.steps(), row.steps());
    for (int o = 0; o < mo::kOperands; ++o) {
      for (int64_t i = 0; i < row.op[o].count(); ++i) {
        CHECK_SAYS(got.op[o].bits(i) == row.op[o].bits(i),
                   "%s row %zu (%" PRId64 " elements) operand %d element %" PRId64 ": %a, not %a", what, r, row.numel,
                   o, i, got.op[o].get(i), row.op[o].get(i));
      }
    }
  }
  if (before.control.update_stats) {
    CHECK(close(after.result.update_norm, total.update) && after.result.updated == 1.0);
    CHECK(close(after.result.stored_norm, total.stored));
    CHECK(close(after.result.param_norm, total.param));
  }
}

}  // namespace expected
