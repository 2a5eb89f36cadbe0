// Between Adafactor's first and second pass: row and column means of runs of matrices, and their inverse roots.
// Formula: rules/adafactor.h; everything in double, rounded once to the compute type. Reference: mo_fused/reference.py,
//   factored_roots.
// Bytes per row or column of a matrix: 4 read a tile it lies in, 4 read and 8 written (float64: twice as much).
// Assumes of the table: the norms of every tile; row scalars prepared by the finish; one block for a run of matrices.
#include "cuda/tile.cuh"

namespace mo {
namespace {

constexpr int kAtOnce = 4;   // means that a thread has in work together: one alone would wait for memory each time
constexpr int kSmall = 32;   // matrices of no more rows are one thread's each

// Mean squares of rows or columns, from the norms that `grid` tiles found of each, `pitch` apart.
template <class T>
struct Means {
  T* mean;
  const T* norms;
  int32_t grid;
  int64_t pitch;
  double length, coef, weight, added;

  // The new running averages of those from `first` on, `step` apart, as far as they are below `end`.
  __device__ __forceinline__ void next(int64_t first, int64_t step, int64_t end, T (&out)[kAtOnce]) const {
    double sum[kAtOnce] = {}, old[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (first + u * step < end) old[u] = double(mean[first + u * step]);
    }
#pragma unroll 1
    for (int32_t k = 0; k < grid; ++k) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const double norm = first + u * step < end ? double(norms[k * pitch + first + u * step]) * coef : 0.0;
        sum[u] += norm * norm;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      out[u] = T(MO_ISA::toward(old[u], sum[u] / length + added, weight));
      if (first + u * step < end) mean[first + u * step] = out[u];
    }
  }
};

// Rows [begin, end), of one matrix: `first` and `step` say which of them are this thread's, `total` makes their mean of
// what each thread has added up.
template <class T, class Total>
__device__ __forceinline__ void matrix_rows(const Means<T>& means, T* roots, int64_t begin, int64_t end, int64_t first,
                                            int64_t step, double floor, Total total) {
  double sum = 0.0;
#pragma unroll 1
  for (int64_t i = begin + first; i < end; i += kAtOnce * step) {
    T now[kAtOnce];
    means.next(i, step, end, now);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) sum += i + u * step < end ? double(now[u]) : 0.0;
  }
  const double mean = total(sum);
  const double root = MO_ISA::square_root(mean < floor ? floor : mean);
#pragma unroll 1
  for (int64_t i = begin + first; i < end; i += kAtOnce * step) {
    double own[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) own[u] = i + u * step < end ? double(means.mean[i + u * step]) : 1.0;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * step < end) roots[i + u * step] = T(root / MO_ISA::square_root(own[u]));
    }
  }
}

// Each thread overwrites the norms that no other has to read, with the roots of what it made of them.
template <class T>
__device__ __forceinline__ void make_factors(const Row& row, const RowScalars& s, int64_t first, int64_t count) {
  const Factored& f = factored_of(row);
  T* of_rows = as<T>(f.norms);
  T* of_cols = of_rows + f.col_norms;
  const double weight = s.a[MO_ISA::kRest], added = s.a[MO_ISA::kAdded], floor = s.a[MO_ISA::kFloor];
  const int64_t rows = f.batch * f.rows, cols = f.batch * f.cols;
  const Means<T> of_row{as<T>(row.state[0]),  of_rows, int32_t(f.grid_cols), rows,
                        double(f.whole_cols), s.coef,  weight,               added};
  const Means<T> of_col{as<T>(row.state[1]),  of_cols, int32_t(f.grid_rows), cols,
                        double(f.whole_rows), s.coef,  weight,               added};
  // Of matrix b: of the whole where rows are elsewhere too, else of `sum`.
  const auto mean_of = [&](int64_t b, double sum) {
    const double* means = as<const double>(f.means);
    if (means == nullptr) return sum / double(f.rows);
    return MO_ISA::mean_of_rows(means[b], means[f.batch + b], s.coef, s.a[MO_ISA::kAdded], s.a[MO_ISA::kRest]);
  };
  if (f.rows <= kSmall) {
#pragma unroll 1
    for (int64_t b = first + threadIdx.x; b < first + count; b += kThreads) {
      const auto alone = [&](double sum) { return mean_of(b, sum); };
      matrix_rows(of_row, of_rows, b * f.rows, (b + 1) * f.rows, 0, 1, floor, alone);
    }
  } else {
#pragma unroll 1
    for (int64_t b = first; b < first + count; ++b) {
      const auto together = [&](double sum) { return mean_of(b, block_reduce(sum, Add())); };
      matrix_rows(of_row, of_rows, b * f.rows, (b + 1) * f.rows, threadIdx.x, kThreads, floor, together);
    }
  }
  const int64_t end = (first + count) * f.cols;
#pragma unroll 1
  for (int64_t j = first * f.cols + threadIdx.x; j < end; j += kAtOnce * kThreads) {
    T now[kAtOnce];
    of_col.next(j, kThreads, end, now);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (j + u * kThreads < end) of_cols[j + u * kThreads] = T(1.0 / MO_ISA::square_root(double(now[u])));
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks<float>) factors_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  const int64_t* run = as<const int64_t>(s.runs) + 4 * int64_t(blockIdx.x);
  const Row& row = as<const Row>(s.rows)[run[0]];
  if (!(row.flags & kActive)) return;
  const RowScalars& scalars = as<const DeviceScalars>(s.scalars)[run[0]].scalars;
  if (row.dtype[kParam] == kF64) return make_factors<double>(row, scalars, run[1], run[2]);
  make_factors<float>(row, scalars, run[1], run[2]);
}

}  // namespace

cudaError_t launch_factors(const DeviceStep& s, cudaStream_t stream) {
  if (s.n_runs == 0) return cudaSuccess;
  MO_LAUNCH(factors_kernel, int(s.n_runs), kThreads, stream, s);
  return launched();
}

}  // namespace mo
