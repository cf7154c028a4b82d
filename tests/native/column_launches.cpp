// The launches over columns that a thread caches are those that it would make anew, argument by argument: over problems
// drawn from more views than the cache holds, with batch invariance switched and tables replaced between them, and on
// several threads; then with one thing changed at a time. Prints how many launches were found and how many were made;
// exits with 1 at the first that is wrong.
#include <cstdio>
#include <functional>
#include <thread>

#include "column_launches.h"
#include "columns_draw.h"
#include "cuda/host/launch_cache.h"

namespace {

struct Looked {
  int found = 0, made = 0;
};

bool wrong(const std::string& what) { return std::printf("%s\n", what.c_str()), false; }

bool is_right(const Problem& call, int device, void* stream, Looked* looked) {
  planned = 0;
  run(call, device, stream);
  ++(planned ? looked->made : looked->found);
  const CudaPlan plan = plan_of(call, device), instead = plan_of(call, device, false);
  const bool refused = answer && plan.in_grid() && merges(call);
  if (seen.size() != (refused ? 2 : 1)) return wrong("another number of launches");
  std::string what = mistake(seen[0], plan, call, device, stream);
  if (refused && what.empty()) what = mistake(seen[1], instead, call, device, stream);
  return what.empty() || wrong(what + ": " + words_of(seen.back().kernel));
}

// A view by its number, mostly one that comes often now, on one of few devices and at one of few addresses, with a
// driver that may refuse cooperative launches.
bool is_right_view(bool forward, unsigned often, Looked* looked) {
  answer = below(4) ? 0 : below(2) ? kTooLarge : kNotSupported;
  void* const stream = reinterpret_cast<void*>(uintptr_t(1 + below(5)));
  const unsigned view = unsigned(below(4) ? often + below(2) : below(64)), place_of_it = unsigned(below(2));
  Problem call = {};
  draw.seed(view);
  if (!(forward ? draw_forward : draw_backward)(below(2), &call)) return true;
  draw.seed(place_of_it);
  place(&call);
  return is_right(call, int(below(3)), stream, looked);
}

bool run_seed(unsigned seed, bool sets, int calls, Looked* looked) {
  for (int i = 0; i < calls; ++i) {
    const unsigned number = seed * unsigned(calls) + unsigned(i), often = number / 200 * 2;
    draw.seed(number);
    if (i % 50 == 0) thread_invariant = int(below(3)) - 1;
    if (sets && i % 400 == 399) set_tables("first", other_tables(i / 400));
    if (!is_right_view(below(2), often, looked)) {
      return std::printf("call %d of seed %u\n", i, seed), false;
    }
  }
  return true;
}

// One thing at a time
// ---------------------------------------------------------------------------------------------------

struct Asked {
  Problem call = {};
  int device = 0;
  bool invariant = false, tables = false;
};

struct Change {
  std::string name;
  std::function<void(Asked&)> make;
};

template <class Address>
void move(Address* address, int64_t bytes) {
  *address = reinterpret_cast<Address>(uintptr_t(*address) + uintptr_t(bytes));
}

// Whether a launch was made for it, and right.
bool is_new(const Asked& asked, bool* right) {
  thread_invariant = asked.invariant;
  if (asked.tables) set_tables("first", other_tables(0));
  planned = 0;
  run(asked.call, asked.device, nullptr);
  const bool made = planned;
  const CudaPlan plan = plan_of(asked.call, asked.device);
  const std::string what = mistake(seen.back(), plan, asked.call, asked.device, nullptr);
  if (!what.empty()) *right = wrong(what);
  return made;
}

// What is in the key, each by itself, and what is not.
bool each_counts(const Problem& call, std::vector<Change> that_count, std::vector<Change> others) {
  using Of = Asked;
  that_count.insert(that_count.end(), {{"device 1", [](Of& of) { of.device = 1; }},
                                       {"device 2", [](Of& of) { of.device = 2; }},
                                       {"batch invariance", [](Of& of) { of.invariant = true; }},
                                       {"tables", [](Of& of) { of.tables = true; }}});
  for (const bool reduced : {false, true}) {
    const auto& group = reduced ? call.layout.reduced : call.layout.outer;
    constexpr int kNumbers = int(sizeof(Dim) / sizeof(int64_t));  // a size, and the strides of all tensors
    for (int i = 0; i < group.count * kNumbers; ++i) {
      const auto add = [=](Of& of) {
        auto& changed = reduced ? of.call.layout.reduced : of.call.layout.outer;
        ++reinterpret_cast<int64_t*>(changed.dims)[i];
      };
      that_count.push_back({(reduced ? "reduced " : "outer ") + std::to_string(i), add});
    }
  }
  bool right = true;
  for (const auto& change : that_count) {
    Of asked = {call};
    is_new(asked, &right);  // the change before may have put it out
    if (is_new(asked, &right)) right = wrong("not cached, before " + change.name);
    change.make(asked);
    if (!is_new(asked, &right)) right = wrong("does not count: " + change.name);
  }
  Of asked = {call};
  is_new(asked, &right);
  for (const auto& change : others) {
    change.make(asked);
    if (is_new(asked, &right)) right = wrong("counts: " + change.name);
  }
  return right;
}

bool each_counts() {
  // 6 x 20 x 12 over the middle, with something between all dims.
  const auto place = [](int64_t at) { return reinterpret_cast<char*>(at << 16); };
  const DType f32 = DType::float32, f64 = DType::float64;
  const int64_t sizes[] = {6, 20, 12}, x[] = {400, 16, 1}, y[] = {640, 24, 1}, lse[] = {12, 0, 1};
  const bool reduce[] = {false, true, false};
  const Problem call = Problem::forward(make_forward_layout(3, sizes, x, y, reduce, false), Function::softmax, f32, f32,
                                        place(1), place(2));
  using Of = Asked;
  bool right = each_counts(call,
                           {{"function", [](Of& of) { of.call.function = Function::softmin; }},
                            {"x's type", [=](Of& of) { of.call.tensors[kX].type = f64; }},
                            {"y's type", [=](Of& of) { of.call.tensors[kY].type = f64; }},
                            {"x's place", [](Of& of) { move(&of.call.tensors[kX].data, 4); }},
                            {"y's place", [](Of& of) { move(&of.call.tensors[kY].data, 8); }}},
                           {{"x", [](Of& of) { move(&of.call.tensors[kX].data, 16); }},
                            {"y", [](Of& of) { move(&of.call.tensors[kY].data, 4096); }}});
  for (const bool is_lse : {false, true}) {
    const int64_t* const each[] = {x, y, is_lse ? lse : x, lse};
    const Problem back = Problem::backward(make_backward_layout(3, sizes, each, reduce, is_lse),
                                           is_lse ? Function::logsumexp : Function::softmax, f32, f32, place(1),
                                           place(2), place(3), is_lse ? place(4) : nullptr);
    std::vector<Change> that_count = {{"type", [=](Of& of) { of.call.tensors[kGrad].type = f64; }},
                                      {"dx's type", [=](Of& of) { of.call.tensors[kDx].type = f64; }},
                                      {"dx's place", [](Of& of) { move(&of.call.tensors[kDx].data, 4); }},
                                      {"saved's place", [](Of& of) { move(&of.call.tensors[kSaved].data, 8); }},
                                      {"grad's place", [](Of& of) { move(&of.call.tensors[kGrad].data, 12); }}};
    if (!is_lse) that_count.push_back({"function", [](Of& of) { of.call.function = Function::softmin; }});
    right &= each_counts(back, that_count,
                         {{"dx", [](Of& of) { move(&of.call.tensors[kDx].data, 32); }},
                          {"saved", [](Of& of) { move(&of.call.tensors[kSaved].data, 16); }},
                          {"grad", [](Of& of) { move(&of.call.tensors[kGrad].data, 64); }},
                          {"lse", [=](Of& of) { is_lse ? move(&of.call.tensors[kLse].data, 4) : void(); }}});
  }
  return right;
}

// A call may have the dims of a gradient.
bool passes_count() {
  Layout layout;
  layout.outer.count = 2, layout.reduced.count = 1;
  layout.outer.dims[0] = {20, {19, 18, 17, 16}}, layout.outer.dims[1] = {15, {14, 13, 12, 11}};
  layout.reduced.dims[0] = {10, {9, 8, 7, 6}};
  const Problem back = Problem::backward(layout, Function::softmax, DType::float32, DType::float32);
  const Problem call = Problem::forward(layout, Function::softmax, DType::float32, DType::float32);
  const LaunchKey forward(call, 0, false, 0), backward(back, 0, false, 0);
  return !(forward == backward) && !(backward == forward) ? true : wrong("a call has a gradient's key");
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
    if (seen[0].grid_x() != 2048 / across * kTuned) return wrong("places of other threads");
  }
  return true;
}

}  // namespace

int main() {
  constexpr int kCalls = 20000, kThreads = 4;
  if (!passes_count() || !threads_count() || !each_counts()) return 1;
  Looked looked[1 + kThreads];
  std::atomic<bool> right{run_seed(0, true, kCalls, &looked[0])};
  std::vector<std::thread> threads;
  for (unsigned t = 1; t <= kThreads; ++t) {
    threads.emplace_back([&, t] { right = run_seed(t, false, kCalls, &looked[t]) && right; });
  }
  for (std::thread& thread : threads) thread.join();
  if (!right) return 1;
  Looked all;
  for (const Looked& of : looked) all.found += of.found, all.made += of.made;
  std::printf("%d %d", all.found, all.made);
}
