// Adafactor's first pass over one tile: norms of its rows and columns, and with them the gradient's statistics.
// Formula: sqrt(sum g^2) along rows and columns, partial sums in the compute type over at most 2048 elements of a row or 64
//   of a column and double above; a tile whose sum overflows or nearly vanishes is summed again with a power of two taken
//   out. Reference: tests/test_adafactor_numerics.py, against float64.
// Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8), on request the parameter once.
// Assumes of the table: Row::factored, a Tile for the chunk, and scratch for its norms.
#include "cpu/factored.h"
#include "cpu/kernels.h"

namespace mo {
namespace MO_ISA {
namespace {

constexpr int64_t kColRows = 64;  // rows whose squares are added up in the compute type

template <class T>
struct Range;
template <>
struct Range<float> {
  static constexpr double low = 1e-30;  // below this the squares may have lost bits to denormal numbers
  static constexpr double high = 1e36;  // above it a sum of several in the compute type may have overflown
  static constexpr float largest = 3.40282347e+38f;
};
template <>
struct Range<double> {
  static constexpr double low = 1e-280, high = 1e300;
  static constexpr double largest = 1.7976931348623157e308;
};

// Columns of one matrix: the running sums of a few rows, and those of all rows before.
template <class T>
struct Columns {
  alignas(64) T near[kTile];
  alignas(64) double far[kTile];
  int64_t rows = 0;

  void begin(int64_t n) {
    for (int64_t j = 0; j < n; ++j) near[j] = T(0);
    for (int64_t j = 0; j < n; ++j) far[j] = 0.0;
    rows = 0;
  }
  void flush(int64_t n) {
    for (int64_t j = 0; j < n; ++j) far[j] += double(near[j]);
    for (int64_t j = 0; j < n; ++j) near[j] = T(0);
    rows = 0;
  }
};

template <class T>
struct Seen {
  double sum = 0.0;
  T amax = T(0);
};

// Integers order magnitudes: finite < inf < NaN.
template <class T>
struct Largest {
  using V = typename Vec<T>::type;
  using B = typename Vec<T>::bits;
  static constexpr auto kMagnitude = sizeof(T) == 8 ? int64_t(0x7fffffffffffffff) : int64_t(0x7fffffff);
  B bits = {};
  MO_RULE void take(const V& x) {
    const B magnitude = (B)x & (decltype(bits[0] + 0))kMagnitude;
    bits = magnitude > bits ? magnitude : bits;
  }
  T value() const {
    auto most = bits[0];
    for (int k = 1; k < Vec<T>::width; ++k) most = bits[k] > most ? bits[k] : most;
    T x;
    memcpy(&x, &most, sizeof x);
    return x;
  }
};

template <class T>
struct SumsPass {
  using V = typename Vec<T>::type;
  using Sum = RunSum<T>;
  const Row& row;
  const Factored& f;
  const Chunk& chunk;
  const Tile& tile;
  const double scale;  // a power of two
  const double back;   // its inverse
  Columns<T>& columns;
  T* const norms = reinterpret_cast<T*>(f.norms);
  Largest<T> largest;
  double total = 0.0;

  SumsPass(const Row& row, const Factored& f, const Chunk& chunk, const Tile& tile, double scale, Columns<T>& columns)
      : row(row), f(f), chunk(chunk), tile(tile), scale(scale), back(1.0 / scale), columns(columns) {}

  // One run: its own sum, and its squares on top of the columns'.
  template <bool kMatrix, class S>
  MO_RULE double run(const S* g, int64_t n, T* near) {
    Sum sum;
    Largest<T> most = largest;
    each_vector<T>(
        n,
        [&](int64_t i, int k) MO_LAMBDA {
          const V x = load(g + i);
          most.take(x);
          sum.add(x, k);
          if (kMatrix) store(near + i, V(load(near + i) + x * x));
        },
        [&](int64_t i, int k, int64_t rest) MO_LAMBDA {
          const Rest<T> last(g + i, rest);
          most.take(last.all());
          sum.add_last(last.all(), k);
          for (int64_t j = 0; kMatrix && j < rest; ++j) near[i + j] += last.at[j] * last.at[j];
        });
    largest = most;
    return sum.total();
  }

  template <class S>
  MO_RULE void rows_of(const Block& b, const S* g, int64_t& in_matrix, int64_t& matrix) {
    if (!f.factored) {
      total += run<false>(g, b.cols, static_cast<T*>(nullptr));
      return;
    }
    const int64_t matrix_rows = tile.rows < f.rows ? tile.rows : f.rows;
    for (int64_t r = 0; r < b.rows; ++r) {
      const double sum = run<true>(g + r * b.cols, b.cols, columns.near);
      total += sum;
      norms[tile.row_norms + b.at + r] = T(__builtin_sqrt(sum) * back);
      if (++columns.rows == kColRows) columns.flush(tile.cols);
      if (++in_matrix == matrix_rows) {
        end_matrix(matrix++);
        in_matrix = 0;
        columns.begin(tile.cols);
      }
    }
  }

  void end_matrix(int64_t matrix) {
    columns.flush(tile.cols);
    T* to = norms + tile.col_norms + matrix * f.cols;
    for (int64_t j = 0; j < tile.cols; ++j) to[j] = T(__builtin_sqrt(columns.far[j]) * back);
  }

  Seen<T> operator()() {
    alignas(64) T buffer[kTile];
    int64_t in_matrix = 0, matrix = 0;
    if (f.factored) columns.begin(tile.cols);
    each_block(f, chunk, tile, [&](const Block& b) MO_LAMBDA {
      if (scale == 1.0) {
        with_elements(row, kGrad, b.start, b.n(), buffer, [&](auto g) MO_LAMBDA { rows_of(b, g, in_matrix, matrix); });
      } else {
        const T* g = fetch(row, kGrad, b.start, b.n(), buffer);
        for (int64_t i = 0; i < b.n(); ++i) buffer[i] = g[i] * T(scale);
        rows_of(b, static_cast<const T*>(buffer), in_matrix, matrix);
      }
    });
    return {total, largest.value()};
  }
};

template <class T>
void factor_sums_kernel(const Row& row, const Factored& f, const Chunk& chunk, const Tile& tile, ChunkStats& out) {
  Columns<T> columns;
  Seen<T> seen = SumsPass<T>(row, f, chunk, tile, 1.0, columns)();
  const bool finite = seen.amax <= Range<T>::largest;
  int exponent = 0;
  if (finite && seen.amax > T(0) && !(seen.sum >= Range<T>::low && seen.sum <= Range<T>::high)) {
    exponent = __builtin_ilogb(double(seen.amax));
    const int most = sizeof(T) == 8 ? 1000 : 120;  // the power itself is a normal number of the compute type
    exponent = exponent > most ? most : exponent < -most ? -most : exponent;
    const double scale = __builtin_ldexp(1.0, -exponent);
    seen.sum = SumsPass<T>(row, f, chunk, tile, scale, columns)().sum;
  }
  out.sumsq = seen.sum;
  out.exponent = 2 * exponent;
  out.amax = double(seen.amax);
  out.nonfinite = 0;
  out.zeros = 0;
  if (finite) return;
  alignas(64) T buffer[kTile];
  each_block(f, chunk, tile, [&](const Block& b) MO_LAMBDA {
    const T* g = fetch(row, kGrad, b.start, b.n(), buffer);
    for (int64_t i = 0; i < b.n(); ++i) out.nonfinite += !(g[i] - g[i] == T(0));
  });
}

template <class T>
double param_sums_kernel(const Row& row, const Factored& f, const Chunk& chunk, const Tile& tile) {
  alignas(64) T buffer[kTile];
  double sum = 0.0;
  each_block(f, chunk, tile, [&](const Block& b) MO_LAMBDA {
    double of_block = 0.0;  // added up as the update does it
    with_elements(row, kParam, b.start, b.n(), buffer, [&](auto p) MO_LAMBDA {
      for (int64_t k = 0; k < b.rows; ++k) of_block += param_sum<T>(p + k * b.cols, b.cols);
    });
    sum += of_block;
  });
  return sum;
}

}  // namespace

void launch_factor_sums(const Row& row, const Chunk& chunk, const Tile& tile, ChunkStats& out, double& param_sumsq) {
  const Factored& f = *reinterpret_cast<const Factored*>(row.factored);
  const bool wide = row.dtype[kParam] == kF64;
  if (wide) {
    factor_sums_kernel<double>(row, f, chunk, tile, out);
  } else {
    factor_sums_kernel<float>(row, f, chunk, tile, out);
  }
  if (row.flags & kParamUnknown) {
    param_sumsq = wide ? param_sums_kernel<double>(row, f, chunk, tile) : param_sums_kernel<float>(row, f, chunk, tile);
  }
}

}  // namespace MO_ISA
}  // namespace mo
