// segments.cpp: from a problem of segments to the launch of its kernel.
#include <algorithm>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 256;      // of a block
constexpr int64_t kWaves = 16;     // blocks of a multiprocessor, which take rows in turn
constexpr int kHeadsOfChunk = 64;  // of a tile, where tiles are not one piece of memory
constexpr int kLeastItems = 16;    // of a tile that is one
constexpr int kItemsPerLane = 3;   // of a row of mean length

using P = SegmentProblem;

// The tensors of the problem that the kernel's are.
struct Roles {
  int of[kSegmentTensors] = {-1, -1, -1, -1, -1};

  explicit Roles(const P& problem) {
    const bool sums = problem.is_backward() && !problem.is_reduction();
    of[kItemFirst] = sums ? P::kOfY : P::kOfX;
    of[kItemSecond] = sums ? P::kOfGrad : problem.has(P::kOfBias) ? P::kOfBias : -1;
    if (problem.is_backward() && !sums) of[kRowFirst] = P::kOfY, of[kRowSecond] = P::kOfGrad;
    if (problem.is_backward() || !problem.is_reduction())
      of[kItemResult] = problem.result();
    else
      of[kRowFirst] = P::kOfY;
  }
  bool has(int tensor) const { return of[tensor] >= 0; }
};

}  // namespace

bool can_launch_segments(const P& problem) { return problem.inner.count <= kSegmentDims; }

SegmentLaunch make_segment_launch(const P& problem, int device) {
  const Gpu& gpu = device_info(device);
  const Roles roles(problem);
  SegmentLaunch launch = {};
  SegmentMap& map = launch.map;
  int widest = 1;  // bytes of an element
  for (int t = 0; t < kSegmentTensors; ++t) {
    if (!roles.has(t)) continue;
    map.data[t] = problem.data[roles.of[t]], map.steps[t] = problem.steps[roles.of[t]];
    for (int d = 0; d < problem.inner.count; ++d) map.strides[t][d] = problem.inner.dims[d].strides[roles.of[t]];
    if (t <= kItemResult) widest = std::max(widest, size_of(problem.types[roles.of[t]]));
  }
  map.dims = problem.inner.count;
  for (int d = 0; d < map.dims; ++d) map.sizes[d] = problem.inner.dims[d].size;
  map.plane = problem.plane, map.items = problem.items, map.segments = problem.segments;
  map.offsets = problem.offsets, map.order = problem.order, map.has_wide_indices = problem.has_wide_indices;
  map.columns = problem.columns, map.factor = problem.factor, map.factor_f32 = float(problem.factor);

  const bool sums = problem.is_backward() && !problem.is_reduction();
  const bool is_pointwise = problem.is_backward() && !sums;
  KernelKind kind = {problem.function, problem.is_backward() ? Pass::backward : Pass::forward,
                     problem.types[roles.of[kItemFirst]], problem.types[problem.result()]};
  kind.segment_parts = kSegments;
  if (problem.has(P::kOfBias)) kind.segment_parts |= kSegmentBias, kind.bias = problem.types[P::kOfBias];
  launch.groups = 1;
  if (batch_invariant() && !is_pointwise) {
    kind.segment_parts |= kSegmentInvariant;
    launch.threads = kThreads;
    launch.kernel = find_or_load(kind, {Tier::warp, 32, kThreads / 32, 1, 1, 1, 0, VecAccess::aligned}, device);
    const int64_t blocks = ceil_div(problem.segments * problem.columns, kThreads / 32);
    launch.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kWaves * gpu.sm_count));
    map.steps_run = 1;
    return launch;
  }

  // Tiles.
  launch.threads = problem.columns > 16 ? 2 * kThreads : kThreads;
  const int per_thread = (sums ? 8 : 16) / (problem.accumulator() == DType::float64 ? 2 : 1);
  const int elements = int(launch.threads) * per_thread;
  int vec_size = 16 / widest;
  bool is_flat = !map.order && map.dims <= 1 && map.columns <= std::min(kSegmentHeads, elements / kLeastItems);
  for (int t = 0; t <= kItemResult; ++t) {
    if (!roles.has(t)) continue;
    is_flat &= map.steps[t] == map.columns && (map.dims == 0 || map.strides[t][0] == 1) &&
               uint64_t(map.data[t]) % (vec_size * size_of(problem.types[roles.of[t]])) == 0;
  }
  if (!is_flat) vec_size = 1;
  map.heads = int(is_flat ? map.columns : std::min<int64_t>(map.columns, kHeadsOfChunk));
  map.chunks = int(ceil_div(map.columns, map.heads)), map.by_heads = divider_of(map.heads);
  map.tile_items = elements / map.heads;
  if (is_flat) map.tile_items = map.tile_items / 8 * 8;
  map.tiles = std::max<int64_t>(1, ceil_div(map.items, map.tile_items));
  while (1 << map.head_lanes_log2 < std::min(map.heads, 32)) ++map.head_lanes_log2;
  const int64_t mean = map.items / std::max<int64_t>(1, map.segments);
  int row_lanes = 1;
  while (row_lanes << map.head_lanes_log2 < 32 && row_lanes * kItemsPerLane < mean) row_lanes *= 2;

  if (is_flat) kind.segment_parts |= kSegmentFlat;
  if (map.columns == 1) kind.segment_parts |= kSegmentSingle;
  const CudaPlan as = {Tier::warp, row_lanes,         int(launch.threads) / row_lanes, per_thread, vec_size, 1,
                       0,          VecAccess::aligned};
  launch.kernel = find_or_load(kind, as, device);
  launch.shared = unsigned(elements * size_of(problem.accumulator()) * (sums ? 2 : 1));

  // Blocks that run at a time wait for each other's messages.
  const int64_t resident = count_resident(launch, gpu), at_a_time = resident / map.chunks;
  map.steps_run = map.tiles == 1 || is_pointwise ? 1 : gpu.cooperative && at_a_time > 1 ? 3 : 2;
  launch.blocks = unsigned(map.chunks * std::clamp<int64_t>(at_a_time, 1, map.tiles));
  map.most_tiles = map.steps_run == 3 ? int(launch.blocks) / map.chunks : 0;
  if (map.tiles > 1 && !is_pointwise)
    launch.message_bytes = map.tiles * map.chunks * 2 * map.heads * message_size(kind.in, kind.out);
  return launch;
}

void start_segments(SegmentLaunch launch, void* messages, void* stream) {
  void* arguments[] = {&launch.map};
  launch.map.messages = messages;
  const bool is_cooperative = launch.map.steps_run == 3;
  if (is_cooperative && start_kernel(launch, arguments, stream)) return;
  launch.message_bytes = 0;  // not cooperative
  if (is_cooperative) launch.map.steps_run = 2, launch.map.most_tiles = 0;
  const bool in_two_steps = launch.map.steps_run == 2;
  launch.map.steps_run = 1;
  start_kernel(launch, arguments, stream);
  if (!in_two_steps) return;
  launch.map.steps_run = 2;
  start_kernel(launch, arguments, stream);
}

}  // namespace onepass::cuda
