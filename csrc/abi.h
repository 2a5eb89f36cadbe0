// The border between Python and the native code: plain structs, all addresses as integers, no torch types.
// mo_fused/table.py builds the same structs as numpy records; bindings.cpp exports the sizes and offsets below so that
// the Python side can refuse a library that was built from another layout.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mo {

// Element types that the kernels read and write.
enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kDTypes = 4 };
// Element types of the rest of a weight that its parameter does not hold.
enum RestType : int32_t { kI16 = 4, kI8 = 5 };
// Element types of quantised moments, 8 or 4 bits wide: signed values, or square roots; see rules/quantised.h. Their codes
// lie in the order of the shape without gaps, two of 4 bits in a byte, the first in its lower half.
enum QuantType : int32_t { kQ8 = 6, kQ8Root = 7, kQ4 = 8, kQ4Root = 9 };

// Operands of a row, in the order of Row::dtype and Layout::stride.
enum Operand : int32_t { kParam = 0, kGrad = 1, kState0 = 2, kState1 = 3, kState2 = 4, kMaster = 5, kOperands = 6 };

// Where the part of a weight lies that a 16-bit parameter does not hold; see rules/master.h.
enum MasterMode : uint8_t { kNoMaster = 0, kMaster32 = 1, kSplit = 2, kSplit8 = 3, kKahan = 4, kStochastic = 5 };

enum RowFlag : int32_t {
  kActive = 1,   // has a gradient this step
  kFresh = 2,    // first step of this row: the momentum buffer holds no value yet
  kStepF64 = 4,  // `step` is a float64 scalar, not float32
  // With clip_in_place, a gradient that several rows share is scaled once, after all of them have read it.
  kGradShared = 8,
  kScalesShared = 16,  // the row that does it
  kParamUnknown = 32,  // Adafactor: pass 1 takes the parameter's sum of squares, which no earlier step has left
};

// One parameter. state0..2: exp_avg, exp_avg_sq, max_exp_avg_sq (Adam), momentum_buffer (SGD), or row_var (of a vector:
// variance), col_var, exp_avg (Adafactor; all but exp_avg are contiguous, in the compute type and no operands of a Layout).
struct Row {
  uint64_t param;
  uint64_t grad;
  uint64_t state[3];
  uint64_t step;    // address of the 0-dim step counter, 0 where the rule has none
  uint64_t layout;  // address of a Layout, 0 when every operand is dense in the same element order
  int64_t numel;
  uint8_t dtype[7];  // DType of each Operand (of kMaster also a RestType, of states a QuantType), and one unused
  uint8_t master_mode;
  int32_t group;     // index into the Hyper table
  int32_t flags;     // RowFlag bits
  int64_t first_chunk;
  int64_t chunks;
  int64_t scalars;  // written by the finish: which RowScalars it uses
  uint64_t fresh;   // on a device: address of an int32, 1 while the momentum buffer holds no value; 0 where there is none
  uint64_t factored;  // Adafactor: address of a Factored
  uint64_t master;    // the rest of the weights, or 0
  uint64_t stream;    // of random numbers: from the seed and the parameter's position
  uint64_t scale[3];  // of quantised states: addresses of a float32 for each block
  int64_t block;      // elements of a block of quantised states, a power of two; 0: they are not quantised
  int64_t offset;     // index in the whole tensor of the row's first element: what its random numbers go by
  uint64_t reserved[10];  // a power of two: with another size Triton's kernels run out of registers
};
static_assert(sizeof(Row) == 256, "Row is mirrored by mo_fused/table.py");

// How to walk a row whose operands differ in element order. Dimensions are coalesced, outermost first; for Adafactor in
// the order of the shape, so that an element's index tells its matrix, row and column.
constexpr int kMaxDims = 8;
struct Layout {
  int64_t dims;
  int64_t size[kMaxDims];
  int64_t stride[kOperands][kMaxDims];  // in elements
  int64_t linear[kOperands];            // 1: this operand is contiguous in the walking order
};
static_assert(sizeof(Layout) == 8 * (1 + kMaxDims + kOperands * kMaxDims + kOperands), "mirrored by table.py");

// A run of elements of one row; the unit of work. Always cut at multiples of kChunk, so results never depend on threads.
constexpr int64_t kChunk = 16384;
struct Chunk {
  int64_t start;
  int32_t row;
  int32_t length;
};
static_assert(sizeof(Chunk) == 16, "mirrored by table.py");

// Adafactor's view of a row: `batch` matrices of rows x cols, the last two dimensions. A vector (factored = 0) is one row,
// and its second moment is kept element by element.
struct Factored {
  int64_t batch, rows, cols;
  int64_t factored;
  // Scratch in the compute type: norms of matrix rows, [grid_cols][batch * rows], then of columns,
  // [grid_rows][batch * cols]. When the factors are made, the first of each hold inverse roots instead.
  uint64_t norms;
  int64_t col_norms;  // where the second part begins, in elements
  int64_t grid_rows, grid_cols;  // tiles that one matrix is cut into
  // The parameter may be a part of a larger one. What means are taken over: as above where it is none.
  int64_t whole_rows, whole_cols, whole_numel;
  // Where the whole's rows are elsewhere too: address of means over all of them, [2][batch] doubles, of the row means as
  // the last step has left them and of the gradient's squares. 0: row means are averaged over these rows.
  uint64_t means;
  uint64_t whole;  // address of two doubles, as StepTable's sums, but over the whole; 0: the sums of the row's tiles
  uint64_t reserved[3];
};
static_assert(sizeof(Factored) == 128, "mirrored by mo_fused/factored.py");

// The part of a row that a Chunk of an Adafactor table stands for, which has the same index: a rectangle of one matrix, or
// whole matrices, or a run of a vector (rows = 1). The chunk's start is its upper left corner.
struct Tile {
  int64_t rows, cols;           // of several whole matrices: all their rows
  int64_t row_norms, col_norms;  // where its norms go, in elements
};
static_assert(sizeof(Tile) == 32, "mirrored by mo_fused/factored.py");
constexpr int64_t kTileCols = 2048;  // no tile of a matrix is wider

// Hyper-parameters of one group, as the user gave them; rounded once to the row's compute type.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
  double clip;       // 0: takes no part in the norm or the scaling
  double maximize;   // flags are 0 or 1
  double decoupled;  // weight decay outside the moments (AdamW)
  double amsgrad, nesterov;
  // Adafactor: the second eps, the limit of the update's RMS, a StepKind and FactorFlag bits. Its beta2 is the exponent of
  // the decay; eps is NaN for the spacing of the parameter's dtype, and beta1 is 0 without a first moment.
  double eps2, threshold, step_kind, factor_flags;
};
static_assert(sizeof(Hyper) == 128, "mirrored by table.py");

// What one chunk contributes: sum of squares is sumsq * 2^exponent.
struct ChunkStats {
  double sumsq;
  double amax;
  int64_t nonfinite;
  int64_t zeros;
  double update_sumsq, stored_sumsq, param_sumsq;
  int64_t exponent;
};
static_assert(sizeof(ChunkStats) == 64, "scratch, sized by table.py");

// Per parameter results, all float64 so that they are one tensor in Python.
struct RowStats {
  double grad_norm;  // of the unscaled gradient
  double grad_amax;
  double nonfinite, zeros;
  double update_norm, stored_norm, param_norm;
  double active;
};
static_assert(sizeof(RowStats) == 64, "mirrored by mo_fused/stats.py");

struct Result {
  double grad_norm, clip_coef, skipped, nonfinite, zeros, grad_amax;
  double update_norm, stored_norm, param_norm;
  double found_inf;   // 1 when a gradient element was non-finite or the caller said so
  double measured;    // 1 when the gradients were measured (on a device the host knows)
  double updated;     // 1 when update statistics were taken
  double grad_scale;  // on a device: what the gradients were divided by
  double reserved[3];
};
static_assert(sizeof(Result) == 128, "mirrored by mo_fused/stats.py");

// Scalars of one row for this step, in double; a kernel rounds each once to its compute type.
struct RowScalars {
  double coef;   // multiplies the gradient: clip coefficient / grad_scale, negative to maximize
  double scale;  // the same without the sign, for writing gradients back
  double a[8];   // per rule: see the headers in rules/
  int64_t step;  // the row's counter after this step; 0 where it has none
  int64_t reserved;
};

enum Phase : int32_t {
  kMeasure = 1, kFinish = 2, kUpdate = 4, kScale = 8,
  // A step in several calls. kDeferred: the finish prepares an update that later calls make, each of some chunks. Those
  // say kPrepared; kMeasured: Adafactor's first pass has run over these rows; kSums: add up what all of them have left.
  kDeferred = 16, kPrepared = 32, kMeasured = 64, kSums = 128,
  // With kPrepared, where Adafactor's rows are parts of larger parameters. kMeasure: the first pass alone, kSums adds up
  // its statistics; kFactors: stop when the sums of the update's squares are made; kSized: go on from there.
  kFactors = 256, kSized = 512
};
enum Rule : int32_t { kAdam = 0, kSGD = 1, kNoRule = 2, kAdafactor = 3 };
// Adafactor's step size before it is scaled: min(lr, 1/sqrt(t)); lr; min(0.01, 1/sqrt(t)); min(1e-6 t, 1/sqrt(t)).
enum StepKind : int32_t { kCapped = 0, kGiven = 1, kRelative = 2, kWarmUp = 3 };
// The step size is scaled by the parameter's RMS; eps is added to the squares; weight decay follows the scaled step size.
enum FactorFlag : int32_t { kScaleParameter = 1, kEpsAdded = 2, kDecayScaled = 4 };

struct Control {
  double max_grad_norm;  // NaN: no clipping
  double grad_scale;     // gradients are divided by it (1: none)
  double found_inf;      // non-zero: the caller already knows that the step must be skipped
  // What gradients that are stepped elsewhere add to the norm, as ChunkStats would.
  double extra_sumsq, extra_exponent, extra_amax, extra_nonfinite, extra_zeros;
  int32_t phases, rule;
  int32_t skip_nonfinite, update_stats;
  int32_t clip_in_place, threads;
  int32_t grad_stats_in_update;  // nobody gates the update: take gradient sums while the chunk is in cache
  int32_t reserved;
};

// Everything one call needs. Addresses belong to numpy arrays that the caller keeps alive.
struct StepTable {
  uint64_t rows, chunks, batches, hyper;
  int64_t n_rows, n_chunks, n_batches, n_groups;
  uint64_t scalars, chunk_stats, row_stats, result, control;
  // Adafactor: a Tile for each chunk, and one double each: sum of squares of the update before it is limited, and of the
  // parameter as the last step has left it.
  uint64_t tiles, update_sums, param_sums;
};
static_assert(sizeof(StepTable) == 16 * 8, "mirrored by table.py");

// ---- The same step on a device: see mo_fused/device_table.py, which writes these, and csrc/cuda. ----

struct DeviceChunk {
  int64_t start, row, length;
  int64_t slot;  // its place among the statistics
};
static_assert(sizeof(DeviceChunk) == 32, "mirrored by table.py");

// One group; record 0 has the clip limit in the place of hyper.lr. source: for each field of Hyper, the address of a
// float32 tensor on the device that stands for it (with kSourceF64: of a float64 one), or 0.
struct Settings {
  Hyper hyper;
  uint64_t source[16];
};
static_assert(sizeof(Settings) == 256, "mirrored by table.py");
constexpr uint64_t kSourceF64 = uint64_t(1) << 60;

// What the finish prepares for a row; padded to 128 bytes.
struct DeviceScalars {
  RowScalars scalars;
  int64_t fresh;  // the momentum buffer holds no value yet
  int64_t reserved[3];
};
static_assert(sizeof(DeviceScalars) == 128, "mirrored by table.py");

// Columns of float64 behind the Result, one number a chunk in each.
enum StatColumn : int32_t {
  kSumsq, kExponent, kAmax, kNonfinites, kZeroCount, kClips, kUpdateSumsq, kStoredSumsq, kParamSumsq, kStatColumns
};

enum DevicePhase : int32_t {
  kDeviceMeasure = 1, kDevicePartial = 2, kDeviceFinish = 4, kDeviceUpdate = 8, kDeviceScale = 16, kDeviceNorms = 32
};

// One call. Addresses are the device's, but for the call's own.
struct DeviceStep {
  uint64_t rows, settings, chunks, programs, scalars, stats;
  int64_t n_rows, n_chunks, n_programs;
  uint64_t grad_scale, found_inf;  // float32 scalars, or 0
  uint64_t report;                 // float32 that receives found_inf, or 0
  uint64_t extras;                 // five float64 for each of n_extras other devices: what kDevicePartial writes there
  uint64_t norm;                   // a total norm (float64) that is known already, or 0
  uint64_t partial;
  uint64_t before;                 // statistics of the step before, or 0
  uint64_t stream;
  int64_t n_extras;
  // Adafactor: a Tile for each chunk, sums as in StepTable, and runs of matrices whose factors one block makes: four int64
  // each (row, first matrix, number of matrices, 0).
  uint64_t tiles, update_sums, param_sums, runs;
  int64_t n_runs;
  int32_t device, phases, rule;
  int32_t measured, clipping, skip_nonfinite;
  int32_t sums;  // of the update: 0 none, 1 update and parameter, 2 also the gradient
  int32_t from_tensors;
  int32_t wide;  // the programs are those of float64 parameters
  int32_t elsewhere;  // 1: the totals are those of the extras alone, which contain this table's gradients already
};
static_assert(sizeof(DeviceStep) == 23 * 8 + 10 * 4, "mirrored by table.py");

}  // namespace mo
