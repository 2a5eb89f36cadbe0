// Which instruction sets' kernels this build has and this machine can run.
#pragma once

#include <cstdio>
#include <vector>

#include "cpu/features.h"

namespace isa {

// Names for MO_FUSED_ISA. Says which of the built ones are left out. Kernels of a device run instead with their threads in
// so many orders.
inline std::vector<const char*> names(int orders) {
#if defined(MO_CUDA_SHIM)
  if (orders == 1) return {"seed 1"};
  return {"seed 1", "seed 2"};
#endif
  (void)orders;
  std::vector<const char*> there{"base"};
  const auto add = [&](const char* name, bool runs) {
    if (runs) {
      there.push_back(name);
    } else {
      std::printf("%s left out: this machine lacks it\n", name);
    }
  };
  (void)add;
#if defined(MO_HAVE_AVX2)
  add("avx2", mo::runs_avx2());
#endif
#if defined(MO_HAVE_AVX512)
  add("avx512", mo::runs_avx512());
#endif
  return there;
}

}  // namespace isa
