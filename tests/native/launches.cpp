// launches.cpp: the launches that a thread caches are those that it would make anew, argument by argument: of problems
// over any dims, forward and backward, on three devices and several threads, with batch invariance switched, tables
// replaced and a driver that refuses cooperative launches or fails between them. Its argument says how many calls each
// thread makes. Prints how many launches were found and made,
// how many tiers they had, and the nanoseconds of a launch from the cache, of a forward and of a gradient; exits with 1
// at the first that is wrong.
#include <chrono>
#include <thread>
#include <utility>

#include "core/batch_invariant.h"
#include "cuda/host/launch_cache.h"
#include "draw.h"
#include "fake_driver.h"

namespace {

// What the driver was given: numbers of the configuration, then the bytes of the kernel's arguments but for the address
// of the messages.
struct Seen {
  Handle kernel;
  std::vector<uint64_t> config;
  std::string arguments;
  bool cooperative;
  const void* messages;
  bool operator==(const Seen& other) const {
    return kernel == other.kernel && config == other.config && arguments == other.arguments &&
           cooperative == other.cooperative && !messages == !other.messages;
  }
};

thread_local std::vector<Seen> seen;                    // launches since the last call
thread_local Result to_cooperative = 0, to_others = 0;  // the driver's answers
thread_local bool records = true;

}  // namespace

Result onepass::cuda::take_launch(const LaunchConfig& c, Handle kernel, void** arguments) {
  if (!records) return 0;
  Seen now = {kernel,
              {c.grid_x, c.grid_y, c.grid_z, c.block_x, c.block_y, c.block_z, c.shared_bytes, c.attribute_count,
               uint64_t(c.stream), cluster_of(c)},
              {},
              is_cooperative(c),
              nullptr};
  const auto add = [&](size_t bytes) { now.arguments.append(static_cast<const char*>(*arguments++), bytes); };
  const auto has = [&](const char* word) { return words_of(kernel).find(word) != std::string::npos; };
  if (has("columns")) {
    add(sizeof(void*) * (has("IS_BACKWARD=1") ? 4 : 2));
    Tiles tiles = *static_cast<const Tiles*>(*arguments);
    now.messages = std::exchange(tiles.messages, nullptr);
    __builtin_clear_padding(&tiles);
    now.arguments.append(reinterpret_cast<const char*>(&tiles), sizeof tiles);
  } else {
    add(sizeof(int64_t) * (2 + 2 * (has("IS_BACKWARD=1") ? 3 : 2)));
    if (has("rows_pointwise")) {
      for (int i = 0; i < 3; ++i) add(sizeof(int64_t));
    } else {
      for (int i = 0; i < 3; ++i) add(sizeof(int));
      now.messages = *static_cast<void**>(*arguments);
    }
  }
  seen.push_back(now);
  return now.cooperative ? to_cooperative : to_others;
}

namespace {

// Launches as the engine does, by the problem's own plan or a forced one; `seen` has the launches then. Gives the words
// of an error. Blocks exchange messages somewhere else every time.
std::string run(const Problem& problem, int device, void* stream, const CudaPlan* forced = nullptr) {
  static char rooms[4096];
  seen.clear();
  try {
    launch_with_fallback(problem, device, forced, [&](const Launch& launch) {
      return start(launch, problem, launch.message_bytes ? rooms + 16 * below(64) : nullptr, stream);
    });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool is_refusal(Result result) { return result == kTooLarge || result == kNotSupported; }

struct Looked {
  int found = 0, made = 0;
  unsigned tiers = 0;
};

// The launches of a problem with these answers of the driver are those of its plan and, where it was refused, of the
// plan without cooperative launches; each is the one that is made by that plan, which is not cached.
bool is_right(const Problem& problem, int device, void* stream, Looked* looked) {
  planned = 0;
  const std::string error = run(problem, device, stream);
  const std::vector<Seen> got = seen;
  const bool refused = got.size() && got[0].cooperative && is_refusal(to_cooperative);
  ++(planned > int(refused) ? looked->made : looked->found);
  const Result last = refused || !got[0].cooperative ? to_others : to_cooperative;
  if (error != (last ? "cuLaunchKernelEx" : "")) return complain("the error is '" + error + "'");
  if (got.size() != (refused ? 2 : 1)) return complain("another number of launches");
  for (size_t i = 0; i < got.size(); ++i) {
    Gpu gpu = device_info(device);
    gpu.cooperative = gpu.cooperative && i == 0;
    const CudaPlan plan = plan_cuda(problem, gpu, batch_invariant());
    looked->tiers |= 1u << int(plan.tier);
    const KernelKind kind = kind_of(problem);
    // The blocks of a gradient of logsumexp share columns and merge nothing.
    const bool merges = !problem.is_backward() || !problem.is_reduction();
    const auto answers = std::pair(std::exchange(to_cooperative, 0), std::exchange(to_others, 0));
    run(problem, device, stream, &plan);
    std::tie(to_cooperative, to_others) = answers;
    const std::string words = words_of(got[i].kernel);
    const std::string wanted = cubin(source_of(kind, plan.tier), defines_of(kind, plan), gpu.arch, nullptr, false);
    if (words != wanted || !(got[i] == seen[0]))
      return complain("another launch than that of its plan: " + words + ", " + kTierNames[int(plan.tier)]);
    if (got[i].cooperative != (plan.sends_messages() || (plan.in_grid() && merges)) ||
        !got[i].messages == got[i].cooperative || (got[i].cooperative && !gpu.cooperative))
      return complain("a cooperative launch, or none: " + words);
    const std::string refusal = "onepass: the driver refuses a cooperative launch of this plan";
    if (i == 0 && refused && (run(problem, device, stream, &plan) != refusal || seen.size() != 1))
      return complain("a forced plan that is refused is no error: " + words);
  }
  return true;
}

// Of the GPU that is called "first": other ones every turn.
Tables other_tables(int turn) {
  constexpr int kBlock = int(Tier::block), kWarp = int(Tier::warp), kColumns = int(Tier::columns);
  const std::vector<Entry> odd = {{kAnyLength, kUseWriteTable, 0, 0, 1, 0}};
  const std::vector<Entry> rows = {{64, kWarp, turn % 2 ? 8 : 32, 0, 1, 0},
                                   {kAnyLength, kBlock, 0, 8 + turn * 4 % 32, 1, 0}};
  const std::vector<Entry> few = {{256, kUseWriteTable, 0, 0, 1, 0}, {kAnyLength, kBlock, 0, 12 + turn * 4 % 20, 1, 0}};
  const std::vector<Entry> columns = {{64, kColumns, turn % 2 ? 128 : 256, 8, 8, 0},
                                      {kAnyLength, kColumns, 128, 8 + turn % 3 * 4, 8, 0}};
  return {"a test's", rows, rows, rows, rows, odd, odd, few, few, columns, columns, columns, columns};
}

// Mostly problems that come often now, of more shapes than the cache holds, at one of few addresses. Only one thread
// replaces tables.
bool run_seed(int seed, int calls, Looked* looked) {
  for (int i = 0; i < calls; ++i) {
    const int number = seed * calls + i;
    draw.seed(unsigned(number));
    if (i % 50 == 0) thread_invariant = int(below(3)) - 1;
    if (seed == 0 && i % 400 == 399) set_tables("first", other_tables(i / 400));
    to_cooperative = Result(one_of({0, 0, 0, 0, kTooLarge, kNotSupported, 700}));
    to_others = Result(one_of({0, 0, 0, 0, 0, 0, 1, kTooLarge}));
    void* const stream = reinterpret_cast<void*>(uintptr_t(1 + below(5)));
    const int device = int(below(3));
    const unsigned place_of_it = unsigned(below(2));
    draw.seed(unsigned(below(4) ? number / 200 * 2 + below(2) : below(64)));
    Problem problem = draw_problem(false);
    if (i % 1000 == 0)  // many long rows are seldom drawn
      problem =
          Problem::forward(contiguous_layout(64, 1000000, false), Function::softmax, DType::float32, DType::float32);
    draw.seed(place_of_it);
    place(&problem);
    // A row that is shorter than the vectors of its batch-invariant plan may not have that plan forced.
    if (batch_invariant() && problem.layout.n < 8) continue;
    if (!is_right(problem, device, stream, looked)) return std::printf("call %d of seed %d\n", i, seed), false;
  }
  return true;
}

// Every size, stride, type, function and address modulo 16 counts in the key of a launch, by itself, and so do the
// device, batch invariance, the tables and what the plan of scores depends on.
bool each_counts(const Problem& problem) {
  const LaunchKey own(problem, 0, false, 1);
  bool right = true;
  const auto expect = [&](bool counts, const std::string& what, const LaunchKey& changed) {
    if (counts == (own == changed)) right = complain((counts ? "does not count: " : "counts: ") + what);
  };
  expect(true, "device 1", LaunchKey(problem, 1, false, 1));
  expect(true, "device 2", LaunchKey(problem, 2, false, 1));
  expect(true, "batch invariance", LaunchKey(problem, 0, true, 1));
  expect(true, "tables", LaunchKey(problem, 0, false, 2));
  for (const unsigned scores : {1u, 2u, 4u}) expect(true, "scores", LaunchKey(problem, 0, false, 1, scores));
  const auto change = [&](bool counts, const std::string& what, auto&& make) {
    Problem changed = problem;
    make(changed);
    expect(counts, what, LaunchKey(changed, 0, false, 1));
  };
  change(true, "direction",
         [](Problem& p) { p.direction = p.is_backward() ? Direction::forward : Direction::backward; });
  change(true, "function", [](Problem& p) { p.function = Function(int(p.function) ^ 1); });
  const int types[] = {problem.is_backward() ? int(kDx) : int(kX), problem.is_backward() ? int(kGrad) : int(kY)};
  for (const int t : types) change(true, "a type", [&](Problem& p) { p.tensors[t].type = DType(int(p.type(t)) ^ 1); });
  for (int t = 0; t < kBackwardTensors; ++t) {
    for (const int64_t bytes : {4, 8, 12, 16, 4096}) {
      change(bytes < 16 && t < problem.count_tensors(), "an address",
             [&](Problem& p) { p.tensors[t].data = reinterpret_cast<void*>(p.address(t) + uint64_t(bytes)); });
    }
  }
  for (const auto dims : {&Layout::outer, &Layout::reduced}) {
    for (int i = 0; i < (problem.layout.*dims).count * int(sizeof(Dim) / sizeof(int64_t)); ++i)
      change(true, "a size or stride", [&](Problem& p) { ++reinterpret_cast<int64_t*>((p.layout.*dims).dims)[i]; });
  }
  return right;
}

// A kernel has as many blocks at a time as its threads leave room for, which differ where their plans do.
bool threads_count() {
  const int64_t sizes[] = {4096, 2, 1024}, strides[] = {2048, 1024, 1};
  const bool reduce[] = {false, true, false};
  const Problem call = Problem::forward(make_forward_layout(3, sizes, strides, strides, reduce, false),
                                        Function::softmax, DType::float32, DType::float32);
  for (const int across : {256, 160}) {
    const CudaPlan plan = {Tier::columns, across, 1, 8, 4, 1, kPrefetch, VecAccess::aligned};
    run(call, 0, nullptr, &plan);
    if (seen[0].config[0] != unsigned(2048 / across * kTuned)) return complain("places of other threads");
  }
  return true;
}

// The nanoseconds of one problem's launch again and again, which is neither planned nor loaded anew.
double time_repeated(const Problem& problem) {
  constexpr int kTurns = 20, kLaunches = 20000;
  cached_launch(problem, 0);
  records = false, planned = 0;
  const int before = loaded;
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kLaunches; ++i) start(cached_launch(problem, 0), problem, nullptr, nullptr);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count() / kLaunches);
  }
  records = true;
  return planned || loaded != before ? 0 : best;
}

}  // namespace

int main(int, char** arguments) {
  constexpr int kThreads = 4;
  const int calls = std::atoi(arguments[1]);
  draw.seed(7);
  for (int i = 0; i < 300; ++i) {
    if (!each_counts(draw_problem(false))) return 1;
  }
  if (!threads_count()) return 1;
  Looked looked[1 + kThreads];
  std::atomic<bool> right{run_seed(0, calls, &looked[0])};
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) threads.emplace_back([&, t] { right = run_seed(t, calls, &looked[t]) && right; });
  for (std::thread& thread : threads) thread.join();
  if (!right) return 1;
  Looked all;
  for (const Looked& of : looked) all.found += of.found, all.made += of.made, all.tiers |= of.tiers;
  // With other tables a problem has another kernel.
  thread_invariant = 0;
  int64_t sizes[] = {128, 64}, strides[] = {64, 1}, none[] = {0, 0};
  const int64_t* const each[] = {strides, strides, strides, none};
  const bool reduce[] = {false, true};
  const Problem forward = Problem::forward(contiguous_layout(128, 64, false), Function::softmax, DType::float32,
                                           DType::float32, sizes, sizes);
  const Problem backward = Problem::backward(make_backward_layout(2, sizes, each, reduce, false), Function::softmax,
                                             DType::float32, DType::float32, sizes, sizes, sizes);
  set_tables("first", other_tables(0));
  const Handle first = cached_launch(forward, 0).kernel;
  const double forward_ns = time_repeated(forward), backward_ns = time_repeated(backward);
  if (cached_launch(forward, 0).kernel != first) return complain("another kernel"), 1;
  set_tables("first", other_tables(1));
  if (cached_launch(forward, 0).kernel == first) return complain("the kernel of the old tables"), 1;
  std::printf("%d %d %d %.1f %.1f", all.found, all.made, __builtin_popcount(all.tiers), forward_ns, backward_ns);
}
