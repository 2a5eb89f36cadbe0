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
};

// The best table this machine can run, or the one named by MO_FUSED_ISA. `error` is set when that one cannot be had.
const KernelTable& kernels(const char** error = nullptr);

}  // namespace mo
