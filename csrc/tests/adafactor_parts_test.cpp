// Two steps of Adafactor in several calls, each of whole rows, against the same steps in one, on every instruction set:
// parameters, states, counters, statistics, result and the sums for the next step bit for bit.
#include <algorithm>
#include <string>

#include "adafactor_table.h"
#include "parts.h"

namespace {

using adafactor::kNone;
using adafactor::Param;
using adafactor::TestRow;
using adafactor::TestTable;

// Vectors and matrices of one tile and of several, matrices that come several to a tile, a gradient in another order.
std::vector<Param> params(int p, int m) {
  return {{1, 170, 200, {p, p, m}}, {1, 0, 2100, {p, p, m}}, {1, 5, 7, {p, p, m}}, {500, 3, 3, {p, p, kNone}},
          {1, 0, 3, {p, p, m}},     {2, 81, 97, {p, p, m}},  {1, 64, 40, {p, p, m}}, {2, 30, 20, {p, p, m}, true},
          {1, 90, 110, {p, p, m}}};
}

bool same(const Memory& a, const Memory& b) {
  return a.count() == b.count() &&
         (a.count() == 0 || std::memcmp(a.at(0), b.at(0), size_t(a.count() * storage::size_of(a.dtype()))) == 0);
}

void check_same(const std::string& what, const TestTable& got, const TestTable& want) {
  for (size_t r = 0; r < want.rows.size(); ++r) {
    const TestRow &a = got.rows[r], &b = want.rows[r];
    for (int o = 0; o < 3; ++o) CHECK_SAYS(same(a.op[o], b.op[o]), "%s: row %zu operand %d", what.c_str(), r, o);
    CHECK_SAYS(same(a.second, b.second) && same(a.cols, b.cols), "%s: row %zu second moment", what.c_str(), r);
    CHECK_SAYS(a.step == b.step, "%s: row %zu at step %g, not %g", what.c_str(), r, double(a.step), double(b.step));
    const mo::RowStats &x = got.row_stats[r], &y = want.row_stats[r];
    CHECK_SAYS(std::memcmp(&x, &y, sizeof x) == 0, "%s: row %zu statistics, norms %.17g %.17g, not %.17g %.17g",
               what.c_str(), r, x.grad_norm, x.update_norm, y.grad_norm, y.update_norm);
  }
  CHECK_SAYS(std::memcmp(got.sums[1].data(), want.sums[1].data(), want.sums[1].size() * sizeof(double)) == 0,
             "%s: sums of the parameters", what.c_str());
  const mo::Result &x = got.result, &y = want.result;
  CHECK_SAYS(std::memcmp(&x, &y, sizeof x) == 0, "%s: result, norms %.17g %.17g, not %.17g %.17g", what.c_str(),
             x.grad_norm, x.update_norm, y.grad_norm, y.update_norm);
}

std::vector<parts::Operand> operands_of(const TestRow& row, mo::Row& n) {
  std::vector<parts::Operand> all;
  const auto put = [&](uint64_t& address, const Memory& m) {
    if (m.there() && address != 0) all.push_back({&address, m.count() * storage::size_of(m.dtype())});
  };
  put(n.param, row.op[0]);
  put(n.grad, row.op[1]);
  put(n.state[0], row.second);
  put(n.state[1], row.cols);
  put(n.state[2], row.op[2]);
  return all;
}

// Which calls take the first pass.
enum Pass { kInUpdate, kOnce, kAgain };  // nothing gates the update; the first call; it and every later one

void in_parts(const std::string& what, TestTable& table, bool unknown, int pass, int most, bool apart) {
  Records made = table.records(unknown);
  if (!parts::decide(made.table, apart)) return;
  // Later calls must leave what the first pass gave, or must not need it.
  for (mo::ChunkStats& s : made.stats) {
    if (pass == kOnce) s.amax = -1.0;
  }
  for (TestRow& row : table.rows) {
    for (int64_t i = 0; pass != kOnce && i < row.scratch.count(); ++i) row.scratch.set(i, NAN);
  }
  std::vector<int32_t> edges{0};
  for (int32_t r = most; r < int32_t(made.rows.size()); r += most) {
    edges.push_back(int32_t(made.rows[size_t(r)].first_chunk));
  }
  edges.push_back(int32_t(made.chunks.size()));
  parts::update(made.table, edges, pass == kOnce ? mo::kMeasured : 0, [](int32_t r) { return r % 3 == 2; },
                [&](int32_t r, mo::Row& n) { return operands_of(table.rows[size_t(r)], n); });
  for (const mo::ChunkStats& s : made.stats) {
    CHECK_SAYS((s.amax == -1.0) == (pass == kOnce), "%s: largest magnitude %g", what.c_str(), s.amax);
  }
}

void step_twice(Digests& digests, const std::string& what, int p, int m, int pass, bool clips, bool stats) {
  for (int most : {1, 4, 100}) {
    for (int threads : {1, 3}) {
      TestTable want(params(p, m)), got(params(p, m));
      for (TestTable* table : {&want, &got}) {
        table->control.update_stats = stats;
        if (clips) table->control.max_grad_norm = 0.5;
      }
      got.control.threads = threads;
      for (uint64_t step = 1; step <= 2; ++step) {
        const int32_t phases = (pass == kInUpdate ? 0 : mo::kMeasure) | mo::kFinish | mo::kUpdate;
        for (TestTable* table : {&want, &got}) {
          table->fill(step, 1.0);
          table->control.phases = phases;
          table->control.grad_stats_in_update = stats && pass == kInUpdate;
        }
        const std::vector<TestRow> before(want.rows);
        want.run(step == 1);
        in_parts(what, got, step == 1, pass, most, most == 4);
        check_same(what + " step " + std::to_string(step) + " most " + std::to_string(most) + " threads " +
                       std::to_string(threads), got, want);
        for (size_t r = 0; r < before.size(); ++r) CHECK(!same(before[r].op[0], want.rows[r].op[0]));
        CHECK((want.result.clip_coef < 1.0) == clips && (want.result.updated != 0.0) == stats);
      }
      if (most == 1 && threads == 1) digests.keep(what, want.digest());
    }
  }
}

// The same in two calls of all rows, between which sums are exchanged where rows are parts of larger parameters.
void in_two_calls(bool gated, bool clips, bool stats) {
  for (int threads : {1, 3}) {
    TestTable want(params(mo::kF32, mo::kF32)), got(params(mo::kF32, mo::kF32));
    got.control.threads = threads;
    int calls = 0;
    for (uint64_t step = 1; step <= 2; ++step) {
      for (TestTable* table : {&want, &got}) {
        table->fill(step, 1.0);
        table->control.update_stats = stats;
        if (clips) table->control.max_grad_norm = 0.5;
        table->control.phases = (gated ? mo::kMeasure : 0) | mo::kFinish | mo::kUpdate;
        table->control.grad_stats_in_update = stats && !gated;
      }
      const std::vector<TestRow> before(got.rows);
      want.run(step == 1);
      got.run(step == 1, [&](int) {
        ++calls;
        for (size_t r = 0; r < before.size(); ++r) CHECK(same(before[r].op[0], got.rows[r].op[0]));
      });
      check_same("in two calls, step " + std::to_string(step), got, want);
    }
    CHECK(calls == 4 && (want.result.clip_coef < 1.0) == clips && (want.result.updated != 0.0) == stats);
  }
}

void skips(Digests& digests) {
  TestTable want(params(mo::kF32, mo::kF32)), got(params(mo::kF32, mo::kF32));
  for (TestTable* table : {&want, &got}) {
    table->fill(1, 1.0);
    table->rows[5].op[1].set(9000, NAN);
    table->control.skip_nonfinite = 1;
  }
  const std::vector<TestRow> before(want.rows);
  want.run(true);
  in_parts("skips", got, true, kOnce, 1, false);
  check_same("skips", got, want);
  CHECK(want.result.skipped == 1.0);
  for (size_t r = 0; r < before.size(); ++r) {
    CHECK(same(before[r].op[0], want.rows[r].op[0]) && want.rows[r].step == 0.0f);
  }
  digests.keep("skips", want.digest());
}

}  // namespace

int main() {
  return run_on_every_isa("adafactor_parts_test", [](Digests& digests) {
    for (int pass : {kInUpdate, kOnce, kAgain}) {
      for (int stats = 0; stats < 2; ++stats) {
        for (int clips = 0; clips < (pass == kInUpdate ? 1 : 2); ++clips) {
          const std::string what = " pass " + std::to_string(pass) + " clips " + std::to_string(clips) + " stats " +
                                   std::to_string(stats);
          step_twice(digests, "fp32" + what, mo::kF32, mo::kF32, pass, clips, stats);
          step_twice(digests, "bf16" + what, mo::kBF16, mo::kF32, pass, clips, stats);
        }
      }
    }
    for (int stats = 0; stats < 2; ++stats) {
      for (int clips = 0; clips < 2; ++clips) in_two_calls(true, clips, stats);
      in_two_calls(false, false, stats);
    }
    skips(digests);
  });
}
