// Adafactor's rows and tables built by hand: matrices and vectors, cut into tiles, and what a step needs beside them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "step_table.h"

namespace adafactor {

constexpr int kNone = -1;

// Tiles as mo_fused/factored.py cuts them, but smaller.
constexpr int64_t kRows = 80, kCols = 96, kTogether = 2048;

struct Param {
  int64_t batch, rows, cols;  // rows = 0: a vector of cols elements
  int dtype[3];               // of parameter, gradient and first moment
  bool turned = false;        // the gradient lies column by column

  int64_t numel() const { return batch * std::max<int64_t>(rows, 1) * cols; }
  bool wide() const { return dtype[0] == mo::kF64; }
};

struct TestRow {
  Param param;
  Memory op[3], second, cols;  // of a matrix: row and column means; of a vector: second moments
  Memory scratch;
  mo::Factored f{};
  mo::Layout layout{};
  float step = 0.0f;

  explicit TestRow(const Param& p) : param(p) {
    for (int o = 0; o < 3; ++o) {
      if (p.dtype[o] >= 0) op[o] = Memory(mo::DType(p.dtype[o]), p.numel(), o == 1 ? 1 : 0);
    }
    const mo::DType compute = p.wide() ? mo::kF64 : mo::kF32;
    second = Memory(compute, p.rows ? p.batch * p.rows : p.cols);
    cols = Memory(compute, p.rows ? p.batch * p.cols : 1);
  }
  int64_t grad_at(int64_t i) const {
    if (!param.turned) return i;
    const int64_t size = param.rows * param.cols, in = i % size;
    return i / size * size + in % param.cols * param.rows + in / param.cols;
  }
};

struct TestTable {
  std::vector<TestRow> rows;
  mo::Hyper hyper{};
  mo::Control control{};
  mo::Result result{};
  std::vector<mo::RowStats> row_stats;
  std::vector<double> sums[2];
  std::vector<mo::Tile> tiles;
  std::vector<mo::DeviceChunk> chunks;

  explicit TestTable(const std::vector<Param>& params) {
    for (const Param& p : params) rows.emplace_back(p);
    hyper.lr = 0.05;
    hyper.beta1 = 0.6;
    hyper.beta2 = -0.8;
    hyper.eps = NAN;
    hyper.weight_decay = 0.1;
    hyper.clip = 1.0;
    hyper.eps2 = 1e-3;
    hyper.threshold = 1.0;
    hyper.factor_flags = mo::kScaleParameter;
    control.max_grad_norm = NAN;
    control.grad_scale = 1.0;
    control.rule = mo::kAdafactor;
    control.threads = 1;
    control.phases = mo::kMeasure | mo::kFinish | mo::kUpdate;
    control.update_stats = 1;
    cut();
  }

  void fill(uint64_t seed, double scale) {
    Random random(seed);
    for (TestRow& r : rows) {
      for (int o = seed == 1 ? 0 : 1; o < 2; ++o) {
        for (int64_t i = 0; i < r.op[o].count(); ++i) r.op[o].set(i, random.value(o == 0 ? 1.0 : scale));
      }
    }
  }

  void cut() {
    for (size_t r = 0; r < rows.size(); ++r) {
      const Param& p = rows[r].param;
      mo::Factored& f = rows[r].f;
      f = {p.rows ? p.batch : 1, p.rows ? p.rows : 1, p.cols, p.rows != 0, 0, 0, 1, 1, 0, 0, p.numel(), 0, 0, {}};
      f.whole_rows = f.rows;
      f.whole_cols = f.cols;
      const auto put = [&](int64_t start, int64_t high, int64_t wide, int64_t row, int64_t col) {
        chunks.push_back({start, int64_t(r), high * wide, int64_t(chunks.size())});
        tiles.push_back({high, wide, row, col});
      };
      if (!f.factored) {
        for (int64_t i = 0; i < p.cols; i += kTogether) put(i, 1, std::min(kTogether, p.cols - i), 0, 0);
        continue;
      }
      if (p.rows <= kRows && p.cols <= kCols) {
        f.col_norms = f.batch * f.rows;
        const int64_t whole = std::max<int64_t>(1, kTogether / (p.rows * p.cols));
        for (int64_t b = 0; b < p.batch; b += whole) {
          const int64_t here = std::min(whole, p.batch - b);
          put(b * p.rows * p.cols, here * p.rows, p.cols, b * p.rows, f.col_norms + b * p.cols);
        }
      } else {
        f.grid_rows = (p.rows + kRows - 1) / kRows;
        f.grid_cols = (p.cols + kCols - 1) / kCols;
        f.col_norms = f.grid_cols * f.batch * f.rows;
        for (int64_t b = 0; b < p.batch; ++b) {
          for (int64_t i = 0; i < f.grid_rows; ++i) {
            for (int64_t j = 0; j < f.grid_cols; ++j) {
              put((b * p.rows + i * kRows) * p.cols + j * kCols, std::min(kRows, p.rows - i * kRows),
                  std::min(kCols, p.cols - j * kCols), j * f.batch * f.rows + b * p.rows + i * kRows,
                  f.col_norms + i * f.batch * f.cols + b * p.cols + j * kCols);
            }
          }
        }
      }
      rows[r].scratch = Memory(p.wide() ? mo::kF64 : mo::kF32, f.col_norms + f.grid_rows * f.batch * f.cols);
    }
    for (auto& s : sums) s.assign(std::max<size_t>(1, chunks.size()), NAN);
  }

  // `unknown`: the first pass takes the sums of the parameters.
  Records records(bool unknown) {
    Records made;
    made.rows.resize(rows.size());
    int64_t chunk = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      TestRow& row = rows[r];
      const Param& p = row.param;
      mo::Row& n = made.rows[r];
      n = mo::Row{};
      n.param = row.op[0].address();
      n.grad = row.op[1].address();
      n.state[0] = row.second.address();
      n.state[1] = p.rows ? row.cols.address() : 0;
      n.state[2] = row.op[2].address();
      const int compute = p.wide() ? mo::kF64 : mo::kF32;
      const int dtypes[] = {p.dtype[0], p.dtype[1], compute, compute, std::max(p.dtype[2], 0)};
      for (int o = mo::kParam; o <= mo::kState2; ++o) n.dtype[o] = uint8_t(dtypes[o]);
      n.step = uint64_t(&row.step);
      n.numel = p.numel();
      n.flags = mo::kActive | (unknown ? mo::kParamUnknown : 0);
      n.first_chunk = chunk;
      for (; chunk < int64_t(chunks.size()) && chunks[size_t(chunk)].row == int64_t(r);) ++chunk;
      n.chunks = chunk - n.first_chunk;
      row.f.norms = row.scratch.address();
      n.factored = uint64_t(&row.f);
      if (p.turned) {
        mo::Layout& l = row.layout;
        l = {3, {p.batch, p.rows, p.cols}, {}, {1, 0, 0, 0, 1}};
        for (int o = 0; o < mo::kOperands; ++o) {
          const bool grad = o == mo::kGrad;
          const int64_t strides[] = {p.rows * p.cols, grad ? 1 : p.cols, grad ? p.rows : 1};
          for (int d = 0; d < 3; ++d) l.stride[o][d] = strides[d];
        }
        n.layout = uint64_t(&l);
      }
    }
    made.batches = {0};
    for (const mo::DeviceChunk& c : chunks) {
      made.chunks.push_back({c.start, int32_t(c.row), int32_t(c.length)});
      made.batches.push_back(int32_t(made.chunks.size()));
    }
    row_stats.assign(rows.size(), mo::RowStats{});
    result = mo::Result{};
    made.finish(&hyper, 1, row_stats, result, control);
    made.table.tiles = uint64_t(tiles.data());
    made.table.update_sums = uint64_t(sums[0].data());
    made.table.param_sums = uint64_t(sums[1].data());
    return made;
  }

  // `exchange`: called with 0 and 1 after the first and the second pass, where rows are parts of larger parameters.
  void run(bool unknown, const std::function<void(int)>& exchange = {}) {
    Records made = records(unknown);
#if defined(MO_CUDA_SHIM)
    run_on_device(made.rows, exchange);
#else
    if (!exchange) return mo::run_step(made.table);
    const int32_t asked = control.phases, first = asked & mo::kMeasure;
    const auto call = [&](int32_t phases) {
      control.phases = phases;
      mo::run_step(made.table);
    };
    call(first | mo::kFinish | mo::kUpdate | mo::kDeferred);
    if (!first) call(mo::kMeasure | mo::kPrepared);
    exchange(0);
    call(mo::kUpdate | mo::kPrepared | mo::kMeasured | mo::kFactors);
    exchange(1);
    call(mo::kUpdate | mo::kPrepared | mo::kMeasured | mo::kSized | mo::kSums);
    control.phases = asked;
#endif
  }

#if defined(MO_CUDA_SHIM)
  void run_on_device(std::vector<mo::Row>& native, const std::function<void(int)>& exchange) {
    std::vector<double> stats(sizeof(mo::Result) / sizeof(double) + mo::kStatColumns * chunks.size(), NAN);
    std::vector<mo::DeviceScalars> scalars(rows.size());
    std::vector<mo::Settings> settings(2);
    settings[1].hyper = hyper;
    std::vector<int64_t> runs;
    for (size_t r = 0; r < rows.size(); ++r) {
      const mo::Factored& f = rows[r].f;
      const int64_t together = f.factored ? std::max<int64_t>(1, 2048 / (f.rows + f.cols)) : 1;
      for (int64_t b = 0; f.factored && b < f.batch; b += together) {
        for (int64_t x : {int64_t(r), b, std::min(together, f.batch - b), int64_t(0)}) runs.push_back(x);
      }
    }
    mo::DeviceStep s{};
    s.rows = uint64_t(native.data());
    s.settings = uint64_t(settings.data());
    s.scalars = uint64_t(scalars.data());
    s.stats = uint64_t(stats.data());
    s.n_rows = int64_t(native.size());
    s.n_chunks = int64_t(chunks.size());
    s.rule = mo::kAdafactor;
    s.measured = 1;
    s.sums = control.update_stats;
    s.tiles = uint64_t(tiles.data());
    s.update_sums = uint64_t(sums[0].data());
    s.param_sums = uint64_t(sums[1].data());
    s.runs = uint64_t(runs.data());
    s.n_runs = int64_t(runs.size()) / 4;
    const auto once = [&](int phase) {
      s.phases = phase;
      CHECK(mo::run_device_step(s) == nullptr);
    };
    const auto over_tiles = [&](int phase) {
      for (int wide = 0; wide < 2; ++wide) {
        std::vector<mo::DeviceChunk> mine;
        for (const mo::DeviceChunk& c : chunks) {
          if (rows[size_t(c.row)].param.wide() == (wide == 1)) mine.push_back(c);
        }
        if (mine.empty()) continue;
        std::vector<int32_t> edges;
        for (int32_t e = 0; e < int32_t(mine.size()); e += 3) edges.push_back(e);
        s.n_programs = int64_t(edges.size());
        edges.push_back(int32_t(mine.size()));
        s.chunks = uint64_t(mine.data());
        s.programs = uint64_t(edges.data());
        s.wide = wide;
        once(phase);
      }
    };
    over_tiles(mo::kDeviceMeasure);
    once(mo::kDeviceFinish);
    if (exchange) exchange(0);
    once(mo::kDeviceFactors);
    over_tiles(mo::kDeviceFactoredRms);
    if (exchange) exchange(1);
    once(mo::kDeviceSizes);
    over_tiles(mo::kDeviceUpdate);
    if (control.update_stats) once(mo::kDeviceNorms);
    result = *reinterpret_cast<const mo::Result*>(stats.data());
  }
#endif

  Digest digest() const {
    Digest d;
    for (const TestRow& r : rows) {
      for (const Memory* m : {&r.op[0], &r.op[1], &r.op[2], &r.second, &r.cols}) {
        for (int64_t i = 0; i < m->count(); ++i) d.add(m->bits(i));
      }
      d.add(double(r.step));
    }
    for (double x : {result.grad_norm, result.update_norm, result.stored_norm, result.param_norm}) d.add(x);
    return d;
  }
};

}  // namespace adafactor
