// Two steps of Adafactor on tables built by hand, against loops in double: matrices of every kind of tile, vectors, dtypes
// and strides. On every instruction set and for any number of threads, and on a device for any order of threads, with the
// same bits, whether the parameters' sums are those that the step before has left or are taken anew.
#include <algorithm>
#include <string>

#include "rules/adafactor.h"
#include "step_table.h"

namespace {

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
      f = {p.rows ? p.batch : 1, p.rows ? p.rows : 1, p.cols, p.rows != 0, 0, 0, 1, 1};
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

  void run(bool unknown) {
    std::vector<mo::Row> native(rows.size());
    int64_t chunk = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      TestRow& row = rows[r];
      const Param& p = row.param;
      mo::Row& n = native[r];
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
#if defined(MO_CUDA_SHIM)
    run_on_device(native);
#else
    std::vector<mo::Chunk> on_host;
    std::vector<int32_t> batches{0};
    for (const mo::DeviceChunk& c : chunks) {
      on_host.push_back({c.start, int32_t(c.row), int32_t(c.length)});
      batches.push_back(int32_t(on_host.size()));
    }
    std::vector<mo::RowScalars> scalars(rows.size());
    std::vector<mo::ChunkStats> stats(chunks.size());
    std::vector<mo::RowStats> row_stats(rows.size());
    result = mo::Result{};
    control.phases = mo::kMeasure | mo::kFinish | mo::kUpdate;
    mo::StepTable t{};
    t.rows = uint64_t(native.data());
    t.chunks = uint64_t(on_host.data());
    t.batches = uint64_t(batches.data());
    t.hyper = uint64_t(&hyper);
    t.n_rows = int64_t(native.size());
    t.n_chunks = int64_t(chunks.size());
    t.n_batches = int64_t(batches.size()) - 1;
    t.n_groups = 1;
    t.scalars = uint64_t(scalars.data());
    t.chunk_stats = uint64_t(stats.data());
    t.row_stats = uint64_t(row_stats.data());
    t.result = uint64_t(&result);
    t.control = uint64_t(&control);
    t.tiles = uint64_t(tiles.data());
    t.update_sums = uint64_t(sums[0].data());
    t.param_sums = uint64_t(sums[1].data());
    mo::run_step(t);
#endif
  }

#if defined(MO_CUDA_SHIM)
  void run_on_device(std::vector<mo::Row>& native) {
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
    once(mo::kDeviceFactors);
    over_tiles(mo::kDeviceFactoredRms);
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

// The step of one row in double, from what it holds; the parameter it must come to, element by element.
std::vector<double> expected(const TestRow& r, const mo::Hyper& h) {
  const Param& p = r.param;
  const double t = double(r.step) + 1.0, rest = std::pow(t, h.beta2), eps = mo::base::spacing(p.dtype[0]);
  const int64_t n = p.numel(), rows = p.rows ? p.rows : 1, matrix = rows * p.cols;
  std::vector<double> g(static_cast<size_t>(n)), u(g), out(g);
  for (int64_t i = 0; i < n; ++i) g[size_t(i)] = r.op[1].get(r.grad_at(i));
  double u_sum = 0.0, p_sum = 0.0;
  for (int64_t b = 0; b < n / matrix; ++b) {
    std::vector<double> of_row(size_t(rows), 0.0), of_col(size_t(p.cols), 0.0);
    for (int64_t i = 0; i < matrix; ++i) {
      const double square = g[size_t(b * matrix + i)] * g[size_t(b * matrix + i)];
      of_row[size_t(i / p.cols)] += square / double(p.cols);
      of_col[size_t(i % p.cols)] += square / double(rows);
    }
    double mean = 0.0;
    for (int64_t i = 0; p.rows && i < rows; ++i) {
      of_row[size_t(i)] = r.second.get(b * rows + i) * (1.0 - rest) + of_row[size_t(i)] * rest;
      mean += of_row[size_t(i)] / double(rows);
    }
    for (int64_t j = 0; j < p.cols; ++j) {
      const double old = p.rows ? r.cols.get(b * p.cols + j) : r.second.get(j);
      of_col[size_t(j)] = old * (1.0 - rest) + of_col[size_t(j)] * rest;
    }
    for (int64_t i = 0; i < matrix; ++i) {
      const double col = of_col[size_t(i % p.cols)];
      const double v = p.rows ? of_row[size_t(i / p.cols)] * col / std::max(mean, eps) : col;
      u[size_t(b * matrix + i)] = g[size_t(b * matrix + i)] * std::min(1.0 / std::sqrt(v), 1.0 / eps);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    u_sum += u[size_t(i)] * u[size_t(i)];
    p_sum += r.op[0].get(i) * r.op[0].get(i);
  }
  double size = std::min(h.lr, 1.0 / std::sqrt(t)) * std::max(h.eps2, std::sqrt(p_sum / double(n)));
  size /= std::max(1.0, std::sqrt(u_sum / double(n)) / h.threshold);
  for (int64_t i = 0; i < n; ++i) {
    double update = u[size_t(i)] * size;
    if (p.dtype[2] >= 0) update = r.op[2].get(i) * h.beta1 + update * (1.0 - h.beta1);
    out[size_t(i)] = r.op[0].get(i) * (1.0 - h.lr * h.weight_decay) - update;
  }
  return out;
}

std::vector<Param> params(int p, int g, int m) {
  return {{1, 5, 7, {p, g, m}},     {1, 64, 40, {p, g, m}},      {1, 0, 3, {p, g, m}},   {1, 0, 2100, {p, g, m}},
          {500, 3, 3, {p, g, m}},   {300, 1, 1, {p, g, kNone}}, {1, 1, 600, {p, g, m}}, {1, 600, 1, {p, g, m}},
          {1, 170, 200, {p, g, m}}, {3, 40, 33, {p, g, m}},      {5, 33, 8, {p, g, m}},  {2, 81, 97, {p, g, kNone}},
          {2, 30, 20, {p, g, m}, true}, {1, 90, 110, {p, g, m}, true}};
}

void step_twice(Digests& digests, const std::string& what, int p, int g, int m, double scale) {
  TestTable table(params(p, g, m)), again(params(p, g, m));
  again.control.threads = 2;
  const double places = p == mo::kF64 ? 1e-12 : p == mo::kF32 ? 2e-6 : p == mo::kBF16 ? 1e-2 : 2e-3;
  for (uint64_t step = 1; step <= 2; ++step) {
    table.fill(step, scale);
    again.fill(step, scale);
    std::vector<std::vector<double>> wanted;
    for (const TestRow& r : table.rows) wanted.push_back(expected(r, table.hyper));
    table.run(step == 1);
    again.run(true);
    for (size_t r = 0; r < table.rows.size(); ++r) {
      for (int64_t i = 0; i < table.rows[r].param.numel(); ++i) {
        const double got = table.rows[r].op[0].get(i), want = wanted[r][size_t(i)];
        CHECK_SAYS(std::fabs(got - want) <= places * std::max(std::fabs(want), 0.1),
                   "%s step %d row %zu [%d]: %.9g, not %.9g", what.c_str(), int(step), r, int(i), got, want);
      }
      CHECK(table.rows[r].step == float(step));
    }
    CHECK_SAYS(table.digest().hash == again.digest().hash, "%s step %d: other bits with sums taken anew", what.c_str(),
               int(step));
  }
  digests.keep(what, table.digest());
}

}  // namespace

int main() {
  return run_on_every_isa("adafactor_test", [](Digests& digests) {
    step_twice(digests, "fp32", mo::kF32, mo::kF32, mo::kF32, 1.0);
    step_twice(digests, "bf16", mo::kBF16, mo::kBF16, mo::kF32, 1.0);
    step_twice(digests, "fp64", mo::kF64, mo::kF64, mo::kF64, 1.0);
    step_twice(digests, "mixed", mo::kF16, mo::kF32, mo::kBF16, 1.0);
    step_twice(digests, "large", mo::kF32, mo::kF32, kNone, 2e18);
    step_twice(digests, "tiny", mo::kF32, mo::kF32, kNone, 1e-20);
  });
}
