// What a step measures of its gradients and what that decides: norms of any magnitude, counts, clipping, unscaling,
// non-finite gradients, skips, gradients written back. On every instruction set, against long double sums.
#include <algorithm>
#include <limits>
#include <string>

#include "expected.h"

namespace {

constexpr int kNone = -1;  // no such operand

struct Truth {
  long double sumsq = 0;  // its range holds the square of every double
  double amax = 0.0;
  int64_t nonfinite = 0, zeros = 0;

  void add(double x) {
    sumsq += (long double)x * x;
    if (!(std::fabs(x) <= amax)) amax = std::isnan(amax) ? amax : std::fabs(x);
    nonfinite += !std::isfinite(x);
    zeros += x == 0.0;
  }
};

// Within a block of 2048 the squares of anything but float64 are summed in float.
double tolerance(mo::DType dtype) { return dtype == mo::kF64 ? 1e-14 : 1e-6; }

bool close(double got, long double want, double relative) {
  if (std::isnan(double(want))) return std::isnan(got);
  return got == double(want) || fabsl(got - want) <= relative * fabsl(want);
}

// Measures the table and compares rows and totals, clipped groups only in the total norm.
void measure(Digests& digests, const std::string& what, TestTable& table) {
  table.control.phases |= mo::kMeasure;
  const TestTable before(table);
  table.run();
  digests.keep(what, table.digest());
  const double scale = table.control.grad_scale;
  Truth total;
  double relative = 0.0;
  for (size_t r = 0; r < before.rows.size(); ++r) {
    const TestRow& row = *before.rows[r];
    const mo::RowStats& s = table.row_stats[r];
    if (!(row.flags & mo::kActive)) {
      CHECK(s.active == 0.0 && s.grad_norm == 0.0);
      continue;
    }
    Truth truth;
    for (int64_t i = 0; i < row.numel; ++i) truth.add(row.get(mo::kGrad, i));
    const double t = tolerance(row.op[mo::kGrad].dtype());
    relative = std::max(relative, t);
    CHECK_SAYS(close(s.grad_norm, sqrtl(truth.sumsq) / scale, t), "%s row %zu: norm %.17g, not %.17g", what.c_str(), r,
               s.grad_norm, double(sqrtl(truth.sumsq) / scale));
    CHECK_SAYS(close(s.grad_amax, (long double)truth.amax / scale, 1e-15), "%s row %zu: amax %g, not %g", what.c_str(),
               r, s.grad_amax, truth.amax / scale);
    CHECK_SAYS(s.nonfinite == double(truth.nonfinite), "%s row %zu: %g non-finite", what.c_str(), r, s.nonfinite);
    CHECK_SAYS(s.zeros == double(truth.zeros), "%s row %zu: %g zeros, not %g", what.c_str(), r, s.zeros,
               double(truth.zeros));
    CHECK(s.active == 1.0);
    if (before.hyper[size_t(row.group)].clip != 0.0) total.sumsq += truth.sumsq;
    if (!(truth.amax <= total.amax)) total.amax = std::isnan(total.amax) ? total.amax : truth.amax;
    total.nonfinite += truth.nonfinite;
    total.zeros += truth.zeros;
  }
  const mo::Result& result = table.result;
  CHECK_SAYS(close(result.grad_norm, sqrtl(total.sumsq) / scale, relative), "%s: total %.17g, not %.17g", what.c_str(),
             result.grad_norm, double(sqrtl(total.sumsq) / scale));
  CHECK(close(result.grad_amax, (long double)total.amax / scale, 1e-15));
  CHECK(result.nonfinite == double(total.nonfinite));
  CHECK(result.zeros == double(total.zeros));
  CHECK(result.measured == 1.0);
  if (!(before.control.phases & mo::kFinish)) return;
  if (!std::isnan(before.control.max_grad_norm)) {
    const double coef = before.control.max_grad_norm / (result.grad_norm + 1e-6);
    CHECK(close(result.clip_coef, coef > 1.0 ? 1.0 : coef, 1e-15));
  } else {
    CHECK(result.clip_coef == 1.0);
  }
}

TestTable gradients_only() {
  TestTable table(mo::kNoRule);
  table.control.phases = mo::kMeasure;
  return table;
}

void fill_gradient(TestRow& row, uint64_t seed, double scale) {
  Random random(seed);
  for (int64_t i = 0; i < row.op[mo::kGrad].count(); ++i) row.op[mo::kGrad].set(i, random.value(scale));
}

// Every length around the lanes of a block (64 and 32), the block (2048) and the chunk.
void norm_sizes(Digests& digests) {
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    TestTable table = gradients_only();
    for (int64_t n = 0; n <= 130; ++n) fill_gradient(table.add(n, {kNone, dtype}, n % 3), uint64_t(n), 1.0);
    for (int64_t n : {2047, 2048, 2049, 16383, 16384, 16385, 40000}) {
      fill_gradient(table.add(n, {kNone, dtype}, n % 3), uint64_t(n), 1.0);
    }
    measure(digests, "norm sizes " + std::to_string(dtype), table);
  }
}

// Magnitudes whose squares leave float's range or float's normal numbers, and for float64 double's; alone, beside
// ordinary ones in other blocks, chunks and rows, and all together in one table.
void extreme_magnitudes(Digests& digests) {
  const std::vector<std::vector<double>> scales{{1e25, 1e-25, 1e38, 1e-38, 1e-42, 3e-15},
                                                {1e25, 1e-25, 1e38, 1e-38, 1e-40},
                                                {3e4, 1e-4, 6e-8},
                                                {1e25, 1e-25, 1e200, 1e-200, 1e300, 1e-300, 1e-310, 3e-140, 1e154}};
  TestTable all = gradients_only();
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    for (double scale : scales[size_t(dtype)]) {
      TestTable table = gradients_only();
      for (int64_t n : {1, 5, 2048, 3000, 20000}) {
        fill_gradient(table.add(n, {kNone, dtype}), uint64_t(n), scale);
        fill_gradient(all.add(n, {kNone, dtype}), uint64_t(n), scale);
      }
      TestRow& changing = table.add(50000, {kNone, dtype});
      fill_gradient(changing, 9, 1.0);
      for (int64_t i = 18000; i < 19000; ++i) changing.op[mo::kGrad].set(i, scale * double(1 + i % 2));
      measure(digests, "magnitude " + std::to_string(dtype) + " " + std::to_string(std::log10(scale)), table);
      CHECK(table.result.nonfinite == 0.0 && table.result.grad_norm > 0.0 && std::isfinite(table.result.grad_norm));
    }
  }
  measure(digests, "all magnitudes", all);
}

void zeros_and_nonfinite(Digests& digests) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    TestTable zeros = gradients_only();
    for (int64_t n : {1, 63, 64, 2048, 20000}) {
      TestRow& row = zeros.add(n, {kNone, dtype});
      for (int64_t i = 0; i < n; i += 2) row.op[mo::kGrad].set(i, -0.0);
    }
    measure(digests, "zeros " + std::to_string(dtype), zeros);
    CHECK(zeros.result.grad_norm == 0.0 && zeros.result.grad_amax == 0.0);
    for (int kind = 0; kind < 4; ++kind) {
      for (int64_t place : {0, 1, 40, 2047, 2050, 16400, 19999}) {
        TestTable table = gradients_only();
        fill_gradient(table.add(777, {kNone, dtype}), 1, 1.0);
        TestRow& row = table.add(20000, {kNone, dtype});
        fill_gradient(row, 2, 1.0);
        row.op[mo::kGrad].set(place, kind == 0 ? infinity : kind == 1 ? -infinity : NAN);
        if (kind == 3) row.op[mo::kGrad].set((place + 5000) % 20000, infinity);
        measure(digests, "non-finite " + std::to_string(dtype) + std::to_string(kind) + " at " + std::to_string(place),
                table);
      }
    }
  }
}

mo::Hyper adamw_hyper() {
  mo::Hyper h{};
  h.lr = 1e-2;
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.eps = 1e-8;
  h.weight_decay = 0.1;
  h.decoupled = 1.0;
  h.clip = 1.0;
  return h;
}

// Rows of all dtypes in three groups, one of which is not clipped; one row has no gradient.
TestTable stepping(uint64_t seed) {
  TestTable table(mo::kAdam);
  table.hyper.assign(3, adamw_hyper());
  table.hyper[1].clip = 0.0;
  table.hyper[2].maximize = 1.0;
  Random random(seed);
  for (int k = 0; k < 9; ++k) {
    const int dtype = k % mo::kDTypes;
    TestRow& row = table.add(k == 4 ? 0 : 1 + 1111 * k, {dtype, dtype, dtype, dtype, kNone}, k % 2);
    row.group = k % 3;
    if (k == 5) row.flags &= ~mo::kActive;
    row.step = float(k);
    for (int o = 0; o <= mo::kState1; ++o) {
      for (int64_t i = 0; i < row.numel; ++i) {
        row.op[o].set(i, std::fabs(random.value()) * (o == mo::kGrad && i % 2 ? -1 : 1));
      }
    }
  }
  return table;
}

// Clipping and unscaling in one coefficient; the gradients stay as they are.
void clip(Digests& digests) {
  for (double scale : {1.0, 1024.0, 65536.0}) {
    for (double max_norm : {0.0, 0.5, 1e9, std::numeric_limits<double>::infinity()}) {
      for (int threads : {1, 4}) {
        TestTable table = stepping(4);
        table.control.max_grad_norm = max_norm;
        table.control.grad_scale = scale;
        table.control.threads = threads;
        const TestTable before(table);
        measure(digests, "clip " + std::to_string(max_norm) + " scale " + std::to_string(scale) + " threads " +
                             std::to_string(threads), table);
        expected::check_step("clip", before, table);
        CHECK(table.result.clip_coef <= 1.0 && table.result.skipped == 0.0 && table.result.found_inf == 0.0);
      }
    }
  }
}

bool same_memory(const TestTable& a, const TestTable& b) {
  bool same = true;
  for (size_t r = 0; r < a.rows.size(); ++r) {
    for (int o = 0; o < mo::kOperands; ++o) {
      const Memory &x = a.rows[r]->op[o], &y = b.rows[r]->op[o];
      if (x.count()) same &= std::memcmp(x.at(0), y.at(0), size_t(x.count() * storage::size_of(x.dtype()))) == 0;
    }
    same &= a.rows[r]->steps() == b.rows[r]->steps();
  }
  return same;
}

// A skipped step leaves every bit, gradients and counters too; without a reason to skip the same table is stepped.
void skip(Digests& digests) {
  for (int reason = 0; reason < 5; ++reason) {
    TestTable table = stepping(5);
    table.control.max_grad_norm = 1.0;
    table.control.clip_in_place = 1;
    table.control.update_stats = 1;
    table.control.skip_nonfinite = reason != 3;
    if (reason == 0) table.rows[8]->op[mo::kGrad].set(8000, NAN);
    if (reason == 1) table.rows[0]->op[mo::kGrad].set(0, INFINITY);
    if (reason == 2) table.rows[1]->op[mo::kGrad].set(3, -INFINITY);  // in the group that is not clipped
    if (reason == 3) table.control.found_inf = 1.0;                   // the caller says so
    if (reason == 4) table.control.extra_nonfinite = 2.0;             // in a gradient that is stepped elsewhere
    const TestTable before(table);
    table.control.phases |= mo::kMeasure;
    table.run();
    digests.keep("skip " + std::to_string(reason), table.digest());
    CHECK_SAYS(same_memory(before, table), "reason %d", reason);
    CHECK(table.result.skipped == 1.0 && table.result.found_inf == 1.0);
    CHECK(table.result.updated == 0.0 && table.result.update_norm == 0.0);
  }
  TestTable found(stepping(5));  // nobody measures: found_inf alone skips
  found.control.found_inf = 1.0;
  const TestTable before(found);
  found.run();
  CHECK(same_memory(before, found) && found.result.skipped == 1.0 && found.result.measured == 0.0);
  TestTable goes_on(stepping(5));
  goes_on.control.skip_nonfinite = 1;
  measure(digests, "no reason to skip", goes_on);
  CHECK(!same_memory(before, goes_on) && goes_on.result.skipped == 0.0);
}

// A non-finite gradient that nobody wants skipped reaches every clipped parameter through the coefficient, whatever
// bits its NaN has: rounding to half precision must not make a number of it.
void nan_spreads(Digests& digests) {
  const uint32_t patterns[] = {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu,
                               0x7fc0ffffu, 0x7f800001u, 0xff80ffffu};
  for (uint32_t bits : patterns) {
    for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
      TestTable table(mo::kAdam);
      table.hyper[0] = adamw_hyper();
      table.control.max_grad_norm = 1.0;
      TestRow& poisoned = table.add(100, {mo::kF32, mo::kF32, mo::kF32, mo::kF32, kNone});
      TestRow& other = table.add(100, {dtype, dtype, dtype, dtype, kNone});
      for (TestRow* row : {&poisoned, &other}) {
        for (int o = 0; o <= mo::kState1; ++o) {
          for (int64_t i = 0; i < 100; ++i) row->op[o].set(i, 0.5);
        }
      }
      std::memcpy(poisoned.op[mo::kGrad].at(50), &bits, sizeof bits);
      measure(digests, "NaN " + std::to_string(bits) + " dtype " + std::to_string(dtype), table);
      int64_t numbers = 0;
      for (int64_t i = 0; i < 100; ++i) numbers += !std::isnan(other.get(mo::kParam, i));
      CHECK_SAYS(numbers == 0, "NaN 0x%08x, dtype %d: %d parameters are numbers", bits, dtype, int(numbers));
      for (int rule : {mo::kAdam, mo::kSGD}) {  // a learning rate that is not a number does the same
        TestTable lost{mo::Rule(rule)};
        lost.hyper[0] = adamw_hyper();
        lost.hyper[0].lr = double(storage::bits_as<float>(bits));
        TestRow& row = lost.add(100, rule == mo::kAdam ? std::vector<int>{dtype, dtype, dtype, dtype}
                                                      : std::vector<int>{dtype, dtype});
        for (int64_t i = 0; i < 100; ++i) row.op[mo::kGrad].set(i, 0.5);
        lost.run();
        numbers = 0;
        for (int64_t i = 0; i < 100; ++i) numbers += !std::isnan(row.get(mo::kParam, i));
        CHECK_SAYS(numbers == 0, "lr 0x%08x, rule %d, dtype %d: %d parameters are numbers", bits, rule, dtype,
                   int(numbers));
      }
    }
  }
}

// Gradients written back: multiplied in their compute type, rounded once, and only when there is something to multiply.
void scale_in_place(Digests& digests) {
  for (int way = 0; way < 3; ++way) {  // with the step, by the scale phase alone, and with a coefficient of 1
    TestTable table = stepping(6);
    table.control.max_grad_norm = way == 2 ? 1e9 : 0.25;
    if (way == 1) {
      table.control.rule = mo::kNoRule;
      table.control.phases = mo::kFinish | mo::kScale;
    } else {
      table.control.clip_in_place = 1;
      table.control.grad_scale = way == 0 ? 8.0 : 1.0;
    }
    const TestTable before(table);
    measure(digests, "in place " + std::to_string(way), table);
    for (size_t r = 0; r < table.rows.size(); ++r) {
      const TestRow &old = *before.rows[r], &now = *table.rows[r];
      const double clip_coef = table.hyper[size_t(old.group)].clip != 0.0 ? table.result.clip_coef : 1.0;
      const double scale = clip_coef / before.control.grad_scale;
      const mo::DType dtype = old.op[mo::kGrad].dtype();
      for (int64_t i = 0; i < old.numel; ++i) {
        const double x = old.get(mo::kGrad, i);
        const double product = dtype == mo::kF64 ? x * scale : double(float(x) * float(scale));
        Memory want(dtype, 1);
        want.set(0, old.flags & mo::kActive ? product : x);
        CHECK(now.op[mo::kGrad].bits(i) == want.bits(0));
        if (way == 1) CHECK(now.op[mo::kParam].bits(i) == old.op[mo::kParam].bits(i));
      }
    }
  }
}

// Two rows given one and the same gradient: both are stepped with it as it was, and it is scaled once.
void shared_gradient(Digests& digests) {
  for (int threads : {1, 4}) {
    TestTable table(mo::kAdam);
    table.hyper[0] = adamw_hyper();
    table.control.max_grad_norm = 0.25;
    table.control.clip_in_place = 1;
    table.control.threads = threads;
    for (int64_t n : {100000, 100000, 60000}) {
      TestRow& row = table.add(n, {mo::kF32, mo::kF32, mo::kF32, mo::kF32, kNone});
      fill_gradient(row, uint64_t(n), 1.0);  // equal contents where the gradient is shared
    }
    table.rows[1]->grad_of = 0;
    table.rows[0]->flags |= mo::kGradShared | mo::kScalesShared;
    table.rows[1]->flags |= mo::kGradShared;
    const TestTable before(table);
    measure(digests, "shared gradient, threads " + std::to_string(threads), table);
    TestTable want(before);
    const float scale = float(table.result.clip_coef);
    for (size_t r = 0; r < 3; ++r) {
      TestRow& row = *want.rows[r];
      expected::step(row, want.hyper[0], mo::kAdam, table.result.clip_coef);
      for (int64_t i = 0; i < row.numel; ++i) {
        CHECK(table.rows[r]->op[mo::kParam].bits(i) == row.op[mo::kParam].bits(i));
        const float g = float(before.rows[r]->get(mo::kGrad, i));
        CHECK(float(table.rows[r]->get(mo::kGrad, i)) == (r == 1 ? g : g * scale));  // row 1's own memory is not used
      }
    }
  }
}

// A transposed gradient and one with gaps: the walk for norms and for writing back; what lies between stays.
void strided_gradients(Digests& digests) {
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    TestTable table = gradients_only();
    table.control.phases = mo::kMeasure | mo::kFinish | mo::kScale;
    table.control.max_grad_norm = 0.5;
    const Walk transposed{{150, 200}, {{}, {1, 150}, {}, {}, {}}}, gaps{{7, 11, 13}, {{}, {500, 40, 3}, {}, {}, {}}};
    fill_gradient(table.add(transposed, {kNone, dtype}, 1), 5, 1.0);
    fill_gradient(table.add(gaps, {kNone, dtype}, 1), 6, 1.0);
    TestTable want(table);
    measure(digests, "strided gradients " + std::to_string(dtype), table);
    for (size_t r = 0; r < want.rows.size(); ++r) {
      TestRow& row = *want.rows[r];
      for (int64_t i = 0; i < row.numel; ++i) {
        const double x = row.get(mo::kGrad, i), c = table.result.clip_coef;
        row.op[mo::kGrad].set(row.offset(mo::kGrad, i), dtype == mo::kF64 ? x * c : double(float(x) * float(c)));
      }
      for (int64_t i = 0; i < row.op[mo::kGrad].count(); ++i) {
        CHECK(table.rows[r]->op[mo::kGrad].bits(i) == row.op[mo::kGrad].bits(i));
      }
    }
  }
}

// What gradients stepped elsewhere add, in the form of ChunkStats.
void extra(Digests& digests) {
  TestTable table = gradients_only();
  TestRow& row = table.add(1, {kNone, mo::kF64});
  row.op[mo::kGrad].set(0, 3.0);
  table.control.extra_sumsq = 1.0;
  table.control.extra_exponent = 4.0;  // 16 = 4 squared
  table.control.extra_amax = 4.0;
  table.control.extra_zeros = 7.0;
  table.run();
  CHECK(table.result.grad_norm == 5.0 && table.result.grad_amax == 4.0 && table.result.zeros == 7.0);
  CHECK(table.row_stats[0].grad_norm == 3.0);
  row.op[mo::kGrad].set(0, 1e200);
  table.run();
  CHECK(table.result.grad_norm == 1e200);
  digests.keep("extra", table.digest());
}

// Sums that nobody gates on, taken during the update: the same as in a pass of their own.
void sums_in_update(Digests& digests) {
  TestTable apart = stepping(7), together = stepping(7);
  apart.control.update_stats = together.control.update_stats = 1;
  apart.control.phases |= mo::kMeasure;
  together.control.grad_stats_in_update = 1;
  apart.run();
  together.run();
  CHECK(apart.digest().hash == together.digest().hash);
  CHECK(together.result.measured == 1.0 && together.result.grad_norm > 0.0);
  digests.keep("sums in update", together.digest());
}

// Enough work for several threads: the same bits whatever their number, run after run.
void threads(Digests& digests) {
  for (int dtype = 0; dtype < mo::kDTypes; ++dtype) {
    TestTable table = gradients_only();
    for (int k = 0; k < 12; ++k) {
      fill_gradient(table.add(40000 + 7 * k, {kNone, dtype}), uint64_t(k), k == 3 ? 1e3 : 1.0);
    }
    TestTable again(table);
    measure(digests, "threads " + std::to_string(dtype), table);
    for (int count = 2; count <= 4; ++count) {
      again.control.threads = count;
      again.run();
      CHECK(again.digest().hash == table.digest().hash);
    }
  }
}

}  // namespace

int main() {
  return run_on_every_isa("norm_test", [](Digests& digests) {
    norm_sizes(digests);
    extreme_magnitudes(digests);
    zeros_and_nonfinite(digests);
    clip(digests);
    skip(digests);
    nan_spreads(digests);
    scale_in_place(digests);
    shared_gradient(digests);
    strided_gradients(digests);
    extra(digests);
    sums_in_update(digests);
    threads(digests);
  });
}
