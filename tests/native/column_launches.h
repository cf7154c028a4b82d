// column_launches.h: what the programs on launches over columns share: a call served as the engine serves it, what the
// driver was given, and what it should have been given.
#pragma once

#include <utility>

#include "plan/columns.h"
#include "cuda/host/column_launch.h"
#include "fake_driver.h"
#include "core/batch_invariant.h"

namespace {

thread_local std::vector<Seen> seen;  // launches since the last call
thread_local Result answer = 0;       // of the driver to a cooperative launch
thread_local Result otherwise = 0;    // and to others

void add(const TileDims& dims, std::vector<int64_t>* numbers) {
  numbers->push_back(dims.count);
  numbers->insert(numbers->end(), dims.sizes, dims.sizes + kTileDims);
  for (const auto& steps : dims.steps) numbers->insert(numbers->end(), steps, steps + kTileDims);
}

// All but the address of the messages.
std::vector<int64_t> numbers_of(const Tiles& t) {
  std::vector<int64_t> numbers = {t.n,     t.inner,  t.side,  t.tall,   t.plane, t.across, t.down,   t.pitch,
                                  t.parts, t.stride, t.group, t.narrow, t.shelf, t.turns,  t.waiting};
  for (const Divider& by : {t.by_side, t.by_line}) numbers.insert(numbers.end(), {by.multiplier, by.shift});
  for (const Counted& count : {t.there, t.whole}) numbers.insert(numbers.end(), {count.all, count.rest});
  numbers.insert(numbers.end(), t.jump, t.jump + kTileTensors);
  numbers.insert(numbers.end(), t.steps, t.steps + kTileTensors);
  add(t.outer, &numbers), add(t.reduced, &numbers);
  return numbers;
}

// Where blocks tell each other things; it begins somewhere else every time.
char* room() {
  static char rooms[4096];
  static thread_local size_t turn = 0;
  return rooms + 16 * (++turn % 64);
}

// As the engine does it; `seen` has its launches then, the last of which the driver took.
template <class AnyCall>
void served(const AnyCall& call, int device, void* stream, const CudaPlan* forced = nullptr) {
  seen.clear();
  run_columns(call, device, forced,
              [&](ColumnLaunch made) { return launch(made, call, made.parts ? room() : nullptr, stream); });
}

template <class AnyCall>
CudaPlan plan_of(const AnyCall& call, int device, bool cooperative = true) {
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  const ColumnView view = column_view(call);
  return column_planner(view, gpu, call).plan();
}

std::vector<const void*> addresses_of(const Call& call) { return {call.x, call.y}; }
std::vector<const void*> addresses_of(const BackwardCall& call) { return {call.dx, call.saved, call.grad, call.lse}; }

// The kernel of a plan, by the words that it is made from.
std::string words_for(const CudaPlan& plan, const Call& call, int device) {
  return cubin(source_of(Pass::forward, call.function, plan.tier),
               defines_of(call.function, call.x_type, call.y_type, plan), device_info(device).compute, nullptr);
}
std::string words_for(const CudaPlan& plan, const BackwardCall& call, int device) {
  const Pass pass = is_even(call) ? Pass::backward_broadcast : Pass::backward;
  return cubin(source_of(pass, call.function, plan.tier),
               defines_of(call.function, call.type, call.dx_type, plan, pass), device_info(device).compute, nullptr);
}

bool merges(const Call&) { return true; }
bool merges(const BackwardCall& call) { return call.function != Function::logsumexp; }

// What is wrong with a launch that should be the one by this plan; empty where nothing is.
template <class AnyCall>
std::string mistake(const Seen& got, const CudaPlan& plan, const AnyCall& call, int device, void* stream) {
  std::vector<Seen> others;
  others.swap(seen);
  const Result before = std::exchange(answer, 0);
  served(call, device, stream, &plan);  // nothing is remembered of a plan that is given
  answer = before;
  others.swap(seen);
  const Seen& anew = others.back();
  if (words_of(got.kernel) != words_for(plan, call, device) || got.kernel != anew.kernel) return "another kernel";
  if (got.numbers != anew.numbers) return "other numbers";
  if (got.addresses != addresses_of(call)) return "other addresses";
  if (got.stream != stream) return "another stream";
  if (got.cooperative != (plan.in_grid() && merges(call))) return "a cooperative launch, or none";
  if ((got.messages != nullptr) != got.cooperative) return "room for messages, or none";
  if (got.cluster() != (plan.tier == Tier::columns && plan.split > 1 ? plan.split : 0)) return "another cluster";
  if (got.threads() != plan.threads()) return "another block";
  if (got.grid_x() < 1 || got.grid_x() % plan.split || got.grid_y() < 1) return "another grid";
  return "";
}

}  // namespace

Result onepass::cuda::taken(const LaunchConfig& config, Handle kernel, void** arguments) {
  Seen now(config, kernel);
  const int addresses = words_of(kernel).compare(0, 16, "columns_backward") ? 2 : 4;
  for (int i = 0; i < addresses; ++i) now.addresses.push_back(*static_cast<void**>(arguments[i]));
  const Tiles& tiles = *static_cast<const Tiles*>(arguments[addresses]);
  const std::vector<int64_t> numbers = numbers_of(tiles);
  now.numbers.insert(now.numbers.end(), numbers.begin(), numbers.end());
  now.messages = tiles.messages;
  seen.push_back(now);
  return now.cooperative ? answer : otherwise;
}
