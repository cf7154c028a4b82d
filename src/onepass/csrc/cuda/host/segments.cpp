// segments.cpp: from a problem of segments to the launch of its kernel.
#include <algorithm>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 32 * kSegmentWarps, kRowThreads = 32 * kSegmentRowWarps;  // of a block
constexpr int64_t kWaves = 16;               // times kThreads threads of a multiprocessor, which take rows in turn
constexpr int kMostVec = 4, kVecBytes = 16;  // heads of a lane
// A block takes a row of which a warp could keep no more than a part of as many; where there are heads, a row of more
// items than so many for each lane of a warp, or for all of them. It takes no row of more items than some for each lane
// of a warp: longer ones are cut into tiles, one for each block. A sweep has chosen them (H200, 2026-11-27).
constexpr int kWarpChunks = 6, kHeadItems = 128, kMostHeadItems = 1024;
constexpr int kLeastLaneItems = 32, kMostLaneItems = 2048, kWarpsPerSm = 32;
constexpr double kMostShares = 10;

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
  launch.groups = launch.rows.groups = 1;
  if (batch_invariant() && !is_pointwise) {
    kind.segment_parts |= kSegmentInvariant;
    launch.rows.threads = kThreads;
    launch.rows.kernel = find_or_load(kind, {Tier::warp, 32, kThreads / 32, 1, 1, 1, 0, VecAccess::aligned}, device);
    const int64_t blocks = ceil_div(problem.segments * problem.columns, kThreads / 32);
    launch.rows.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kWaves * gpu.sm_count));
    return launch;
  }

  // Vectors of heads, and lanes.
  launch.threads = kThreads, launch.rows.threads = kRowThreads;
  int vec_size = std::min(kMostVec, kVecBytes / widest);
  const auto fits = [&](int heads) {
    bool does = map.columns % heads == 0 && map.dims == 1;
    for (int t = 0; t <= kItemResult && does; ++t) {
      if (!roles.has(t)) continue;
      does &= map.strides[t][0] == 1 && map.steps[t] % heads == 0 &&
              uint64_t(map.data[t]) % (heads * size_of(problem.types[roles.of[t]])) == 0;
    }
    return does;
  };
  while (vec_size > 1 && !fits(vec_size)) vec_size /= 2;
  const int64_t vectors = map.columns / vec_size;
  while (1 << map.head_lanes_log2 < std::min<int64_t>(vectors, 32)) ++map.head_lanes_log2;
  map.chunks = int(ceil_div(vectors, 1 << map.head_lanes_log2));
  const int item_lanes = 32 >> map.head_lanes_log2;
  // Items of a lane in registers; the lanes of a short row have room for some more than the mean number.
  const int divisor = (problem.is_backward() ? 2 : 1) * (problem.accumulator() == DType::float64 ? 2 : 1);
  const int kept = (vec_size > 1 ? 16 / vec_size : 8) / divisor;
  const double room = vec_size == 1 && !sums ? 3 : 1.5;
  const double mean = double(map.items) / double(std::max<int64_t>(1, map.segments));
  int row_lanes = 1;
  while (row_lanes < item_lanes && row_lanes * kept < room * mean) row_lanes *= 2;
  // No block takes a row that is some times the fair share that a warp has of all items.
  const int64_t share = map.items * map.chunks / (gpu.sm_count * kWarpsPerSm) / item_lanes;
  map.tile_items =
      item_lanes * std::clamp<int64_t>(int64_t(kMostShares * double(share)), kLeastLaneItems, kMostLaneItems);
  map.tiles = std::max<int64_t>(1, ceil_div(map.items, map.tile_items));
  map.warp_items = int(map.tile_items);
  const int each = sums ? kHeadItems / 4 : kHeadItems;
  const int most = map.columns == 1 ? kWarpChunks * kept * item_lanes : std::min(each * item_lanes, kMostHeadItems);
  if (map.tiles > 1) map.warp_items = std::min(map.warp_items, most);

  bool is_dense = map.columns == 1;
  for (int t = 0; t <= kItemResult; ++t) is_dense &= !roles.has(t) || map.steps[t] == 1;
  if (is_dense) kind.segment_parts |= kSegmentSingle;
  if (map.order) kind.segment_parts |= kSegmentOrder;
  CudaPlan as = {Tier::warp, row_lanes, kRowThreads / row_lanes, kept * vec_size, vec_size, 1, 0, VecAccess::aligned};
  launch.rows.kernel = find_or_load(kind, as, device);
  const int64_t needed = ceil_div(problem.segments * row_lanes, item_lanes * kSegmentRowWarps);
  const int64_t most_blocks = kWaves * gpu.sm_count * kThreads / kRowThreads / map.chunks;
  launch.rows.blocks = unsigned(map.chunks * std::clamp<int64_t>(most_blocks, 1, std::max<int64_t>(1, needed)));
  if (map.tiles == 1) return launch;

  // Blocks that run at a time wait for each other's messages.
  kind.segment_parts |= kSegmentLong;
  as.threads_per_row = 1, as.rows_per_block = kThreads;
  launch.kernel = find_or_load(kind, as, device);
  const int64_t at_a_time = std::max<int64_t>(1, count_resident(launch, gpu) / map.chunks);
  launch.blocks = unsigned(map.chunks * std::min<int64_t>(at_a_time, map.tiles));
  map.steps_run = is_pointwise ? 1 : gpu.cooperative && at_a_time > 1 ? 3 : 2;
  map.most_tiles = is_pointwise ? 0x7fffffff : map.steps_run == 3 ? int(launch.blocks) / map.chunks : 0;
  launch.message_bytes = ceil_div(launch.rows.blocks, 16) * 16;
  map.row_blocks = int(launch.rows.blocks);
  if (!is_pointwise)
    launch.message_bytes +=
        map.tiles * map.chunks * (2 * vec_size << map.head_lanes_log2) * message_size(kind.in, kind.out);
  return launch;
}

void start_segments(SegmentLaunch launch, void* messages, void* stream) {
  void* arguments[] = {&launch.map};
  launch.map.has_long = messages;
  launch.map.messages = static_cast<char*>(messages) + ceil_div(launch.rows.blocks, 16) * 16;
  start_kernel(launch.rows, arguments, stream);
  if (launch.blocks == 0) return;
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
