// See adafactor_walk.h. Bytes per element: what the three passes state; a wave is small enough to stay in a shared cache.
#include "cpu/adafactor_walk.h"

#include "cpu/kernels.h"
#include "rules/adafactor.h"

namespace mo {
namespace {

// Elements of a wave for each thread: 4 MB of fp32 gradients, more than a last-level cache holds for a core by little.
constexpr int64_t kWave = int64_t(1) << 20;

template <class T>
T* as(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

AdafactorWalk::AdafactorWalk(const StepTable& table, bool measured, int team)
    : t_(table),
      rows_(as<const Row>(table.rows)),
      chunks_(as<const Chunk>(table.chunks)),
      tiles_of_(as<const Tile>(table.tiles)),
      control_(*as<const Control>(table.control)),
      measured_(measured),
      stops_(control_.phases & kFactors),
      sized_(control_.phases & kSized) {
  int64_t elements = 0;
  for (int32_t r = 0; r < t_.n_rows; ++r) {
    const Row& row = rows_[r];
    if (!(row.flags & kActive)) continue;
    if (row.chunks == 1) {
      one_.push_back(r);
      continue;
    }
    if (waves_.empty() || elements + row.numel > kWave * team) {
      waves_.emplace_back(many_.size(), tiles_.size());
      elements = 0;
    }
    many_.push_back(r);
    for (int64_t c = row.first_chunk; c < row.first_chunk + row.chunks; ++c) tiles_.push_back(c);
    waves_.back().last_row = many_.size();
    waves_.back().last_tile = tiles_.size();
    elements += row.numel;
  }
}

void AdafactorWalk::sums(int64_t c) const {
  kernels().factor_sums(row_of(c), chunks_[c], tiles_of_[c], as<ChunkStats>(t_.chunk_stats)[c],
                        as<double>(t_.param_sums)[c]);
}

// The parameter's sum has to be kept here: while some threads still look for the step size, others write new ones.
void AdafactorWalk::factors(int32_t r) const {
  const Row& row = rows_[r];
  RowScalars& s = as<RowScalars>(t_.scalars)[row.scalars];
  double param = 0.0;
  for (int64_t c = row.first_chunk; c < row.first_chunk + row.chunks; ++c) param += as<const double>(t_.param_sums)[c];
  s.a[base::kFactorStep] = param;
  kernels().factors(row, s);
}

void AdafactorWalk::rms(int64_t c) const {
  const RowScalars& s = as<const RowScalars>(t_.scalars)[row_of(c).scalars];
  as<double>(t_.update_sums)[c] = kernels().factored_rms(row_of(c), chunks_[c], tiles_of_[c], s);
}

// Every thread adds up the tiles by itself, in their order.
RowScalars AdafactorWalk::sized(const Row& row) const {
  RowScalars s = as<const RowScalars>(t_.scalars)[row.scalars];
  double update = 0.0;
  for (int64_t c = row.first_chunk; c < row.first_chunk + row.chunks; ++c) update += as<const double>(t_.update_sums)[c];
  double param = s.a[base::kFactorStep];
  const Factored& f = *as<const Factored>(row.factored);
  if (f.whole) {
    update = as<const double>(f.whole)[0];
    param = as<const double>(f.whole)[1];
  }
  base::size_adafactor(as<const Hyper>(t_.hyper)[row.group], double(f.whole_numel), update, param, s);
  return s;
}

void AdafactorWalk::update(int64_t c, const RowScalars& s) const {
  ChunkStats* stats = control_.update_stats ? &as<ChunkStats>(t_.chunk_stats)[c] : nullptr;
  kernels().adafactor(row_of(c), chunks_[c], tiles_of_[c], s, stats, as<double>(t_.param_sums)[c]);
}

}  // namespace mo
