// See thread_pool.h. Bytes per element: none.
#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <system_error>

namespace mo {
namespace {

constexpr int kSpins = 2000;  // a few microseconds: about as long as the other members need for their last chunk

inline void pause_briefly(int spins) {
  if (spins > kSpins) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::atomic<ThreadPool*> current{nullptr};

}  // namespace

void Barrier::wait() {
  const int round = round_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_) {
    waiting_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) pause_briefly(spins);
}

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = current.load(std::memory_order_acquire);
  if (pool) return *pool;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)registered;
  ThreadPool* fresh = new ThreadPool;  // leaked on purpose: threads may outlive static destruction
  if (current.compare_exchange_strong(pool, fresh)) return *fresh;
  delete fresh;
  return *pool;
}

int ThreadPool::reserve(int threads) {
  if (threads <= 1) return 1;
  std::lock_guard<std::mutex> turn(turn_);
  std::lock_guard<std::mutex> lock(mutex_);
  while (int(threads_.size()) + 1 < threads) {
    if (start_.size() == threads_.size()) start_.emplace_back();
    try {
      threads_.emplace_back(&ThreadPool::work, this, int(threads_.size()) + 1, generation_);
    } catch (const std::system_error&) {
      break;  // the system gives no more threads: the work is done by those there are
    }
  }
  const int available = int(threads_.size()) + 1;
  return threads < available ? threads : available;
}

void ThreadPool::run(int team, Function function, void* context) {
  if (team <= 1) {
    function(context, 0, 1);
    return;
  }
  std::lock_guard<std::mutex> turn(turn_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = Job{function, context, team};
    running_.store(team - 1, std::memory_order_relaxed);
    ++generation_;
  }
  // Not all that there are: those who sit out would wake for nothing, one after the other under one lock.
  for (int member = 1; member < team; ++member) start_[size_t(member - 1)].notify_one();
  function(context, 0, team);
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) pause_briefly(spins);
}

void ThreadPool::work(int member, uint64_t seen) {
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_[size_t(member - 1)].wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      job = job_;
    }
    if (member >= job.team) continue;  // woken by chance, or late for a run without it
    job.function(job.context, member, job.team);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace mo
