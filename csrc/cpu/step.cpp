// The walk over all chunks of all rows, and the finish between its two passes.
// Bytes per element: pass 1 reads the gradient once, pass 2 moves what the update kernel states; nothing else is touched.
#include "cpu/step.h"

#include <atomic>
#include <cmath>
#include <optional>

#include "cpu/adafactor_walk.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "rules/adafactor.h"
#include "rules/adamw.h"
#include "rules/grad_stats.h"
#include "rules/sgd.h"

namespace mo {
namespace {

using base::ScaledSum;

template <class T>
T* as(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

struct Step {
  const StepTable& t;
  Row* rows = as<Row>(t.rows);
  const Chunk* chunks = as<Chunk>(t.chunks);
  const int32_t* batches = as<int32_t>(t.batches);
  const Hyper* hyper = as<Hyper>(t.hyper);
  RowScalars* scalars = as<RowScalars>(t.scalars);
  ChunkStats* chunk_stats = as<ChunkStats>(t.chunk_stats);
  RowStats* row_stats = as<RowStats>(t.row_stats);
  Result* result = as<Result>(t.result);
  const Control& control = *as<Control>(t.control);
  const KernelTable& kernel = kernels();
  std::atomic<int64_t> next_measure{0}, next_update{0};
  bool update = false, scale = false;

  explicit Step(const StepTable& table) : t(table) {}

  template <class Work>
  void each_chunk(int64_t batch, Work work) const {
    for (int32_t c = batches[batch]; c < batches[batch + 1]; ++c) {
      const Row& row = rows[chunks[c].row];
      if (row.flags & kActive) work(row, chunks[c], c);
    }
  }

  void measure() {
    for (int64_t b; (b = next_measure.fetch_add(1)) < t.n_batches;) {
      each_chunk(b, [&](const Row& row, const Chunk& chunk, int32_t c) {
        if (control.rule == kAdafactor) {
          kernel.factor_sums(row, chunk, as<Tile>(t.tiles)[c], chunk_stats[c], as<double>(t.param_sums)[c]);
        } else {
          kernel.grad_stats(row, chunk, chunk_stats[c]);
        }
      });
    }
  }

  // Fixed order: chunks of a row, then rows, then what is stepped elsewhere.
  void reduce_gradients() {
    ScaledSum total;
    total.add(control.extra_sumsq, int64_t(control.extra_exponent));
    double nonfinite = control.extra_nonfinite, zeros = control.extra_zeros, amax = control.extra_amax;
    for (int64_t r = 0; r < t.n_rows; ++r) {
      const Row& row = rows[r];
      RowStats& out = row_stats[r];
      out = RowStats{};
      if (!(row.flags & kActive)) continue;
      ScaledSum sum;
      double row_max = 0.0;
      int64_t row_nonfinite = 0, row_zeros = 0;
      for (int64_t c = row.first_chunk; c < row.first_chunk + row.chunks; ++c) {
        const ChunkStats& s = chunk_stats[c];
        sum.add(s.sumsq, s.exponent);
        if (!(s.amax <= row_max)) row_max = row_max == row_max ? s.amax : row_max;
        row_nonfinite += s.nonfinite;
        row_zeros += s.zeros;
      }
      out.active = 1.0;
      out.grad_norm = sum.norm() / control.grad_scale;
      out.grad_amax = row_max / control.grad_scale;
      out.nonfinite = double(row_nonfinite);
      out.zeros = double(row_zeros);
      nonfinite += out.nonfinite;
      zeros += out.zeros;
      if (!(row_max <= amax)) amax = amax == amax ? row_max : amax;
      if (hyper[row.group].clip != 0.0) total.add(sum.sumsq, sum.exponent);
    }
    result->grad_norm = total.norm() / control.grad_scale;
    result->nonfinite = nonfinite;
    result->zeros = zeros;
    result->grad_amax = amax / control.grad_scale;
    result->measured = 1.0;
  }

  void finish() {
    double coef = 1.0;
    if (result->measured != 0.0 && control.max_grad_norm == control.max_grad_norm) {
      coef = base::clip_coefficient(result->grad_norm, control.max_grad_norm);
    }
    result->clip_coef = coef;
    const bool found = control.found_inf != 0.0 || (control.skip_nonfinite && result->nonfinite != 0.0);
    result->found_inf = control.found_inf != 0.0 || result->nonfinite != 0.0;
    result->skipped = found;
    update = (control.phases & kUpdate) && !found;
    scale = (control.phases & kScale) && coef != 1.0;
    if (update || scale) prepare_rows(coef);
    if (control.phases & kDeferred) update = scale = false;
  }

  // Bias corrections and other scalars; consecutive rows of one group at the same step share them, but for Adafactor,
  // where a row's step size follows from the row.
  void prepare_rows(double clip_coef) {
    int64_t last_step = -1, last = -1;
    int32_t last_group = -1;
    for (int64_t r = 0; r < t.n_rows; ++r) {
      Row& row = rows[r];
      if (!(row.flags & kActive)) continue;
      const int64_t step = update ? advance(row) : 0;
      if (last < 0 || row.group != last_group || step != last_step || control.rule == kAdafactor) {
        const Hyper& h = hyper[row.group];
        RowScalars& s = scalars[++last];
        s.scale = (h.clip != 0.0 ? clip_coef : 1.0) / control.grad_scale;
        s.coef = h.maximize != 0.0 ? -s.scale : s.scale;
        s.step = step;
        if (control.rule == kAdam) base::prepare_adamw(h, step, s);
        if (control.rule == kSGD) base::prepare_sgd(h, s);
        if (control.rule == kAdafactor) base::prepare_adafactor(h, step, row.dtype[kParam], s);
        last_group = row.group;
        last_step = step;
      }
      row.scalars = last;
    }
  }

  static int64_t advance(const Row& row) {
    if (row.step == 0) return 0;
    if (row.flags & kStepF64) return int64_t(*as<double>(row.step) += 1.0);
    return int64_t(*as<float>(row.step) += 1.0f);
  }

  // Backwards: what pass 1 read last is still in cache.
  void run_update() {
    for (int64_t b; (b = t.n_batches - 1 - next_update.fetch_add(1)) >= 0;) {
      each_chunk(b, [&](const Row& row, const Chunk& chunk, int32_t c) {
        const RowScalars& s = scalars[row.scalars];
        if (update) {
          if (control.grad_stats_in_update) kernel.grad_stats(row, chunk, chunk_stats[c]);
          ChunkStats* stats = control.update_stats ? &chunk_stats[c] : nullptr;
          if (control.rule == kAdam) {
            kernel.adamw(row, chunk, s, hyper[row.group].amsgrad != 0.0, stats);
          } else {
            kernel.sgd(row, chunk, s, stats);
          }
        }
        if (!(row.flags & kGradShared)) scale_grad(row, chunk, c);
      });
    }
  }

  // Adafactor's passes over each row, instead of run_update.
  void run_walk(AdafactorWalk& walk, Barrier& barrier) {
    walk.run(barrier, [&](int64_t c) {
      const Row& row = rows[chunks[c].row];
      if (!(row.flags & kGradShared)) scale_grad(row, chunks[c], c);
    });
  }

  void scale_grad(const Row& row, const Chunk& chunk, int64_t c) const {
    const double factor = scalars[row.scalars].scale;
    if (!(scale || control.clip_in_place) || factor == 1.0) return;
    if (row.factored == 0) return kernel.scale_grad(row, chunk, factor);
    const Tile& tile = as<const Tile>(t.tiles)[c];
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t pitch = as<const Factored>(row.factored)->cols;
      kernel.scale_grad(row, Chunk{chunk.start + i * pitch, chunk.row, int32_t(tile.cols)}, factor);
    }
  }

  void scale_shared() {
    for (int64_t c = 0; control.clip_in_place && c < t.n_chunks; ++c) {
      const Row& row = rows[chunks[c].row];
      if ((row.flags & kActive) && (row.flags & kScalesShared)) scale_grad(row, chunks[c], c);
    }
  }

  void reduce_updates() {
    double update_sum = 0.0, stored_sum = 0.0, param_sum = 0.0;
    for (int64_t r = 0; r < t.n_rows; ++r) {
      const Row& row = rows[r];
      if (!(row.flags & kActive)) continue;
      double u = 0.0, s = 0.0, p = 0.0;
      for (int64_t c = row.first_chunk; c < row.first_chunk + row.chunks; ++c) {
        u += chunk_stats[c].update_sumsq;
        s += chunk_stats[c].stored_sumsq;
        p += chunk_stats[c].param_sumsq;
      }
      row_stats[r].update_norm = std::sqrt(u);
      row_stats[r].stored_norm = std::sqrt(s);
      row_stats[r].param_norm = std::sqrt(p);
      update_sum += u;
      stored_sum += s;
      param_sum += p;
    }
    result->update_norm = std::sqrt(update_sum);
    result->stored_norm = std::sqrt(stored_sum);
    result->param_norm = std::sqrt(param_sum);
    result->updated = 1.0;
  }
};

struct Team {
  Step& step;
  Barrier measured, finished;
  std::optional<AdafactorWalk> walk;
};

void member_runs(void* context, int member, int size) {
  Team& team = *static_cast<Team*>(context);
  Step& s = team.step;
  if (s.control.phases & kMeasure) {
    s.measure();
    team.measured.wait();
    if (member == 0 && !(s.control.phases & kPrepared)) {
      s.reduce_gradients();
      if (s.control.phases & kFinish) s.finish();
      if (s.update && s.control.rule == kAdafactor) team.walk.emplace(s.t, true, size);
    }
    team.finished.wait();
  }
  if (team.walk) return s.run_walk(*team.walk, team.finished);
  if (s.update || s.scale) s.run_update();
}

}  // namespace

void run_step(const StepTable& table) {
  Step step(table);
  const Control& control = step.control;
  const bool prepared = control.phases & kPrepared;
  if (!(control.phases & kMeasure) && (control.phases & kFinish)) step.finish();
  if (prepared) step.update = control.phases & kUpdate;
  const int64_t useful = table.n_batches < control.threads ? table.n_batches : control.threads;
  ThreadPool& pool = ThreadPool::instance();
  const int members = pool.reserve(int(useful));
  Team team{step, Barrier(members), Barrier(members), std::nullopt};
  // Where nothing decided on the update, its rows are measured when their turn comes.
  const bool measured = prepared ? (control.phases & kMeasured) != 0 : step.result->measured != 0.0;
  if (step.update && control.rule == kAdafactor) team.walk.emplace(table, measured, members);
  pool.run(members, member_runs, &team);
  if (step.update && !(control.phases & kFactors)) step.scale_shared();
  if (prepared ? (control.phases & kSums) != 0 : step.update) {
    if (control.grad_stats_in_update) step.reduce_gradients();
    if (control.update_stats) step.reduce_updates();
  }
}

}  // namespace mo
