// Runs a suite once per instruction set, each in a process of its own (the choice is made once in a process), and
// compares what the runs computed.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "isa.h"
#if defined(MO_CUDA_SHIM)
#include "cuda/tests/shim.h"
#endif

// A hash of everything that one case computed, in which all NaNs are one.
struct Digest {
  uint64_t hash = 0xcbf29ce484222325ull;
  void add(uint64_t word) {
    hash = (hash ^ word) * 0x100000001b3ull;
    hash ^= hash >> 32;
  }
  void add(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    add(x != x ? ~uint64_t(0) : bits);
  }
};

class Digests {
 public:
  void keep(const std::string& name, const Digest& digest) { kept_.push_back({name, digest.hash}); }

  void write(std::FILE* file) const {
    for (const auto& [name, hash] : kept_) std::fprintf(file, "%016" PRIx64 " %s\n", hash, name.c_str());
  }

 private:
  std::vector<std::pair<std::string, uint64_t>> kept_;
};

inline std::vector<std::string> lines_of(std::FILE* file) {
  std::vector<std::string> lines;
  char line[512];
  std::rewind(file);
  while (std::fgets(line, sizeof line, file)) lines.emplace_back(line);
  return lines;
}

// The whole main() of such a test.
template <class Suite>
int run_on_every_isa(const char* name, Suite suite, int orders = 2) {
  std::vector<std::string> first;
  int failed = 0;
  for (const char* isa : isa::names(orders)) {
    std::FILE* results = std::tmpfile();
    if (!results) {
      std::perror("tmpfile");
      return 1;
    }
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      check::done = 0;
      check::failures = 0;
#if defined(MO_CUDA_SHIM)
      shim::set_seed(std::strtoull(isa + std::strlen("seed "), nullptr, 10));
#else
      setenv("MO_FUSED_ISA", isa, 1);
      const char* error = nullptr;
      CHECK(std::strcmp(mo::kernels(&error).name, isa) == 0);
      CHECK(error == nullptr);
#endif
      Digests digests;
      suite(digests);
      digests.write(results);
      std::fflush(results);
      std::exit(check::report((std::string(name) + " " + isa).c_str()));
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      std::fprintf(stderr, "%s %s: status %d\n", name, isa, status);
      ++failed;
    }
    const std::vector<std::string> now = lines_of(results);
    std::fclose(results);
    if (first.empty()) {
      CHECK(!now.empty());
      first = now;
      continue;
    }
    CHECK(now.size() == first.size());
    for (size_t i = 0; i < now.size() && i < first.size(); ++i) {
      CHECK_SAYS(now[i] == first[i], "%s gives other bits than base: %s", isa, now[i].c_str());
    }
  }
  const int unequal = check::report((std::string(name) + " equal bits").c_str());
  return failed || unequal ? 1 : 0;
}
