// segments.cpp: from a problem of segments to the launch of its kernel.
#include <algorithm>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kThreads = 32 * kSegmentWarps;  // of a block of the kernel of longer rows
constexpr int kMostVec = 4, kVecBytes = 16;   // heads of a lane
constexpr int kPadBytes = 32;                 // between the elements of strips, at most
constexpr int kStaticBytes = 8192;            // of shared memory that the kernel of tiles declares, at most
// The kernel of tiles. Sweeps have chosen these (H200, 2026-11-28): warps of a block; values of a thread, twice as many
// of vectors of heads but in gradients, half as many doubles; lanes beside each other that have an item's heads, or
// bytes of these where they are no vectors; groups of such lanes that have other heads.
constexpr int kTileWarps = 4, kStripValues = 16, kHeadLanes = 2, kHeadBytes = 32, kMostGroups = 8;
constexpr int64_t kInvariantWaves = 16;  // of blocks of the batch-invariant kernel
// The kernel of longer rows. A block computes one of no more items than some for each lane of a warp. Longer ones are
// cut into tiles, one for each block.
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
  SegmentMap map = {};
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
    launch.rows_map = map;
    launch.rows.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kInvariantWaves * gpu.sm_count));
    return launch;
  }

  // Vectors of heads, and lanes.
  launch.threads = kThreads;
  const bool is_wide = problem.accumulator() == DType::float64;
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
  const auto lanes_of = [&](int64_t most) {
    int log2 = 0;
    while (1 << log2 < std::min(vectors, most)) ++log2;
    return log2;
  };
  bool is_dense = map.columns == 1;
  for (int t = 0; t <= kItemResult; ++t) is_dense &= !roles.has(t) || map.steps[t] == 1;
  if (is_dense) kind.segment_parts |= kSegmentSingle;
  if (map.order) kind.segment_parts |= kSegmentOrder;

  // Tiles of short rows.
  const DType of_first = problem.types[roles.of[kItemFirst]];
  map.head_lanes_log2 = lanes_of(vec_size > 1 ? kHeadLanes : kHeadBytes / size_of(of_first));
  const int64_t of_lanes = ceil_div(vectors, 1 << map.head_lanes_log2);
  int capacity = 0, groups = 1;
  while (groups < std::min<int64_t>(of_lanes, kMostGroups)) groups *= 2;
  const int values = kStripValues * (vec_size > 1 && !sums ? 2 : 1) / (is_wide ? 2 : 1);
  const int strip = std::max(1, values / vec_size);
  for (;; groups /= 2) {
    const int warps = std::max(groups, is_dense || vec_size > 1 ? kTileWarps : 2 * kTileWarps);
    launch.rows.threads = unsigned(32 * warps);
    map.group_warps = warps / groups;
    map.chunks = int(ceil_div(of_lanes, groups));
    map.pitch = int(map.chunks == 1 ? map.columns : vec_size * groups << map.head_lanes_log2);
    capacity = (32 * map.group_warps >> map.head_lanes_log2) * strip;
    for (map.padded_log2 = 0; 2 << map.padded_log2 <= std::min(strip * map.pitch, 32 * warps);) ++map.padded_log2;
    const auto tile_bytes = [&](int t) {
      const int elements = 32 * warps * strip * vec_size + kVecBytes;
      const int padding = (elements >> map.padded_log2) * kPadBytes;
      return roles.has(t) ? int(ceil_div(elements * size_of(problem.types[roles.of[t]]) + padding, 128)) * 128 : 0;
    };
    map.first_bytes = std::max(tile_bytes(kItemFirst), tile_bytes(kItemResult));
    map.buffer_bytes = map.first_bytes + tile_bytes(kItemSecond);
    const int number = is_wide ? 8 : 4, in_place = !is_pointwise && size_of(of_first) == number;
    launch.rows.shared = unsigned(2 * map.buffer_bytes);
    if (roles.has(kRowFirst)) launch.rows.shared += unsigned((2 - in_place) * capacity * map.pitch * number);
    if (groups == 1 || launch.rows.shared + kStaticBytes <= unsigned(gpu.shared)) break;
  }
  map.by_pitch = divider_of(map.pitch);
  map.short_items = is_dense ? capacity - kVecBytes / size_of(of_first) : capacity;
  for (int t = 0; t <= kItemResult; ++t) {
    if (!roles.has(t)) continue;
    const int size = size_of(problem.types[roles.of[t]]);
    const bool is_unit = map.columns == 1 || (map.dims == 1 && map.strides[t][0] == 1);
    const auto are_vectors = [&](int64_t elements) { return elements * size % kVecBytes == 0; };
    if (!map.order && map.chunks == 1 && is_unit && map.steps[t] == map.columns)
      map.access[t] = kSegmentFlat;
    else if (is_unit && are_vectors(map.pitch) && are_vectors(map.columns) && are_vectors(map.steps[t]) &&
             uint64_t(map.data[t]) % kVecBytes == 0)
      map.access[t] = kSegmentVectors;
  }
  const int rows_per_block = int(launch.rows.threads);
  CudaPlan as = {Tier::warp, 1, rows_per_block, strip * vec_size, vec_size, 1, 0, VecAccess::aligned};
  launch.rows.kernel = find_or_load(kind, as, device);
  const int64_t at_a_time = count_resident(launch.rows, gpu);
  const int64_t ranges = std::clamp<int64_t>(ceil_div(map.items, capacity), 1, std::max<int64_t>(1, at_a_time));
  map.range_items = std::max<int64_t>(1, ceil_div(map.items, ranges));
  map.chunk_blocks = int(std::clamp<int64_t>(at_a_time / ranges, 1, map.chunks));
  launch.rows.blocks = unsigned(map.chunk_blocks * ranges);
  launch.rows_map = map;
  if (map.items <= map.short_items) return launch;

  // Longer rows.
  map.head_lanes_log2 = lanes_of(32);
  map.chunks = int(ceil_div(vectors, 1 << map.head_lanes_log2));
  const int item_lanes = 32 >> map.head_lanes_log2;
  // No block takes a row that is some times the fair share that a warp has of all items.
  const int64_t share = map.items * map.chunks / (gpu.sm_count * kWarpsPerSm) / item_lanes;
  map.tile_items =
      item_lanes * std::clamp<int64_t>(int64_t(kMostShares * double(share)), kLeastLaneItems, kMostLaneItems);
  map.tile_items = std::max<int64_t>(map.tile_items, map.short_items);
  map.tiles = std::max<int64_t>(1, ceil_div(map.items, map.tile_items));
  kind.segment_parts |= kSegmentLong;
  const int kept = (vec_size > 1 ? 16 / vec_size : 8) / ((problem.is_backward() ? 2 : 1) * (is_wide ? 2 : 1));
  as = {Tier::warp, 1, kThreads, kept * vec_size, vec_size, 1, 0, VecAccess::aligned};
  launch.kernel = find_or_load(kind, as, device);
  // Blocks that run at a time wait for each other's messages.
  const int64_t together = std::max<int64_t>(1, count_resident(launch, gpu) / map.chunks);
  launch.blocks = unsigned(map.chunks * std::min<int64_t>(together, map.tiles));
  map.steps_run = is_pointwise ? 1 : gpu.cooperative && together > 1 ? 3 : 2;
  map.most_tiles = is_pointwise ? 0x7fffffff : map.steps_run == 3 ? int(launch.blocks) / map.chunks : 0;
  launch.message_bytes = ceil_div(launch.rows.blocks, 16) * 16;
  map.row_blocks = int(launch.rows.blocks);
  if (!is_pointwise)
    launch.message_bytes +=
        map.tiles * map.chunks * (2 * vec_size << map.head_lanes_log2) * message_size(kind.in, kind.out);
  launch.map = map;
  launch.rows_map.tile_items = map.tile_items;
  return launch;
}

void start_segments(SegmentLaunch launch, void* messages, void* stream) {
  void *rows_arguments[] = {&launch.rows_map}, *arguments[] = {&launch.map};
  launch.map.has_long = launch.rows_map.has_long = messages;
  launch.map.messages = static_cast<char*>(messages) + ceil_div(launch.rows.blocks, 16) * 16;
  start_kernel(launch.rows, rows_arguments, stream);
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
