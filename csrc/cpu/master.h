// Tiles of weights that are finer than their 16-bit parameter (rules/master.h): put together from the parameter and the rest,
// and taken apart again. Rows with quantised moments go through the same tiles, with such weights or without.
#pragma once

#include "abi.h"
#include "cpu/draws.h"
#include "cpu/lanes.h"
#include "cpu/quantised.h"
#include "cpu/span.h"
#include "cpu/update_sums.h"
#include "rules/master.h"

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

// The bits of n weights of split or split8; S: the remainder's type, kScale: what it is multiplied by.
template <int kScale, class S>
inline void join_tile(float* to, const uint16_t* p, const S* rest, int64_t n) {
  constexpr int width = Vec<float>::width;
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    store(to + i, join_weights(load_wide(p + i), u32v(load_wide(rest + i) * uint32_t(kScale))));
  }
  for (; i < n; ++i) to[i] = bits_float(split_join(load_one(p + i), load_one(rest + i) * uint32_t(kScale)));
}

// Stores what element(bits, i, random bits) makes of each weight. kDraws: it needs random bits.
template <bool kDraws, class Vector, class One>
MO_RULE void each_weight(const float* from, int64_t n, const Draws& draws, Vector vector, One one) {
  constexpr int width = Vec<float>::width;
  int64_t i = 0;
  for (; i + width <= n; i += width) vector((u32v)load(from + i), i, kDraws ? draws.vector(i) : u32v{});
  for (; i < n; ++i) one(float_bits(from[i]), i, kDraws ? draws.one(i) : 0u);
}

// Where a weight's two parts lie, and what its rounding draws from.
struct Weights {
  const Row& row;
  uint64_t key;
  Weights(const Row& row, const RowScalars& s) : row(row), key(step_key(row.stream, s.step, kMaster)) {}

  void load_weights(float* to, const void* param, const void* rest, int64_t n) const {
    const uint16_t* p = static_cast<const uint16_t*>(param);
    switch (row.master_mode) {
      case kMaster32: return load_master(to, param, static_cast<const float*>(rest), n);
      case kSplit: return join_tile<1>(to, p, static_cast<const int16_t*>(rest), n);
      case kSplit8: return join_tile<256>(to, p, static_cast<const int8_t*>(rest), n);
      case kKahan: {
        float lost[kTile];
        load_tile(to, param, row.dtype[kParam], n);
        load_tile(lost, rest, row.dtype[kMaster], n);
        for (int64_t i = 0; i < n; ++i) to[i] = kahan_join(to[i], lost[i], row.dtype[kParam] == kBF16);
        return;
      }
      default: load_tile(to, param, row.dtype[kParam], n);
    }
  }

  void load_master(float* to, const void* param, const float* master, int64_t n) const {
    if (row.dtype[kParam] == kBF16) {
      const uint16_t* p = static_cast<const uint16_t*>(param);
      constexpr int width = Vec<float>::width;
      int64_t i = 0;
      for (; i + width <= n; i += width) store(to + i, (f32v)followed_master((u32v)load(master + i), load_wide(p + i)));
      for (; i < n; ++i) to[i] = bits_float(followed_master(float_bits(master[i]), load_one(p + i)));
      return;
    }
    f16 copy[kTile];
    store_tile(copy, master, kF16, n);
    load_tile(to, param, kF16, n);
    const f16* p = static_cast<const f16*>(param);
    for (int64_t i = 0; i < n; ++i) to[i] = copy[i].bits == p[i].bits ? master[i] : to[i];
  }

  // `first`: index of the first element in the parameter. Afterwards `from` holds what storage keeps.
  void store_weights(void* param, void* rest, float* from, int64_t first, int64_t n) const {
    uint16_t* p = static_cast<uint16_t*>(param);
    const Draws draws{key, row.offset + first};
    switch (row.master_mode) {
      case kMaster32:
        memcpy(rest, from, size_t(n) * sizeof(float));
        if (row.dtype[kParam] != kBF16) return store_tile(param, from, row.dtype[kParam], n);
        return each_weight<false>(
            from, n, draws, [&](const u32v& u, int64_t i, const u32v&) MO_LAMBDA { store_low(p + i, rounded_away(u)); },
            [&](uint32_t u, int64_t i, uint32_t) MO_LAMBDA { p[i] = uint16_t(rounded_away(u)); });
      case kSplit: {
        int16_t* low = static_cast<int16_t*>(rest);
        return each_weight<false>(
            from, n, draws,
            [&](const u32v& u, int64_t i, const u32v&) MO_LAMBDA {
              const u32v upper = rounded_away(u);
              store_low(p + i, upper);
              store_low(low + i, split_low(u, upper));
            },
            [&](uint32_t u, int64_t i, uint32_t) MO_LAMBDA {
              p[i] = uint16_t(rounded_away(u));
              low[i] = int16_t(split_low(u, uint32_t(p[i])));
            });
      }
      case kSplit8: {
        int8_t* low = static_cast<int8_t*>(rest);
        return each_weight<true>(
            from, n, draws,
            [&](const u32v& weight, int64_t i, const u32v& random) MO_LAMBDA {
              store(from + i, (f32v)store_split8(p + i, low + i, weight, random));
            },
            [&](uint32_t weight, int64_t i, uint32_t random) MO_LAMBDA {
              const uint32_t u = rounded_24(weight, random);
              p[i] = uint16_t(rounded_away(u));
              low[i] = int8_t(split_low(u, uint32_t(p[i])) >> 8);
              from[i] = bits_float(u);
            });
      }
      case kKahan: {
        float kept[kTile];
        store_tile(param, from, row.dtype[kParam], n);
        load_tile(kept, param, row.dtype[kParam], n);
        for (int64_t i = 0; i < n; ++i) {
          const float lost = from[i] - kept[i];
          from[i] = lost - lost == 0.0f ? lost : 0.0f;  // an infinite parameter has lost nothing
        }
        store_tile(rest, from, row.dtype[kMaster], n);
        return load_weights(from, param, rest, n);
      }
      case kNoMaster:
        store_tile(param, from, row.dtype[kParam], n);
        return load_tile(from, param, row.dtype[kParam], n);
      default: break;
    }
    if (row.dtype[kParam] == kBF16) {
      each_weight<true>(
          from, n, draws,
          [&](const u32v& u, int64_t i, const u32v& random) MO_LAMBDA { store_low(p + i, stochastic_bf16(u, random)); },
          [&](uint32_t u, int64_t i, uint32_t random) MO_LAMBDA { p[i] = uint16_t(stochastic_bf16(u, random)); });
    } else {
      for (int64_t i = 0; i < n; ++i) p[i] = stochastic_f16(from[i], draws.one(i)).bits;
    }
    load_tile(from, param, row.dtype[kParam], n);
  }
};

// Elements of a tile: all operands of one in float are 14 KiB, within the first cache.
constexpr int64_t kWeightTile = 512;

// A chunk of a row with a MasterMode or with quantised states: tiles in float, kernel(tiles, n, sums) on each, and back.
// `state`: bits of its state operands.
template <class Kernel>
inline void for_each_weight(const Row& row, const Chunk& chunk, const RowScalars& rs, unsigned state, ChunkStats* stats,
                            Kernel kernel) {
  const Weights weights(row, rs);
  const bool quantised = row.block != 0;
  const uint64_t state_key = quantised ? step_key(row.stream, rs.step, kState0) : 0;
  const unsigned written = 1u << kParam | 1u << kMaster | (quantised ? 0u : state);
  UpdateSums asked, kept;
  alignas(64) float tile[kOperands][kWeightTile], old[kWeightTile];
  for_each_span(row, chunk, written | 1u << kGrad, written, [&](const Span& a) {
    for (int64_t i = 0; i < a.n; i += kWeightTile) {
      const int64_t n = a.n - i < kWeightTile ? a.n - i : kWeightTile;
      const auto at = [&](int op) { return static_cast<char*>(a.at[op]) + i * item_size(row.dtype[op]); };
      weights.load_weights(tile[kParam], at(kParam), at(kMaster), n);
      load_tile(tile[kGrad], at(kGrad), row.dtype[kGrad], n);
      for (int op = kState0; op <= kState2; ++op) {
        if (a.at[op]) load_tile(tile[op], at(op), row.dtype[op], n);
        if (quantised && state >> op & 1) load_quantised(tile[op], row, op, a.start + i, n);
      }
      if (stats) memcpy(old, tile[kParam], size_t(n) * sizeof(float));
      kernel(tile, n, &asked);
      weights.store_weights(at(kParam), at(kMaster), tile[kParam], a.start + i, n);
      if (stats) add_sums(kept, old, old, tile[kParam], n);
      for (int op = kState0; op <= kState2; ++op) {
        if (a.at[op]) store_tile(at(op), tile[op], row.dtype[op], n);
        if (quantised && state >> op & 1) store_quantised(op, tile[op], row, state_key, a.start + i, n);
      }
    }
  });
  if (stats == nullptr) return;
  ChunkStats of_kept;
  kept.finish(of_kept);
  asked.finish(*stats);
  stats->stored_sumsq = of_kept.stored_sumsq;
  stats->param_sumsq = of_kept.param_sumsq;
}

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
