// Two steps of Adafactor on tables built by hand, against loops in double: matrices of every kind of tile, vectors, dtypes
// and strides. On every instruction set and for any number of threads, and on a device for any order of threads, with the
// same bits, whether the parameters' sums are those that the step before has left or are taken anew.
#include <algorithm>
#include <string>

#include "adafactor_table.h"
#include "rules/adafactor.h"

namespace {

using adafactor::kNone;
using adafactor::Param;
using adafactor::TestRow;
using adafactor::TestTable;

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
