// A StepTable built by hand: rows over memory of any dtype, order and alignment, cut as mo_fused/table.py cuts them.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "abi.h"
#include "check.h"
#include "cpu/step.h"
#include "every_isa.h"
#include "storage.h"
#if defined(MO_CUDA_SHIM)
#include "device_run.h"
#endif

// Numbers that are the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  // Of either sign, magnitudes from 2^-8 to 2 times `scale`, and now and then an exact zero.
  double value(double scale = 1.0) {
    if (bits() % 29 == 0) return bits() & 1 ? 0.0 : -0.0;
    const double magnitude = std::exp2(uniform() * 9.0 - 8.0) * scale;
    return bits() & 1 ? magnitude : -magnitude;
  }

 private:
  uint64_t state_;
};

// Memory of one operand. `shift` elements lie before the first one, so that nothing but the element type aligns it; the
// allocation ends with the last one, so that the address sanitizer sees any access beyond.
class Memory {
 public:
  Memory() = default;
  Memory(mo::DType dtype, int64_t count, int64_t shift = 0)
      : dtype_(dtype),
        count_(count),
        shift_(shift),
        bytes_(new unsigned char[size_t((count + shift) * storage::size_of(dtype))]()) {}
  Memory(const Memory& other) {
    if (!other.there()) return;
    *this = Memory(other.dtype_, other.count_, other.shift_);
    if (count_) std::memcpy(at(0), other.at(0), size_t(count_ * storage::size_of(dtype_)));
  }
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  mo::DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  bool there() const { return bytes_ != nullptr; }
  void* at(int64_t i) const { return bytes_.get() + (i + shift_) * storage::size_of(dtype_); }
  double get(int64_t i) const { return storage::read(at(i), dtype_); }
  void set(int64_t i, double x) { storage::write(at(i), x, dtype_); }
  uint64_t bits(int64_t i) const { return storage::comparable(at(i), dtype_); }
  uint64_t address() const { return bytes_ ? reinterpret_cast<uint64_t>(at(0)) : 0; }

 private:
  mo::DType dtype_ = mo::kF32;
  int64_t count_ = 0, shift_ = 0;
  std::unique_ptr<unsigned char[]> bytes_;
};

// The walking order of a row: sizes, and the strides of each operand in elements, outermost first.
struct Walk {
  std::vector<int64_t> size;
  std::vector<int64_t> stride[mo::kOperands];

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t s : size) n *= s;
    return n;
  }
  // Elements that the operand's memory must have.
  int64_t reach(int op) const {
    int64_t last = 0;
    for (size_t d = 0; d < size.size(); ++d) last += (size[d] - 1) * stride[op][d];
    return last + 1;
  }
  int64_t offset(int op, int64_t i) const {
    int64_t at = 0;
    for (size_t d = size.size(); d-- > 0;) {
      at += i % size[d] * stride[op][d];
      i /= size[d];
    }
    return at;
  }
  bool linear(int op) const {
    int64_t expected = 1;
    for (size_t d = size.size(); d-- > 0;) {
      if (size[d] != 1 && stride[op][d] != expected) return false;
      expected *= size[d];
    }
    return true;
  }
};

// A state in codes, at a byte of any alignment, and the scales of its blocks. Exactly so much memory.
struct TestCodes {
  int type = 0;
  int64_t shift = 0;
  std::vector<unsigned char> bytes;
  std::vector<float> scale;

  int bits() const { return type == mo::kQ4 || type == mo::kQ4Root ? 4 : 8; }
  uint32_t get(int64_t i) const {
    const uint32_t byte = bytes[size_t(shift + i * bits() / 8)];
    return bits() == 8 ? byte : byte >> (i % 2 * 4) & 15u;
  }
  void set(int64_t i, uint32_t code) {
    unsigned char& byte = bytes[size_t(shift + i * bits() / 8)];
    if (bits() == 8) byte = static_cast<unsigned char>(code);
    else byte = static_cast<unsigned char>((byte & (i % 2 ? 0x0fu : 0xf0u)) | (code & 15u) << (i % 2 * 4));
  }
};

struct TestRow {
  int64_t numel = 0;
  int group = 0;
  int flags = mo::kActive;
  bool has_step = false;
  float step = 0.0f;
  double wide_step = 0.0;  // used when flags has kStepF64
  int grad_of = -1;        // the row whose gradient memory this one uses instead of its own
  Walk walk;               // no sizes: every operand is dense in the same order
  Memory op[mo::kOperands];
  mo::Layout layout{};
  int64_t block = 0;  // quantised_test.cpp: states are codes instead of operands
  TestCodes codes[3];
  mo::MasterMode mode = mo::kNoMaster;
  int rest_size = 0;  // bytes of an element of the rest
  std::vector<unsigned char> rest;
  uint64_t stream = 0;
  int64_t shard = 0;  // Row::offset

  bool strided() const { return !walk.size.empty(); }
  int64_t offset(int o, int64_t i) const { return strided() ? walk.offset(o, i) : i; }
  double get(int o, int64_t i) const { return op[o].get(offset(o, i)); }
  double steps() const { return flags & mo::kStepF64 ? wide_step : double(step); }
};

// The records of one call, and what they point to.
struct Records {
  std::vector<mo::Row> rows;
  std::vector<mo::Chunk> chunks;
  std::vector<int32_t> batches;
  std::vector<mo::RowScalars> scalars;
  std::vector<mo::ChunkStats> stats;
  mo::StepTable table{};

  // When rows, chunks and batches are there.
  void finish(mo::Hyper* hyper, size_t groups, std::vector<mo::RowStats>& row_stats, mo::Result& result,
              mo::Control& control) {
    scalars.resize(rows.size());
    stats.resize(chunks.size());
    table.rows = uint64_t(rows.data());
    table.chunks = uint64_t(chunks.data());
    table.batches = uint64_t(batches.data());
    table.hyper = uint64_t(hyper);
    table.n_rows = int64_t(rows.size());
    table.n_chunks = int64_t(chunks.size());
    table.n_batches = int64_t(batches.size()) - 1;
    table.n_groups = int64_t(groups);
    table.scalars = uint64_t(scalars.data());
    table.chunk_stats = uint64_t(stats.data());
    table.row_stats = uint64_t(row_stats.data());
    table.result = uint64_t(&result);
    table.control = uint64_t(&control);
  }
};

class TestTable {
 public:
  std::vector<std::unique_ptr<TestRow>> rows;
  std::vector<mo::Hyper> hyper{mo::Hyper{}};
  mo::Control control{};
  mo::Result result{};
  std::vector<mo::RowStats> row_stats;

  explicit TestTable(mo::Rule rule) {
    control.max_grad_norm = NAN;
    control.grad_scale = 1.0;
    control.rule = rule;
    control.phases = mo::kFinish | mo::kUpdate;
    control.threads = 1;
    hyper[0].clip = 1.0;
  }

  // A deep copy: the same step can be taken twice.
  TestTable(const TestTable& other) : hyper(other.hyper), control(other.control) {
    for (const auto& row : other.rows) rows.push_back(std::make_unique<TestRow>(*row));
  }

  // A dense row; an operand is there when its dtype is not negative.
  TestRow& add(int64_t numel, const std::vector<int>& dtypes, int64_t shift = 0) {
    rows.push_back(std::make_unique<TestRow>());
    TestRow& row = *rows.back();
    row.numel = numel;
    for (size_t o = 0; o < dtypes.size(); ++o) {
      if (dtypes[o] >= 0) row.op[o] = Memory(mo::DType(dtypes[o]), numel, shift);
    }
    row.has_step = control.rule == mo::kAdam;
    return row;
  }

  TestRow& add(const Walk& walk, const std::vector<int>& dtypes, int64_t shift = 0) {
    TestRow& row = add(walk.numel(), std::vector<int>(dtypes.size(), -1));
    row.walk = walk;
    for (size_t o = 0; o < dtypes.size(); ++o) {
      if (dtypes[o] >= 0) row.op[o] = Memory(mo::DType(dtypes[o]), walk.reach(int(o)), shift);
    }
    return row;
  }

  // The records of a step over this table; they are of use as long as the table stays where it is.
  Records records() {
    Records made;
    made.rows.resize(rows.size());
    made.batches = {0};
    int64_t elements = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      TestRow& row = *rows[r];
      mo::Row& n = made.rows[r];
      n = mo::Row{};
      n.param = row.op[mo::kParam].address();
      n.grad = (row.grad_of < 0 ? row : *rows[size_t(row.grad_of)]).op[mo::kGrad].address();
      for (int k = 0; k < 3; ++k) n.state[k] = row.op[mo::kState0 + k].address();
      for (int o = 0; o < mo::kOperands; ++o) n.dtype[o] = uint8_t(row.op[o].dtype());
      if (row.has_step) n.step = row.flags & mo::kStepF64 ? uint64_t(&row.wide_step) : uint64_t(&row.step);
      if (row.strided()) n.layout = describe(row);
      if (row.block != 0) describe_formats(row, n);
      n.numel = row.numel;
      n.group = row.group;
      n.flags = row.flags;
      n.first_chunk = int64_t(made.chunks.size());
      for (int64_t start = 0; start < row.numel; start += mo::kChunk) {
        if (elements / mo::kChunk != int64_t(made.batches.size()) - 1) {
          made.batches.push_back(int32_t(made.chunks.size()));
        }
        const int64_t length = std::min(mo::kChunk, row.numel - start);
        made.chunks.push_back({start, int32_t(r), int32_t(length)});
        elements += length;
      }
      n.chunks = int64_t(made.chunks.size()) - n.first_chunk;
    }
    row_stats.assign(rows.size(), mo::RowStats{});
    if (!made.chunks.empty()) made.batches.push_back(int32_t(made.chunks.size()));
    made.finish(hyper.data(), hyper.size(), row_stats, result, control);
    return made;
  }

  void run() {
    Records made = records();
#if defined(MO_CUDA_SHIM)
    device_run::run(made.rows, hyper, control, result, row_stats);
#else
    mo::run_step(made.table);
#endif
  }

  // Everything that a step may write.
  Digest digest() const {
    Digest d;
    for (const auto& row : rows) {
      for (const Memory& m : row->op) {
        for (int64_t i = 0; i < m.count(); ++i) d.add(m.bits(i));
      }
      d.add(row->steps());
      for (const TestCodes& c : row->codes) {
        for (unsigned char byte : c.bytes) d.add(uint64_t(byte));
        for (float x : c.scale) d.add(double(x));
      }
      for (unsigned char byte : row->rest) d.add(uint64_t(byte));
    }
    for (double x : {result.grad_norm, result.clip_coef, result.skipped, result.nonfinite, result.zeros,
                     result.grad_amax, result.update_norm, result.stored_norm, result.param_norm, result.found_inf}) {
      d.add(x);
    }
    for (const mo::RowStats& s : row_stats) {
      for (double x : {s.grad_norm, s.grad_amax, s.nonfinite, s.zeros, s.update_norm, s.stored_norm, s.param_norm,
                       s.active}) {
        d.add(x);
      }
    }
    return d;
  }

 private:
  static uint64_t describe(TestRow& row) {
    row.layout = mo::Layout{};
    row.layout.dims = int64_t(row.walk.size.size());
    for (size_t d = 0; d < row.walk.size.size(); ++d) {
      row.layout.size[d] = row.walk.size[d];
      for (int o = 0; o < mo::kOperands; ++o) {
        if (there(row, o)) row.layout.stride[o][d] = row.walk.stride[o][d];
      }
    }
    for (int o = 0; o < mo::kOperands; ++o) row.layout.linear[o] = there(row, o) && row.walk.linear(o);
    return reinterpret_cast<uint64_t>(&row.layout);
  }
  static bool there(const TestRow& row, int o) {
    return row.op[o].there() || (o == mo::kMaster && row.mode != mo::kNoMaster);
  }

  static void describe_formats(TestRow& row, mo::Row& n) {
    n.block = row.block;
    n.stream = row.stream;
    n.offset = row.shard;
    n.master_mode = row.mode;
    n.master = row.rest.empty() ? 0 : uint64_t(row.rest.data());
    switch (row.mode) {
      case mo::kSplit: n.dtype[mo::kMaster] = mo::kI16; break;
      case mo::kSplit8: n.dtype[mo::kMaster] = mo::kI8; break;
      case mo::kKahan: n.dtype[mo::kMaster] = uint8_t(row.op[mo::kParam].dtype()); break;
      default: n.dtype[mo::kMaster] = mo::kF32;
    }
    for (int k = 0; k < 3; ++k) {
      TestCodes& c = row.codes[k];
      if (c.type == 0) continue;
      n.state[k] = uint64_t(c.bytes.data() + c.shift);
      n.scale[k] = uint64_t(c.scale.data());
      n.dtype[mo::kState0 + k] = uint8_t(c.type);
    }
  }
};
