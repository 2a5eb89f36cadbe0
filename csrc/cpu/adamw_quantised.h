// The way from adamw_kernel.cpp to adamw_quantised_kernel.cpp.
#pragma once

#include "abi.h"
#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

// False where the row is not one that the kernel takes; nothing is done then.
bool launch_adamw_quantised(const Row& row, const Chunk& chunk, const RowScalars& rs);

}  // namespace MO_ISA
}  // namespace mo
