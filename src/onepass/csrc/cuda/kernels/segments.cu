// segments.cu: rows of unequal length. Some lanes of a warp take a short row, and a whole warp takes one that is
// longer. A second kernel computes all others. A block takes a row of middling length. All blocks together take the
// long rows, each a tile of some thousand elements, and the states of the tiles of a row go through global memory.
// Elements are read from where they are. A row that fits the registers of those who take it stays there; elements of
// all others are read a second time, from a cache.
#include "segment_tiles.cuh"

constexpr int kRowLanes = C::kThreadsPerRow;  // lanes that take items of a short row
constexpr int kRowWarps = kSegmentRowWarps;   // of a block of the first kernel
constexpr int kBlockWarps = C::has(kSegmentLong) ? kWarps : kRowWarps;
constexpr int kMinWarps = sizeof(A) == 8 ? 8 : V > 1 && !C::has(kSegmentLong) ? 24 : 32;  // of a multiprocessor

__device__ inline int64_t shuffle(int64_t value, int lane) {
  return (int64_t)__shfl_sync(0xffffffffu, (long long)value, lane);
}

// What a block of the first kernel says of the rows that it met.
constexpr int kHasMiddling = 1, kHasLong = 2;

// All rows that a warp or less takes. A warp takes as many neighbouring ones at a time as it has lanes for.
__device__ inline void compute_rows(const Lane& lane) {
  const SegmentMap& map = lane.map;
  int longest = 0;
  const int log2 = C::kSingle ? 0 : map.head_lanes_log2, head_lanes = lane.head_lanes;
  const int row_lanes = kRowLanes << log2, rows = 32 / row_lanes;  // lanes of a row; rows at a time
  const int lane_at = threadIdx.x % 32, slot = lane_at / row_lanes;
  const Team team = {lane, lane.at(kRowLanes), kRowLanes}, whole = {lane, lane.at(32 >> log2), 32 >> log2};
  const auto reduce_row = [&](Values values, auto op) {
    unroll<V>([&](int v) {
      unroll<31>([&](int i) {
        if (1 << i < kRowLanes) values.at[v] = op(values.at[v], shuffle_xor(values.at[v], head_lanes << i));
      });
    });
    return values;
  };
  const WarpReduce reduce_warp = {head_lanes};
  const int64_t step = (int64_t)(gridDim.x / map.chunks) * kRowWarps * rows;
  int64_t segment = ((int64_t)(blockIdx.x / map.chunks) * kRowWarps + threadIdx.x / 32) * rows + slot;
  int64_t begin = 0, end = 0;
  const auto load_offsets = [&] {
    if (segment < map.segments) begin = offset_of(map, segment), end = offset_of(map, segment + 1);
  };
  load_offsets();
  for (int64_t first = segment - slot; first < map.segments; first += step) {
    const bool is_there = segment < map.segments;
    const Row row = row_of(map, segment, begin, end);
    segment += step;
    load_offsets();
    const bool is_short = is_there && row.count <= K * kRowLanes;
    longest = max(longest, row.count);
    const unsigned others = __ballot_sync(0xffffffffu, is_there && !is_short && row.count <= map.warp_items);
    Row own = row;
    if (!is_short) own.count = 0;
    const int most = __reduce_max_sync(0xffffffffu, (own.count + kRowLanes - 1) / kRowLanes);
    compute_kept(team, own, most, is_short && team.at == 0, reduce_row);
    // Rows of more items, one after another.
    for (unsigned left = others; left;) {
      const int from = __ffs((int)left) - 1;
      left &= ~((row_lanes == 32 ? ~0u : (1u << row_lanes) - 1) << from);
      const Row of = {shuffle(row.segment, from), shuffle(row.begin, from), __shfl_sync(0xffffffffu, row.count, from)};
      compute_row(whole, of, reduce_warp);
    }
  }
  if (map.has_long == nullptr) return;
  const bool has_middling = __syncthreads_or(longest > map.warp_items);
  const bool has_long = __syncthreads_or(longest > map.tile_items);
  unsigned char* const has = (unsigned char*)map.has_long + blockIdx.x;
  if (threadIdx.x == 0) *has = has_middling * kHasMiddling + has_long * kHasLong;
  // Others read 16 bytes at a time.
  if (threadIdx.x > 0 && threadIdx.x < 16 - blockIdx.x % 16 && blockIdx.x == gridDim.x - 1) has[threadIdx.x] = 0;
}
// What all blocks of that kernel said together.
__device__ inline int longer_rows(const SegmentMap& map) {
  uint32_t all = 0;
  for (int i = threadIdx.x; i * 16 < map.row_blocks; i += kThreads) {
    const Vector<uint32_t, 4> of = ((const Vector<uint32_t, 4>*)map.has_long)[i];
    unroll<4>([&](int k) { all |= of.at[k]; });
  }
  const bool has_middling = __syncthreads_or(all & 0x01010101u * kHasMiddling);
  const bool has_long = __syncthreads_or(all & 0x01010101u * kHasLong);
  return has_middling * kHasMiddling + has_long * kHasLong;
}

__device__ inline void compute_long_rows(const SegmentMap& map, Shared& shared) {
  const int has = longer_rows(map);
  if (!has) return;
  const Lane lane(map);
  LongRows rows(lane, shared);
  if constexpr (C::kPointwise) {
    return rows.for_tiles([&](int64_t, const Tile& in) {
      rows.compute_middling(in);
      rows.finish(in.parts, false, [&](int k) { return in.parts[k].exists(); });
    });
  }
  const bool has_long = has & kHasLong, is_cooperative = map.steps_run == 3;
  bool has_deferred = false;
  if (map.steps_run & 1) {
    GridBarrier barrier;
    bool awaits_barrier = is_cooperative && has_long;
    if (awaits_barrier) {
      if (threadIdx.x == 0) barrier.init();
      for (int64_t tile = rows.first_tile; tile < map.tiles; tile += rows.step) rows.clear(tile);
      __syncthreads();
      if (threadIdx.x == 0) barrier.arrive(blockIdx.x, gridDim.x);
    }
    rows.for_tiles([&](int64_t tile, const Tile& in) {
      const Part* const parts = in.parts;
      if (has_long) rows.send_states(tile, parts);
      rows.compute_middling(in);  // while messages travel
      if (!has_long) return;
      // No message is read before all have been cleared.
      if (awaits_barrier && threadIdx.x == 0) barrier.wait();
      awaits_barrier = false;
      has_deferred |= parts[0].is_deferred(map) || parts[1].is_deferred(map);
      rows.finish(parts, true, [&](int k) { return LongRows::has_results(parts, k) && !parts[k].is_deferred(map); });
    });
  }
  if (!has_long || !(map.steps_run & 2) || (is_cooperative && !has_deferred)) return;
  rows.for_tiles([&](int64_t, const Tile& in) {
    rows.finish(in.parts, is_cooperative,
                [&](int k) { return LongRows::has_results(in.parts, k) && in.parts[k].is_deferred(map); });
  });
}

extern "C" __global__ void __launch_bounds__(32 * kBlockWarps, kMinWarps / kBlockWarps)
    onepass_kernel(const __grid_constant__ SegmentMap map) {
  if constexpr (C::has(kSegmentLong)) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) shared.found = -1;
    compute_long_rows(map, shared);
  } else {
    compute_rows(Lane(map));
  }
}
