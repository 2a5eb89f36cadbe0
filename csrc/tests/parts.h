// A step in several calls (Phase in abi.h), as mo_fused/offload takes it: first what decides, then parts of the update,
// each of some chunks whose operands were copied into buffers of their own, at last the sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "abi.h"
#include "cpu/step.h"

namespace parts {

// Something of a row that passes through a buffer: where the row has its address, and the bytes of the whole.
struct Operand {
  uint64_t* address;
  int64_t size;
};

// Elements [start, start + count) of an operand in memory of exactly their size. The row's address becomes that of
// element 0, as if the buffer held all of them, so that chunks keep their starts. Nothing need lie there: it is an
// integer, not a pointer.
class Staged {
 public:
  Staged(const Operand& of, int64_t numel, int64_t start, int64_t count)
      : first_(start * of.size / numel),
        size_((start + count) * of.size / numel - first_),
        home_(reinterpret_cast<unsigned char*>(*of.address + uint64_t(first_))),
        buffer_(new unsigned char[size_t(size_)]) {
    std::memcpy(buffer_.get(), home_, size_t(size_));
    *of.address = reinterpret_cast<uint64_t>(buffer_.get()) - uint64_t(first_);
  }
  void send() const { std::memcpy(home_, buffer_.get(), size_t(size_)); }

 private:
  int64_t first_, size_;
  unsigned char* home_;
  std::unique_ptr<unsigned char[]> buffer_;
};

inline mo::Control& control_of(const mo::StepTable& t) { return *reinterpret_cast<mo::Control*>(t.control); }

inline void call(const mo::StepTable& t, int32_t phases) {
  control_of(t).phases = phases;
  mo::run_step(t);
}

// Everything before the update; `apart`: the measurement is a call of its own. Whether there is an update.
inline bool decide(const mo::StepTable& t, bool apart) {
  int32_t measure = control_of(t).phases & mo::kMeasure;
  if (apart && measure) {
    call(t, mo::kMeasure);
    measure = 0;
  }
  call(t, measure | mo::kFinish | mo::kUpdate | mo::kDeferred);
  return reinterpret_cast<const mo::Result*>(t.result)->skipped == 0.0;
}

// The rest. `edges`: chunks with which parts begin, and the last one's end; the last part is updated first. Then the
// rows of which stays(row number) is true, where they are, and the sums. `more`: kMeasured or 0.
// operands(row number, row): what of a row passes through buffers.
template <class Stays, class Operands>
void update(const mo::StepTable& whole, const std::vector<int32_t>& edges, int32_t more, Stays stays,
            Operands operands) {
  constexpr int32_t kTogether = 2;  // chunks of a batch
  const mo::Row* rows = reinterpret_cast<const mo::Row*>(whole.rows);
  const mo::Chunk* chunks = reinterpret_cast<const mo::Chunk*>(whole.chunks);
  // As in Job.run of mo_fused/offload/rows.py, addresses of parts that are over stay in the copy.
  std::vector<mo::Row> copy(rows, rows + whole.n_rows), back(copy);
  for (mo::Row& row : copy) row.flags = 0;
  mo::StepTable t = whole;
  t.rows = uint64_t(copy.data());
  for (size_t e = edges.size() - 1; e-- > 0;) {
    std::vector<Staged> staged;
    std::vector<int32_t> batches{edges[e]};
    for (int32_t c = edges[e]; c < edges[e + 1];) {
      const int32_t r = chunks[c].row;
      const int64_t start = chunks[c].start;
      int64_t count = 0;
      for (; c < edges[e + 1] && chunks[c].row == r; ++c) count += chunks[c].length;
      if (stays(r)) continue;
      copy[size_t(r)] = rows[r];
      for (const Operand& o : operands(r, copy[size_t(r)])) staged.emplace_back(o, rows[r].numel, start, count);
    }
    while (batches.back() < edges[e + 1]) batches.push_back(std::min(batches.back() + kTogether, edges[e + 1]));
    t.batches = uint64_t(batches.data());
    t.n_batches = int64_t(batches.size()) - 1;
    call(t, mo::kUpdate | mo::kPrepared | more);
    for (const Staged& s : staged) s.send();
    for (mo::Row& row : copy) row.flags = 0;
  }
  for (size_t r = 0; r < back.size(); ++r) {
    if (!stays(int32_t(r))) back[r].flags = 0;
  }
  t = whole;
  t.rows = uint64_t(back.data());
  call(t, mo::kUpdate | mo::kPrepared | more);
  for (size_t r = 0; r < copy.size(); ++r) copy[r].flags = rows[r].flags;
  t.rows = uint64_t(copy.data());
  t.n_batches = 0;
  call(t, mo::kPrepared | mo::kSums);
}

}  // namespace parts
