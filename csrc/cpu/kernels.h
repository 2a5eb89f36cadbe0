// The kernels of one instruction set, as a table; cpu/select.cpp picks the table once, at run time.
#pragma once

#include "abi.h"

namespace mo {

struct KernelTable {
  const char* name;
  // Each works on one chunk of one row and is re-entrant.
  void (*adamw)(const Row&, const Chunk&, const RowScalars&, bool amsgrad, ChunkStats* stats);  // stats: null for none
  void (*sgd)(const Row&, const Chunk&, const RowScalars&, ChunkStats* stats);
  void (*grad_stats)(const Row&, const Chunk&, ChunkStats&);
  void (*scale_grad)(const Row&, const Chunk&, double scale);
  // Adafactor's passes, in their order; all but `factors` on one tile. param_sumsq: the parameter's sum of squares, read
  // first where the row asks for it, and written by the last.
  void (*factor_sums)(const Row&, const Chunk&, const Tile&, ChunkStats&, double& param_sumsq);
  void (*factors)(const Row&, const RowScalars&);
  double (*factored_rms)(const Row&, const Chunk&, const Tile&, const RowScalars&);
  void (*adafactor)(const Row&, const Chunk&, const Tile&, const RowScalars&, ChunkStats* stats, double& param_sumsq);
};

// The best table this machine can run, or the one named by MO_FUSED_ISA. `error` is set when that one cannot be had.
const KernelTable& kernels(const char** error = nullptr);

}  // namespace mo
