// Between Adafactor's first and second pass: the row and column means of one parameter, and their inverse roots.
// Formula: rules/adafactor.h; everything in double, in the order of the matrices, rounded once to the compute type.
// Reference: mo_fused/reference.py, factored_roots.
// Bytes per row or column of a matrix: 4 read a tile it lies in, 4 read and 8 written (float64: twice as much).
// Assumes of the table: the norms of every tile of the row; row scalars prepared by the finish.
#include "cpu/factored.h"
#include "cpu/kernels.h"

namespace mo {
namespace MO_ISA {
namespace {

// Mean squares of n rows (or columns), from what `grid` tiles found of each, into their running average.
template <class T>
void average(T* mean, const T* norms, int64_t n, int64_t grid, int64_t pitch, double coef, double length,
             const RowScalars& s) {
  const double weight = s.a[kRest], added = s.a[kAdded];
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0.0;
    for (int64_t k = 0; k < grid; ++k) {
      const double norm = double(norms[k * pitch + i]) * coef;
      sum += norm * norm;
    }
    mean[i] = T(toward(double(mean[i]), sum / length + added, weight));
  }
}

template <class T>
void factors_kernel(const Row& row, const Factored& f, const RowScalars& s) {
  T* of_rows = reinterpret_cast<T*>(f.norms);
  T* of_cols = of_rows + f.col_norms;
  T* row_var = reinterpret_cast<T*>(row.state[0]);
  T* col_var = reinterpret_cast<T*>(row.state[1]);
  const double coef = s.coef;
  const double* means = reinterpret_cast<const double*>(f.means);
  if (f.whole_rows == 0 || f.whole_cols == 0) return;
  average(row_var, of_rows, f.batch * f.rows, f.grid_cols, f.batch * f.rows, coef, double(f.whole_cols), s);
  average(col_var, of_cols, f.batch * f.cols, f.grid_rows, f.batch * f.cols, coef, double(f.whole_rows), s);
  for (int64_t b = 0; b < f.batch; ++b) {
    constexpr int lanes = 8;
    double part[lanes] = {};
    const T* r = row_var + b * f.rows;
    for (int64_t i = 0; i < f.rows; ++i) part[i % lanes] += double(r[i]);
    double mean = 0.0;
    for (double x : part) mean += x;
    mean /= double(f.rows);
    if (means) mean = mean_of_rows(means[b], means[f.batch + b], coef, s.a[kAdded], s.a[kRest]);
    const double root = __builtin_sqrt(mean < s.a[kFloor] ? s.a[kFloor] : mean);
    T* to = of_rows + b * f.rows;
    for (int64_t i = 0; i < f.rows; ++i) to[i] = T(root / __builtin_sqrt(double(r[i])));
  }
  for (int64_t j = 0; j < f.batch * f.cols; ++j) of_cols[j] = T(1.0 / __builtin_sqrt(double(col_var[j])));
}

}  // namespace

void launch_factors(const Row& row, const RowScalars& s) {
  const Factored& f = *reinterpret_cast<const Factored*>(row.factored);
  if (!f.factored) return;
  row.dtype[kParam] == kF64 ? factors_kernel<double>(row, f, s) : factors_kernel<float>(row, f, s);
}

}  // namespace MO_ISA
}  // namespace mo
