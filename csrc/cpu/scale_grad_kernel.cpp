// Multiplies one chunk of a gradient by a coefficient, in place.
// Formula: g = g * scale in the compute type (double for float64, else float), rounded once.
// Reference: torch.nn.utils.clip_grads_with_norm_.
// Bytes per element, read + written: fp32 4 + 4, bf16 and fp16 2 + 2, fp64 8 + 8.
// Assumes of the table: Row::grad with its dtype and layout; gradients of different rows do not overlap.
#include "cpu/kernels.h"
#include "cpu/span.h"

namespace mo {
namespace MO_ISA {
namespace {

template <class T, class S>
void scale_grad_kernel(void* at, int64_t n, double scale) {
  S* g = static_cast<S*>(at);
  using V = typename Vec<T>::type;
  constexpr int width = Vec<T>::width;
  const T s = T(scale);
  int64_t i = 0;
  for (; i + width <= n; i += width) store(g + i, V(V(load(g + i)) * s));
  if (i == n) return;
  S rest[width] = {};
  memcpy(rest, g + i, size_t(n - i) * sizeof(S));
  store(rest, V(V(load(rest)) * s));
  memcpy(g + i, rest, size_t(n - i) * sizeof(S));
}

}  // namespace

void launch_scale_grad(const Row& row, const Chunk& chunk, double scale) {
  for_each_span(row, chunk, 1u << kGrad, 1u << kGrad, [&](const Span& a) {
    switch (row.dtype[kGrad]) {
      case kF32: return scale_grad_kernel<float, float>(a.at[kGrad], a.n, scale);
      case kBF16: return scale_grad_kernel<float, bf16>(a.at[kGrad], a.n, scale);
      case kF16: return scale_grad_kernel<float, f16>(a.at[kGrad], a.n, scale);
      default: return scale_grad_kernel<double, double>(a.at[kGrad], a.n, scale);
    }
  });
}

}  // namespace MO_ISA
}  // namespace mo
