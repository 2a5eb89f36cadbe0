// A small team of threads for the step: sleeps between steps (an OpenMP team that spins was measured to slow the next
// matrix product), survives fork, and is shared by all optimizers of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace mo {

// All members of a team wait here until the last has come.
class Barrier {
 public:
  explicit Barrier(int team) : team_(team) {}
  void wait();

 private:
  const int team_;
  std::atomic<int> waiting_{0};
  std::atomic<int> round_{0};
};

class ThreadPool {
 public:
  using Function = void (*)(void* context, int member, int team);

  // The pool of this process; a forked child gets a new one, as only the forking thread lives on in it.
  static ThreadPool& instance();

  // How many threads a team of at most `threads` will have: fewer when the system refuses to start more, at least one.
  int reserve(int threads);

  // Calls function(context, member, team) once on each of `team` threads, as reserved, the caller being member 0, and
  // returns when all have finished. Callers take turns.
  void run(int team, Function function, void* context);

 private:
  struct Job {
    Function function = nullptr;
    void* context = nullptr;
    int team = 0;
  };

  void work(int member, uint64_t seen);

  std::mutex turn_;
  std::mutex mutex_;
  std::deque<std::condition_variable> start_;  // one for each thread: those who sit out a run sleep on
  Job job_;
  uint64_t generation_ = 0;
  std::atomic<int> running_{0};
  std::vector<std::thread> threads_;  // never joined: the pool lives as long as the process
};

}  // namespace mo
