// The launches of rows, forward and backward, that a thread caches are those that it would make anew. Over many
// problems drawn from few shapes, types, addresses and devices, with batch invariance switched and tables replaced
// between them; then on several threads. Prints how many problems were looked at, and the nanoseconds that a launch
// from the cache takes, of a forward and of a gradient; exits with 1 at the first launch that is wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

#include "core/batch_invariant.h"
#include "fake_driver.h"
#include "plan/columns.h"

namespace {

thread_local Seen seen;
thread_local Result answer = 0;  // of the driver to a cooperative launch
thread_local bool counts_only = false;

bool is_backward(Handle kernel) { return words_of(kernel).find("IS_BACKWARD=1") != std::string::npos; }
bool is_pointwise(Handle kernel) { return words_of(kernel).compare(0, 14, "rows_pointwise") == 0; }

}  // namespace

Result onepass::cuda::taken(const LaunchConfig& config, Handle kernel, void** arguments) {
  if (counts_only) return 0;
  seen = Seen(config, kernel);
  const auto add_address = [&] { seen.addresses.push_back(*static_cast<void**>(*arguments++)); };
  const auto add_long = [&] { seen.numbers.push_back(*static_cast<int64_t*>(*arguments++)); };
  const int64_t* const rows = static_cast<int64_t*>(*arguments++);
  const int tensors = is_backward(kernel) ? 3 : 2;
  for (int i = 0; i < tensors; ++i) seen.addresses.push_back(reinterpret_cast<void*>(rows[i]));
  seen.numbers.insert(seen.numbers.end(), rows + tensors, rows + 2 * tensors + 2);  // rows, n and strides
  if (is_pointwise(kernel)) {
    add_address(), add_long(), add_long();
  } else {
    for (int i = 0; i < 3; ++i) seen.numbers.push_back(*static_cast<int*>(*arguments++));
    add_address();  // of the messages
  }
  return seen.cooperative ? answer : 0;
}

namespace {

struct Draw : std::mt19937 {
  using std::mt19937::mt19937;
  int64_t one_of(std::initializer_list<int64_t> from) { return from.begin()[(*this)() % from.size()]; }
  int64_t rows() { return one_of({1, 3, 64, 4096}); }
  int64_t n() { return one_of({8, 33, 128, 1000, 4096, 128256, 4194304}); }
  void place(TensorArg* tensor, int64_t begin) {
    const int64_t at = begin + 0x1000 * ((*this)() % 7) + size_of(tensor->type) * one_of({0, 0, 0, 1, 2});
    tensor->data = reinterpret_cast<void*>(at);
  }
};

void draw_forward(Draw& draw, Problem* problem) {
  const Function function = Function(draw() % 5);
  const DType x = DType(draw.one_of({0, 0, 2, 3, 1}));
  const DType y = function == Function::state ? (x == DType::float64 ? DType::float64 : DType::float32)
                  : is_reduction(function)    ? x
                                              : DType(draw.one_of({int(x), int(x), 0, 2}));
  const int64_t rows = draw.rows(), n = draw.n();
  *problem = Problem::forward(contiguous_layout(rows, n, is_reduction(function)), function, x, y);
  if (problem->layout.outer.count && draw() % 3 == 0) {  // rows with something between them
    problem->layout.outer.dims[0].strides[kX] += draw.one_of({1, 4});
    if (!is_reduction(function)) problem->layout.outer.dims[0].strides[kY] += draw.one_of({1, 4});
  }
  draw.place(&problem->tensors[kX], 0x100000), draw.place(&problem->tensors[kY], 0x900000);
}

void draw_backward(Draw& draw, Problem* problem) {
  const Function function = Function(draw() % 4);
  const bool is_lse = function == Function::logsumexp, is_broadcast = !is_lse && draw() % 4 == 0;
  const DType result = DType(draw.one_of({0, 0, 2, 3, 1}));
  const DType dx = is_lse ? result : DType(draw.one_of({int(result), int(result), 0, 2}));
  const int64_t sizes[] = {draw.rows(), draw.n()}, n = sizes[1];
  const int64_t gap = draw() % 3 ? 0 : draw.one_of({1, 4});
  const int64_t dx_steps[] = {n + gap, 1}, saved[] = {n + gap, 1},
                grad[] = {is_lse         ? 1
                          : is_broadcast ? 0
                                         : n + gap,
                          is_lse || is_broadcast ? 0 : 1};
  const int64_t lse[] = {is_lse ? 1 : 0, 0};
  const int64_t* const strides[] = {dx_steps, saved, grad, lse};
  const bool reduce[] = {false, true};
  *problem = Problem::backward(make_backward_layout(2, sizes, strides, reduce, is_lse), function, result, dx);
  for (int t = 0; t < (is_lse ? 4 : 3); ++t) draw.place(&problem->tensors[t], 0x100000 * (1 + 2 * t));
}

CudaPlan plan_of(const Problem& problem, const Gpu& gpu) { return plan_rows(problem, gpu, batch_invariant()); }

bool is_right(Draw& draw, bool forward) {
  Problem problem = {};
  (forward ? draw_forward : draw_backward)(draw, &problem);
  const int device = int(draw() % 3);
  void *const stream = reinterpret_cast<void*>(uintptr_t(1 + draw() % 5)), *const messages = &draw;
  for (const bool cooperative : {true, false}) {
    answer = draw() % 4 ? 0 : draw() % 2 ? kTooLarge : kNotSupported;
    Gpu gpu = device_info(device);
    gpu.cooperative = gpu.cooperative && cooperative;
    const CudaPlan plan = plan_of(problem, gpu);
    const Launch launch = cooperative ? cached_launch(problem, device) : make_fallback_launch(problem, device);
    const bool is_taken = start(launch, problem, messages, stream);
    const Seen got = seen;
    const Launch anew = make_checked_launch(plan, problem, device);
    const bool is_same_answer = start(anew, problem, messages, stream) == is_taken;
    if (!is_same_answer || !(got == seen) || launch.message_bytes != anew.message_bytes || got.stream != stream ||
        got.addresses[0] != problem.tensors[0].data || got.addresses[1] != problem.tensors[1].data ||
        got.grid_x() == 0 || got.threads() != unsigned(plan.threads()) ||
        (plan.tier == Tier::grid) != got.cooperative) {
      return std::printf("%s, %s, %ld rows of %ld on device %d\n", words_of(got.kernel).c_str(),
                         kTierNames[int(plan.tier)], long(problem.layout.rows), long(problem.layout.n), device),
             false;
    }
    if (is_taken) break;
    if (plan.tier != Tier::grid || !cooperative) return std::printf("refused without a reason\n"), false;
  }
  return true;
}

bool run(unsigned seed, bool sets, int problems) {
  Draw draw(seed);
  for (int i = 0; i < problems; ++i) {
    if (i % 50 == 0) thread_invariant = int(draw() % 3) - 1;
    if (sets && i % 400 == 399) set_tables("first", other_tables(i / 400));
    if (!is_right(draw, i % 2)) {
      return std::printf("problem %d of seed %u\n", i, seed), false;
    }
  }
  return true;
}

// Launches one problem again and again, and gives the nanoseconds of each, or 0 where one was planned or loaded anew.
double time_repeated(const Problem& problem) {
  constexpr int kTurns = 20, kLaunches = 20000;
  cached_launch(problem, 0);
  planned = 0;
  const int before = loaded;
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kLaunches; ++i) start(cached_launch(problem, 0), problem, nullptr, nullptr);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count() / kLaunches);
  }
  return planned || loaded != before ? 0 : best;
}

}  // namespace

int main() {
  constexpr int kProblems = 60000, kThreadsHere = 4;
  std::atomic<bool> right{run(0, true, kProblems)};
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreadsHere; ++t) threads.emplace_back([&, t] { right = run(t, false, kProblems) && right; });
  for (std::thread& thread : threads) thread.join();
  if (!right) return 1;
  // One problem again and again: the plan and the kernel are found, and nothing is loaded; with other tables there are
  // others.
  thread_invariant = 0;
  const Problem problem = Problem::forward(contiguous_layout(128, 64, false), Function::softmax, DType::float32,
                                           DType::float32, &right, &threads);
  set_tables("first", other_tables(0));
  const Handle first = cached_launch(problem, 0).kernel;
  counts_only = true;
  const int64_t sizes[] = {128, 64}, steps[] = {64, 1}, none[] = {0, 0};
  const int64_t* const strides[] = {steps, steps, steps, none};
  const bool reduce[] = {false, true};
  const Problem gradient = Problem::backward(make_backward_layout(2, sizes, strides, reduce, false), Function::softmax,
                                             DType::float32, DType::float32, &right, &threads, &threads);
  const double forward_ns = time_repeated(problem), backward_ns = time_repeated(gradient);
  if (cached_launch(problem, 0).kernel != first) return std::printf("another kernel\n"), 1;
  set_tables("first", other_tables(1));
  if (cached_launch(problem, 0).kernel == first) return std::printf("the kernel of the old tables\n"), 1;
  std::printf("%d %.1f %.1f", kProblems * (1 + kThreadsHere), forward_ns, backward_ns);
}
