// From a tile of Adafactor's table to its elements and to their inverse roots. A tile is taken in pieces: as many elements
// of a matrix row as 16 bytes hold of the dtype it is walked by. Which thread has which piece follows from the shapes and
// that dtype alone, not from addresses or other operands, so that a sum has the same bits whichever kernel takes it.
#pragma once

#include "cuda/update_sums.cuh"
#include "rules/adafactor.h"

namespace mo {

constexpr int kTileColumns = 512;  // no tile of a matrix is wider on a device (mo_fused/factored.py, device_limits)

// Calls body(row, chunk, tile, scalars) for each tile of this block. All are read where they lie: registers are scarce.
template <class Body>
__device__ __forceinline__ void each_tile(const DeviceStep& s, Body body) {
  const int32_t* edges = as<const int32_t>(s.programs);
  for (int32_t c = edges[blockIdx.x]; c < edges[blockIdx.x + 1]; ++c) {
    const DeviceChunk& chunk = as<const DeviceChunk>(s.chunks)[c];
    body(as<const Row>(s.rows)[chunk.row], chunk, as<const Tile>(s.tiles)[chunk.slot],
         as<const DeviceScalars>(s.scalars)[chunk.row].scalars);
  }
}

__device__ __forceinline__ const Factored& factored_of(const Row& row) { return *as<const Factored>(row.factored); }

// Whether N elements can be accessed together here.
template <int N, class S>
__device__ __forceinline__ bool is_aligned(const S* at) {
  return (reinterpret_cast<uint64_t>(at) & (N * sizeof(S) == 8 ? 7 : 15)) == 0;
}

template <class S>
constexpr int kPackOf = 16 / sizeof(S);
__device__ __forceinline__ int pack_of(int dtype) { return dtype == kF32 ? 4 : dtype == kF64 ? 2 : 8; }

// Elements that one thread takes together.
struct Piece {
  int64_t offset;  // of the first from the tile's first, in elements of the parameter
  int row, col;    // in the tile
  int n;           // a pack, one, or what is left at the end of a vector
};

// Elements of matrices go one by one where rows begin at any address.
template <class Visit>
__device__ __forceinline__ void each_piece(int pack, const Factored& f, const Tile& tile, Visit visit) {
  const int size = f.factored && int(f.cols % pack) != 0 ? 1 : pack;
  const int cols = int(tile.cols), pieces = (cols + size - 1) / size;
  const int down = kThreads / pieces, along = kThreads % pieces;
  int row = int(threadIdx.x) / pieces, at = int(threadIdx.x) % pieces;
#pragma unroll 1
  while (row < int(tile.rows)) {
    const int col = at * size, left = cols - col;
    visit(Piece{row * f.cols + col, row, col, left < size ? left : size});
    row += down;
    at += along;
    if (at >= pieces) {
      at -= pieces;
      ++row;
    }
  }
}

// ---- n of N elements; `whole`: all of them, and aligned

template <class S, int N>
__device__ __forceinline__ Pack<S, N> load_part(const S* from, int n, bool whole) {
  if (whole) return load_pack<S, N>(from);
  Pack<S, N> pack = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < n) pack.at[k] = from[k];
  }
  return pack;
}
template <class S, int N>
__device__ __forceinline__ void store_part(S* to, const Pack<S, N>& pack, int n, bool whole) {
  if (whole) return store_pack(to, pack);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < n) to[k] = pack.at[k];
  }
}

// ---- the inverse root of each element's second moment

template <class T>
struct Roots {
  const T* rows;  // of the tile's first row on; of a vector: null
  const T* cols;  // of the tile's first column on; of a vector: its second moments
  int width, height;  // of a matrix, as far as it lies in the tile

  __device__ __forceinline__ Roots(const Row& row, int64_t start, const Tile& tile) {
    const Factored& f = factored_of(row);
    width = int(f.cols);
    height = int(tile.rows < f.rows ? tile.rows : f.rows);
    if (!f.factored) {
      rows = nullptr;
      cols = as<const T>(row.state[0]) + start;
      return;
    }
    // Norms of tiles that lie beside or below others are further parts of the scratch; the roots are in the first.
    int64_t of_row = tile.row_norms, of_col = tile.col_norms - f.col_norms;
    if (of_row >= f.batch * f.rows) of_row %= f.batch * f.rows;
    if (of_col >= f.batch * f.cols) of_col %= f.batch * f.cols;
    rows = as<const T>(f.norms) + of_row;
    cols = as<const T>(f.norms) + f.col_norms + of_col;
  }

  __device__ __forceinline__ const T* columns_of(const Piece& piece) const {
    return cols + (piece.row < height ? 0 : piece.row / height * width) + piece.col;
  }

  // Of element k of a piece.
  __device__ __forceinline__ T one(const Piece& piece, int k) const {
    const T column = columns_of(piece)[k];
    return rows ? rows[piece.row] * column : T(1) / MO_ISA::square_root(column);
  }

  // Of a piece of at most N, of vectors alone or of matrices alone.
  template <bool kVector, int N>
  __device__ __forceinline__ void many(const Piece& piece, T (&root)[N]) const {
    const T* from = kVector ? cols + piece.col : columns_of(piece);
    const auto values = load_part<T, N>(from, piece.n, piece.n == N && is_aligned<N>(from));
    const T r = kVector ? T(1) : rows[piece.row];
#pragma unroll
    for (int k = 0; k < N; ++k) root[k] = kVector ? T(1) / MO_ISA::square_root(values.at[k]) : r * values.at[k];
  }
};

// What a thread has of the parameter's sum of squares, from pieces of packs of its dtype.
template <class T>
struct ParamSum {
  double sum = 0.0;
  T squares = T(0);
  __device__ __forceinline__ void add(T p) { squares += p * p; }
  __device__ __forceinline__ void end_piece() {
    sum += double(squares);
    squares = T(0);
  }
};

}  // namespace mo
