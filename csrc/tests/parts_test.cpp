// A step of Adam and SGD in several calls against the same step in one, on every instruction set: parameters, states,
// counters, statistics and the result bit for bit. step_test.cpp, norm_test.cpp and quantised_test.cpp say what the one
// call must come to. adafactor_parts_test.cpp has Adafactor.
#include <algorithm>
#include <string>

#include "parts.h"
#include "step_table.h"

namespace {

constexpr int kNone = -1;  // no such operand

mo::Hyper hyper_of(int rule) {
  mo::Hyper h{};
  h.lr = rule == mo::kAdam ? 1e-2 : 0.1;
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.eps = 1e-8;
  h.weight_decay = 1e-2;
  h.decoupled = 1.0;
  h.momentum = 0.9;
  h.clip = 1.0;
  return h;
}

// Whether two operands hold the same bytes.
bool same(const Memory& a, const Memory& b) {
  return a.count() == b.count() &&
         (a.count() == 0 || std::memcmp(a.at(0), b.at(0), size_t(a.count() * storage::size_of(a.dtype()))) == 0);
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void check_same(const std::string& what, const TestTable& got, const TestTable& want) {
  for (size_t r = 0; r < want.rows.size(); ++r) {
    const TestRow &a = *got.rows[r], &b = *want.rows[r];
    for (int o = 0; o < mo::kOperands; ++o) {
      CHECK_SAYS(same(a.op[o], b.op[o]), "%s: row %zu operand %d", what.c_str(), r, o);
    }
    CHECK_SAYS(a.steps() == b.steps(), "%s: row %zu at step %g, not %g", what.c_str(), r, a.steps(), b.steps());
    for (int k = 0; k < 3; ++k) {
      CHECK_SAYS(same(a.codes[k].bytes, b.codes[k].bytes), "%s: row %zu codes %d", what.c_str(), r, k);
      CHECK_SAYS(same(a.codes[k].scale, b.codes[k].scale), "%s: row %zu scales %d", what.c_str(), r, k);
    }
    CHECK_SAYS(same(a.rest, b.rest), "%s: row %zu rest", what.c_str(), r);
    const mo::RowStats &x = got.row_stats[r], &y = want.row_stats[r];
    CHECK_SAYS(std::memcmp(&x, &y, sizeof x) == 0, "%s: row %zu statistics, norms %.17g %.17g, not %.17g %.17g",
               what.c_str(), r, x.grad_norm, x.update_norm, y.grad_norm, y.update_norm);
  }
  const mo::Result &x = got.result, &y = want.result;
  CHECK_SAYS(std::memcmp(&x, &y, sizeof x) == 0, "%s: result, norms %.17g %.17g, not %.17g %.17g", what.c_str(),
             x.grad_norm, x.update_norm, y.grad_norm, y.update_norm);
}

// Bytes that pass through a buffer: all that the row has. Strided rows are used where they are.
std::vector<parts::Operand> operands_of(const TestRow& row, mo::Row& n) {
  std::vector<parts::Operand> all;
  if (row.strided()) return all;
  const auto put = [&](uint64_t& address, int64_t size) {
    if (address != 0) all.push_back({&address, size});
  };
  const auto plain = [&](uint64_t& address, int o) { put(address, row.numel * storage::size_of(row.op[o].dtype())); };
  plain(n.param, mo::kParam);
  plain(n.grad, mo::kGrad);
  put(n.master, row.numel * row.rest_size);
  for (int k = 0; k < 3; ++k) {
    const TestCodes& c = row.codes[k];
    if (c.type == 0) {
      plain(n.state[k], mo::kState0 + k);
    } else {
      put(n.state[k], row.numel * c.bits() / 8);
      put(n.scale[k], int64_t(c.scale.size() * sizeof(float)));
    }
  }
  return all;
}

// Takes the step in one call, and in parts of one, three and all chunks. Every third row stays where it is, and so do
// those that share a gradient.
void take(Digests& digests, const std::string& what, const TestTable& start, bool skipped = false) {
  TestTable want(start);
  want.run();
  CHECK_SAYS((want.result.skipped != 0.0) == skipped, "%s: skipped %g", what.c_str(), want.result.skipped);
  CHECK_SAYS((want.result.updated != 0.0) == (start.control.update_stats && !skipped), "%s: updated %g", what.c_str(),
             want.result.updated);
  for (size_t r = 0; r < start.rows.size(); ++r) {
    const TestRow &before = *start.rows[r], &after = *want.rows[r];
    const bool moves = !skipped && before.flags & mo::kActive && before.numel;
    CHECK_SAYS(same(before.op[mo::kParam], after.op[mo::kParam]) != moves, "%s: row %zu", what.c_str(), r);
  }
  for (int most : {1, 3, 1000}) {
    for (int threads : {1, 3}) {
      const bool apart = most == 3;
      TestTable got(start);
      got.control.threads = threads;
      Records made = got.records();
      const auto stays = [&](int32_t r) { return r % 3 == 2 || made.rows[size_t(r)].flags & mo::kGradShared; };
      if (parts::decide(made.table, apart)) {
        std::vector<int32_t> edges;
        for (int32_t c = 0; c < int32_t(made.chunks.size()); c += most) edges.push_back(c);
        edges.push_back(int32_t(made.chunks.size()));
        parts::update(made.table, edges, 0, stays,
                      [&](int32_t r, mo::Row& n) { return operands_of(*got.rows[size_t(r)], n); });
      }
      check_same(what + ", most " + std::to_string(most) + " threads " + std::to_string(threads), got, want);
    }
  }
  digests.keep(what, want.digest());
}

// What stands between measurement and update, and what is asked.
enum Gate { kNoGate, kClips, kNeverClips, kLooks };

void ask(TestTable& table, int gate, bool stats) {
  mo::Control& c = table.control;
  if (gate != kNoGate) c.phases |= mo::kMeasure;
  if (gate == kClips) c.max_grad_norm = 0.25;
  if (gate == kNeverClips) c.max_grad_norm = 1e9;
  c.skip_nonfinite = gate == kLooks;
  c.update_stats = stats;
  c.grad_stats_in_update = stats && gate == kNoGate;
}

// Rows of less than a chunk, of one, and of several with and without a remainder; two groups, one that is not clipped;
// float64 counters, a row without a gradient, one without elements, one whose operands differ in order.
TestTable plain(int rule, int dtype, int state) {
  TestTable table{mo::Rule(rule)};
  table.hyper.assign(2, hyper_of(rule));
  table.hyper[0].amsgrad = rule == mo::kAdam && dtype == mo::kF32;
  table.hyper[1].clip = 0.0;
  table.hyper[1].lr *= 3;
  const bool amsgrad = table.hyper[0].amsgrad != 0.0;
  const auto dtypes = [&](int group) {
    return rule == mo::kAdam ? std::vector<int>{dtype, dtype, state, state, amsgrad && !group ? state : kNone}
                             : std::vector<int>{dtype, dtype, state};
  };
  const int64_t sizes[] = {3 * mo::kChunk + 77, 5,  2 * mo::kChunk, 130, mo::kChunk + 1, 0, 4 * mo::kChunk, mo::kChunk,
                           mo::kChunk - 3,      999};
  int k = 0;
  for (int64_t n : sizes) {
    TestRow& row = table.add(n, dtypes(k / 2 % 2), k % 2);
    row.group = k / 2 % 2;
    if (k % 4 == 3) row.flags |= mo::kStepF64;
    if (k == 4 && rule == mo::kSGD) row.flags |= mo::kFresh;
    if (k == 7) row.flags &= ~mo::kActive;
    ++k;
  }
  Walk walk;
  walk.size = {190, 177};  // 33630 elements
  const std::vector<int64_t> across{177, 1}, along{1, 190};
  for (int o = 0; o < mo::kOperands; ++o) walk.stride[o] = o == mo::kGrad ? along : across;
  table.add(walk, dtypes(0));
  Random random(uint64_t(rule * 10 + dtype));
  for (auto& row : table.rows) {
    for (int o = 0; o < mo::kOperands; ++o) {
      const bool second = rule == mo::kAdam && o >= mo::kState1;
      for (int64_t i = 0; i < row->op[o].count(); ++i) {
        const double x = random.value(second ? 1e-2 : 1.0);
        row->op[o].set(i, second ? std::fabs(x) : x);
      }
    }
    row->step = float(random.bits() % 3);
    row->wide_step = double(random.bits() % 3);
  }
  return table;
}

std::string name(const char* what, int rule, int dtype, int gate, int stats) {
  return std::string(what) + ", rule " + std::to_string(rule) + " dtype " + std::to_string(dtype) + " gate " +
         std::to_string(gate) + " stats " + std::to_string(stats);
}

void moments(Digests& digests) {
  const int dtypes[][2] = {{mo::kF32, mo::kF32}, {mo::kBF16, mo::kBF16}, {mo::kBF16, mo::kF32}};
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (const auto& d : dtypes) {
      const TestTable start = plain(rule, d[0], d[1]);
      for (int gate : {kNoGate, kClips, kNeverClips, kLooks}) {
        for (int stats = 0; stats < 2; ++stats) {
          TestTable table(start);
          ask(table, gate, stats);
          take(digests, name("moments", rule, 10 * d[0] + d[1], gate, stats), table);
        }
      }
    }
  }
}

// Nothing may move, no counter either: found by the measurement, or known to the caller.
void skips(Digests& digests) {
  for (int rule : {mo::kAdam, mo::kSGD}) {
    const TestTable start = plain(rule, mo::kF32, mo::kF32);
    for (int gate : {kNoGate, kClips, kLooks}) {
      TestTable table(start);
      ask(table, gate, true);
      if (gate == kLooks) {
        table.rows[6]->op[mo::kGrad].set(3 * mo::kChunk + 5, INFINITY);
      } else {
        table.control.found_inf = 1.0;
      }
      take(digests, name("skips", rule, mo::kF32, gate, 1), table, true);
    }
  }
}

// Gradients are written back, scaled: those of buffers once, one that two rows share once, after both.
void scaled_gradients(Digests& digests) {
  for (int stats = 0; stats < 2; ++stats) {
    TestTable table = plain(mo::kAdam, mo::kF32, mo::kF32);
    ask(table, kClips, stats);
    table.control.clip_in_place = 1;
    table.control.grad_scale = 4.0;
    TestRow& third = table.add(mo::kChunk + 1, {mo::kF32, kNone, mo::kF32, mo::kF32, mo::kF32});
    third.op[mo::kParam].set(7, 1.5);
    third.grad_of = 4;
    for (TestRow* row : {&third, table.rows[4].get()}) row->flags |= mo::kGradShared;
    third.flags |= mo::kScalesShared;
    TestTable scaled(table);
    scaled.run();
    for (size_t r : {0, 2, 4, 10}) CHECK(!same(scaled.rows[r]->op[mo::kGrad], table.rows[r]->op[mo::kGrad]));
    take(digests, name("scaled gradients", mo::kAdam, mo::kF32, kClips, stats), table);
  }
}

// Moments in codes, whose random bits follow from an element's place in its parameter, and weights finer than theirs.
void quantised(Digests& digests) {
  const int pairs[][2] = {{mo::kQ8, mo::kQ8Root}, {mo::kQ4, mo::kQ4Root}};
  const int rest_sizes[] = {0, 4, 2, 1, 2, 0};
  for (int rule : {mo::kAdam, mo::kSGD}) {
    for (const auto& pair : pairs) {
      for (int mode : {mo::kNoMaster, mo::kMaster32, mo::kSplit, mo::kSplit8, mo::kKahan, mo::kStochastic}) {
        for (int gate : {kNoGate, kClips}) {
          TestTable table{mo::Rule(rule)};
          table.hyper[0] = hyper_of(rule);
          ask(table, gate, mode % 2);
          Random random(uint64_t(mode + 9));
          for (int64_t n : {2 * mo::kChunk + 512, int64_t(64), mo::kChunk, 3 * mo::kChunk, mo::kChunk + 64}) {
            TestRow& row = table.add(n, {mo::kBF16, mo::kBF16});
            row.block = 64;
            row.mode = mo::MasterMode(mode);
            row.stream = random.bits();
            row.shard = (int64_t(1) << 32) - row.block * int64_t(random.bits() % uint64_t(n / row.block));
            row.rest_size = rest_sizes[mode];
            row.rest.resize(size_t(row.rest_size * n));
            for (unsigned char& byte : row.rest) byte = static_cast<unsigned char>(random.bits() >> 40);
            for (int64_t i = 0; i < n; ++i) {
              row.op[mo::kParam].set(i, random.value());
              row.op[mo::kGrad].set(i, random.value());
            }
            for (int k = 0; k < (rule == mo::kSGD ? 1 : 2); ++k) {
              TestCodes& c = row.codes[k];
              c.type = pair[k];
              c.bytes.resize(size_t(n * c.bits() / 8));
              c.scale.assign(size_t(n / row.block), 0x1p-9f);
              // No step leaves codes of the sign bit alone.
              const uint32_t never = c.type == mo::kQ8 ? 128 : c.type == mo::kQ4 ? 8 : 256;
              for (int64_t i = 0; i < n; ++i) {
                const uint32_t code = uint32_t(random.bits() >> 40) & (c.bits() == 8 ? 255u : 15u);
                c.set(i, code == never ? 0 : code);
              }
            }
          }
          take(digests, name("quantised", rule, 10 * pair[0] + mode, gate, mode % 2), table);
        }
      }
    }
  }
}

}  // namespace

int main() {
  return run_on_every_isa("parts_test", [](Digests& digests) {
    moments(digests);
    skips(digests);
    scaled_gradients(digests);
    quantised(digests);
  });
}
