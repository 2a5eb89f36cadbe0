// SGD update of one chunk, with or without a momentum buffer.
// Formula: rules/sgd.h; of weights finer than their parameter rules/master.h. Reference: mo_fused/reference.py and
//   mo_fused/masters.py, bit for bit.
// Bytes per element, read + written: with momentum fp32 12 + 8, bf16 and fp16 6 + 4; without 8 + 4 and 4 + 2;
//   master weights add the rest's own size each way (fp32 4 + 4, and the parameter is not read).
// Assumes of the table: rows validated; a row without momentum has no state address; kFresh rows have a buffer whose
//   contents are ignored; Row::stream and the number of the step where random bits are drawn.
#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/master.h"
#include "cpu/span.h"
#include "cpu/update_sums.h"
#include "rules/sgd.h"

namespace mo {
namespace MO_ISA {
namespace {

template <class R, bool Momentum, bool Stats, class T, class P, class G, class S>
inline void sgd_kernel(P* p, const G* g, S* buf, int64_t n, const SgdScalars<T>& s, bool fresh, UpdateSums* out) {
  using V = typename Vec<T>::type;
  constexpr int width = Vec<T>::width;
  constexpr bool bf16_only = std::is_same<P, bf16>::value && std::is_same<G, bf16>::value && std::is_same<S, bf16>::value;
  constexpr Order order = bf16_only && !Stats ? Order::kEvenOdd : Order::kSequence;
  const SgdScalars<T> scalars = s;
  UpdateSums sums;
  if (Stats) sums = *out;

  int64_t i = 0;
  if (!Stats) {
    for (; i + 2 * width <= n; i += 2 * width) {
      V pa, pb, ga, gb, ba = {}, bb = {}, update;
      load2<order>(p + i, pa, pb);
      load2<order>(g + i, ga, gb);
      if (Momentum) load2<order>(buf + i, ba, bb);
      sgd_update<Momentum>(pa, ga, ba, update, scalars, fresh);
      sgd_update<Momentum>(pb, gb, bb, update, scalars, fresh);
      store2<order>(p + i, pa, pb);
      if (Momentum) store2<order>(buf + i, ba, bb);
    }
  }
  const auto one = [&](P* p, const G* g, S* buf, int lane, int kept) MO_LAMBDA {
    V param = load(p), momentum = {}, update;
    const V old = param;
    if (Momentum) momentum = load(buf);
    sgd_update<Momentum>(param, V(load(g)), momentum, update, scalars, fresh);
    store(p, param);
    if (Momentum) store(buf, momentum);
    if (Stats) {
      const V kept_value = stored_value(static_cast<const R*>(nullptr), param);
      sums.add(update, V(kept_value - old), kept_value, lane, kept);
    }
  };
  constexpr int lanes = Stats ? UpdateSums::kLanes : width;
  for (; i + lanes <= n; i += lanes) {
    for (int k = 0; k < lanes; k += width) one(p + i + k, g + i + k, Momentum ? buf + i + k : buf, k, width);
  }
  // The last elements, in a padded copy.
  const int64_t rest = n - i;
  if (rest > 0) {
    P pt[lanes] = {};
    G gt[lanes] = {};
    S bt[lanes] = {};
    memcpy(pt, p + i, size_t(rest) * sizeof(P));
    memcpy(gt, g + i, size_t(rest) * sizeof(G));
    if (Momentum) memcpy(bt, buf + i, size_t(rest) * sizeof(S));
    for (int k = 0; k < lanes; k += width) one(pt + k, gt + k, bt + k, k, int(rest) - k);
    memcpy(p + i, pt, size_t(rest) * sizeof(P));
    if (Momentum) memcpy(buf + i, bt, size_t(rest) * sizeof(S));
  }
  if (Stats) *out = sums;
}

template <class T, class P, class G, class S, bool Momentum, bool Stats>
void native(const Row& row, const Span& a, const RowScalars& rs, UpdateSums* sums) {
  sgd_kernel<P, Momentum, Stats>(static_cast<P*>(a.at[kParam]), static_cast<const G*>(a.at[kGrad]),
                                 static_cast<S*>(a.at[kState0]), a.n, SgdScalars<T>(rs), row.flags & kFresh, sums);
}

template <class T, class R, bool Momentum, bool Stats>
void mixed(const Row& row, const Span& a, const RowScalars& rs, UpdateSums* sums) {
  T tile[3][kTile];
  const SgdScalars<T> s(rs);
  for (int64_t i = 0; i < a.n; i += kTile) {
    const int64_t n = a.n - i < kTile ? a.n - i : kTile;
    const auto at = [&](int op) { return static_cast<char*>(a.at[op]) + i * item_size(row.dtype[op]); };
    load_tile(tile[0], at(kParam), row.dtype[kParam], n);
    load_tile(tile[1], at(kGrad), row.dtype[kGrad], n);
    if (Momentum) load_tile(tile[2], at(kState0), row.dtype[kState0], n);
    sgd_kernel<R, Momentum, Stats>(tile[0], tile[1], tile[2], n, s, row.flags & kFresh, sums);
    store_tile(at(kParam), tile[0], row.dtype[kParam], n);
    if (Momentum) store_tile(at(kState0), tile[2], row.dtype[kState0], n);
  }
}

// Weights that are finer than their parameter.
template <bool Momentum, bool Stats>
void weighted(const Row& row, const Chunk& chunk, const RowScalars& rs, ChunkStats* stats) {
  const SgdScalars<float> s(rs);
  const bool fresh = row.flags & kFresh;
  const unsigned state = Momentum ? 1u << kState0 : 0u;
  for_each_weight(row, chunk, rs, state, stats, [&](float (&tile)[kOperands][kWeightTile], int64_t n, UpdateSums* sums) {
    sgd_kernel<float, Momentum, Stats>(tile[kParam], tile[kGrad], tile[kState0], n, s, fresh, sums);
  });
}

using Function = void (*)(const Row&, const Span&, const RowScalars&, UpdateSums*);

template <bool Momentum, bool Stats>
Function choose(const Row& r) {
  const int p = r.dtype[kParam], g = r.dtype[kGrad], b = Momentum ? r.dtype[kState0] : p;
  if (p == g && p == b) {
    if (p == kF32) return native<float, float, float, float, Momentum, Stats>;
    if (p == kBF16) return native<float, bf16, bf16, bf16, Momentum, Stats>;
    if (p == kF16) return native<float, f16, f16, f16, Momentum, Stats>;
    return native<double, double, double, double, Momentum, Stats>;
  }
  if (p == kF64) return mixed<double, double, Momentum, Stats>;
  if (p == kBF16) return mixed<float, bf16, Momentum, Stats>;
  if (p == kF16) return mixed<float, f16, Momentum, Stats>;
  return mixed<float, float, Momentum, Stats>;
}

}  // namespace

void launch_sgd(const Row& row, const Chunk& chunk, const RowScalars& rs, ChunkStats* stats) {
  const bool momentum = row.state[0] != 0;
  if (row.master_mode != kNoMaster || row.block != 0) {
    const auto run = momentum ? (stats ? weighted<true, true> : weighted<true, false>)
                              : (stats ? weighted<false, true> : weighted<false, false>);
    return run(row, chunk, rs, stats);
  }
  const Function run = momentum ? (stats ? choose<true, true>(row) : choose<true, false>(row))
                                : (stats ? choose<false, true>(row) : choose<false, false>(row));
  const unsigned written = 1u << kParam | (momentum ? 1u << kState0 : 0u);
  UpdateSums sums;
  for_each_span(row, chunk, written | 1u << kGrad, written, [&](const Span& a) { run(row, a, rs, &sums); });
  if (stats) sums.finish(*stats);
}

}  // namespace MO_ISA
}  // namespace mo
