// column_launches.h: what the programs on launches over columns share: a problem launched as the engine launches it,
// what the driver was given, and what it should have been given.
#pragma once

#include <utility>

#include "core/batch_invariant.h"
#include "fake_driver.h"
#include "plan/columns.h"

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
  std::vector<int64_t> numbers = {t.n,
                                  t.inner,
                                  t.tiles_per_slice,
                                  t.slices,
                                  t.plane_stride,
                                  t.threads_x,
                                  t.threads_y,
                                  t.tile_cols,
                                  t.partials,
                                  t.partial_stride,
                                  t.merge_threads,
                                  t.is_narrow,
                                  t.smem_vecs,
                                  t.vecs_per_thread_max,
                                  t.smem_vecs_bytes};
  for (const FastDivisor& by : {t.by_tiles_per_slice, t.by_line})
    numbers.insert(numbers.end(), {by.multiplier, by.shift});
  for (const VecCount& count : {t.existing, t.full}) numbers.insert(numbers.end(), {count.all, count.rest});
  numbers.insert(numbers.end(), t.vec_strides, t.vec_strides + kTileTensors);
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

// Launches as the engine does; `seen` has the launches then, the last of which the driver took.
void run(const Problem& problem, int device, void* stream, const CudaPlan* forced = nullptr) {
  seen.clear();
  launch_with_fallback(problem, device, forced, [&](const Launch& launch) {
    return start(launch, problem, launch.message_bytes ? room() : nullptr, stream);
  });
}

CudaPlan plan_of(const Problem& problem, int device, bool cooperative = true) {
  Gpu gpu = device_info(device);
  gpu.cooperative = gpu.cooperative && cooperative;
  const ColumnView view = column_view(problem);
  return column_planner(view, gpu, problem).plan();
}

std::vector<const void*> addresses_of(const Problem& problem) {
  std::vector<const void*> addresses;
  const int count = problem.direction == Direction::forward ? int(kForwardTensors) : int(kBackwardTensors);
  for (int t = 0; t < count; ++t) addresses.push_back(problem.tensors[t].data);
  return addresses;
}

Pass pass_of(const Problem& problem) {
  if (!problem.is_backward()) return Pass::forward;
  return grad_is_broadcast_in_tile(problem) ? Pass::backward_broadcast : Pass::backward;
}

// The kernel of a plan, by the words that it is made from.
std::string words_for(const CudaPlan& plan, const Problem& problem, int device) {
  const KernelKind kind = {problem.function, pass_of(problem), problem.in_type(), problem.out_type()};
  return cubin(source_of(kind, plan.tier), defines_of(kind, plan), device_info(device).arch, nullptr);
}

bool merges(const Problem& problem) { return problem.direction == Direction::forward || !problem.is_reduction(); }

// What is wrong with a launch that should be the one by this plan; empty where nothing is.
std::string mistake(const Seen& got, const CudaPlan& plan, const Problem& problem, int device, void* stream) {
  std::vector<Seen> others;
  others.swap(seen);
  const Result before = std::exchange(answer, 0);
  run(problem, device, stream, &plan);  // the launch of a plan that is given is not cached
  answer = before;
  others.swap(seen);
  const Seen& anew = others.back();
  if (words_of(got.kernel) != words_for(plan, problem, device) || got.kernel != anew.kernel) return "another kernel";
  if (got.numbers != anew.numbers) return "other numbers";
  if (got.addresses != addresses_of(problem)) return "other addresses";
  if (got.stream != stream) return "another stream";
  if (got.cooperative != (plan.in_grid() && merges(problem))) return "a cooperative launch, or none";
  if ((got.messages != nullptr) != got.cooperative) return "room for messages, or none";
  if (got.cluster() != (plan.tier == Tier::columns && plan.blocks_per_row > 1 ? plan.blocks_per_row : 0))
    return "another cluster";
  if (got.threads() != plan.threads()) return "another block";
  if (got.grid_x() < 1 || got.grid_x() % plan.blocks_per_row || got.grid_y() < 1) return "another grid";
  return "";
}

}  // namespace

Result onepass::cuda::taken(const LaunchConfig& config, Handle kernel, void** arguments) {
  Seen now(config, kernel);
  void** const tensors = static_cast<void**>(arguments[0]);
  now.addresses.assign(tensors, tensors + (words_of(kernel).find("IS_BACKWARD=1") == std::string::npos ? 2 : 4));
  const Tiles& tiles = *static_cast<const Tiles*>(arguments[1]);
  const std::vector<int64_t> numbers = numbers_of(tiles);
  now.numbers.insert(now.numbers.end(), numbers.begin(), numbers.end());
  now.messages = tiles.messages;
  seen.push_back(now);
  return now.cooperative ? answer : otherwise;
}
