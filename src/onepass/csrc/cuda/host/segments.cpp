// segments.cpp: from a problem of segments to the launches of its kernels: first the sizes of vectors and tiles for
// short rows, then the pieces of long rows.
#include <algorithm>

#include "../../core/batch_invariant.h"
#include "../../plan/column_view.h"
#include "launch.h"

namespace onepass::cuda {

namespace {

constexpr int kMostVec = 4, kVecBytes = 16;  // heads of a lane
constexpr int kPadBytes = 32;                // the most bytes between the elements of strips
constexpr int kStaticBytes = 20480;          // the most shared memory that the kernel of tiles declares
// The kernel of tiles, tuned by sweeps (H200, 2026-11-29). Tiles without heads are twice as large if rows have on
// average kLargeTileMean items and there are kLargeTileItems items per multiprocessor. A block has kTileWarps warps. A
// thread has kStripValues values: twice as many in large tiles and with vectors of heads (not in gradients), half as
// many doubles. kHeadLanes neighbouring lanes have the heads of an item, or kHeadBytes bytes of them if heads are not
// vectors. Up to kMostGroups groups of such lanes have different heads.
constexpr int kLargeTileMean = 8, kLargeTileItems = 8192;
constexpr int kTileWarps = 4, kStripValues = 16, kHeadLanes = 2, kHeadBytes = 32, kMostGroups = 8;
// The batch-invariant kernel: threads of a block, and waves of blocks.
constexpr int kInvariantThreads = 256;
constexpr int64_t kInvariantWaves = 16;
// The shared memory that the system takes of each block, and the most that the kernel of longer rows declares, in
// bytes.
constexpr int kSystemBytes = 1024, kLongStaticBytes = 4096;

using P = SegmentProblem;

// Which of the problem's tensors each tensor of the kernel is.
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

// The offsets in memory of the list of longer rows, and of the messages after it.
struct LongList {
  int64_t rows, messages;

  explicit LongList(const SegmentMap& map)
      : rows(ceil_div(map.sections * int64_t(sizeof(LongSection)), 16) * 16),
        messages(rows + (map.sections * (map.section_rows + int64_t(1)) + kReadBehind) * int64_t(sizeof(LongRow))) {}

 private:
  static constexpr int kReadBehind = 32;  // a warp may read so many rows behind the last one
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
    launch.rows.threads = kInvariantThreads;
    launch.rows.kernel =
        find_or_load(kind, {Tier::warp, 32, kInvariantThreads / 32, 1, 1, 1, 0, VecAccess::aligned}, device);
    const int64_t blocks = ceil_div(problem.segments * problem.columns, kInvariantThreads / 32);
    launch.rows_map = map;
    launch.rows.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kInvariantWaves * gpu.sm_count));
    return launch;
  }

  // The vector size of heads, and the lanes of an item's heads.
  const bool is_wide = problem.accumulator() == DType::float64;
  const auto fits = [&](int heads) {
    bool does = map.columns % heads == 0 && map.dims == 1;
    for (int t = 0; t <= kItemResult && does; ++t) {
      if (!roles.has(t)) continue;
      does &= map.strides[t][0] == 1 && map.steps[t] % heads == 0 &&
              uint64_t(map.data[t]) % (heads * size_of(problem.types[roles.of[t]])) == 0;
    }
    return does;
  };
  const auto largest_fit = [&](int heads) {
    while (heads > 1 && !fits(heads)) heads /= 2;
    return heads;
  };
  const int vec_size = largest_fit(std::min(kMostVec, kVecBytes / widest));
  const int64_t vectors = map.columns / vec_size;
  const auto log2_of_lanes = [](int64_t vectors, int64_t most) {
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
  map.head_lanes_log2 = log2_of_lanes(vectors, vec_size > 1 ? kHeadLanes : kHeadBytes / size_of(of_first));
  const int64_t of_lanes = ceil_div(vectors, 1 << map.head_lanes_log2);
  int capacity = 0, groups = 1;
  while (groups < std::min<int64_t>(of_lanes, kMostGroups)) groups *= 2;
  const int64_t mean = map.items / std::max<int64_t>(1, map.segments);
  const bool is_dense_forward = is_dense && !sums && !is_pointwise && !is_wide;
  const bool has_large_tiles =
      is_dense_forward && mean >= kLargeTileMean && map.items >= kLargeTileItems * gpu.sm_count;
  const int values = kStripValues * ((vec_size > 1 && !sums) || has_large_tiles ? 2 : 1) / (is_wide ? 2 : 1);
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

  // Longer rows. The kernel of short rows lists them.
  const int size_of_second = roles.has(kItemSecond) ? size_of(problem.types[roles.of[kItemSecond]]) : 0;
  // Without heads, a vector has neighbouring items. With an order, these are not adjacent in memory.
  const bool has_items_alone = is_dense && !map.order;
  const int vec = has_items_alone ? kVecBytes / widest : largest_fit(kVecBytes / widest);
  SegmentMap& of_long = launch.map = map;
  of_long.head_lanes_log2 = log2_of_lanes(map.columns / vec, kSegmentHeadBytes / (vec * size_of(of_first)));
  if (has_items_alone) of_long.head_lanes_log2 = 0;
  const int64_t heads = has_items_alone ? 1 : vec << of_long.head_lanes_log2;  // heads of a block
  of_long.chunks = int(ceil_div(map.columns, heads));
  const int sections = int(ranges), counts_bytes = (sections + 1) * 4;
  launch.threads = kSegmentLongThreads;
  const int turn_bytes = kSegmentLongThreads * vec * (size_of(of_first) + size_of_second);
  const int taken = kSystemBytes + kLongStaticBytes + counts_bytes;
  const int room = (gpu.shared + kSystemBytes) / long_blocks(!has_items_alone) - taken;
  of_long.turns = std::max(2, room / turn_bytes);
  launch.shared = unsigned(of_long.turns * turn_bytes + counts_bytes);
  // A piece has at most half of the ring, so that the next one can be copied meanwhile. A piece that begins and ends
  // within vectors has one more vector.
  const int64_t piece_vectors = of_long.turns / 2 * kSegmentLongThreads;
  of_long.piece_items = has_items_alone ? (piece_vectors - 1) * vec : piece_vectors >> of_long.head_lanes_log2;
  of_long.most_pieces = int(map.items / of_long.piece_items + map.items / map.short_items + 1);
  of_long.sections = sections, of_long.section_rows = int(map.range_items / map.short_items + 2);
  kind.segment_parts = (kind.segment_parts & ~(has_items_alone ? 0u : unsigned(kSegmentSingle))) | kSegmentLong;
  as = {Tier::warp, 1, kSegmentLongThreads, vec, vec, 1, 0, VecAccess::aligned};
  launch.kernel = find_or_load(kind, as, device);
  // Blocks that run at the same time wait for each other's messages.
  const int64_t together = std::max<int64_t>(1, count_resident(launch, gpu) / of_long.chunks);
  const int64_t teams = std::min<int64_t>(together, of_long.most_pieces);
  launch.blocks = unsigned(of_long.chunks * teams);
  of_long.steps_run = is_pointwise ? 1 : gpu.cooperative && together > 1 ? 3 : 2;
  // In a reduction, only the block of the last piece of a row waits for the states of the others. No block waits for
  // it.
  const bool waits = is_pointwise || (of_long.steps_run == 3 && roles.has(kRowFirst));
  of_long.most_waiting = waits ? 0x7fffffff : of_long.steps_run == 3 ? int(teams) : 1;
  const LongList list(of_long);
  launch.message_bytes = list.messages;
  if (!is_pointwise)
    launch.message_bytes += of_long.most_pieces * heads * of_long.chunks * message_size(kind.in, kind.out);
  launch.rows_map = of_long;  // the same map, except for the chunks of heads
  launch.rows_map.head_lanes_log2 = map.head_lanes_log2, launch.rows_map.chunks = map.chunks;
  return launch;
}

void start_segments(SegmentLaunch launch, void* messages, void* stream) {
  void *rows_arguments[] = {&launch.rows_map}, *arguments[] = {&launch.map};
  if (launch.blocks) {
    const LongList list(launch.map);
    char* const memory = static_cast<char*>(messages);
    launch.map.section_counts = launch.rows_map.section_counts = memory;
    launch.map.long_rows = launch.rows_map.long_rows = memory + list.rows;
    launch.map.messages = memory + list.messages;
  }
  start_kernel(launch.rows, rows_arguments, stream);
  if (launch.blocks == 0) return;
  const bool is_cooperative = launch.map.steps_run == 3;
  if (is_cooperative && start_kernel(launch, arguments, stream)) return;
  launch.message_bytes = 0;  // not a cooperative launch
  if (is_cooperative) launch.map.steps_run = 2, launch.map.most_waiting = 1;
  const bool in_two_steps = launch.map.steps_run == 2;
  launch.map.steps_run = 1;
  start_kernel(launch, arguments, stream);
  if (!in_two_steps) return;
  launch.map.steps_run = 2;
  start_kernel(launch, arguments, stream);
}

void start_segment_offsets(const SortedIndex& of, int device, void* stream) {
  constexpr int kOffsetThreads = 128, kItemsOfBlock = 32 * kOffsetThreads, kBlocks = 16;
  KernelKind kind = {Function::softmax, Pass::forward, DType::float32, DType::float32};
  kind.segment_parts = kSegments | kSegmentOffsets;
  Launch launch = {};
  launch.kernel = find_or_load(kind, {Tier::warp, 1, kOffsetThreads, 1, 1, 1, 0, VecAccess::scalar}, device);
  launch.blocks = unsigned(std::min<int64_t>(of.items / kItemsOfBlock + 1, kBlocks * device_info(device).sm_count));
  launch.groups = 1, launch.threads = kOffsetThreads;
  void* arguments[] = {const_cast<SortedIndex*>(&of)};
  start_kernel(launch, arguments, stream);
}

void start_item_moves(const MoveMap& map, int item_bytes, int device, void* stream) {
  const DType type = item_bytes == 2 ? DType::float16 : item_bytes == 4 ? DType::float32 : DType::float64;
  KernelKind kind = {Function::softmax, Pass::forward, type, type};
  kind.segment_parts = kSegments | kSegmentMoves;
  Launch launch = {};
  launch.kernel = find_or_load(kind, {Tier::warp, 1, kMoveThreads, 1, 1, 1, 0, VecAccess::scalar}, device);
  launch.blocks = unsigned(ceil_div(map.items, kMoveChunk)), launch.groups = 1, launch.threads = kMoveThreads;
  launch.shared = unsigned(kMoveChunk * item_bytes);
  void* arguments[] = {const_cast<MoveMap*>(&map)};
  start_kernel(launch, arguments, stream);
}

}  // namespace onepass::cuda
