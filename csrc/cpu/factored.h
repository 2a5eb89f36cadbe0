// How the Adafactor kernels see a tile: blocks of whole runs of a matrix's rows in the compute type, at most kTile
// elements each. Operands of another dtype or order are copied into a buffer of that size and back.
#pragma once

#include "abi.h"
#include "cpu/lanes.h"
#include "cpu/span.h"
#include "rules/adafactor.h"

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

static_assert(kTileCols <= kTile, "a run of a tile fits into a buffer");

template <class T>
constexpr int kDTypeOf = sizeof(T) == 8 ? kF64 : kF32;

// Elements [start, start + n) of an operand, in the order of the shape: the operand itself where it can be, or `buffer`.
template <class T>
inline T* fetch(const Row& row, int op, int64_t start, int64_t n, T* buffer) {
  const uint64_t base = operand_address(row, op);
  const int dtype = row.dtype[op];
  const int64_t size = item_size(dtype);
  const Layout* l = reinterpret_cast<const Layout*>(row.layout);
  if (l == nullptr || l->linear[op]) {
    if (dtype == kDTypeOf<T>) return reinterpret_cast<T*>(base) + start;
    load_tile(buffer, reinterpret_cast<const void*>(base + start * size), dtype, n);
    return buffer;
  }
  if (dtype == kDTypeOf<T>) {
    gather(buffer, size, base, *l, op, start, n);
    return buffer;
  }
  alignas(64) uint8_t raw[kTile * 8];
  gather(raw, size, base, *l, op, start, n);
  load_tile(buffer, raw, dtype, n);
  return buffer;
}

// Writes back what fetch gave; afterwards `at` holds what storage keeps of it.
template <class T>
inline void put(const Row& row, int op, int64_t start, int64_t n, T* at) {
  const uint64_t base = operand_address(row, op);
  const int dtype = row.dtype[op];
  const int64_t size = item_size(dtype);
  const Layout* l = reinterpret_cast<const Layout*>(row.layout);
  if (l == nullptr || l->linear[op]) {
    if (dtype == kDTypeOf<T>) {
      T* to = reinterpret_cast<T*>(base) + start;
      if (to != at) memcpy(to, at, size_t(n) * sizeof(T));
      return;
    }
    void* to = reinterpret_cast<void*>(base + start * size);
    store_tile(to, at, dtype, n);
    load_tile(at, to, dtype, n);
    return;
  }
  if (dtype == kDTypeOf<T>) return scatter(at, size, base, *l, op, start, n);
  alignas(64) uint8_t raw[kTile * 8];
  store_tile(raw, at, dtype, n);
  scatter(raw, size, base, *l, op, start, n);
  load_tile(at, raw, dtype, n);
}

// Calls body(pointer to the elements) in their storage type where the kernels read it as it is, else to copies in T.
template <class T, class Body>
inline void with_elements(const Row& row, int op, int64_t start, int64_t n, T* buffer, Body body) {
  const Layout* l = reinterpret_cast<const Layout*>(row.layout);
  if constexpr (sizeof(T) == 4) {
    if (l == nullptr || l->linear[op]) {
      const uint64_t at = operand_address(row, op) + start * 2;
      if (row.dtype[op] == kBF16) return body(reinterpret_cast<const bf16*>(at));
      if (row.dtype[op] == kF16) return body(reinterpret_cast<const f16*>(at));
    }
  }
  body(static_cast<const T*>(fetch(row, op, start, n, buffer)));
}

// A block: `rows` runs of `cols` elements from element `start` of the parameter on; `at` counts matrix rows in the tile.
struct Block {
  int64_t start, rows, cols, at;
  int64_t n() const { return rows * cols; }
};

// Calls visit(block) for the blocks of a tile, in order. Runs that follow one another in memory share a block.
template <class Visit>
inline void each_block(const Factored& f, const Chunk& chunk, const Tile& tile, Visit visit) {
  if (!f.factored) {
    for (int64_t i = 0; i < tile.cols; i += kTile) {
      visit(Block{chunk.start + i, 1, tile.cols - i < kTile ? tile.cols - i : kTile, 0});
    }
    return;
  }
  const int64_t together = tile.cols == f.cols ? kTile / tile.cols : 1;
  for (int64_t i = 0; i < tile.rows; i += together) {
    visit(Block{chunk.start + i * f.cols, tile.rows - i < together ? tile.rows - i : together, tile.cols, i});
  }
}

// Sum of squares of a run: partial sums by place in the compute type, whatever the vectors' width, then double.
template <class T>
class RunSum {
 public:
  static constexpr int kLanes = 2 * Vec<T>::lanes;
  static constexpr int kWidth = Vec<T>::width;
  static constexpr int kVectors = kLanes / kWidth;
  using V = typename Vec<T>::type;

  // A vector whose place among the lanes is `vector`, known when compiling so that the sums stay in registers.
  MO_RULE void add(const V& x, int vector) { acc_[vector] += x * x; }
  // The same where the place is known only when running.
  MO_RULE void add_last(const V& x, int vector) {
    const V square = x * x;
    for (int k = 0; k < kVectors; ++k) {
      if (k == vector) acc_[k] += square;
    }
  }
  MO_RULE double total() const {
    T lanes[kLanes];
    memcpy(lanes, acc_, sizeof lanes);
    double wide[kLanes];
    for (int k = 0; k < kLanes; ++k) wide[k] = double(lanes[k]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) wide[k] += wide[k + half];
    }
    return wide[0];
  }

 private:
  V acc_[kVectors] = {};
};

// The last n elements of a run, fewer than a vector has, in the compute type and followed by zeros.
template <class T>
struct Rest {
  static constexpr int kWidth = Vec<T>::width;
  alignas(64) T at[kWidth] = {};

  Rest() = default;
  template <class S>
  MO_RULE Rest(const S* from, int64_t n) {
    S padded[kWidth] = {};
    memcpy(padded, from, size_t(n) * sizeof(S));
    store(at, load(padded));
  }
  MO_RULE void keep(int64_t n) {  // zeros behind the first n again
    for (int64_t i = n; i < kWidth; ++i) at[i] = T(0);
  }
  MO_RULE typename Vec<T>::type all() const { return load(at); }
};

// Calls full(i, k) for every whole vector of a run of n elements, i being its first element and k its place among the lanes
// of a RunSum, and then last(i, k, count) for what is left.
template <class T, class Full, class Last>
MO_RULE void each_vector(int64_t n, Full full, Last last) {
  constexpr int width = Vec<T>::width, vectors = RunSum<T>::kVectors;
  int64_t i = 0;
  for (; i + width * vectors <= n; i += width * vectors) {
    for (int k = 0; k < vectors; ++k) full(i + k * width, k);
  }
  for (int k = 0; k < vectors - 1; ++k) {
    if (i + width > n) break;
    full(i, k);
    i += width;
  }
  if (i < n) last(i, int(i / width % vectors), n - i);
}

// Sum of squares of a run of the parameter: the same bits whether it is read or was just written.
template <class T, class S>
inline double param_sum(const S* p, int64_t n) {
  RunSum<T> sum;
  each_vector<T>(
      n, [&](int64_t i, int k) MO_LAMBDA { sum.add(load(p + i), k); },
      [&](int64_t i, int k, int64_t rest) MO_LAMBDA { sum.add_last(Rest<T>(p + i, rest).all(), k); });
  return sum.total();
}

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
