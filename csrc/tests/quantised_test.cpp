// One step of rows with quantised states (rules/quantised.h), on every instruction set and on a device, against a
// scalar loop that goes by the description there: codes, scales, parameters and rests of weights bit for bit. Every pair
// of codes, size of block, master mode and dtype, strides, odd addresses, AMSGrad, fresh momentum, and what is not finite.
#include <algorithm>
#include <string>

#include "expected.h"
#include "rules/master.h"
#include "rules/random.h"

namespace {

using mo::base::bits_float;
using mo::base::float_bits;

// ---- codes, by arithmetic in double: it is exact but where float has to round

struct Scheme {
  int mantissa;
  uint32_t top;
  bool root;
};
Scheme scheme_of(int type) {
  switch (type) {
    case mo::kQ8: return {5, 127, false};
    case mo::kQ8Root: return {7, 255, true};
    case mo::kQ4: return {2, 7, false};
    default: return {2, 15, true};
  }
}

// (1 + f) 2^e - 1 of a magnitude's code.
double unscaled(const Scheme& s, uint32_t magnitude) {
  const int of_segment = 1 << s.mantissa;
  return std::ldexp(1.0 + double(int(magnitude) % of_segment) / of_segment, int(magnitude) / of_segment) - 1.0;
}

// `code`: as it lies in memory.
float decoded(int type, uint32_t code, float scale) {
  const Scheme s = scheme_of(type);
  const int bits = type == mo::kQ8 || type == mo::kQ8Root ? 8 : 4;
  const bool negative = !s.root && code >> (bits - 1);
  const uint32_t magnitude = negative ? (1u << bits) - code : code;
  const float x = float(unscaled(s, magnitude)) * scale;
  return negative ? -x : x;
}

// `random`: in [0, 1).
uint32_t encoded(int type, float value, float inverse, double random) {
  const Scheme s = scheme_of(type);
  const float x = std::fabs(value) * inverse;
  const float shifted = x + 1.0f;
  uint32_t code = s.top;
  if (!std::isinf(shifted)) {
    const int e = std::ilogb(shifted);
    const double f = std::ldexp(double(shifted), -e) - 1.0;
    const double chance = s.root || x < 1.0f ? random : 0.5;
    code = uint32_t(std::min(std::floor((e + f) * (1 << s.mantissa) + chance), double(s.top)));
  }
  if (s.root) return code == 0 && value != 0.0f ? 1 : code;
  return (std::signbit(value) ? 0u - code : code) & (type == mo::kQ8 ? 255u : 15u);
}

// ---- a whole step

struct Weight {
  uint32_t param, rest;
  float kept;
};

float widened(const TestRow& row, uint32_t bits) {
  const bool bf16 = row.op[mo::kParam].dtype() == mo::kBF16;
  return bf16 ? mo::base::widen(mo::base::bf16{uint16_t(bits)}) : mo::base::widen(mo::base::f16{uint16_t(bits)});
}
uint32_t narrowed(const TestRow& row, float x) {
  return row.op[mo::kParam].dtype() == mo::kBF16 ? mo::base::narrow_bf16(x).bits : mo::base::narrow_f16(x).bits;
}

// Rests are sign-extended.
float joined(const TestRow& row, uint32_t param, uint32_t rest) {
  const bool bf16 = row.op[mo::kParam].dtype() == mo::kBF16;
  switch (row.mode) {
    case mo::kMaster32:
      if (bf16) return bits_float(mo::base::followed_master(rest, param));
      return narrowed(row, bits_float(rest)) == param ? bits_float(rest) : widened(row, param);
    case mo::kSplit: return bits_float(mo::base::split_join(param, rest));
    case mo::kSplit8: return bits_float(mo::base::split_join(param, rest << 8));
    case mo::kKahan: return mo::base::kahan_join(widened(row, param), widened(row, rest), bf16);
    default: return widened(row, param);
  }
}

Weight taken_apart(const TestRow& row, float x, uint32_t random) {
  const bool bf16 = row.op[mo::kParam].dtype() == mo::kBF16;
  const uint32_t nearest = narrowed(row, x);
  uint32_t u = float_bits(x), upper = mo::base::rounded_away(u);
  switch (row.mode) {
    case mo::kNoMaster: return {nearest, 0, widened(row, nearest)};
    case mo::kMaster32: return {bf16 ? upper : nearest, u, x};
    case mo::kSplit: return {upper, mo::base::split_low(u, upper), x};
    case mo::kSplit8:
      u = mo::base::rounded_24(u, random);
      upper = mo::base::rounded_away(u);
      return {upper, mo::base::split_low(u, upper) >> 8, bits_float(u)};
    case mo::kKahan: {
      const float lost = x - widened(row, nearest);
      const uint32_t rest = narrowed(row, std::isfinite(lost) ? lost : 0.0f);
      return {nearest, rest, joined(row, nearest, rest)};
    }
    default: {
      const uint32_t param = bf16 ? mo::base::stochastic_bf16(u, random) : mo::base::stochastic_f16(x, random).bits;
      return {param, 0, widened(row, param)};
    }
  }
}

uint32_t load_rest(const TestRow& row, int64_t at) {
  int32_t wide = 0;
  int16_t half = 0;
  if (row.rest_size == 4) std::memcpy(&wide, &row.rest[size_t(at * 4)], 4);
  if (row.rest_size == 2) std::memcpy(&half, &row.rest[size_t(at * 2)], 2), wide = half;
  if (row.rest_size == 1) wide = static_cast<signed char>(row.rest[size_t(at)]);
  return uint32_t(wide);
}
void store_rest(TestRow& row, int64_t at, uint32_t bits) {  // little-endian, as everything here
  if (row.rest_size) std::memcpy(&row.rest[size_t(at * row.rest_size)], &bits, size_t(row.rest_size));
}

uint32_t drawn(uint64_t key, int64_t i) { return mo::base::draw(uint32_t(i), uint32_t(uint64_t(i) >> 32), key); }

expected::Sums step(TestRow& row, const mo::Hyper& h, int rule) {
  expected::Sums sums;
  const bool amsgrad = rule == mo::kAdam && h.amsgrad != 0.0, wide = row.op[mo::kParam].dtype() == mo::kF32;
  const bool fresh = rule == mo::kSGD && row.flags & mo::kFresh;
  const int slots = rule == mo::kSGD ? 1 : amsgrad ? 3 : 2;
  if (row.has_step) row.step += 1.0f;
  const int64_t steps = row.has_step ? int64_t(row.step) : 0;
  const expected::Adam<float> adam(h, steps, h.maximize != 0.0 ? -1.0 : 1.0);
  const expected::Sgd<float> sgd(h, 1.0);
  const uint64_t of_weights = mo::base::step_key(row.stream, steps, mo::kMaster);
  const uint64_t of_states = mo::base::step_key(row.stream, steps, mo::kState0);
  std::vector<float> values[3];
  for (int64_t i = 0; i < row.numel; ++i) {
    float state[3];
    for (int k = 0; k < slots; ++k) {
      const TestCodes& c = row.codes[k];
      state[k] = fresh ? 0.0f : decoded(c.type, c.get(i), c.scale[size_t(i / row.block)]);
      if (k > 0) state[k] *= state[k];
    }
    const int64_t p_at = row.offset(mo::kParam, i), rest_at = row.strided() ? row.walk.offset(mo::kMaster, i) : i;
    uint16_t half = 0;
    float p = float(row.op[mo::kParam].get(p_at));
    if (!wide) {
      std::memcpy(&half, row.op[mo::kParam].at(p_at), 2);
      p = joined(row, half, load_rest(row, rest_at));
    }
    const float old = p, g = float(row.get(mo::kGrad, i));
    const float update = rule == mo::kAdam ? adam(p, g, state[0], state[1], amsgrad ? &state[2] : nullptr)
                                           : sgd(p, g, &state[0], fresh);
    float kept = p;
    if (wide) {
      row.op[mo::kParam].set(p_at, double(p));
    } else {
      const Weight w = taken_apart(row, p, drawn(of_weights, row.shard + i));
      half = uint16_t(w.param);
      std::memcpy(row.op[mo::kParam].at(p_at), &half, 2);
      store_rest(row, rest_at, w.rest);
      kept = w.kept;
    }
    const float change = kept - old;
    sums.update += (long double)update * update;
    sums.stored += (long double)change * change;
    sums.param += (long double)kept * kept;
    for (int k = 0; k < slots; ++k) values[k].push_back(k == 0 ? state[k] : std::sqrt(state[k]));
  }
  for (int k = 0; k < slots; ++k) {
    TestCodes& c = row.codes[k];
    const Scheme s = scheme_of(c.type);
    const float reach = float(unscaled(s, s.top)), limit = s.root ? 0x1.fffffep63f : 0x1.fffffep127f;
    for (int64_t b = 0; b < row.numel; b += row.block) {
      float largest = 0x1p-100f;
      bool valid = true;
      for (int64_t i = b; i < b + row.block; ++i) {
        valid = valid && !std::isnan(values[k][size_t(i)]);
        largest = std::max(largest, std::min(std::fabs(values[k][size_t(i)]), limit));
      }
      c.scale[size_t(b / row.block)] = valid ? largest / reach : NAN;
      const float inverse = reach / largest;
      for (int64_t i = b; i < b + row.block; ++i) {
        const uint32_t random = drawn(of_states, row.shard + i);
        const double chance = k == 0 ? double(random >> 16) / 65536 : k == 1 ? double(random & 0xffff) / 65536 : 0.5;
        c.set(i, valid ? encoded(c.type, values[k][size_t(i)], inverse, chance) : 0);
      }
    }
  }
  return sums;
}

// ---- tables

const int kPairs[][2] = {{mo::kQ8, mo::kQ8Root}, {mo::kQ4, mo::kQ4Root}, {mo::kQ4, mo::kQ8Root}};
constexpr int64_t kBlocks[] = {32, 64, 128, 256};

mo::Hyper hyper_of(int rule) {
  mo::Hyper h{};
  h.lr = rule == mo::kAdam ? 1e-3 : 0.1;
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.eps = 1e-8;
  h.weight_decay = 1e-2;
  h.decoupled = 1.0;
  h.momentum = 0.9;
  h.dampening = 0.25;
  return h;
}

struct Options {
  int rule = mo::kAdam, pair = 0;
  int64_t block = 256, shift = 0;
  int param = mo::kBF16, grad = mo::kBF16;
  mo::MasterMode mode = mo::kNoMaster;
  bool amsgrad = false;
};

// Any codes are codes of some state; those of one bit pattern, -128 and -8, no step leaves.
void add(TestTable& table, const Options& o, const Walk& walk, Random& random) {
  TestRow& row = table.add(walk, {o.param, o.grad}, o.shift);
  if (walk.size.size() == 1) row.walk = Walk();  // dense
  row.block = o.block;
  row.mode = o.mode;
  row.stream = random.bits();
  // A shard of a larger tensor, and mostly one in which the upper half of the index changes.
  row.shard = int64_t(random.bits() % 4 << 32) - o.block * int64_t(random.bits() % uint64_t(row.numel / o.block));
  if (row.shard < 0) row.shard = 0;
  row.step = float(random.bits() % 5);
  const int modes[] = {0, 4, 2, 1, 2, 0};
  row.rest_size = modes[o.mode];
  row.rest.resize(size_t(row.rest_size * walk.reach(mo::kMaster)));
  for (int64_t i = 0; i < row.op[mo::kParam].count(); ++i) row.op[mo::kParam].set(i, random.value());
  for (int64_t i = 0; i < row.op[mo::kGrad].count(); ++i) row.op[mo::kGrad].set(i, random.value(1e-2));
  for (unsigned char& byte : row.rest) byte = static_cast<unsigned char>(random.bits() >> 40);
  for (int64_t i = 0; i < row.numel && o.mode == mo::kMaster32; i += 3) {  // most go on from the last step
    const uint32_t u = float_bits(float(row.get(mo::kParam, i)) * 1.0001f);
    store_rest(row, row.strided() ? row.walk.offset(mo::kMaster, i) : i, u);
  }
  for (int k = 0; k < (o.rule == mo::kSGD ? 1 : o.amsgrad ? 3 : 2); ++k) {
    TestCodes& c = row.codes[k];
    c.type = kPairs[o.pair][k != 0];
    c.shift = o.shift;
    c.bytes.resize(size_t(c.shift + row.numel * c.bits() / 8));
    c.scale.resize(size_t(row.numel / o.block));
    for (float& x : c.scale) x = float(std::exp2(random.uniform() * 8 - 14));
    const uint32_t never = c.type == mo::kQ8 ? 128 : c.type == mo::kQ4 ? 8 : 256;
    for (int64_t i = 0; i < row.numel; ++i) {
      const uint32_t code = uint32_t(random.bits() >> 40) & (c.bits() == 8 ? 255u : 15u);
      c.set(i, code == never ? 0 : code);
    }
  }
}
Walk dense(int64_t n) {
  Walk walk;
  walk.size = {n};
  for (auto& stride : walk.stride) stride = {1};
  return walk;
}

void take(Digests& digests, const std::string& what, TestTable& table) {
  TestTable want(table);
  table.run();
  const auto close = [](double got, long double sum) {
    const double norm = double(sqrtl(sum));
    return std::isnan(norm) ? std::isnan(got) : got == norm || std::fabs(got - norm) <= 1e-12 * norm;
  };
  for (size_t r = 0; r < want.rows.size(); ++r) {
    TestRow& row = *want.rows[r];
    const TestRow& got = *table.rows[r];
    const expected::Sums sums = step(row, table.hyper[size_t(row.group)], table.control.rule);
    if (table.control.update_stats) {
      const mo::RowStats& s = table.row_stats[r];
      CHECK_SAYS(close(s.update_norm, sums.update), "%s row %zu: %.17g", what.c_str(), r, s.update_norm);
      CHECK_SAYS(close(s.stored_norm, sums.stored), "%s row %zu: %.17g", what.c_str(), r, s.stored_norm);
      CHECK_SAYS(close(s.param_norm, sums.param), "%s row %zu: %.17g", what.c_str(), r, s.param_norm);
    }
    CHECK(got.steps() == row.steps());
    for (int64_t i = 0; i < row.op[mo::kParam].count(); ++i) {
      const Memory &a = got.op[mo::kParam], &b = row.op[mo::kParam];
      CHECK_SAYS(a.bits(i) == b.bits(i), "%s row %zu parameter %" PRId64 ": %a, not %a", what.c_str(), r, i, a.get(i),
                 b.get(i));
    }
    CHECK_SAYS(got.rest == row.rest, "%s row %zu: rests", what.c_str(), r);
    for (int k = 0; k < 3; ++k) {
      const TestCodes &a = got.codes[k], &b = row.codes[k];
      for (size_t i = 0; i < b.scale.size(); ++i) {
        const float x = a.scale[i], y = b.scale[i];
        CHECK_SAYS(float_bits(x) == float_bits(y) || (std::isnan(x) && std::isnan(y)),
                   "%s row %zu state %d scale %zu: %a, not %a", what.c_str(), r, k, i, double(x), double(y));
      }
      for (int64_t i = 0; b.type != 0 && i < row.numel; ++i) {
        CHECK_SAYS(a.get(i) == b.get(i), "%s row %zu state %d code %" PRId64 ": %u, not %u", what.c_str(), r, k, i,
                   a.get(i), b.get(i));
      }
    }
  }
  digests.keep(what, table.digest());
}

// One block, an odd number of them, and several chunks whose last one has lanes without a block; at three alignments.
void every_block(Digests& digests) {
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (int pair = 0; pair < (rule == mo::kAdam ? 3 : 2); ++pair) {
      for (int64_t block : kBlocks) {
        for (int variant = 0; variant < 4; ++variant) {
          Options o;
          o.rule = rule;
          o.pair = pair;
          o.block = block;
          o.amsgrad = rule == mo::kAdam && variant >= 2;
          TestTable table{mo::Rule(rule)};
          table.hyper[0] = hyper_of(rule);
          table.hyper[0].amsgrad = o.amsgrad;
          table.hyper[0].nesterov = variant >= 2;
          table.control.update_stats = variant % 2;
          Random random(uint64_t(100 * pair + variant) + uint64_t(block));
          for (int dtype : {mo::kF32, mo::kBF16, mo::kF16}) {
            o.param = o.grad = dtype;
            for (int64_t n : {block, 5 * block, 4096 + 3 * block}) {
              o.shift = (n / block + dtype) % 4;
              add(table, o, dense(n), random);
              if (rule == mo::kSGD && dtype == mo::kF16) table.rows.back()->flags |= mo::kFresh;
            }
          }
          take(digests, "rule " + std::to_string(rule) + " pair " + std::to_string(pair) + " block " +
                            std::to_string(block) + " variant " + std::to_string(variant), table);
        }
      }
    }
  }
}

// Weights finer than their parameter, gradients of every dtype; in runs of whole accesses and element by element.
void every_weight(Digests& digests) {
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (int mode = mo::kNoMaster; mode <= mo::kStochastic; ++mode) {
      for (int stats = 0; stats < 2; ++stats) {
        Options o;
        o.rule = rule;
        o.mode = mo::MasterMode(mode);
        o.amsgrad = rule == mo::kAdam && stats != 0;
        TestTable table{mo::Rule(rule)};
        table.hyper[0] = hyper_of(rule);
        table.hyper[0].amsgrad = o.amsgrad;
        table.hyper[0].decoupled = stats;
        table.control.update_stats = stats;
        Random random(20 + uint64_t(mode));
        for (int dtype : {mo::kBF16, mo::kF16}) {
          if (dtype == mo::kF16 && (mode == mo::kSplit || mode == mo::kSplit8)) continue;
          o.param = dtype;
          for (int grad = 0; grad < mo::kDTypes; ++grad) {
            o.grad = grad;
            o.pair = grad % 2;
            for (o.shift = 0; o.shift < 2; ++o.shift) add(table, o, dense(2304), random);
          }
        }
        take(digests, "weights, rule " + std::to_string(rule) + " mode " + std::to_string(mode) + " stats " +
                          std::to_string(stats), table);
      }
    }
  }
}

// Codes lie in the order of the shape, whatever that of the others.
void strides(Digests& digests) {
  const std::vector<int64_t> rows{96, 1}, columns{1, 70}, gaps{300, 3};
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (int pair = 0; pair < 2; ++pair) {
      for (auto mode : {mo::kNoMaster, mo::kSplit8, mo::kMaster32, mo::kKahan}) {
        Options o;
        o.rule = rule;
        o.pair = pair;
        o.block = 32;
        o.mode = mode;
        o.shift = 1;
        TestTable table{mo::Rule(rule)};
        table.hyper[0] = hyper_of(rule);
        table.control.update_stats = pair;
        Random random(uint64_t(pair) + 7);
        Walk walk;
        walk.size = {70, 96};
        for (auto& stride : walk.stride) stride = rows;
        walk.stride[mo::kGrad] = columns;
        add(table, o, walk, random);
        walk.stride[mo::kGrad] = rows;
        walk.stride[mo::kParam] = gaps;
        add(table, o, walk, random);
        walk.stride[mo::kMaster] = columns;
        add(table, o, walk, random);
        take(digests, "strides, rule " + std::to_string(rule) + " pair " + std::to_string(pair) + " mode " +
                          std::to_string(mode), table);
      }
    }
  }
}

// Blocks of zeros, with a NaN, an infinity, too small and too large numbers.
void special_values(Digests& digests) {
  const double special[] = {0.0, NAN, INFINITY, -INFINITY, 1e-33, 1e-42, 1e20, 3e38};
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (int pair = 0; pair < 2; ++pair) {
      for (int old = 0; old < 2; ++old) {  // whether there are states before, of each one block with a NaN
        Options o;
        o.rule = rule;
        o.pair = pair;
        o.block = 64;
        o.param = o.grad = mo::kF32;
        o.amsgrad = rule == mo::kAdam;
        TestTable table{mo::Rule(rule)};
        table.hyper[0] = hyper_of(rule);
        table.hyper[0].amsgrad = o.amsgrad;
        table.control.update_stats = 1;
        Random random(5);
        const int64_t kinds = int64_t(std::size(special));
        add(table, o, dense(2 * kinds * o.block), random);
        TestRow& row = *table.rows[0];
        for (int64_t i = 0; i < row.numel; ++i) {
          const int64_t block = i / o.block;
          // One element of a block, and then all of one.
          if (block >= kinds || i % o.block == 37) row.op[mo::kGrad].set(i, special[block % kinds]);
        }
        const int64_t of_zeros = kinds, small = kinds + 4, smaller = kinds + 5;  // blocks without a NaN in the gradient
        for (int k = 0; k < 3; ++k) {
          TestCodes& c = row.codes[k];
          if (old == 0) std::fill(c.bytes.begin(), c.bytes.end(), static_cast<unsigned char>(0));
          if (old == 0) std::fill(c.scale.begin(), c.scale.end(), 0.0f);
          if (old == 1 && c.type != 0) c.scale[size_t(k == 0 ? of_zeros : k == 1 ? small : smaller)] = NAN;
        }
        take(digests, "special values, rule " + std::to_string(rule) + " pair " + std::to_string(pair) + " old " +
                          std::to_string(old), table);
      }
    }
  }
}

}  // namespace

int main() {
  return run_on_every_isa("quantised_test", [](Digests& digests) {
    every_block(digests);
    every_weight(digests);
    strides(digests);
    special_values(digests);
  });
}
