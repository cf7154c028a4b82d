// The launches that a thread remembers are those that it would make anew. Over many calls drawn from few shapes, types,
// addresses and devices, with batch invariance switched and tables replaced between them; then on several threads.
// Prints how many calls were looked at; exits with 1 at the first that differs.
#include <atomic>
#include <cstdio>
#include <random>
#include <thread>

#include "fake_driver.h"
#include "core/batch_invariant.h"

namespace {

thread_local Seen seen;
thread_local Result answer = 0;  // of the driver to a cooperative launch

}  // namespace

Result onepass::cuda::taken(const LaunchConfig& config, Handle kernel, void** arguments) {
  seen = Seen(config, kernel);
  for (const int pointer : {0, 1, 9}) seen.addresses.push_back(*static_cast<void**>(arguments[pointer]));
  for (int i = 2; i < 6; ++i) seen.numbers.push_back(*static_cast<int64_t*>(arguments[i]));
  for (int i = 6; i < 9; ++i) seen.numbers.push_back(*static_cast<int*>(arguments[i]));
  return seen.cooperative ? answer : 0;
}

namespace {

bool run(unsigned seed, bool sets, int calls) {
  std::mt19937 draw(seed);
  const auto one_of = [&](std::initializer_list<int64_t> from) { return from.begin()[draw() % from.size()]; };
  for (int i = 0; i < calls; ++i) {
    if (i % 50 == 0) thread_invariant = int(draw() % 3) - 1;
    if (sets && i % 400 == 399) set_tables("first", other_tables(i / 400));
    Call call = {};
    call.function = Function(draw() % 5);
    call.x_type = DType(one_of({0, 0, 2, 3, 1}));
    call.y_type = call.function == Function::state ? (call.x_type == DType::float64 ? DType::float64 : DType::float32)
                  : call.reduces()                 ? call.x_type
                                                   : DType(one_of({int(call.x_type), int(call.x_type), 0, 2}));
    const int64_t rows = one_of({1, 3, 64, 4096}), n = one_of({8, 33, 128, 1000, 4096, 128256, 4194304});
    call.layout = contiguous_layout(rows, n, call.reduces());
    if (call.layout.outer.count && draw() % 3 == 0) {  // rows with something between them
      call.layout.outer.dims[0].x_stride += one_of({1, 4});
      if (!call.reduces()) call.layout.outer.dims[0].y_stride += one_of({1, 4});
    }
    call.x = reinterpret_cast<void*>(0x100000 + 0x1000 * (draw() % 7) + size_of(call.x_type) * one_of({0, 0, 0, 1, 2}));
    call.y = reinterpret_cast<void*>(0x900000 + 0x1000 * (draw() % 7) + size_of(call.y_type) * one_of({0, 0, 0, 1, 2}));
    const int device = int(draw() % 3);
    void *const stream = reinterpret_cast<void*>(uintptr_t(1 + draw() % 5)), *const parts = &draw;
    for (const bool cooperative : {true, false}) {
      answer = draw() % 4 ? 0 : draw() % 2 ? kTooLarge : kNotSupported;
      const Alignment alignment(call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), call.layout,
                                call.reduces());
      Gpu gpu = device_info(device);
      gpu.cooperative = gpu.cooperative && cooperative;
      const CudaPlan plan = plan_cuda(call.layout, call.x_type, call.y_type, alignment, gpu, batch_invariant());
      const Launch made = launch_of(call, device, cooperative);
      const bool taken = launch(made, call, parts, stream);
      const Seen got = seen;
      const Launch anew = launch_by(plan, call, device);
      const bool same_answer = launch(anew, call, parts, stream) == taken;
      if (!same_answer || !(got == seen) || made.parts != anew.parts || got.addresses[0] != call.x ||
          got.addresses[1] != call.y || got.stream != stream || got.grid_x() == 0 ||
          got.threads() != unsigned(plan.threads()) || (plan.tier == Tier::grid) != got.cooperative) {
        std::printf("call %d of seed %u: %s, %ld rows of %ld on device %d\n", i, seed, kTierNames[int(plan.tier)],
                    long(rows), long(n), device);
        return false;
      }
      if (taken) break;
      if (plan.tier != Tier::grid || !cooperative) return std::printf("refused without a reason\n"), false;
    }
  }
  return true;
}

}  // namespace

int main() {
  constexpr int kCalls = 60000, kThreadsHere = 4;
  std::atomic<bool> right{run(0, true, kCalls)};
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreadsHere; ++t) threads.emplace_back([&, t] { right = run(t, false, kCalls) && right; });
  for (std::thread& thread : threads) thread.join();
  if (!right) return 1;
  // One call again and again: the plan and the kernel are found, and nothing is loaded; with other tables there are
  // others.
  thread_invariant = 0;
  Call call = {Function::softmax, DType::float32, DType::float32, &right, &call, contiguous_layout(128, 64, false)};
  set_tables("first", other_tables(0));
  const Handle first = launch_of(call, 0).kernel;
  const int before = loaded;
  for (int i = 0; i < 1000; ++i) {
    if (launch_of(call, 0).kernel != first) return std::printf("another kernel\n"), 1;
  }
  if (loaded != before) return std::printf("a kernel was loaded again\n"), 1;
  set_tables("first", other_tables(1));
  if (launch_of(call, 0).kernel == first) return std::printf("the kernel of the old tables\n"), 1;
  std::printf("%d", kCalls * (1 + kThreadsHere));
}
