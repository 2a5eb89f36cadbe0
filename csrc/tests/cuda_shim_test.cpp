// The shim itself (cuda/tests/shim.h): that it runs every thread of every block, in other orders for other seeds, and that
// each kind of fault it is there for is caught. The faults are planted into kernels built from the same parts
// (cuda/chunk.cuh, cuda/block_reduce.cuh) as the real ones; those that only the address sanitizer sees end a child process.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/block_reduce.cuh"
#include "cuda/chunk.cuh"

namespace {

std::string complaint;

// What the shim said while `run` ran; empty when it was content.
template <class Run>
std::string complaint_about(Run run) {
  complaint.clear();
  shim::set_handler([](const char* what) {
    if (complaint.empty()) complaint = what;
  });
  run();
  shim::set_handler(nullptr);
  return complaint;
}

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Whether a process of its own ends with an error; what it prints is thrown away.
template <class Run>
bool ends_badly(Run run) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(0);
    run();
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && status != 0;
}

void every_thread(std::vector<int>* seen, std::vector<int>* order) {
  (*seen)[size_t(blockIdx.x * mo::kThreads + threadIdx.x)] += 1;
  order->push_back(threadIdx.x);
}

void threads_and_order() {
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    shim::set_seed(seed);
    std::vector<int> seen(size_t(3 * mo::kThreads), 0), order;
    MO_LAUNCH(every_thread, 3, mo::kThreads, nullptr, &seen, &order);
    for (int n : seen) CHECK(n == 1);
    orders.insert(order);
  }
  CHECK(orders.size() == 3);
}

// block_reduce as it is, and without the barrier that keeps a warp from being read before it has written.
void good_sum(const double* x, double* out) {
  const double sum = mo::block_reduce(x[threadIdx.x], mo::Add());
  if (threadIdx.x == 0) *out = sum;
}
void sum_without_barrier(const double* x, double* out) {
  __shared__ double of_warp[mo::kThreads / 32];
  double mine = x[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_xor_sync(~0u, mine, distance);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  // __syncthreads() belongs here.
  if (threadIdx.x == 0) {
    *out = 0.0;
    for (double part : of_warp) *out += part;
  }
}

void missing_barrier() {
  std::vector<double> x(mo::kThreads);
  double expected = 0.0;
  for (int i = 0; i < mo::kThreads; ++i) expected += x[size_t(i)] = 1.0 + i;
  int good_wrong = 0, bad_wrong = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    shim::set_seed(seed);
    for (double& value : x) value = -value;  // so that what the last run left is not right by accident
    expected = -expected;
    double good = 0.0, bad = 0.0;
    MO_LAUNCH(good_sum, 1, mo::kThreads, nullptr, x.data(), &good);
    MO_LAUNCH(sum_without_barrier, 1, mo::kThreads, nullptr, x.data(), &bad);
    good_wrong += good != expected;
    bad_wrong += bad != expected;
  }
  CHECK(good_wrong == 0);
  CHECK_SAYS(bad_wrong > 0, "a missing barrier went unnoticed in 8 orders");
}

void divergent_barrier() {
  const auto kernel = [](int last) {
    if (threadIdx.x < last) __syncthreads();
  };
  CHECK(complaint_about([&] { MO_LAUNCH(kernel, 1, mo::kThreads, nullptr, mo::kThreads); }).empty());
  CHECK(mentions(complaint_about([&] { MO_LAUNCH(kernel, 1, mo::kThreads, nullptr, mo::kThreads - 1); }), "barrier"));
  const auto shuffle = [](int last) {
    if (threadIdx.x < last) __shfl_xor_sync(~0u, 1.0, 1);
  };
  CHECK(mentions(complaint_about([&] { MO_LAUNCH(shuffle, 1, mo::kThreads, nullptr, mo::kThreads - 1); }), "shuffle"));
  const auto warp = [](int last) {
    if (threadIdx.x < last) __syncwarp();
  };
  CHECK(complaint_about([&] { MO_LAUNCH(warp, 1, mo::kThreads, nullptr, 32); }).empty());
  CHECK(mentions(complaint_about([&] { MO_LAUNCH(warp, 1, mo::kThreads, nullptr, 31); }), "__syncwarp"));
}

// Doubles every element, in packs, as scale_grad_kernel does. `shift`: a wrong index; `round_up`: a wrong tail.
void double_all(float* x, int n, int head, int shift, bool round_up) {
  const int rounded = round_up ? (n + 3) / 4 * 4 : n;
  mo::walk<4>(
      rounded, head, [&](int i) { x[i + shift] *= 2.0f; },
      [&](int i) {
        auto pack = mo::load_pack<float, 4>(x + i + shift);
        for (float& value : pack.at) value *= 2.0f;
        mo::store_pack(x + i + shift, pack);
      });
}

void indices_and_tails() {
  for (int n : {1, 4, 63, 64, 1003}) {
    std::vector<float> x(size_t(n) + 4, 1.0f);
    float* first = x.data();
    const int head = mo::head_of(first);
    MO_LAUNCH(double_all, 1, mo::kThreads, nullptr, first, n, head, 0, false);
    for (int i = 0; i < n + 4; ++i) CHECK(x[size_t(i)] == (i < n ? 2.0f : 1.0f));
  }
  // 1003 elements end inside of a pack: exactly so much memory, of which the sanitizer sees the end.
  const auto run = [](int shift, bool round_up) {
    std::unique_ptr<float[]> x(new float[1003]());
    MO_LAUNCH(double_all, 1, mo::kThreads, nullptr, x.get(), 1003, mo::head_of(x.get()), shift, round_up);
  };
  CHECK(!ends_badly([&] { run(0, false); }));
  CHECK_SAYS(ends_badly([&] { run(0, true); }), "a wrong tail went unnoticed");
  CHECK_SAYS(ends_badly([&] { run(4, false); }), "a wrong index went unnoticed");
  CHECK(mentions(complaint_about([&] {
                   std::vector<float> x(16, 0.0f);
                   const int head = mo::head_of(x.data());
                   MO_LAUNCH(double_all, 1, mo::kThreads, nullptr, x.data(), 12, head, 1, false);
                 }),
                 "misaligned"));
}

}  // namespace

int main() {
  threads_and_order();
  missing_barrier();
  divergent_barrier();
  indices_and_tails();
  return check::report("cuda_shim_test");
}
