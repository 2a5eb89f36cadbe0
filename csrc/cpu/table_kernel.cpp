// The table of one instruction set's kernels (this file is compiled once per instruction set).
// Bytes per element: none of its own; see the kernel files.
#include "cpu/kernels.h"
#include "rules/portable.h"

#define MO_STRING_OF(x) #x
#define MO_STRING(x) MO_STRING_OF(x)

namespace mo {
namespace MO_ISA {

void launch_adamw(const Row&, const Chunk&, const RowScalars&, bool, ChunkStats*);
void launch_sgd(const Row&, const Chunk&, const RowScalars&, ChunkStats*);
void launch_grad_stats(const Row&, const Chunk&, ChunkStats&);
void launch_scale_grad(const Row&, const Chunk&, double);
void launch_factor_sums(const Row&, const Chunk&, const Tile&, ChunkStats&, double&);
void launch_factors(const Row&, const RowScalars&);
double launch_factored_rms(const Row&, const Chunk&, const Tile&, const RowScalars&);
void launch_adafactor(const Row&, const Chunk&, const Tile&, const RowScalars&, ChunkStats*, double&);

extern const KernelTable table;
const KernelTable table = {MO_STRING(MO_ISA), launch_adamw,       launch_sgd,     launch_grad_stats,   launch_scale_grad,
                           launch_factor_sums, launch_factors, launch_factored_rms, launch_adafactor};

}  // namespace MO_ISA
}  // namespace mo
