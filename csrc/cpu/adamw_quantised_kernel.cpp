// Adam / AdamW update of one chunk whose moments are quantised, block by block without tiles: what most rows are.
// Formula: rules/adamw.h, rules/quantised.h, rules/master.h. Reference: mo_fused/reference.py and mo_fused/quantised.py,
//   bit for bit; adamw_kernel.cpp takes the rows that this one does not.
// Bytes per element, read + written: 8-bit moments 2 + 2 and 8 / block for scales; bf16 parameter and gradient 4 + 2;
//   the rest of split weights 2 + 2, of split8 1 + 1.
// Assumes of the table: as adamw_kernel.cpp; Row::block divides the chunk's start and length.
#include "cpu/adamw_quantised.h"

#include "cpu/lanes.h"
#include "cpu/quantised.h"
#include "rules/adamw.h"
#include "rules/master.h"

namespace mo {
namespace MO_ISA {
namespace {

constexpr int kWidth = Vec<float>::width;

// Weights of each MasterMode, a vector at a time. P: the parameter's storage type.
template <int kMode, class P>
struct BlockWeights {
  P* p;
  BlockWeights(const Row& row, const RowScalars&, int64_t first) : p(reinterpret_cast<P*>(row.param) + first) {}
  MO_RULE f32v load_from(int64_t i) const { return load(p + i); }
  MO_RULE void store_to(int64_t i, const f32v& x) const { store(p + i, x); }
};
template <>
struct BlockWeights<kSplit, bf16> {
  uint16_t* p;
  int16_t* low;
  BlockWeights(const Row& row, const RowScalars&, int64_t first)
      : p(reinterpret_cast<uint16_t*>(row.param) + first), low(reinterpret_cast<int16_t*>(row.master) + first) {}
  MO_RULE f32v load_from(int64_t i) const { return join_weights(load_wide(p + i), load_wide(low + i)); }
  MO_RULE void store_to(int64_t i, const f32v& x) const {
    const u32v u = (u32v)x, upper = rounded_away(u);
    store_low(p + i, upper);
    store_low(low + i, split_low(u, upper));
  }
};
template <>
struct BlockWeights<kSplit8, bf16> {
  uint16_t* p;
  int8_t* low;
  Draws draws;
  BlockWeights(const Row& row, const RowScalars& rs, int64_t first)
      : p(reinterpret_cast<uint16_t*>(row.param) + first),
        low(reinterpret_cast<int8_t*>(row.master) + first),
        draws{step_key(row.stream, rs.step, kMaster), row.offset + first} {}
  MO_RULE f32v load_from(int64_t i) const { return join_weights(load_wide(p + i), u32v(load_wide(low + i) << 8)); }
  MO_RULE void store_to(int64_t i, const f32v& x) const {
    store_split8(p + i, low + i, (u32v)x, draws.vector(i));
  }
};

template <int kType>
struct Moment {
  uint8_t* codes;
  float* scale;
  Moment(const Row& row, int state, int64_t first)
      : codes(reinterpret_cast<uint8_t*>(row.state[state]) + code_bytes<kType>(first)),
        scale(reinterpret_cast<float*>(row.scale[state]) + first / row.block) {}
  MO_RULE f32v decoded(int64_t i, float of_block) const {
    return decode<kType>(load_codes<kType>(codes + code_bytes<kType>(i)), of_block);
  }
  MO_RULE void encoded(int64_t i, const f32v& x, float inverse, const u32v& random) const {
    store_codes<kType>(codes + code_bytes<kType>(i), encode<kType>(x, inverse, random));
  }
  void clear(int64_t i, int64_t n) const { memset(codes + code_bytes<kType>(i), 0, size_t(code_bytes<kType>(n))); }
};

template <int kFirst, int kSecond, int kMode, class P>
void adamw_quantised_kernel(const Row& row, const Chunk& chunk, const RowScalars& rs) {
  const AdamScalars<float> s(rs);
  const BlockWeights<kMode, P> weights(row, rs, chunk.start);
  const P* g = reinterpret_cast<const P*>(row.grad) + chunk.start;
  const Moment<kFirst> first(row, 0, chunk.start);
  const Moment<kSecond> second(row, 1, chunk.start);
  const Draws draws{step_key(row.stream, rs.step, kState0), row.offset + chunk.start};
  alignas(64) float of_first[kLargestBlock], of_second[kLargestBlock];
  for (int64_t b = 0, k = 0; b < chunk.length; b += row.block, ++k) {
    const float first_scale = first.scale[k], second_scale = second.scale[k];
    u32v largest_first = {}, largest_second = {};
    // Two short loops: in one, the processor would see too few vectors ahead for the latency of root and division.
    for (int64_t i = 0; i < row.block; i += kWidth) {
      const f32v p = s.penalizes ? weights.load_from(b + i) : f32v{};
      f32v m = first.decoded(b + i, first_scale), root = second.decoded(b + i, second_scale), v = root * root;
      adamw_moments(p, f32v(load(g + b + i)), m, v, s);
      root = square_root(v);
      store(of_first + i, m);
      store(of_second + i, root);
      largest_first = larger(largest_first, u32v((u32v)m & 0x7fffffffu));
      largest_second = larger(largest_second, u32v((u32v)root & 0x7fffffffu));
    }
    for (int64_t i = 0; i < row.block; i += kWidth) {
      f32v p = weights.load_from(b + i);
      adamw_weight(p, load(of_first + i), load(of_second + i), s);
      weights.store_to(b + i, p);
    }
    const BlockScale a = block_scale<kFirst>(largest_of(largest_first));
    const BlockScale c = block_scale<kSecond>(largest_of(largest_second));
    first.scale[k] = a.scale;
    second.scale[k] = c.scale;
    for (int64_t i = b; i < b + row.block; i += kWidth) {
      const u32v drawn = draws.vector(i);
      first.encoded(i, load(of_first + (i - b)), a.inverse, rounding_bits<kState0>(drawn));
      second.encoded(i, load(of_second + (i - b)), c.inverse, rounding_bits<kState1>(drawn));
    }
    if (!a.valid) first.clear(b, row.block);
    if (!c.valid) second.clear(b, row.block);
  }
}

using Function = void (*)(const Row&, const Chunk&, const RowScalars&);

template <int kFirst, int kSecond>
Function of_weights(const Row& row) {
  if (row.dtype[kParam] == kF32) return adamw_quantised_kernel<kFirst, kSecond, kNoMaster, float>;
  switch (row.master_mode) {
    case kNoMaster: return adamw_quantised_kernel<kFirst, kSecond, kNoMaster, bf16>;
    case kSplit: return adamw_quantised_kernel<kFirst, kSecond, kSplit, bf16>;
    case kSplit8: return adamw_quantised_kernel<kFirst, kSecond, kSplit8, bf16>;
    default: return nullptr;
  }
}

}  // namespace

bool launch_adamw_quantised(const Row& row, const Chunk& chunk, const RowScalars& rs) {
  const int p = row.dtype[kParam], first = row.dtype[kState0], second = row.dtype[kState1];
  if (row.layout != 0 || row.dtype[kGrad] != p || (p != kF32 && p != kBF16)) return false;
  const Function run = first == kQ8 && second == kQ8Root   ? of_weights<kQ8, kQ8Root>(row)
                       : first == kQ4 && second == kQ4Root ? of_weights<kQ4, kQ4Root>(row)
                                                           : nullptr;
  if (run) run(row, chunk, rs);
  return run != nullptr;
}

}  // namespace MO_ISA
}  // namespace mo
