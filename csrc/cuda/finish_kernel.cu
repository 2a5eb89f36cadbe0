// Between the two passes: total norm, clip coefficient, skip decision, `step` counters and the scalars of every row.
// Formula: csrc/cpu/step.cpp, reduce_gradients, finish and prepare_rows; everything in double. A skipped step writes its
//   result and nothing else.
// Reference: tests/test_clip.py, tests/test_amp.py.
// Bytes: per chunk of the gradients 48 read, per row 280 read and 128 written.
// Assumes of the table: one block for 64 rows; each of them adds up all chunks by itself, in the same order, so that no
//   block has to wait for another.
#include "cuda/totals.cuh"
#include "rules/adafactor.h"
#include "rules/adamw.h"
#include "rules/grad_stats.h"
#include "rules/sgd.h"

namespace mo {
namespace {

constexpr int kRows = 64;

// The hyper-parameters of a row's group: numbers, or what tensors on the device hold now.
__device__ __forceinline__ Hyper hyper_of(const DeviceStep& s, const Row& row) {
  const Settings& settings = settings_of(s, row);
  Hyper h = settings.hyper;
  if (!s.from_tensors) return h;
  double* fields[] = {&h.lr, &h.beta1, &h.beta2, &h.eps, &h.weight_decay, &h.momentum, &h.dampening};
  for (int k = 0; k < 7; ++k) {
    const uint64_t source = settings.source[k], address = source & (kSourceF64 - 1);
    if (address != 0) *fields[k] = source & kSourceF64 ? *as<const double>(address) : double(*as<const float>(address));
  }
  return h;
}

__device__ __forceinline__ int64_t advance(const Row& row) {
  if (row.step == 0) return 0;
  if (row.flags & kStepF64) return int64_t(*as<double>(row.step) += 1.0);
  return int64_t(*as<float>(row.step) += 1.0f);
}

__device__ __forceinline__ void prepare_row(const DeviceStep& s, int64_t r, double clip_coef, double grad_scale) {
  const Row& row = as<const Row>(s.rows)[r];
  if (!(row.flags & kActive)) return;
  const Hyper h = hyper_of(s, row);
  DeviceScalars out = {};
  out.scalars.scale = (h.clip != 0.0 ? clip_coef : 1.0) / grad_scale;
  out.scalars.coef = h.maximize != 0.0 ? -out.scalars.scale : out.scalars.scale;
  const int64_t step = out.scalars.step = advance(row);
  if (s.rule == kAdam) MO_ISA::prepare_adamw(h, step, out.scalars);
  if (s.rule == kAdafactor) MO_ISA::prepare_adafactor(h, step, row.dtype[kParam], out.scalars);
  if (s.rule == kSGD) {
    MO_ISA::prepare_sgd(h, out.scalars);
    // Whether a momentum buffer holds a value is known here alone: a skipped first step leaves it fresh.
    if (row.fresh != 0) {
      out.fresh = *as<int32_t>(row.fresh);
      *as<int32_t>(row.fresh) = 0;
    }
  }
  as<DeviceScalars>(s.scalars)[r] = out;
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const DeviceStep s) {
  const double grad_scale = s.grad_scale ? double(*as<const float>(s.grad_scale)) : 1.0;
  const bool found = s.found_inf && *as<const float>(s.found_inf) != 0.0f;
  Totals t;
  double norm = 0.0;
  if (s.measured) {
    t = gradient_totals(s, s.n_extras);
    norm = t.norm() / grad_scale;
  }
  if (s.norm) norm = *as<const double>(s.norm);
  const double limit = as<const Settings>(s.settings)[0].hyper.lr;
  const double clip_coef = s.clipping ? MO_ISA::clip_coefficient(norm, limit) : 1.0;
  const bool bad = t.nonfinite != 0.0;
  const bool skipped = found || (s.skip_nonfinite && bad);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    Result& out = *as<Result>(s.stats);
    out.grad_norm = norm;
    out.clip_coef = clip_coef;
    out.skipped = skipped ? 1.0 : 0.0;
    out.nonfinite = t.nonfinite;
    out.zeros = t.zeros;
    out.grad_amax = t.amax / grad_scale;
    out.found_inf = found || bad ? 1.0 : 0.0;
    out.grad_scale = grad_scale;
    if (s.report) *as<float>(s.report) = found || bad ? 1.0f : 0.0f;
  }
  const int64_t r = int64_t(blockIdx.x) * kRows + threadIdx.x;
  if (!skipped && threadIdx.x < kRows && r < s.n_rows) prepare_row(s, r, clip_coef, grad_scale);
}

}  // namespace

cudaError_t launch_finish(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int((s.n_rows + kRows - 1) / kRows);
  MO_LAUNCH(finish_kernel, blocks > 0 ? blocks : 1, kThreads, stream, s);
  return launched();
}

}  // namespace mo
