// One step of Adam, AdamW and SGD on tables built by hand, on every instruction set, against the scalar loops of
// expected.h: parameters and state bit for bit, statistics to 1e-12. norm_test.cpp has the norms, the gates and skips.
#include <algorithm>
#include <string>

#include "expected.h"

namespace {

constexpr int kNone = -1;  // no such operand

mo::Hyper adamw_hyper() {
  mo::Hyper h{};
  h.lr = 1e-3;
  h.beta1 = 0.9;
  h.beta2 = 0.999;
  h.eps = 1e-8;
  h.weight_decay = 1e-2;
  h.decoupled = 1.0;
  h.clip = 1.0;
  return h;
}

mo::Hyper sgd_hyper() {
  mo::Hyper h{};
  h.lr = 0.1;
  h.momentum = 0.9;
  h.dampening = 0.25;
  h.weight_decay = 1e-3;
  h.clip = 1.0;
  return h;
}

// Random contents; the second moments are not negative. Also fills what lies between the elements of strided operands.
void fill(TestTable& table, uint64_t seed) {
  Random random(seed);
  for (auto& row : table.rows) {
    for (int o = 0; o < mo::kOperands; ++o) {
      const bool second_moment = table.control.rule == mo::kAdam && o >= mo::kState1;
      for (int64_t i = 0; i < row->op[o].count(); ++i) {
        const double x = random.value(second_moment ? 1e-2 : 1.0);
        row->op[o].set(i, second_moment ? std::fabs(x) : x);
      }
    }
    row->step = float(random.bits() % 5);
    row->wide_step = double(random.bits() % 5);
  }
}

void take(Digests& digests, const std::string& what, TestTable& table) {
  const TestTable before(table);
  table.run();
  expected::check_step(what.c_str(), before, table);
  digests.keep(what, table.digest());
}

// Around the widths of all vectors and their pairs, the tile, the chunk and several chunks; 0 is an empty parameter.
std::vector<int64_t> sizes() {
  std::vector<int64_t> all;
  for (int64_t n = 0; n <= 70; ++n) all.push_back(n);
  for (int64_t n : {2047, 2048, 2049, 16383, 16384, 16385, 40000}) all.push_back(n);
  return all;
}

// Parameter, gradient and state dtypes that have kernels of their own; every other mix is widened tile by tile.
const int kAdamSignatures[][3] = {{mo::kF32, mo::kF32, mo::kF32},
                                  {mo::kBF16, mo::kBF16, mo::kBF16},
                                  {mo::kBF16, mo::kBF16, mo::kF32},
                                  {mo::kF16, mo::kF16, mo::kF16},
                                  {mo::kF64, mo::kF64, mo::kF64},
                                  {mo::kF32, mo::kBF16, mo::kF64}};

void adam_sizes(Digests& digests) {
  for (const auto& signature : kAdamSignatures) {
    const int p = signature[0], g = signature[1], m = signature[2];
    for (int amsgrad = 0; amsgrad < 2; ++amsgrad) {
      for (int stats = 0; stats < 2; ++stats) {
        TestTable table(mo::kAdam);
        table.hyper[0] = adamw_hyper();
        table.hyper[0].amsgrad = amsgrad;
        table.control.update_stats = stats;
        int64_t shift = 0;
        for (int64_t n : sizes()) table.add(n, {p, g, m, m, amsgrad ? m : kNone}, shift++ % 3);
        fill(table, 11);
        take(digests, "adamw sizes " + std::to_string(p) + std::to_string(g) + std::to_string(m) + " amsgrad " +
                          std::to_string(amsgrad) + " stats " + std::to_string(stats), table);
      }
    }
  }
}

// All 256 mixes of parameter, gradient and two moments; the running maximum takes yet another dtype.
void adam_dtypes(Digests& digests) {
  for (int mix = 0; mix < 256; ++mix) {
    const int p = mix & 3, g = mix >> 2 & 3, m = mix >> 4 & 3, v = mix >> 6 & 3;
    for (int amsgrad = 0; amsgrad < 2; ++amsgrad) {
      TestTable table(mo::kAdam);
      table.hyper[0] = adamw_hyper();
      table.hyper[0].amsgrad = amsgrad;
      table.control.update_stats = mix % 2;
      const int w = amsgrad ? (mix + mix / 16) & 3 : kNone;
      for (int64_t n : {1, 17, 70, 2049}) table.add(n, {p, g, m, v, w}, n % 2);
      fill(table, uint64_t(mix) + 100);
      take(digests, "adamw mix " + std::to_string(mix) + " amsgrad " + std::to_string(amsgrad), table);
    }
  }
}

// What selects the branches of the rule: decay inside, outside and absent, an interpolation from the old end, from the
// new end and exactly between, maximize, and hyper-parameters of zero.
void adam_options(Digests& digests) {
  for (int option = 0; option < 9; ++option) {
    for (int dtype : {mo::kF32, mo::kBF16, mo::kF64}) {
      TestTable table(mo::kAdam);
      mo::Hyper& h = table.hyper[0] = adamw_hyper();
      if (option == 1) h.decoupled = 0.0;
      if (option == 2) h.weight_decay = 0.0;
      if (option == 3) h.beta1 = 0.3;
      if (option == 4) h.beta1 = 0.5;
      if (option == 5) h.beta1 = h.beta2 = 0.0;
      if (option == 6) h.maximize = 1.0;
      if (option == 7) h.eps = 0.0;
      if (option == 8) h.lr = 0.0;
      for (int64_t n : {7, 100, 2100}) table.add(n, {dtype, dtype, dtype, dtype, kNone});
      fill(table, 7);
      const TestTable before(table);
      take(digests, "adamw option " + std::to_string(option) + " dtype " + std::to_string(dtype), table);
      if (option != 8) continue;
      for (size_t r = 0; r < table.rows.size(); ++r) {  // lr = 0 changes no bit of a parameter, -0.0 included
        for (int64_t i = 0; i < table.rows[r]->numel; ++i) {
          CHECK(table.rows[r]->op[mo::kParam].bits(i) == before.rows[r]->op[mo::kParam].bits(i));
        }
      }
    }
  }
}

// The vectors of a row's last elements are filled up. With eps = 0 the filling computes 0 / 0, which must not get into
// the sums: every length up to two rounds of their sixteen lanes.
void padding_takes_no_part(Digests& digests) {
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    for (int mixed = 0; mixed < 2; ++mixed) {
      TestTable table(mo::kAdam);
      table.hyper[0] = adamw_hyper();
      table.hyper[0].eps = 0.0;
      table.control.update_stats = 1;
      for (int64_t n = 1; n <= 33; ++n) {
        TestRow& row = table.add(n, {dtype, mixed ? (dtype + 1) % mo::kDTypes : dtype, dtype, dtype});
        for (int o = 0; o <= mo::kState1; ++o) {
          for (int64_t i = 0; i < n; ++i) row.op[o].set(i, 0.25 + double(i) / 64);
        }
      }
      take(digests, "padding, dtype " + std::to_string(dtype) + " mixed " + std::to_string(mixed), table);
      CHECK(std::isfinite(table.result.update_norm) && table.result.update_norm > 0.0);
    }
  }
}

// Against the formula of the paper, with pow and in another order of operations: only rounding may differ.
void adam_textbook(Digests&) {
  TestTable table(mo::kAdam);
  const mo::Hyper h = table.hyper[0] = adamw_hyper();
  TestRow& row = table.add(3000, {mo::kF64, mo::kF64, mo::kF64, mo::kF64, kNone});
  fill(table, 5);
  row.step = 41.0f;
  const TestTable before(table);
  table.run();
  const TestRow& old = *before.rows[0];
  for (int64_t i = 0; i < row.numel; ++i) {
    const double g = old.get(mo::kGrad, i), theta = old.get(mo::kParam, i);
    const double m = h.beta1 * old.get(mo::kState0, i) + (1 - h.beta1) * g;
    const double v = h.beta2 * old.get(mo::kState1, i) + (1 - h.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(h.beta1, 42)), v_hat = v / (1 - std::pow(h.beta2, 42));
    const double want = theta - h.lr * (m_hat / (std::sqrt(v_hat) + h.eps) + h.weight_decay * theta);
    const double tolerance = 1e-15 * (1 + std::fabs(want)) + 1e-13 * std::fabs(want - theta);
    CHECK_SAYS(std::fabs(row.get(mo::kParam, i) - want) <= tolerance, "%.17g, not %.17g", row.get(mo::kParam, i), want);
    CHECK(std::fabs(row.get(mo::kState0, i) - m) <= 1e-15 && std::fabs(row.get(mo::kState1, i) - v) <= 1e-15);
  }
  CHECK(row.step == 42.0f);
}

// All 64 mixes of parameter, gradient and buffer; without momentum the buffer is not there.
void sgd_dtypes(Digests& digests) {
  for (int mix = 0; mix < 64; ++mix) {
    const int p = mix & 3, g = mix >> 2 & 3, b = mix >> 4 & 3;
    for (int kind = 0; kind < 4; ++kind) {  // plain, momentum, Nesterov, first step
      const bool native = p == g && p == b;
      TestTable table(mo::kSGD);
      table.hyper[0] = sgd_hyper();
      table.hyper[0].nesterov = kind == 2;
      if (kind == 2) table.hyper[0].dampening = 0.0;
      if (kind == 0) table.hyper[0].momentum = 0.0;
      table.control.update_stats = (mix + kind) % 2;
      int64_t shift = 0;
      for (int64_t n : native ? sizes() : std::vector<int64_t>{1, 17, 70, 2049}) {
        TestRow& row = table.add(n, {p, g, kind == 0 ? kNone : b}, shift++ % 3);
        if (kind == 3) row.flags |= mo::kFresh;
      }
      fill(table, uint64_t(mix) * 4 + uint64_t(kind));
      if (kind == 3) {  // whatever the buffer holds before its first step does not count
        for (auto& row : table.rows) {
          for (int64_t i = 0; i < row->numel; ++i) row->op[mo::kState0].set(i, NAN);
        }
      }
      take(digests, "sgd mix " + std::to_string(mix) + " kind " + std::to_string(kind), table);
      for (auto& row : table.rows) {
        for (int64_t i = 0; kind == 3 && i < row->numel; ++i) CHECK(!std::isnan(row->get(mo::kState0, i)));
      }
    }
  }
}

void sgd_options(Digests& digests) {
  for (int option = 0; option < 4; ++option) {
    TestTable table(mo::kSGD);
    mo::Hyper& h = table.hyper[0] = sgd_hyper();
    if (option == 1) h.weight_decay = 0.0;
    if (option == 2) h.maximize = 1.0;
    if (option == 3) h.lr = 0.0;
    for (int64_t n : {7, 100, 2100}) table.add(n, {mo::kF32, mo::kF32, mo::kF32});
    fill(table, 8);
    take(digests, "sgd option " + std::to_string(option), table);
  }
}

// Operands in different orders of elements. Strides are of (param, grad, state0, state1, state2), in walking order.
Walk channels_last() {  // parameter NHWC, its gradient and one moment NCHW: N 5, H 24, W 24, C 18 (51840 elements)
  const std::vector<int64_t> nhwc{10368, 432, 18, 1}, nchw{10368, 24, 1, 576};
  return {{5, 24, 24, 18}, {nhwc, nchw, nhwc, nchw, nhwc}};
}
Walk transposed() {  // a matrix and its transpose; rows longer than a tile
  const std::vector<int64_t> rows{2500, 1}, columns{1, 3};
  return {{3, 2500}, {columns, rows, columns, rows, columns}};
}
Walk gaps() {  // every third element of wider rows; the gradient is one number expanded
  return {{70, 91}, {{300, 3}, {0, 0}, {91, 1}, {182, 2}, {91, 1}}};
}
Walk eight_dimensions() {
  Walk walk;
  walk.size = {2, 3, 2, 3, 2, 3, 2, 3};
  std::vector<int64_t> outer_first(8), outer_last(8);
  int64_t up = 1, down = 1;
  for (size_t d = 0; d < 8; ++d) {
    outer_last[d] = up;
    up *= walk.size[d];
    outer_first[7 - d] = down;
    down *= walk.size[7 - d];
  }
  for (int o = 0; o < mo::kOperands; ++o) walk.stride[o] = o % 2 ? outer_first : outer_last;
  return walk;
}
Walk single() { return {{1}, {{1}, {5}, {1}, {1}, {1}}}; }

void layouts(Digests& digests) {
  const Walk walks[] = {channels_last(), transposed(), gaps(), eight_dimensions(), single()};
  for (size_t w = 0; w < std::size(walks); ++w) {
    const int signatures[][4] = {{mo::kF32, mo::kF32, mo::kF32, mo::kF32},
                                 {mo::kBF16, mo::kBF16, mo::kBF16, mo::kBF16},
                                 {mo::kF16, mo::kF32, mo::kF32, mo::kF32},
                                 {mo::kF64, mo::kBF16, mo::kF64, mo::kF32}};
    for (const auto& s : signatures) {
      for (int rule : {mo::kAdam, mo::kSGD}) {
        TestTable table{mo::Rule(rule)};
        table.hyper[0] = rule == mo::kAdam ? adamw_hyper() : sgd_hyper();
        table.hyper[0].amsgrad = s[0] == mo::kF32;
        table.control.update_stats = s[0] != mo::kBF16;
        table.add(5, rule == mo::kAdam ? std::vector<int>{s[0], s[1], s[2], s[3], s[2]}
                                       : std::vector<int>{s[0], s[1], s[2]});
        if (rule == mo::kAdam) {
          table.add(walks[w], {s[0], s[1], s[2], s[3], table.hyper[0].amsgrad != 0.0 ? s[2] : kNone}, 1);
        } else {
          table.add(walks[w], {s[0], s[1], s[2]}, 1);
        }
        fill(table, w + 40);
        take(digests, "layout " + std::to_string(w) + " dtype " + std::to_string(s[0]) + std::to_string(s[1]) +
                          " rule " + std::to_string(rule), table);
      }
    }
  }
}

// Infinities, NaNs, denormals and extremes in every operand, with nobody asking to skip: the rule runs all the same.
void special_values(Digests& digests) {
  const double special[] = {0.0,    -0.0, INFINITY, -INFINITY, NAN,  1e-45,  -1e-40,
                            5e-324, 6e-8, 65504.0,  65520.0,   3e38, -1e300, 1.0};
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
      for (int stats = 0; stats < 2; ++stats) {
        TestTable table{mo::Rule(rule)};
        table.hyper[0] = rule == mo::kAdam ? adamw_hyper() : sgd_hyper();
        table.hyper[0].amsgrad = rule == mo::kAdam;
        table.control.update_stats = stats;
        TestRow& row = table.add(999, rule == mo::kAdam ? std::vector<int>{dtype, dtype, dtype, dtype, dtype}
                                                       : std::vector<int>{dtype, dtype, dtype});
        fill(table, 3);
        Random random(77);
        for (int o = 0; o < mo::kOperands; ++o) {
          for (int64_t i = 0; row.op[o].there() && i < row.numel; ++i) {
            if (random.bits() % 3 == 0) row.op[o].set(i, special[random.bits() % std::size(special)]);
          }
        }
        take(digests, "special values, rule " + std::to_string(rule) + " dtype " + std::to_string(dtype) + " stats " +
                          std::to_string(stats), table);
      }
    }
  }
}

// Groups with their own hyper-parameters, rows at different steps, float64 counters, rows without a gradient, in one
// table large enough for several threads: the same bits whatever their number.
void many_rows(Digests& digests) {
  for (int rule : {mo::kAdam, mo::kSGD}) {
    TestTable table{mo::Rule(rule)};
    table.hyper.assign(4, rule == mo::kAdam ? adamw_hyper() : sgd_hyper());
    table.hyper[1].lr = 3e-2;
    table.hyper[1].maximize = 1.0;
    table.hyper[2].weight_decay = 0.0;
    table.hyper[2].beta2 = 0.98;
    table.hyper[3].clip = 0.0;
    table.hyper[3].amsgrad = rule == mo::kAdam;
    table.control.max_grad_norm = 1.0;
    table.control.phases |= mo::kMeasure;
    table.control.update_stats = 1;
    for (int k = 0; k < 24; ++k) {
      const int dtype = k % mo::kDTypes, group = k / 3 % 4;
      const int64_t numel = k % 6 == 5 ? 9 : 12345 + 911 * k;
      TestRow& row = table.add(numel, rule == mo::kAdam
                                          ? std::vector<int>{dtype, dtype, dtype, dtype, group == 3 ? dtype : kNone}
                                          : std::vector<int>{dtype, dtype, dtype}, k % 2);
      row.group = group;
      if (k % 5 == 1) row.flags |= mo::kStepF64;
      if (k % 7 == 2) row.flags &= ~mo::kActive;
    }
    fill(table, 21);
    const TestTable start(table);
    take(digests, "many rows, rule " + std::to_string(rule), table);
    for (int threads = 2; threads <= 4; ++threads) {
      TestTable again(start);
      again.control.threads = threads;
      again.run();
      CHECK_SAYS(again.digest().hash == table.digest().hash, "rule %d, %d threads", rule, threads);
    }
  }
}

// Nothing to do, and nothing at all.
void empty_tables(Digests& digests) {
  TestTable none(mo::kAdam);
  none.control.phases |= mo::kMeasure;
  none.control.threads = 4;
  take(digests, "no rows", none);
  TestTable empty(mo::kAdam);
  empty.hyper[0] = adamw_hyper();
  empty.add(0, {mo::kF32, mo::kF32, mo::kF32, mo::kF32, kNone});
  take(digests, "one empty row", empty);
  CHECK(empty.rows[0]->step == 1.0f);
}

}  // namespace

int main() {
  return run_on_every_isa("step_test", [](Digests& digests) {
    adam_sizes(digests);
    adam_dtypes(digests);
    adam_options(digests);
    padding_takes_no_part(digests);
    adam_textbook(digests);
    sgd_dtypes(digests);
    sgd_options(digests);
    layouts(digests);
    special_values(digests);
    many_rows(digests);
    empty_tables(digests);
  }, 1);  // one order of a device's threads: elements do not depend on each other, norm_test.cpp has the sums
}
