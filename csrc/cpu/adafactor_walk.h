// Adafactor's passes in their order: parameters of one tile by one thread from beginning to end, larger ones in waves.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "cpu/thread_pool.h"

namespace mo {

class AdafactorWalk {
 public:
  // `measured`: the first pass has run. `team`: how many threads will call run.
  AdafactorWalk(const StepTable& table, bool measured, int team);

  // Every member of the team calls it once, after the finish. Calls done(chunk index) when a chunk's last pass is over.
  template <class Done>
  void run(Barrier& barrier, Done done);

 private:
  // Parameters that together are worth a walk of all threads: begin and end in many_, and in their tiles, tiles_.
  struct Wave {
    size_t first_row, last_row, first_tile, last_tile;
    std::atomic<int64_t> next[4]{};
    Wave(size_t row, size_t tile) : first_row(row), last_row(row), first_tile(tile), last_tile(tile) {}
    Wave(const Wave& o)
        : first_row(o.first_row), last_row(o.last_row), first_tile(o.first_tile), last_tile(o.last_tile) {}
  };

  const Row& row_of(int64_t chunk) const { return rows_[chunks_[chunk].row]; }
  void sums(int64_t chunk) const;
  void factors(int32_t row) const;
  void rms(int64_t chunk) const;
  RowScalars sized(const Row& row) const;
  void update(int64_t chunk, const RowScalars& s) const;

  const StepTable& t_;
  const Row* rows_;
  const Chunk* chunks_;
  const Tile* tiles_of_;
  const Control& control_;
  const bool measured_;
  const bool stops_, sized_;  // kFactors and kSized of this call
  std::vector<int32_t> one_, many_;  // rows of one tile, and of several or none
  std::vector<int64_t> tiles_;       // of the latter
  std::vector<Wave> waves_;
  std::atomic<int64_t> next_one_{0};
};

template <class Done>
void AdafactorWalk::run(Barrier& barrier, Done done) {
  const auto each = [](std::atomic<int64_t>& next, size_t first, size_t last, auto work) {
    for (size_t i; (i = first + size_t(next.fetch_add(1))) < last;) work(i);
  };
  for (Wave& w : waves_) {
    if (!measured_) {
      each(w.next[0], w.first_tile, w.last_tile, [&](size_t i) { sums(tiles_[i]); });
      barrier.wait();
    }
    if (!sized_) {
      each(w.next[1], w.first_row, w.last_row, [&](size_t i) { factors(many_[i]); });
      barrier.wait();
      each(w.next[2], w.first_tile, w.last_tile, [&](size_t i) { rms(tiles_[w.last_tile - 1 - (i - w.first_tile)]); });
      if (stops_) continue;
      barrier.wait();
    }
    int32_t row = -1;
    RowScalars s;
    each(w.next[3], w.first_tile, w.last_tile, [&](size_t i) {
      const int64_t c = tiles_[i];
      if (chunks_[c].row != row) s = sized(rows_[row = chunks_[c].row]);
      update(c, s);
      done(c);
    });
  }
  each(next_one_, 0, one_.size(), [&](size_t i) {
    const Row& row = rows_[one_[i]];
    if (!measured_) sums(row.first_chunk);
    if (!sized_) {
      factors(one_[i]);
      rms(row.first_chunk);
    }
    if (stops_) return;
    const RowScalars s = sized(row);
    update(row.first_chunk, s);
    done(row.first_chunk);
  });
}

}  // namespace mo
