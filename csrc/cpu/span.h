// How a kernel sees a chunk: contiguous spans of its operands, in native storage types.
//
// Most rows are one span. A row whose operands differ in element order (channels_last parameter with a contiguous
// gradient, strided views) is cut into tiles; operands that are not contiguous in the walking order are copied into a
// tile-sized buffer and back, so the kernels themselves know nothing of strides. Unusual dtype combinations are widened
// into tiles of the compute type in the same way.
#pragma once

#include "abi.h"
#include "cpu/lanes.h"

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

constexpr int64_t kTile = 2048;  // elements; five float64 tiles are 80 KiB, within L2 everywhere

MO_RULE int64_t item_size(int dtype) { return dtype == kF64 ? 8 : dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

// Calls visit(element offset of this operand, position in the tile, run length, inner stride) for the elements
// [start, start + n) in walking order.
template <class Visit>
inline void walk(const Layout& l, int operand, int64_t start, int64_t n, Visit visit) {
  int64_t index[kMaxDims];
  int64_t rest = start;
  for (int64_t d = l.dims - 1; d >= 0; --d) {
    index[d] = rest % l.size[d];
    rest /= l.size[d];
  }
  const int64_t* stride = l.stride[operand];
  const int64_t inner = l.dims - 1;
  int64_t at = 0;
  while (at < n) {
    int64_t offset = 0;
    for (int64_t d = 0; d < l.dims; ++d) offset += index[d] * stride[d];
    int64_t run = l.size[inner] - index[inner];
    if (run > n - at) run = n - at;
    visit(offset, at, run, stride[inner]);
    at += run;
    index[inner] += run;
    for (int64_t d = inner; d > 0 && index[d] == l.size[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <class T>
inline void gather_as(T* tile, uint64_t base, const Layout& l, int operand, int64_t start, int64_t n) {
  const T* from = reinterpret_cast<const T*>(base);
  walk(l, operand, start, n, [&](int64_t offset, int64_t at, int64_t run, int64_t stride) {
    for (int64_t i = 0; i < run; ++i) tile[at + i] = from[offset + i * stride];
  });
}

template <class T>
inline void scatter_as(const T* tile, uint64_t base, const Layout& l, int operand, int64_t start, int64_t n) {
  T* to = reinterpret_cast<T*>(base);
  walk(l, operand, start, n, [&](int64_t offset, int64_t at, int64_t run, int64_t stride) {
    for (int64_t i = 0; i < run; ++i) to[offset + i * stride] = tile[at + i];
  });
}

inline void gather(void* tile, int64_t size, uint64_t base, const Layout& l, int op, int64_t start, int64_t n) {
  if (size == 8) return gather_as(static_cast<uint64_t*>(tile), base, l, op, start, n);
  if (size == 4) return gather_as(static_cast<uint32_t*>(tile), base, l, op, start, n);
  if (size == 1) return gather_as(static_cast<uint8_t*>(tile), base, l, op, start, n);
  gather_as(static_cast<uint16_t*>(tile), base, l, op, start, n);
}

inline void scatter(const void* tile, int64_t size, uint64_t base, const Layout& l, int op, int64_t start, int64_t n) {
  if (size == 8) return scatter_as(static_cast<const uint64_t*>(tile), base, l, op, start, n);
  if (size == 4) return scatter_as(static_cast<const uint32_t*>(tile), base, l, op, start, n);
  if (size == 1) return scatter_as(static_cast<const uint8_t*>(tile), base, l, op, start, n);
  scatter_as(static_cast<const uint16_t*>(tile), base, l, op, start, n);
}

// A span of n elements from `start` on, in walking order: one pointer per operand, null where the row has none.
struct Span {
  void* at[kOperands];
  int64_t n, start;
};

MO_RULE uint64_t operand_address(const Row& row, int op) {
  return op == kParam ? row.param : op == kGrad ? row.grad : op == kMaster ? row.master : row.state[op - kState0];
}

// Cuts a chunk into spans, calls body(span) on each, and writes back what was copied; `written` has a bit per operand.
template <class Body>
inline void for_each_span(const Row& row, const Chunk& chunk, unsigned used, unsigned written, Body body) {
  Span span;
  if (row.layout == 0) {
    for (int op = 0; op < kOperands; ++op) {
      const uint64_t base = used >> op & 1 ? operand_address(row, op) : 0;
      span.at[op] = base ? reinterpret_cast<void*>(base + chunk.start * item_size(row.dtype[op])) : nullptr;
    }
    span.n = chunk.length;
    span.start = chunk.start;
    body(span);
    return;
  }
  const Layout& l = *reinterpret_cast<const Layout*>(row.layout);
  alignas(64) uint8_t tiles[kOperands][kTile * 8];
  for (int64_t done = 0; done < chunk.length; done += kTile) {
    const int64_t start = chunk.start + done;
    span.n = chunk.length - done < kTile ? chunk.length - done : kTile;
    span.start = start;
    for (int op = 0; op < kOperands; ++op) {
      const uint64_t base = used >> op & 1 ? operand_address(row, op) : 0;
      const int64_t size = item_size(row.dtype[op]);
      span.at[op] = nullptr;
      if (!base) continue;
      if (l.linear[op]) {
        span.at[op] = reinterpret_cast<void*>(base + start * size);
      } else {
        gather(tiles[op], size, base, l, op, start, span.n);
        span.at[op] = tiles[op];
      }
    }
    body(span);
    for (int op = 0; op < kOperands; ++op) {
      if ((written >> op & 1) && span.at[op] == tiles[op]) {
        scatter(tiles[op], item_size(row.dtype[op]), operand_address(row, op), l, op, start, span.n);
      }
    }
  }
}

// Elements of any storage type as the compute type T, and back.
template <class T, class S>
inline void convert_span(T* to, const S* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = T(from[i]);
}
template <class S>
inline void widen_span(float* to, const S* from, int64_t n) {
  constexpr int w = Vec<float>::width;
  int64_t i = 0;
  for (; i + w <= n; i += w) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = widen(from[i]);
}
template <class S>
inline void narrow_span(S* to, const float* from, int64_t n) {
  constexpr int w = Vec<float>::width;
  S last[w];
  float rest[w] = {};
  int64_t i = 0;
  for (; i + w <= n; i += w) store(to + i, load(from + i));
  if (i == n) return;
  memcpy(rest, from + i, size_t(n - i) * sizeof(float));
  store(last, load(rest));
  memcpy(to + i, last, size_t(n - i) * sizeof(S));
}

// float64 storage reaches half precision through float, as a cast in torch does.
inline void load_tile(float* to, const void* from, int dtype, int64_t n) {
  if (dtype == kF32) return convert_span(to, static_cast<const float*>(from), n);
  if (dtype == kF64) return convert_span(to, static_cast<const double*>(from), n);
  if (dtype == kBF16) return widen_span(to, static_cast<const bf16*>(from), n);
  widen_span(to, static_cast<const f16*>(from), n);
}
inline void store_tile(void* to, const float* from, int dtype, int64_t n) {
  if (dtype == kF32) return convert_span(static_cast<float*>(to), from, n);
  if (dtype == kF64) return convert_span(static_cast<double*>(to), from, n);
  if (dtype == kBF16) return narrow_span(static_cast<bf16*>(to), from, n);
  narrow_span(static_cast<f16*>(to), from, n);
}
inline void load_tile(double* to, const void* from, int dtype, int64_t n) {
  if (dtype == kF64) return convert_span(to, static_cast<const double*>(from), n);
  float narrow[kTile];
  load_tile(narrow, from, dtype, n);
  convert_span(to, narrow, n);
}
inline void store_tile(void* to, const double* from, int dtype, int64_t n) {
  if (dtype == kF64) return convert_span(static_cast<double*>(to), from, n);
  float narrow[kTile];
  convert_span(narrow, from, n);
  store_tile(to, narrow, dtype, n);
}

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
