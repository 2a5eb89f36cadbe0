// Adam / AdamW / AMSGrad update of one chunk.
// Formula: rules/adamw.h; of weights finer than their parameter rules/master.h. Reference: mo_fused/reference.py and
//   mo_fused/masters.py, bit for bit.
// Bytes per element, read + written: fp32 16 + 12, bf16 and fp16 8 + 6, bf16 with fp32 moments 12 + 10, fp64 32 + 24;
//   AMSGrad adds one moment each way, master weights the rest's own size (fp32 4 + 4, and the parameter is not read).
//   The gradient is read once and never written.
// Assumes of the table: rows validated, operands of equal numel, Row::dtype right, no two rows share written memory;
//   Row::stream and the number of the step where random bits are drawn.
#include <type_traits>

#include "cpu/adamw_quantised.h"
#include "cpu/kernels.h"
#include "cpu/master.h"
#include "cpu/span.h"
#include "cpu/update_sums.h"
#include "rules/adamw.h"

namespace mo {
namespace MO_ISA {
namespace {

// R: the parameter's storage type, which decides what is kept of an update (P differs from it in a widened tile).
template <class R, bool Amsgrad, bool Stats, class T, class P, class G, class S>
inline void adamw_kernel(P* p, const G* g, S* m, S* v, S* w, int64_t n, const AdamScalars<T>& s, UpdateSums* out) {
  using V = typename Vec<T>::type;
  constexpr int width = Vec<T>::width;
  constexpr bool bf16_only = std::is_same<P, bf16>::value && std::is_same<G, bf16>::value && std::is_same<S, bf16>::value;
  constexpr Order order = bf16_only && !Stats ? Order::kEvenOdd : Order::kSequence;
  const AdamScalars<T> scalars = s;  // copies that the compiler can keep in registers
  UpdateSums sums;
  if (Stats) sums = *out;

  int64_t i = 0;
  if (!Stats) {
    for (; i + 2 * width <= n; i += 2 * width) {
      V pa, pb, ga, gb, ma, mb, va, vb, wa = {}, wb = {}, update;
      load2<order>(p + i, pa, pb);
      load2<order>(g + i, ga, gb);
      load2<order>(m + i, ma, mb);
      load2<order>(v + i, va, vb);
      if (Amsgrad) load2<order>(w + i, wa, wb);
      adamw_update<Amsgrad>(pa, ga, ma, va, wa, update, scalars);
      adamw_update<Amsgrad>(pb, gb, mb, vb, wb, update, scalars);
      store2<order>(p + i, pa, pb);
      store2<order>(m + i, ma, mb);
      store2<order>(v + i, va, vb);
      if (Amsgrad) store2<order>(w + i, wa, wb);
    }
  }
  const auto one = [&](P* p, const G* g, S* m, S* v, S* w, int lane, int kept) MO_LAMBDA {
    V param = load(p), first = load(m), second = load(v), largest = {}, update;
    const V old = param;
    if (Amsgrad) largest = load(w);
    adamw_update<Amsgrad>(param, V(load(g)), first, second, largest, update, scalars);
    store(p, param);
    store(m, first);
    store(v, second);
    if (Amsgrad) store(w, largest);
    if (Stats) {
      const V kept_value = stored_value(static_cast<const R*>(nullptr), param);
      sums.add(update, V(kept_value - old), kept_value, lane, kept);
    }
  };
  constexpr int lanes = Stats ? UpdateSums::kLanes : width;
  for (; i + lanes <= n; i += lanes) {
    for (int k = 0; k < lanes; k += width) {
      one(p + i + k, g + i + k, m + i + k, v + i + k, Amsgrad ? w + i + k : w, k, width);
    }
  }
  // The last elements, in a padded copy.
  const int64_t rest = n - i;
  if (rest > 0) {
    P pt[lanes] = {};
    G gt[lanes] = {};
    S mt[lanes] = {}, vt[lanes] = {}, wt[lanes] = {};
    memcpy(pt, p + i, size_t(rest) * sizeof(P));
    memcpy(gt, g + i, size_t(rest) * sizeof(G));
    memcpy(mt, m + i, size_t(rest) * sizeof(S));
    memcpy(vt, v + i, size_t(rest) * sizeof(S));
    if (Amsgrad) memcpy(wt, w + i, size_t(rest) * sizeof(S));
    for (int k = 0; k < lanes; k += width) one(pt + k, gt + k, mt + k, vt + k, wt + k, k, int(rest) - k);
    memcpy(p + i, pt, size_t(rest) * sizeof(P));
    memcpy(m + i, mt, size_t(rest) * sizeof(S));
    memcpy(v + i, vt, size_t(rest) * sizeof(S));
    if (Amsgrad) memcpy(w + i, wt, size_t(rest) * sizeof(S));
  }
  if (Stats) *out = sums;
}

template <class T, class P, class G, class S, bool Amsgrad, bool Stats>
void native(const Row&, const Span& a, const RowScalars& rs, UpdateSums* sums) {
  adamw_kernel<P, Amsgrad, Stats>(static_cast<P*>(a.at[kParam]), static_cast<const G*>(a.at[kGrad]),
                                  static_cast<S*>(a.at[kState0]), static_cast<S*>(a.at[kState1]),
                                  static_cast<S*>(a.at[kState2]), a.n, AdamScalars<T>(rs), sums);
}

// Any mix of dtypes: widened to T tile by tile, computed, narrowed once.
template <class T, class R, bool Amsgrad, bool Stats>
void mixed(const Row& row, const Span& a, const RowScalars& rs, UpdateSums* sums) {
  T tile[kOperands][kTile];
  const AdamScalars<T> s(rs);
  for (int64_t i = 0; i < a.n; i += kTile) {
    const int64_t n = a.n - i < kTile ? a.n - i : kTile;
    const auto at = [&](int op) { return static_cast<char*>(a.at[op]) + i * item_size(row.dtype[op]); };
    for (int op = 0; op < kOperands; ++op) {
      if (a.at[op]) load_tile(tile[op], at(op), row.dtype[op], n);
    }
    adamw_kernel<R, Amsgrad, Stats>(tile[kParam], tile[kGrad], tile[kState0], tile[kState1], tile[kState2], n, s, sums);
    for (int op = 0; op < kOperands; ++op) {
      if (op != kGrad && a.at[op]) store_tile(at(op), tile[op], row.dtype[op], n);
    }
  }
}

// Weights that are finer than their parameter.
template <bool Amsgrad, bool Stats>
void weighted(const Row& row, const Chunk& chunk, const RowScalars& rs, unsigned state, ChunkStats* stats) {
  const AdamScalars<float> s(rs);
  for_each_weight(row, chunk, rs, state, stats, [&](float (&tile)[kOperands][kWeightTile], int64_t n, UpdateSums* sums) {
    adamw_kernel<float, Amsgrad, Stats>(tile[kParam], tile[kGrad], tile[kState0], tile[kState1], tile[kState2], n, s, sums);
  });
}

// Split weights with bf16 gradients and moments, dense and without statistics: no tiles. Returns how many elements it took.
int64_t split_of_bf16(const Row& row, const Chunk& chunk, const RowScalars& rs) {
  constexpr int two = 2 * Vec<float>::width;
  const AdamScalars<float> s(rs);
  uint16_t* p = reinterpret_cast<uint16_t*>(row.param) + chunk.start;
  int16_t* low = reinterpret_cast<int16_t*>(row.master) + chunk.start;
  const bf16* g = reinterpret_cast<const bf16*>(row.grad) + chunk.start;
  bf16* m = reinterpret_cast<bf16*>(row.state[0]) + chunk.start;
  bf16* v = reinterpret_cast<bf16*>(row.state[1]) + chunk.start;
  int64_t i = 0;
  for (; i + two <= chunk.length; i += two) {
    f32v pa, pb, ga, gb, ma, mb, va, vb, unused = {}, update;
    load2_split(p + i, low + i, pa, pb);
    load2<Order::kEvenOdd>(g + i, ga, gb);
    load2<Order::kEvenOdd>(m + i, ma, mb);
    load2<Order::kEvenOdd>(v + i, va, vb);
    adamw_update<false>(pa, ga, ma, va, unused, update, s);
    adamw_update<false>(pb, gb, mb, vb, unused, update, s);
    store2_split(p + i, low + i, pa, pb);
    store2<Order::kEvenOdd>(m + i, ma, mb);
    store2<Order::kEvenOdd>(v + i, va, vb);
  }
  return i;
}

bool is_split_of_bf16(const Row& row) {
  for (int op = kParam; op <= kState1; ++op) {
    if (row.dtype[op] != kBF16) return false;
  }
  return row.master_mode == kSplit && row.layout == 0 && row.block == 0;
}

using Function = void (*)(const Row&, const Span&, const RowScalars&, UpdateSums*);

template <bool Amsgrad, bool Stats>
Function choose(const Row& r) {
  const int p = r.dtype[kParam], g = r.dtype[kGrad], m = r.dtype[kState0], v = r.dtype[kState1];
  const bool one_state = m == v && (!Amsgrad || r.dtype[kState2] == m);
  if (one_state && p == g) {
    if (p == kF32 && m == kF32) return native<float, float, float, float, Amsgrad, Stats>;
    if (p == kBF16 && m == kBF16) return native<float, bf16, bf16, bf16, Amsgrad, Stats>;
    if (p == kBF16 && m == kF32) return native<float, bf16, bf16, float, Amsgrad, Stats>;
    if (p == kF16 && m == kF16) return native<float, f16, f16, f16, Amsgrad, Stats>;
    if (p == kF64 && m == kF64) return native<double, double, double, double, Amsgrad, Stats>;
  }
  if (p == kF64) return mixed<double, double, Amsgrad, Stats>;
  if (p == kBF16) return mixed<float, bf16, Amsgrad, Stats>;
  if (p == kF16) return mixed<float, f16, Amsgrad, Stats>;
  return mixed<float, float, Amsgrad, Stats>;
}

}  // namespace

void launch_adamw(const Row& row, const Chunk& chunk, const RowScalars& rs, bool amsgrad, ChunkStats* stats) {
  const Function run = amsgrad ? (stats ? choose<true, true>(row) : choose<true, false>(row))
                               : (stats ? choose<false, true>(row) : choose<false, false>(row));
  const unsigned state = 1u << kState0 | 1u << kState1 | (amsgrad ? 1u << kState2 : 0u);
  if (row.block != 0 && !amsgrad && !stats && launch_adamw_quantised(row, chunk, rs)) return;
  if (row.master_mode != kNoMaster || row.block != 0) {
    const auto run = amsgrad ? (stats ? weighted<true, true> : weighted<true, false>)
                             : (stats ? weighted<false, true> : weighted<false, false>);
    const int64_t done = !amsgrad && !stats && is_split_of_bf16(row) ? split_of_bf16(row, chunk, rs) : 0;
    if (done == chunk.length) return;
    return run(row, Chunk{chunk.start + done, chunk.row, int32_t(chunk.length - done)}, rs, state, stats);
  }
  const unsigned written = 1u << kParam | state;
  UpdateSums sums;
  for_each_span(row, chunk, written | 1u << kGrad, written, [&](const Span& a) { run(row, a, rs, &sums); });
  if (stats) sums.finish(*stats);
}

}  // namespace MO_ISA
}  // namespace mo
