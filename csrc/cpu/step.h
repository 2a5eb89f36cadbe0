// One optimizer step over a table: measure, finish, update, in one run of the thread team.
#pragma once

#include "abi.h"

namespace mo {

// Runs the phases that the table's Control asks for. Results do not depend on the number of threads.
void run_step(const StepTable& table);

}  // namespace mo
