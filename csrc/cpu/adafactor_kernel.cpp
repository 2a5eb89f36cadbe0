// Adafactor's third pass over one tile: the update itself, and the sum of squares of what it leaves of the parameter.
// Formula: rules/adafactor.h, adafactor_update. Reference: mo_fused/reference.py, bit for bit.
// Bytes per element, read + written: fp32 8 + 4, bf16 and fp16 4 + 2, fp64 16 + 8; a first moment its own size both ways,
//   the second moment of a vector 4 (fp64: 8), read.
// Assumes of the table: inverse roots in the scratch of the norms; row scalars with this step's size.
#include "cpu/factored.h"
#include "cpu/kernels.h"
#include "cpu/update_sums.h"

namespace mo {
namespace MO_ISA {
namespace {

// A run of one matrix row, in place: r is the inverse root of the row, c those of its columns. Returns the sum of squares of
// what storage keeps of the parameter.
template <bool kMomentum, class T, class S>
MO_RULE double update_run(S* p, const S* g, T r, const T* c, T* m, T* update, int64_t n, const FactorScalars<T>& scalars) {
  using V = typename Vec<T>::type;
  const FactorScalars<T> s = scalars;
  const V rv = V{} + r;
  const S* const storage = nullptr;
  RunSum<T> sum;
  const auto one = [&](V& param, const V& g, const V& c, T* m, T* update) MO_LAMBDA {
    V moment = {}, change;
    if (kMomentum) moment = load(m);
    adafactor_update<kMomentum>(param, g, rv, c, moment, change, s);
    if (kMomentum) store(m, moment);
    if (update) store(update, change);
  };
  each_vector<T>(
      n,
      [&](int64_t i, int k) MO_LAMBDA {
        V param = load(p + i);
        one(param, load(g + i), load(c + i), kMomentum ? m + i : m, update ? update + i : update);
        store(p + i, param);
        sum.add(stored_value(storage, param), k);
      },
      [&](int64_t i, int k, int64_t rest) MO_LAMBDA {
        Rest<T> params(p + i, rest), moments, changes;
        if (kMomentum) moments = Rest<T>(m + i, rest);
        V param = params.all();
        one(param, Rest<T>(g + i, rest).all(), Rest<T>(c + i, rest).all(), moments.at, changes.at);
        S stored[Vec<T>::width];
        store(stored, param);
        memcpy(p + i, stored, size_t(rest) * sizeof(S));
        if (kMomentum) memcpy(m + i, moments.at, size_t(rest) * sizeof(T));
        if (update) memcpy(update + i, changes.at, size_t(rest) * sizeof(T));
        store(params.at, stored_value(storage, param));
        params.keep(rest);
        sum.add_last(params.all(), k);
      });
  return sum.total();
}

template <class T>
struct Pass {
  const Row& row;
  const Factored& f;
  const FactorScalars<T> s;
  const bool momentum = row.state[2] != 0;
  alignas(64) T grad[kTile], param[kTile], moment[kTile], roots[kTile], update[kTile], old[kTile];

  Pass(const Row& row, const Factored& f, const RowScalars& rs) : row(row), f(f), s(rs) {}  // buffers stay as they are

  // The runs of a block, one after the other; the sum of squares of what storage keeps of them.
  template <class S>
  MO_RULE double rows(const Block& b, S* p, const S* g, T* m, T* changes) {
    const T* of_rows = reinterpret_cast<const T*>(f.norms);
    const T* of_cols = of_rows + f.col_norms;
    double total = 0.0;
    for (int64_t k = 0; k < b.rows; ++k) {
      T r = T(1);
      const T* c = roots;
      if (f.factored) {
        const int64_t of_row = b.start / f.cols + k;
        r = of_rows[of_row];
        c = of_cols + of_row / f.rows * f.cols + b.start % f.cols;
      }
      const int64_t at = k * b.cols;
      T* u = changes ? changes + at : changes;
      total += momentum ? update_run<true>(p + at, g + at, r, c, m + at, u, b.cols, s)
                        : update_run<false>(p + at, g + at, r, c, m, u, b.cols, s);
    }
    return total;
  }

  // Of a vector: the inverse root of each element's second moment.
  void vector_roots(const Block& b) {
    using V = typename Vec<T>::type;
    const T* v = reinterpret_cast<const T*>(row.state[0]) + b.start;
    int64_t i = 0;
    for (; i + Vec<T>::width <= b.cols; i += Vec<T>::width) {
      store(roots + i, V(T(1) / square_root(V(load(v + i)))));
    }
    for (; i < b.cols; ++i) roots[i] = T(1) / square_root(v[i]);
  }

  template <class S>
  double native(const Block& b) {
    S* p = reinterpret_cast<S*>(row.param) + b.start;
    const S* g = reinterpret_cast<const S*>(row.grad) + b.start;
    T* m = momentum ? fetch(row, kState2, b.start, b.n(), moment) : nullptr;
    const double sum = rows(b, p, g, m, static_cast<T*>(nullptr));
    if (momentum) put(row, kState2, b.start, b.n(), m);
    return sum;
  }

  double general(const Block& b, UpdateSums* sums) {
    const int64_t n = b.n();
    const T* g = fetch(row, kGrad, b.start, n, grad);
    T* p = fetch(row, kParam, b.start, n, param);
    T* m = momentum ? fetch(row, kState2, b.start, n, moment) : nullptr;
    if (sums) memcpy(old, p, size_t(n) * sizeof(T));
    rows(b, p, g, m, sums ? update : nullptr);
    put(row, kParam, b.start, n, p);
    if (momentum) put(row, kState2, b.start, n, m);
    if (sums) add_sums(*sums, update, old, p, n);
    double total = 0.0;  // of what storage has kept
    for (int64_t k = 0; k < b.rows; ++k) total += param_sum<T>(p + k * b.cols, b.cols);
    return total;
  }

  double block(const Block& b, UpdateSums* sums) {
    if (!f.factored) vector_roots(b);
    const int dtype = row.dtype[kParam];
    if (row.layout == 0 && sums == nullptr && row.dtype[kGrad] == dtype) {
      if (dtype == kDTypeOf<T>) return native<T>(b);
      if constexpr (sizeof(T) == 4) {
        if (dtype == kBF16) return native<bf16>(b);
        if (dtype == kF16) return native<f16>(b);
      }
    }
    return general(b, sums);
  }
};

template <class T>
double adafactor_kernel(const Row& row, const Factored& f, const Chunk& chunk, const Tile& tile, const RowScalars& rs,
                        UpdateSums* sums) {
  Pass<T> pass(row, f, rs);
  double total = 0.0;
  each_block(f, chunk, tile, [&](const Block& b) MO_LAMBDA { total += pass.block(b, sums); });
  return total;
}

}  // namespace

void launch_adafactor(const Row& row, const Chunk& chunk, const Tile& tile, const RowScalars& s, ChunkStats* stats,
                      double& param_sumsq) {
  const Factored& f = *reinterpret_cast<const Factored*>(row.factored);
  UpdateSums sums;
  UpdateSums* wanted = stats ? &sums : nullptr;
  param_sumsq = row.dtype[kParam] == kF64 ? adafactor_kernel<double>(row, f, chunk, tile, s, wanted)
                                          : adafactor_kernel<float>(row, f, chunk, tile, s, wanted);
  if (stats) sums.finish(*stats);
}

}  // namespace MO_ISA
}  // namespace mo
