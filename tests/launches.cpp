// The launches that a thread remembers are those that it would make anew. Over many calls drawn from few shapes, types,
// addresses and devices, with batch invariance switched and tables replaced between them; then on several threads.
// Prints how many calls were looked at; exits with 1 at the first that differs.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "cuda/launch.h"
#include "invariant.h"

using namespace onepass;
using namespace onepass::cuda;

namespace {

struct Seen {
  LaunchConfig config;
  LaunchAttribute attribute;
  Handle kernel;
  const void* x;
  void *y, *parts;
  int64_t numbers[4];
  int three[3];
};
thread_local Seen seen;
thread_local Result answer = 0;  // of the driver to a cooperative launch

}  // namespace

// A driver without a GPU, which keeps what it was given.
namespace onepass::cuda {

const Driver& driver() {
  static const Driver fake = [] {
    Driver d = {};
    d.module_load = [](Handle* module, const void* code) {
      *module = reinterpret_cast<Handle>(new std::string(static_cast<const char*>(code)));
      return 0;
    };
    d.module_function = [](Handle* function, Handle module, const char*) { return *function = module, 0; };
    d.function_get = [](int* value, int, Handle) { return *value = 0; };
    d.function_set = [](Handle, int, int) { return 0; };
    d.launch = [](const LaunchConfig* config, Handle kernel, void** arguments, void**) {
      std::memset(&seen, 0, sizeof seen);
      seen.config = *config;
      if (config->attribute_count) seen.attribute = *config->attributes;
      seen.config.attributes = nullptr;
      seen.kernel = kernel;
      seen.x = *static_cast<const void**>(arguments[0]);
      seen.y = *static_cast<void**>(arguments[1]);
      for (int i = 0; i < 4; ++i) seen.numbers[i] = *static_cast<int64_t*>(arguments[2 + i]);
      for (int i = 0; i < 3; ++i) seen.three[i] = *static_cast<int*>(arguments[6 + i]);
      seen.parts = *static_cast<void**>(arguments[9]);
      return seen.attribute.id == kCooperative ? answer : 0;
    };
    return d;
  }();
  return fake;
}

void check(Result result, const char* call) {
  if (result) throw std::runtime_error(call);
}

// Three devices that plan differently.
const Gpu& device_info(int device) {
  static const Gpu kinds[] = {
      typical(90, kTuned, "first"), {90, 60, 227 * 1024, 0, "second"}, typical(80, kTuned, "third")};
  return kinds[device];
}

void enter_context(int) {}

std::atomic<int> loaded{0};
std::string cubin(const std::string& source, const std::vector<std::string>& defines, int compute, bool*) {
  ++loaded;
  std::string name = source + std::to_string(compute);
  for (const std::string& define : defines) name += " " + define;
  return name;
}

}  // namespace onepass::cuda

namespace {

Tables other_tables(int turn) {
  constexpr int kBlock = int(Tier::block), kWarp = int(Tier::warp);
  const std::vector<Entry> odd = {{kAnyLength, kAsRows, 0, 0, 1, 0}};
  const std::vector<Entry> rows = {{64, kWarp, turn % 2 ? 8 : 32, 0, 1, 0},
                                   {kAnyLength, kBlock, 0, 8 + turn * 4 % 32, 1, 0}};
  const std::vector<Entry> few = {{256, kAsRows, 0, 0, 1, 0}, {kAnyLength, kBlock, 0, 12 + turn * 4 % 20, 1, 0}};
  return {"a test's", rows, rows, rows, rows, odd, odd, few, few};
}

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
      const Phase phase(call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), call.layout, call.reduces());
      Gpu gpu = device_info(device);
      gpu.cooperative = gpu.cooperative && cooperative;
      const CudaPlan plan = plan_cuda(call.layout, call.x_type, call.y_type, phase, gpu, batch_invariant());
      const Launch made = launch_of(call, device, cooperative);
      const bool taken = launch(made, call, parts, stream);
      const Seen got = seen;
      const Launch anew = launch_by(plan, call, device);
      const bool same_answer = launch(anew, call, parts, stream) == taken;
      if (!same_answer || std::memcmp(&got, &seen, sizeof got) || made.parts != anew.parts || got.x != call.x ||
          got.y != call.y || got.config.stream != stream || got.config.grid_x == 0 ||
          got.config.block_x != unsigned(plan.threads()) || (plan.tier == Tier::grid) != (made.parts > 0)) {
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
