// What the native tests need instead of a framework: a check that counts and prints, and an exit status at the end.
#pragma once

#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace check {

inline std::atomic<int> failures{0};
inline std::atomic<int64_t> done{0};

// Counts one check. After 20 failures nothing more is printed: the first ones tell what is wrong.
inline bool that(bool ok, const char* file, int line, const char* what) {
  done.fetch_add(1, std::memory_order_relaxed);
  if (ok) return true;
  if (failures.fetch_add(1) < 20) std::fprintf(stderr, "%s:%d: expected %s\n", file, line, what);
  return false;
}

// Call from main: the number of checks, and the exit status.
inline int report(const char* name) {
  std::printf("%s: %" PRId64 " checks, %d failed\n", name, done.load(), failures.load());
  std::fflush(stdout);
  return failures.load() == 0 ? 0 : 1;
}

}  // namespace check

// CHECK(condition) and CHECK_SAYS(condition, printf format, values): what else to print when it does not hold.
#define CHECK(condition) ::check::that((condition), __FILE__, __LINE__, #condition)
#define CHECK_SAYS(condition, ...)                          \
  do {                                                      \
    if (!CHECK(condition) && ::check::failures.load() <= 20) { \
      std::fprintf(stderr, "  ");                           \
      std::fprintf(stderr, __VA_ARGS__);                    \
      std::fprintf(stderr, "\n");                           \
    }                                                       \
  } while (0)
