// Which instruction set's kernels this machine runs. Bytes per element: none.
#include <cstdlib>
#include <cstring>

#include "cpu/features.h"
#include "cpu/kernels.h"

namespace mo {
namespace base {
extern const KernelTable table;
}
#if defined(MO_HAVE_AVX2)
namespace avx2 {
extern const KernelTable table;
}
#endif
#if defined(MO_HAVE_AVX512)
namespace avx512 {
extern const KernelTable table;
}
#endif

namespace {

struct Choice {
  const KernelTable* table;
  const char* error;
};

Choice select() {
  const char* asked = std::getenv("MO_FUSED_ISA");
  if (asked && !*asked) asked = nullptr;
#if defined(MO_HAVE_AVX512)
  if (runs_avx512() && (!asked || !std::strcmp(asked, "avx512"))) return {&avx512::table, nullptr};
#endif
#if defined(MO_HAVE_AVX2)
  if (runs_avx2() && (!asked || !std::strcmp(asked, "avx2"))) return {&avx2::table, nullptr};
#endif
  if (!asked || !std::strcmp(asked, "base")) return {&base::table, nullptr};
  return {&base::table, "MO_FUSED_ISA names an instruction set that this build or this machine does not have"};
}

}  // namespace

const KernelTable& kernels(const char** error) {
  static const Choice choice = select();
  if (error) *error = choice.error;
  return *choice.table;
}

}  // namespace mo
