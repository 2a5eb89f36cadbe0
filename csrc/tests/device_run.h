// Takes a step of a TestTable with the CUDA kernels, which run on the CPU through cuda/tests/shim.h: the tests of the CPU
// kernels then test those, against the same scalar loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "cuda/step.h"
#include "cuda/tests/shim.h"

namespace device_run {

// Small, so that rows of the tests have several chunks; blocks then take three of them.
constexpr int64_t kChunk = 2048;
constexpr int32_t kChunksOfBlock = 3;

// What the columns of the statistics say about each row, as mo_fused/device_part.py sums them.
inline void fill_row_stats(const std::vector<mo::DeviceChunk>& chunks, const std::vector<double>& stats,
                           const mo::Control& control, std::vector<mo::RowStats>& rows) {
  const auto at = [&](int name, const mo::DeviceChunk& c) {
    return stats[sizeof(mo::Result) / sizeof(double) + size_t(name) * chunks.size() + size_t(c.slot)];
  };
  const bool measured = control.phases & mo::kMeasure || control.grad_stats_in_update;
  std::vector<double> top(rows.size(), -1e9), update(rows.size()), stored(rows.size()), param(rows.size());
  std::vector<long double> sums(rows.size());
  for (const mo::DeviceChunk& c : chunks) {
    if (at(mo::kSumsq, c) != 0.0) top[size_t(c.row)] = std::max(top[size_t(c.row)], at(mo::kExponent, c));
  }
  for (const mo::DeviceChunk& c : chunks) {
    const size_t r = size_t(c.row);
    if (measured) {
      sums[r] += ldexpl((long double)at(mo::kSumsq, c), int(at(mo::kExponent, c)));
      mo::RowStats& row = rows[r];
      const double amax = at(mo::kAmax, c);
      if (!(amax <= row.grad_amax)) row.grad_amax = std::isnan(row.grad_amax) ? row.grad_amax : amax;
      row.nonfinite += at(mo::kNonfinites, c);
      row.zeros += at(mo::kZeroCount, c);
    }
    if (control.update_stats) {
      update[r] += at(mo::kUpdateSumsq, c);
      stored[r] += at(mo::kStoredSumsq, c);
      param[r] += at(mo::kParamSumsq, c);
    }
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].active == 0.0) continue;
    rows[r].grad_norm = double(sqrtl(sums[r])) / control.grad_scale;
    rows[r].grad_amax /= control.grad_scale;
    rows[r].update_norm = std::sqrt(update[r]);
    rows[r].stored_norm = std::sqrt(stored[r]);
    rows[r].param_norm = std::sqrt(param[r]);
  }
}

// `rows`: as for the CPU's step. Float32 numbers of the control arrive as such, like a GradScaler's tensors.
inline void run(std::vector<mo::Row>& rows, const std::vector<mo::Hyper>& hyper, const mo::Control& control,
                mo::Result& result, std::vector<mo::RowStats>& row_stats) {
  std::vector<mo::DeviceChunk> chunks;
  bool costly = false;  // rows whose update takes no sums of the gradient: device_part.py measures them before
  std::vector<int32_t> fresh(rows.size(), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    fresh[r] = rows[r].flags & mo::kFresh ? 1 : 0;
    rows[r].fresh = uint64_t(&fresh[r]);
    costly |= rows[r].dtype[mo::kGrad] == mo::kF64 || rows[r].block != 0;
    row_stats[r].active = rows[r].flags & mo::kActive ? 1.0 : 0.0;
    for (int64_t start = 0; start < rows[r].numel; start += kChunk) {
      chunks.push_back({start, int64_t(r), std::min(kChunk, rows[r].numel - start), int64_t(chunks.size())});
    }
  }
  const size_t n_chunks = chunks.size();
  std::vector<double> stats(sizeof(mo::Result) / sizeof(double) + mo::kStatColumns * n_chunks, NAN);
  std::vector<mo::DeviceScalars> scalars(rows.size());
  std::vector<mo::Settings> settings(1 + hyper.size());
  settings[0].hyper.lr = control.max_grad_norm;
  for (size_t g = 0; g < hyper.size(); ++g) settings[1 + g].hyper = hyper[g];
  const float grad_scale = float(control.grad_scale), found_inf = float(control.found_inf);
  const double extras[] = {control.extra_sumsq, control.extra_exponent, control.extra_amax, control.extra_nonfinite,
                           control.extra_zeros};
  mo::DeviceStep s{};
  s.rows = uint64_t(rows.data());
  s.settings = uint64_t(settings.data());
  s.scalars = uint64_t(scalars.data());
  s.stats = uint64_t(stats.data());
  s.n_rows = int64_t(rows.size());
  s.n_chunks = int64_t(n_chunks);
  s.grad_scale = uint64_t(&grad_scale);
  s.found_inf = uint64_t(&found_inf);
  s.extras = uint64_t(extras);
  s.n_extras = 1;
  s.rule = control.rule;
  s.clipping = !std::isnan(control.max_grad_norm);
  s.skip_nonfinite = control.skip_nonfinite;
  mo::Result& out = *reinterpret_cast<mo::Result*>(stats.data());
  const double known = result.measured != 0.0 ? result.grad_norm : 0.0;
  if (!(control.phases & mo::kMeasure) && result.measured != 0.0) s.norm = uint64_t(&known);
  out = mo::Result{};

  // One launch for the rows of each compute type, as mo_fused/device_table.py deals them out.
  const auto over_chunks = [&](int phase) {
    for (int wide = 0; wide < 2; ++wide) {
      std::vector<mo::DeviceChunk> mine;
      for (const mo::DeviceChunk& c : chunks) {
        if ((rows[size_t(c.row)].dtype[mo::kParam] == mo::kF64) == (wide == 1)) mine.push_back(c);
      }
      if (mine.empty()) continue;
      std::vector<int32_t> edges;
      for (int32_t e = 0; e < int32_t(mine.size()); e += kChunksOfBlock) edges.push_back(e);
      s.n_programs = int64_t(edges.size());
      edges.push_back(int32_t(mine.size()));
      s.chunks = uint64_t(mine.data());
      s.programs = uint64_t(edges.data());
      s.wide = wide;
      s.phases = phase;
      CHECK(mo::run_device_step(s) == nullptr);
    }
  };
  const bool first = control.phases & mo::kMeasure || (control.grad_stats_in_update && costly);
  const bool measured = first || control.grad_stats_in_update;
  s.sums = !control.update_stats ? 0 : first || !control.grad_stats_in_update ? 1 : 2;
  if (first) over_chunks(mo::kDeviceMeasure);
  s.measured = first;
  s.phases = mo::kDeviceFinish;
  if (control.phases & (mo::kFinish | mo::kMeasure)) CHECK(mo::run_device_step(s) == nullptr);
  if (control.phases & mo::kUpdate) over_chunks(mo::kDeviceUpdate);
  if (control.phases & mo::kScale || (control.clip_in_place && control.phases & mo::kUpdate)) {
    over_chunks(mo::kDeviceScale);
  }
  if (control.update_stats && out.skipped == 0.0) {
    s.phases = mo::kDeviceNorms;
    CHECK(mo::run_device_step(s) == nullptr);
  }
  const double norm_before = result.grad_norm, measured_before = result.measured;
  result = out;
  result.measured = measured ? 1.0 : measured_before;
  if (!measured) result.grad_norm = norm_before;
  result.grad_scale = 0.0;
  if (measured || control.update_stats) fill_row_stats(chunks, stats, control, row_stats);
}

}  // namespace device_run
