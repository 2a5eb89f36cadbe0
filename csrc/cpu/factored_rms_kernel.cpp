// Adafactor's second pass over one tile: sum of squares of the update before it is limited. Of a vector the second moment,
// which is kept element by element, is brought up to date as well.
// Formula: rules/adafactor.h, factored_update and vector_moment. Reference: mo_fused/reference.py.
// Bytes per element: matrices read the gradient (fp32 4, 16 bits 2, fp64 8); vectors also read and write the moment
//   (4 + 4; fp64 8 + 8).
// Assumes of the table: inverse roots in the scratch of the norms; row scalars prepared by the finish.
#include "cpu/factored.h"
#include "cpu/kernels.h"

namespace mo {
namespace MO_ISA {
namespace {

template <class T, class S>
MO_RULE double vector_run(const S* g, T* v, int64_t n, const FactorScalars<T>& scalars) {
  using V = typename Vec<T>::type;
  const FactorScalars<T> s = scalars;
  RunSum<T> sum;
  const auto update = [&](const V& g, V& v) MO_LAMBDA {
    v = vector_moment(g, v, s);
    return factored_update(g, V(V{} + T(1)), V(T(1) / square_root(v)), s);
  };
  each_vector<T>(
      n,
      [&](int64_t i, int k) MO_LAMBDA {
        V moment = load(v + i);
        sum.add(update(load(g + i), moment), k);
        store(v + i, moment);
      },
      [&](int64_t i, int k, int64_t rest) MO_LAMBDA {
        Rest<T> moments(v + i, rest);
        V moment = moments.all();
        sum.add_last(update(Rest<T>(g + i, rest).all(), moment), k);
        store(moments.at, moment);
        memcpy(v + i, moments.at, size_t(rest) * sizeof(T));
      });
  return sum.total();
}

// One run of a matrix row with inverse root r; c are the inverse roots of its columns.
template <class T, class S>
MO_RULE double matrix_run(const S* g, T r, const T* c, int64_t n, const FactorScalars<T>& scalars) {
  using V = typename Vec<T>::type;
  const FactorScalars<T> s = scalars;
  const V of_row = V{} + r;
  RunSum<T> sum;
  each_vector<T>(
      n,
      [&](int64_t i, int k) MO_LAMBDA { sum.add(factored_update(V(load(g + i)), of_row, V(load(c + i)), s), k); },
      [&](int64_t i, int k, int64_t rest) MO_LAMBDA {
        Rest<T> updates;
        store(updates.at, factored_update(Rest<T>(g + i, rest).all(), of_row, Rest<T>(c + i, rest).all(), s));
        updates.keep(rest);  // zero times an infinite root is none
        sum.add_last(updates.all(), k);
      });
  return sum.total();
}

template <class T>
double factored_rms_kernel(const Row& row, const Factored& f, const Chunk& chunk, const Tile& tile, const RowScalars& rs) {
  const FactorScalars<T> s(rs);
  const T* of_rows = reinterpret_cast<const T*>(f.norms);
  const T* of_cols = of_rows + f.col_norms;
  alignas(64) T buffer[kTile];
  double total = 0.0;
  each_block(f, chunk, tile, [&](const Block& b) MO_LAMBDA {
    with_elements(row, kGrad, b.start, b.n(), buffer, [&](auto g) MO_LAMBDA {
      if (!f.factored) {
        total += vector_run(g, reinterpret_cast<T*>(row.state[0]) + b.start, b.cols, s);
        return;
      }
      for (int64_t k = 0; k < b.rows; ++k) {
        const int64_t of_row = b.start / f.cols + k;
        const T* c = of_cols + of_row / f.rows * f.cols + b.start % f.cols;
        total += matrix_run(g + k * b.cols, of_rows[of_row], c, b.cols, s);
      }
    });
  });
  return total;
}

}  // namespace

double launch_factored_rms(const Row& row, const Chunk& chunk, const Tile& tile, const RowScalars& s) {
  const Factored& f = *reinterpret_cast<const Factored*>(row.factored);
  return row.dtype[kParam] == kF64 ? factored_rms_kernel<double>(row, f, chunk, tile, s)
                                   : factored_rms_kernel<float>(row, f, chunk, tile, s);
}

}  // namespace MO_ISA
}  // namespace mo
