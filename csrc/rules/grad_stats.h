// Sums of squares that neither overflow nor vanish: a value is sumsq * 2^exponent with exponent 0 in all but extreme cases
// (float64 gradients beyond 1e150; fp32 blocks are summed again in double before that). After Blue 1978, LAPACK nrm2.
#pragma once

#include "abi.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

struct ScaledSum {
  double sumsq = 0.0;
  int64_t exponent = 0;

  MO_RULE void add(double other, int64_t other_exponent) {
    if (exponent == other_exponent) {
      sumsq += other;
    } else if (other == 0.0) {
      return;
    } else if (sumsq == 0.0) {
      sumsq = other;
      exponent = other_exponent;
    } else if (exponent > other_exponent) {
      sumsq += __builtin_ldexp(other, clamp(other_exponent - exponent));
    } else {
      sumsq = __builtin_ldexp(sumsq, clamp(exponent - other_exponent)) + other;
      exponent = other_exponent;
    }
  }

  MO_RULE double norm() const {  // exponents are even
    return __builtin_ldexp(__builtin_sqrt(sumsq), int(exponent / 2));
  }

 private:
  MO_RULE static int clamp(int64_t e) { return e < -4000 ? -4000 : int(e); }
};

// min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; NaN stays NaN.
MO_RULE double clip_coefficient(double norm, double max_norm) {
  const double c = max_norm / (norm + 1e-6);
  return c > 1.0 ? 1.0 : c;
}

}  // namespace MO_ISA
}  // namespace mo
