// See shim.h. A fiber for every thread of a block; a scheduler that runs them, in shuffled order, from one barrier to the
// next, and that knows who waits where.
#include "cuda/tests/shim.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {

Index thread, block;

namespace {

constexpr size_t kStack = 256 * 1024;
constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtExchange, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = State::kReady;
  unsigned char value[16];  // what it offers, then what it gets from an exchange
  size_t bytes = 0;
  int from = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  int current = 0;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
  void* scheduler_fake = nullptr;
#endif
};

Block now;
uint64_t random_state = 1;
Handler handler = nullptr;

void wrong(const char* what) {
  if (handler) {
    handler(what);
    return;
  }
  std::fprintf(stderr, "shim: block %d, thread %d: %s\n", block.x, thread.x, what);
  std::abort();
}

uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1dull;
}

void to_scheduler(State state) {
  Fiber& me = now.fibers[size_t(now.current)];
  me.state = state;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(state == State::kDone ? nullptr : &fake, now.scheduler_stack, now.scheduler_bytes);
#endif
  swapcontext(&me.context, &now.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &now.scheduler_stack, &now.scheduler_bytes);
#endif
  now.body(now.context);
  to_scheduler(State::kDone);
}

void to_fiber(int i) {
  Fiber& fiber = now.fibers[size_t(i)];
  now.current = thread.x = i;
  fiber.state = State::kReady;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&now.scheduler_fake, fiber.stack.get(), kStack);
#endif
  swapcontext(&now.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(now.scheduler_fake, nullptr, nullptr);
#endif
}

// Whether all threads from first to last are in one state.
bool all_in(int first, int last, State state) {
  for (int i = first; i < last; ++i) {
    if (now.fibers[size_t(i)].state != state) return false;
  }
  return true;
}

void give_exchange(int first, int last) {
  for (int i = first; i < last; ++i) {
    Fiber& fiber = now.fibers[size_t(i)];
    if (fiber.bytes != now.fibers[size_t(first)].bytes) wrong("threads of a warp exchange values of different sizes");
  }
  std::vector<Fiber*> warp;
  for (int i = first; i < last; ++i) warp.push_back(&now.fibers[size_t(i)]);
  std::vector<unsigned char> offered;
  for (Fiber* fiber : warp) offered.insert(offered.end(), fiber->value, fiber->value + sizeof fiber->value);
  for (Fiber* fiber : warp) {
    const size_t from = size_t(fiber->from) < warp.size() ? size_t(fiber->from) : 0;
    std::memcpy(fiber->value, offered.data() + from * sizeof fiber->value, fiber->bytes);
    fiber->state = State::kReady;
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wclobbered"  // getcontext returns once here: it is makecontext's that is switched to
#endif
void make_fibers() {
  for (Fiber& fiber : now.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.state = State::kReady;
  }
}

void run_block(int threads) {
  std::vector<int> order(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) order[size_t(i)] = i;
  make_fibers();
  for (;;) {
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random_bits() % (i + 1)]);
    for (int i : order) {
      if (now.fibers[size_t(i)].state == State::kReady) to_fiber(i);
    }
    if (all_in(0, threads, State::kDone)) return;
    bool progress = false;
    if (all_in(0, threads, State::kAtBarrier)) {
      for (Fiber& fiber : now.fibers) fiber.state = State::kReady;
      progress = true;
    }
    for (int first = 0; first < threads; first += kWarp) {
      const int last = first + kWarp < threads ? first + kWarp : threads;
      if (!progress && all_in(first, last, State::kAtExchange)) {
        give_exchange(first, last);
        // The other warps may go on too, and the barrier is looked at again after everybody ran.
        for (int other = last; other < threads; other += kWarp) {
          const int end = other + kWarp < threads ? other + kWarp : threads;
          if (all_in(other, end, State::kAtExchange)) give_exchange(other, end);
        }
        progress = true;
      }
    }
    if (!progress) {
      wrong("divergent barrier: not all threads of a block reach __syncthreads, or of a warp a shuffle or __syncwarp");
      return;  // a handler lets the test go on; the fibers are made anew
    }
  }
}

}  // namespace

void run(int blocks, int threads, void (*body)(void*), void* context) {
  if (now.fibers.size() != size_t(threads)) now.fibers = std::vector<Fiber>(size_t(threads));
  now.body = body;
  now.context = context;
  for (block.x = 0; block.x < blocks; ++block.x) run_block(threads);
}

void barrier() { to_scheduler(State::kAtBarrier); }

void exchange(void* value, size_t bytes, int from) {
  Fiber& me = now.fibers[size_t(now.current)];
  if (bytes > sizeof me.value) wrong("a shuffle of more than 16 bytes");
  std::memcpy(me.value, value, bytes);
  me.bytes = bytes;
  me.from = from;
  to_scheduler(State::kAtExchange);
  std::memcpy(value, me.value, bytes);
}

void check_aligned(const void* at, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) wrong("a misaligned access of 4, 8 or 16 bytes");
}

void set_seed(uint64_t seed) { random_state = seed * 0x9e3779b97f4a7c15ull + 1; }
void set_handler(Handler to) { handler = to; }

}  // namespace shim
