// Two steps of Adafactor on tables built by hand, against loops in double: matrices of every kind of tile, vectors, dtypes
// and strides. On every instruction set and for any number of threads, and on a device for any order of threads, with the
// same bits, whether the parameters' sums are those that the step before has left or are taken anew. Then parts of
// larger parameters, with the sums of the whole given.
#include <algorithm>
#include <string>

#include "adafactor_table.h"
#include "rules/adafactor.h"

namespace {

using adafactor::kNone;
using adafactor::Param;
using adafactor::TestRow;
using adafactor::TestTable;

// The step of one row in double, from what it holds; the parameter it must come to, element by element. `sums`: of
// squares of the update and of the parameter.
std::vector<double> expected(const TestRow& r, const mo::Hyper& h, double (*sums)[2] = nullptr) {
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
  if (sums) {
    (*sums)[0] = u_sum;
    (*sums)[1] = p_sum;
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

// The part of a larger parameter that lacks its first rows or columns (of a vector: elements), and its sums.
struct Part {
  int64_t row, col;  // where it begins
  double sums[2];
  std::vector<double> means;
};

// Calls each(index in the part, index in the whole) for every element.
template <class Each>
void over(const Param& part, const Param& whole, const Part& at, Each each) {
  const int64_t high = std::max<int64_t>(part.rows, 1), of_whole = std::max<int64_t>(whole.rows, 1);
  for (int64_t i = 0; i < part.numel(); ++i) {
    const int64_t b = i / (high * part.cols), r = i / part.cols % high, c = i % part.cols;
    each(i, ((b * of_whole) + r + at.row) * whole.cols + c + at.col);
  }
}

void parts_twice(Digests& digests, const std::string& what, int type, bool by_rows) {
  const std::vector<Param> wholes = {{1, 170, 200, {type, type, kNone}}, {3, 40, 33, {type, type, type}},
                                     {1, 5, 7, {type, type, type}},      {2, 81, 97, {type, type, kNone}},
                                     {1, 0, 2100, {type, type, type}},   {1, 0, 3, {type, type, kNone}}};
  std::vector<Param> params;
  std::vector<Part> at;
  for (const Param& w : wholes) {
    Param p = w;
    const bool rows = by_rows && w.rows;
    Part part{rows ? w.rows / 3 : 0, rows ? 0 : w.cols / 3, {}, std::vector<double>(size_t(2 * w.batch))};
    p.rows -= part.row;
    p.cols -= part.col;
    params.push_back(p);
    at.push_back(part);
  }
  TestTable whole(wholes), table(params);
  const double places = type == mo::kF64 ? 1e-12 : 2e-6;
  for (uint64_t step = 1; step <= 2; ++step) {
    whole.fill(step, 1.0);
    std::vector<std::vector<double>> wanted;
    for (size_t r = 0; r < wholes.size(); ++r) {
      TestRow &w = whole.rows[r], &p = table.rows[r];
      wanted.push_back(expected(w, whole.hyper, &at[r].sums));
      const int64_t matrix = wholes[r].rows * wholes[r].cols;
      over(params[r], wholes[r], at[r], [&](int64_t i, int64_t of) {
        if (step == 1) p.op[0].set(i, w.op[0].get(of));
        p.op[1].set(i, w.op[1].get(of));
      });
      if (!wholes[r].rows) continue;
      for (double& x : at[r].means) x = 0.0;
      for (int64_t i = 0; i < wholes[r].batch * wholes[r].rows; ++i) {
        at[r].means[size_t(i / wholes[r].rows)] += w.second.get(i) / double(wholes[r].rows);
      }
      for (int64_t i = 0; i < wholes[r].numel(); ++i) {
        const double g = w.op[1].get(i);
        at[r].means[size_t(wholes[r].batch + i / matrix)] += g * g / double(matrix);
      }
    }
    for (size_t r = 0; r < params.size(); ++r) {
      mo::Factored& f = table.rows[r].f;
      f.whole_numel = wholes[r].numel();
      f.whole = uint64_t(at[r].sums);
      if (!wholes[r].rows) continue;
      f.whole_rows = wholes[r].rows;
      f.whole_cols = wholes[r].cols;
      f.means = by_rows ? uint64_t(at[r].means.data()) : 0;
    }
    // Norms of the whole's columns (or rows) in the place of the part's first, and of no others.
    table.run(step == 1, [&](int pass) {
      for (size_t r = 0; r < params.size() && pass == 0; ++r) {
        TestRow& p = table.rows[r];
        if (!p.f.factored) continue;
        const Param& w = wholes[r];
        const int64_t n = p.f.batch * (by_rows ? p.f.cols : p.f.rows), begin = by_rows ? p.f.col_norms : 0;
        std::vector<double> squares(size_t(n), 0.0);
        for (int64_t i = 0; i < w.numel(); ++i) {
          const double g = whole.rows[r].op[1].get(i);
          const int64_t line = by_rows ? i / (w.rows * w.cols) * w.cols + i % w.cols : i / w.cols;
          squares[size_t(line)] += g * g;
        }
        for (int64_t k = 0; k < (by_rows ? p.f.grid_rows : p.f.grid_cols) * n; ++k) {
          p.scratch.set(begin + k, k < n ? std::sqrt(squares[size_t(k)]) : 0.0);
        }
      }
    });
    whole.run(step == 1);
    for (size_t r = 0; r < params.size(); ++r) {
      const TestRow &w = whole.rows[r], &p = table.rows[r];
      const auto near = [&](double got, double want, const char* of, int64_t i) {
        CHECK_SAYS(std::fabs(got - want) <= places * std::max(std::fabs(want), 0.1),
                   "%s step %d row %zu %s [%d]: %.9g, not %.9g", what.c_str(), int(step), r, of, int(i), got, want);
      };
      over(params[r], wholes[r], at[r], [&](int64_t i, int64_t of) {
        near(p.op[0].get(i), wanted[r][size_t(of)], "parameter", i);
        if (!wholes[r].rows) near(p.second.get(i), w.second.get(of), "second moment", i);
      });
      for (int64_t i = 0; wholes[r].rows && i < p.second.count(); ++i) {
        const int64_t of = i / params[r].rows * wholes[r].rows + i % params[r].rows + at[r].row;
        near(p.second.get(i), w.second.get(of), "row", i);
      }
      for (int64_t i = 0; wholes[r].rows && i < p.cols.count(); ++i) {
        const int64_t of = i / params[r].cols * wholes[r].cols + i % params[r].cols + at[r].col;
        near(p.cols.get(i), w.cols.get(of), "column", i);
      }
      CHECK(p.step == float(step));
    }
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
    for (bool by_rows : {false, true}) {
      const std::string what = by_rows ? "the last rows" : "the last columns";
      parts_twice(digests, what + " fp32", mo::kF32, by_rows);
      parts_twice(digests, what + " fp64", mo::kF64, by_rows);
    }
  });
}
