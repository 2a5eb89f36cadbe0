// The thread pool: every member runs once, barriers order memory, callers take turns, a forked child has a pool of its
// own, and a step gives the same bits on any team. Its name has "thread" in it: run.sh also runs it under the thread
// sanitizer, which is why shared counts below are plain memory wherever the pool promises an order.
#include "cpu/thread_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "expected.h"

namespace {

using mo::Barrier;
using mo::ThreadPool;

constexpr int kMost = 8;

struct Counts {
  int calls[kMost] = {};  // each written by one member, read by the caller when run() has returned
  int wrong_team = 0;     // written by member 0
  int team = 0;
  int pause_us = 0;  // how long a member takes
};

void count(void* context, int member, int team) {
  Counts& c = *static_cast<Counts*>(context);
  if (c.pause_us) std::this_thread::sleep_for(std::chrono::microseconds(c.pause_us));
  ++c.calls[member];
  if (member == 0 && team != c.team) ++c.wrong_team;
}

void every_member_runs_once() {
  ThreadPool& pool = ThreadPool::instance();
  CHECK(&pool == &ThreadPool::instance());
  CHECK(pool.reserve(0) == 1);
  CHECK(pool.reserve(1) == 1);
  for (int round = 0; round < 300; ++round) {
    for (int asked = 1; asked <= kMost; ++asked) {  // small and large teams in turn: members sit out runs
      const int team = pool.reserve(asked);
      CHECK(team >= 1 && team <= asked);
      Counts c;
      c.team = team;
      pool.run(team, count, &c);
      for (int m = 0; m < kMost; ++m) CHECK(c.calls[m] == (m < team ? 1 : 0));
      CHECK(c.wrong_team == 0);
    }
  }
}

constexpr int kRounds = 50;

struct Meeting {
  explicit Meeting(int size) : team(size), barrier(size) {}
  int team;
  Barrier barrier;
  int place[kMost] = {};
  int misses[kMost] = {};
};

// Each writes its place, all meet, each reads all places, all meet again. A barrier that lets one through early is seen
// as a wrong value, and by the thread sanitizer as a race.
void meet(void* context, int member, int team) {
  Meeting& m = *static_cast<Meeting*>(context);
  for (int round = 1; round <= kRounds; ++round) {
    m.place[member] = round;
    m.barrier.wait();
    for (int other = 0; other < team; ++other) m.misses[member] += m.place[other] != round;
    m.barrier.wait();
  }
}

void barriers_order_memory() {
  ThreadPool& pool = ThreadPool::instance();
  for (int round = 0; round < 4; ++round) {
    for (int asked = 1; asked <= kMost; ++asked) {
      Meeting meeting(pool.reserve(asked));
      pool.run(meeting.team, meet, &meeting);
      for (int m = 0; m < kMost; ++m) CHECK(meeting.misses[m] == 0);
      for (int m = 0; m < meeting.team; ++m) CHECK(meeting.place[m] == kRounds);
    }
  }
}

// Threads that step at the same time, with teams of different sizes that take long enough to meet: each gets its own.
void two_callers() {
  const auto caller = [](int seed) {
    ThreadPool& pool = ThreadPool::instance();
    for (int round = 0; round < 200; ++round) {
      Counts c;
      c.team = pool.reserve(1 + (round * seed) % kMost);
      c.pause_us = 30;
      pool.run(c.team, count, &c);
      for (int m = 0; m < kMost; ++m) CHECK(c.calls[m] == (m < c.team ? 1 : 0));
    }
  };
  std::thread first(caller, 3), second(caller, 5);
  caller(7);
  first.join();
  second.join();
}

// The first call of a process may come from several threads at once.
void first_calls_agree() {
  ThreadPool* seen[4] = {};
  std::vector<std::thread> threads;
  for (auto& s : seen) threads.emplace_back([&s] { s = &ThreadPool::instance(); });
  for (auto& t : threads) t.join();
  for (ThreadPool* s : seen) CHECK(s == seen[0] && s != nullptr);
}

// Members sleep between runs: a process that waits uses no processor time.
void idle_members_sleep() {
  ThreadPool& pool = ThreadPool::instance();
  Counts c;
  c.team = pool.reserve(kMost);
  pool.run(c.team, count, &c);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // what is left of the last run
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double used = double(std::clock() - before) / CLOCKS_PER_SEC;
  CHECK_SAYS(used < 0.1, "%.3f s of processor time in 0.3 s of sleep", used);
}

// A small team out of a large pool: nobody else wakes. Counted as waits, of which a run of two has the other member's and
// the pause's, and one that woke all would have all members'.
void those_who_sit_out_sleep_on() {
  constexpr int kRuns = 200;
  ThreadPool& pool = ThreadPool::instance();
  if (pool.reserve(kMost) < kMost) return;
  const auto waits = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
  };
  const long before = waits();
  for (int run = 0; run < kRuns; ++run) {
    Counts c;
    c.team = 2;
    pool.run(2, count, &c);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  const double each = double(waits() - before) / kRuns;
  CHECK_SAYS(each < 5.0, "%.1f waits a run", each);
}

TestTable large_table() {
  TestTable table(mo::kAdam);
  mo::Hyper& h = table.hyper[0];
  h.lr = 1e-3;
  h.beta1 = 0.9;
  h.beta2 = 0.999;
  h.eps = 1e-8;
  h.weight_decay = 0.01;
  h.decoupled = 1.0;
  table.control.max_grad_norm = 1.0;
  table.control.update_stats = 1;
  table.control.phases |= mo::kMeasure;
  Random random(12);
  for (int k = 0; k < 36; ++k) {
    const int dtype = k % 2 ? mo::kBF16 : mo::kF32;
    TestRow& row = table.add(k % 9 == 0 ? 40000 : 3000 + 331 * k, {dtype, dtype, dtype, dtype});
    for (int o = 0; o <= mo::kState1; ++o) {
      for (int64_t i = 0; i < row.numel; ++i) row.op[o].set(i, std::fabs(random.value()));
    }
  }
  return table;
}

// The team is as large as asked for while there are batches (this table has more). step_test compares steps with scalar
// code; here it is that every team gives the same.
void steps_agree(int rounds) {
  const TestTable start = large_table();
  TestTable alone(start);
  alone.run();
  for (int round = 0; round < rounds; ++round) {
    TestTable table(start);
    table.control.threads = 2 + round % 3;
    table.run();
    CHECK_SAYS(table.digest().hash == alone.digest().hash, "%d threads", table.control.threads);
  }
}

void two_steppers() {
  std::thread other([] { steps_agree(4); });
  steps_agree(4);
  other.join();
}

// Forked while the members sleep, as a data loader's workers are: the child starts threads of its own and steps; parent
// and child go on side by side.
void fork_while_idle() {
  ThreadPool* const parents = &ThreadPool::instance();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs must not hang the test
    ThreadPool& pool = ThreadPool::instance();
    CHECK(&pool != parents);
    for (int round = 0; round < 20; ++round) {
      Counts c;
      c.team = pool.reserve(4);
      CHECK(c.team >= 1);
      pool.run(c.team, count, &c);
      for (int m = 0; m < c.team; ++m) CHECK(c.calls[m] == 1);
    }
    steps_agree(3);
    std::fflush(nullptr);
    _exit(check::failures.load() ? 1 : 0);
  }
  CHECK(child > 0);
  steps_agree(3);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_SAYS(status == 0, "the child ended with status %d", status);
  CHECK(&ThreadPool::instance() == parents);
}

}  // namespace

int main() {
  first_calls_agree();
  every_member_runs_once();
  barriers_order_memory();
  two_callers();
  those_who_sit_out_sleep_on();
  steps_agree(3);
  two_steppers();
  fork_while_idle();
  idle_members_sleep();
  return check::report("thread_pool_test");
}
