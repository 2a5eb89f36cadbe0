// Adafactor's first pass: norms of every tile's rows and columns, and with them the gradient's statistics.
// Formula: sqrt(sum g^2) along rows and columns, in the compute type over what one thread sees of a row or of at most 64
//   rows, double above; a tile whose sum overflows or nearly vanishes is summed again with a power of two taken out.
// Reference: tests/test_adafactor_numerics.py, against float64.
// Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8); twice where its dtype is not the compute
//   type's or its order not the shape's, and small matrices (from cache); on request the parameter once.
// Assumes of the table: Row::factored, a Tile for the chunk, and scratch for its norms.
#include "cuda/tile.cuh"

namespace mo {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kPanel = 64 * kWarps;  // rows whose squares are added up in the compute type
constexpr int kSmall = 32;           // a thread takes whole rows and columns of matrices that are no larger
constexpr int kTogether = 4096;      // elements of small matrices that are read again while they are in cache

template <class T>
struct Range;
template <>
struct Range<float> {
  static constexpr double low = 1e-30;  // below this the squares may have lost bits to denormal numbers
  static constexpr double high = 1e36;  // above it a sum of several in the compute type may have overflown
  static constexpr int most = 120;      // a power of two that is a normal number, as is its inverse
};
template <>
struct Range<double> {
  static constexpr double low = 1e-280, high = 1e300;
  static constexpr int most = 1000;
};

// One piece of shared memory for every gradient dtype: sums of a tile's columns, by warp.
template <class T>
__device__ __forceinline__ T* column_sums() {
  __shared__ T sums[kWarps * kTileColumns];
  return sums;
}

// One walk over a tile. A thread's part of the sums; rows' and columns' norms go to the scratch.
template <class T>
struct Walk {
  const Row& row;
  const Factored& f;
  const int64_t start;
  const Tile& tile;
  T* const norms;
  T scale;      // a power of two
  double back;  // its inverse
  double total = 0.0;
  typename Bits<T>::type largest = 0;

  __device__ __forceinline__ Walk(const Row& r, const Factored& of, int64_t from, const Tile& t)
      : row(r), f(of), start(from), tile(t), norms(as<T>(of.norms)), scale(T(1)), back(1.0) {}

  // The square of one element, which is looked at.
  __device__ __forceinline__ T square(T g) {
    const T x = g * scale;
    const auto bits = magnitude_bits(x);
    largest = bits > largest ? bits : largest;
    return x * x;
  }
  __device__ __forceinline__ T element(int64_t i) const {
    return load_any<T>(row.grad, row.dtype[kGrad], place(row, kGrad, start + i));
  }
  __device__ __forceinline__ void put_row(int64_t at, double sum) const {
    norms[tile.row_norms + at] = T(MO_ISA::square_root(sum) * back);
  }
  __device__ __forceinline__ void put_column(int64_t at, double sum) const {
    norms[tile.col_norms + at] = T(MO_ISA::square_root(sum) * back);
  }
  __device__ __forceinline__ int matrix_rows() const { return int(tile.rows < f.rows ? tile.rows : f.rows); }

  template <class G>
  __device__ __forceinline__ void vector() {
    constexpr int N = kPackOf<G>;
    const G* g = as<const G>(row.grad) + start;
    each_piece(N, f, tile, [&](const Piece& piece) {
      const G* from = g + piece.offset;
      const auto pack = load_part<G, N>(from, piece.n, piece.n == N && is_aligned<N>(from));
      T squares = T(0);
#pragma unroll
      for (int k = 0; k < N; ++k) squares += square(widened<T>(pack.at[k]));
      total += double(squares);
    });
  }
  __device__ __forceinline__ void any_vector() {
#pragma unroll 1
    for (int i = threadIdx.x; i < int(tile.cols); i += kThreads) total += double(square(element(i)));
  }

  // Whole matrices of at most kSmall rows and columns: a thread has a row, then a column, by itself.
  __device__ __forceinline__ void small() {
    const int rows = int(f.rows), cols = int(f.cols), matrices = int(tile.rows) / rows;
    const int together = kTogether / (rows * cols);
#pragma unroll 1
    for (int first = 0; first < matrices; first += together) {
      const int here = matrices - first < together ? matrices - first : together;
#pragma unroll 1
      for (int i = first * rows + int(threadIdx.x); i < (first + here) * rows; i += kThreads) {
        T squares = T(0);
#pragma unroll 1
        for (int j = 0; j < cols; ++j) squares += square(element(int64_t(i) * cols + j));
        total += double(squares);
        put_row(i, double(squares));
      }
#pragma unroll 1
      for (int i = first * cols + int(threadIdx.x); i < (first + here) * cols; i += kThreads) {
        const int matrix = i / cols, col = i % cols;
        T squares = T(0);
#pragma unroll 1
        for (int j = 0; j < rows; ++j) squares += square(element((int64_t(matrix) * rows + j) * cols + col));
        put_column(i, double(squares));
      }
    }
  }

  // Larger matrices: a warp takes rows, as many at a time as its threads can take a pack of each; a thread keeps the sums
  // of its columns, and the warps' sums meet in shared memory.
  template <class G>
  __device__ __forceinline__ void matrices() {
    constexpr int N = kPackOf<G>, kPacks = kTileColumns / (32 * N);
    constexpr int kOwn = (kTileColumns + kThreads - 1) / kThreads;
    T* const partial = column_sums<T>();
    const int cols = int(tile.cols), high = matrix_rows();
    int lanes = 1;  // of a row
    while (lanes < 32 && lanes * N < cols) lanes *= 2;
    const int lane = int(threadIdx.x) % lanes, group = int(threadIdx.x) / lanes, groups = kThreads / lanes;
    const int width = lanes == 32 ? kTileColumns : lanes * N;  // of a group's sums
    const int in_warp = int(threadIdx.x) % 32 / lanes, at_once = 32 / lanes, warp = int(threadIdx.x) / 32;
#pragma unroll 1
    for (int first = 0; first < int(tile.rows); first += high) {
      double own[kOwn] = {};
#pragma unroll 1
      for (int panel = 0; panel < high; panel += kPanel * at_once) {
        const int end = high - panel < kPanel * at_once ? high : panel + kPanel * at_once;
        T near[kPacks][N] = {};
#pragma unroll 1
        for (int r = panel + warp * at_once; r < end; r += kWarps * at_once) {
          const int mine = first + r + in_warp;
          const bool there = r + in_warp < end;
          const G* g = as<const G>(row.grad) + start + mine * f.cols + lane * N;
          const int left = there ? cols - lane * N : 0;
          Pack<G, N> pack[kPacks];
          if (cols % N == 0 && is_aligned<N>(g)) {
#pragma unroll
            for (int q = 0; q < kPacks; ++q) {
              pack[q] = {};
              if (left > q * 32 * N) pack[q] = load_pack<G, N>(g + q * 32 * N);
            }
          } else {
#pragma unroll
            for (int q = 0; q < kPacks; ++q) pack[q] = load_part<G, N>(g + q * 32 * N, left - q * 32 * N, false);
          }
          T squares = T(0);
#pragma unroll
          for (int q = 0; q < kPacks; ++q) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
              const T one = square(widened<T>(pack[q].at[k]));
              near[q][k] += one;
              squares += one;
            }
          }
          double sum = double(squares);
          for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
          }
          if (lane == 0 && there) {
            total += sum;
            put_row(mine, sum);
          }
        }
        __syncthreads();  // partial may still be read
#pragma unroll
        for (int q = 0; q < kPacks; ++q) {
#pragma unroll
          for (int k = 0; k < N; ++k) {
            if (q == 0 || lanes == 32) partial[group * width + (q * 32 + lane) * N + k] = near[q][k];
          }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          const int j = k * kThreads + int(threadIdx.x);
#pragma unroll 1
          for (int of = 0; of < groups && j < cols; ++of) own[k] += double(partial[of * width + j]);
        }
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int j = k * kThreads + int(threadIdx.x);
        if (j < cols) put_column(first / high * f.cols + j, own[k]);
      }
    }
  }

  // The same for gradients of any dtype and strides, which are read once for the rows and once for the columns.
  __device__ __forceinline__ void any_matrices() {
    const int cols = int(tile.cols), high = matrix_rows();
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll 1
    for (int r = warp; r < int(tile.rows); r += kWarps) {
      double sum = 0.0;
#pragma unroll 1
      for (int j = lane; j < cols; j += 32) sum += double(square(element(r * f.cols + j)));
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (lane == 0) {
        total += sum;
        put_row(r, sum);
      }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < int(tile.rows) / high * cols; i += kThreads) {
      const int matrix = i / cols, col = i % cols;
      double sum = 0.0;
#pragma unroll 1
      for (int r = 0; r < high; ++r) sum += double(square(element((int64_t(matrix) * high + r) * f.cols + col)));
      put_column(matrix * f.cols + col, sum);
    }
  }

  template <class G>
  __device__ __forceinline__ void of() {
    if (f.factored) {
      matrices<G>();
    } else {
      vector<G>();
    }
  }

  __device__ __forceinline__ void operator()() {
    const int dtype = row.dtype[kGrad];
    if (f.factored && f.rows <= kSmall && f.cols <= kSmall) return small();
    if (row.layout == 0) {
      if constexpr (sizeof(T) == 8) {
        if (dtype == kF64) return of<double>();
      } else {
        if (dtype == kF32) return of<float>();
        if (dtype == kBF16) return of<bf16>();
        if (dtype == kF16) return of<f16>();
      }
    }
    if (f.factored) {
      any_matrices();
    } else {
      any_vector();
    }
  }
};

template <class T>
__device__ __forceinline__ void gradient_sums(const DeviceStep& s, const Row& row, const DeviceChunk& chunk,
                                              const Tile& tile) {
  const Factored& f = factored_of(row);
  Walk<T> walk(row, f, chunk.start, tile);
  double sum = 0.0;
  uint64_t largest = 0;
  int exponent = 0;
  bool finite = true;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    walk.total = 0.0;
    walk();
    sum = block_reduce(walk.total, Add());
    if (turn == 1) break;
    largest = magnitude_bits(from_bits(block_reduce(walk.largest, Larger())));
    finite = largest < Bits<double>::infinity;
    if (!finite || largest == 0 || (sum >= Range<T>::low && sum <= Range<T>::high)) break;
    exponent = int(largest >> 52) - 1023;
    exponent = exponent > Range<T>::most ? Range<T>::most : exponent < -Range<T>::most ? -Range<T>::most : exponent;
    walk.back = from_bits(uint64_t(1023 + exponent) << 52);
    walk.scale = T(from_bits(uint64_t(1023 - exponent) << 52));
  }
  int32_t nonfinite = 0;
  if (!finite) {
    const int cols = int(tile.cols);
#pragma unroll 1
    for (int i = threadIdx.x; i < int(tile.rows) * cols; i += kThreads) {
      const T x = walk.element(i / cols * f.cols + i % cols);
      nonfinite += magnitude_bits(x) >= Bits<T>::infinity;
    }
    nonfinite = block_reduce(nonfinite, Add());
  }
  if (threadIdx.x != 0) return;
  const auto put = [&](int name, double x) { column(s.stats, s.n_chunks, name)[chunk.slot] = x; };
  put(kSumsq, sum);
  put(kExponent, double(2 * exponent));
  put(kAmax, from_bits(largest));
  put(kNonfinites, double(nonfinite));
  put(kZeroCount, 0.0);
  put(kClips, settings_of(s, row).hyper.clip != 0.0 ? 1.0 : 0.0);
}

// What adafactor_kernel has put there when it wrote these parameters.
template <class T, class P>
__device__ __forceinline__ double param_sum(const Row& row, int64_t start, const Tile& tile) {
  constexpr int N = kPackOf<P>;
  const P* p = as<const P>(row.param);
  ParamSum<T> sum;
  each_piece(N, factored_of(row), tile, [&](const Piece& piece) {
    if (row.layout == 0) {
      const P* from = p + start + piece.offset;
      const auto pack = load_part<P, N>(from, piece.n, piece.n == N && is_aligned<N>(from));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < piece.n) sum.add(widened<T>(pack.at[k]));
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < piece.n; ++k) sum.add(widened<T>(p[place(row, kParam, start + piece.offset + k)]));
    }
    sum.end_piece();
  });
  return block_reduce(sum.sum, Add());
}

template <class T>
__device__ __forceinline__ double param_sum_of(const Row& row, int64_t start, const Tile& tile) {
  if constexpr (sizeof(T) == 8) {
    return param_sum<double, double>(row, start, tile);
  } else {
    switch (row.dtype[kParam]) {
      case kF32: return param_sum<float, float>(row, start, tile);
      case kBF16: return param_sum<float, bf16>(row, start, tile);
      default: return param_sum<float, f16>(row, start, tile);
    }
  }
}

// T: double for the launch over float64 parameters, float for the one over all others.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) factor_sums_kernel(const DeviceStep s) {
  each_tile(s, [&](const Row& row, const DeviceChunk& chunk, const Tile& tile, const RowScalars&) {
    if (!(row.flags & kActive)) {
      if (threadIdx.x < kUpdateSumsq) column(s.stats, s.n_chunks, threadIdx.x)[chunk.slot] = 0.0;
      return;
    }
    gradient_sums<T>(s, row, chunk, tile);
    if (!(row.flags & kParamUnknown)) return;
    const double sum = param_sum_of<T>(row, chunk.start, tile);
    if (threadIdx.x == 0) as<double>(s.param_sums)[chunk.slot] = sum;
  });
}

}  // namespace

cudaError_t launch_factor_sums(const DeviceStep& s, cudaStream_t stream) {
  const int blocks = int(s.n_programs);
  if (s.wide) {
    MO_LAUNCH(factor_sums_kernel<double>, blocks, kThreads, stream, s);
  } else {
    MO_LAUNCH(factor_sums_kernel<float>, blocks, kThreads, stream, s);
  }
  return launched();
}

}  // namespace mo
