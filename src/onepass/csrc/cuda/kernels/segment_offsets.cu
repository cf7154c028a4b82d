// segment_offsets.cu: the offsets at which segments begin, from a sorted index, which is read once. A warp takes a span
// of several rounds. In a round, each lane has kItems consecutive items. The warp looks at the last item of each round,
// and reads all items only of the rounds in which a segment begins. If the index is not sorted, the offsets are
// meaningless.
#include "segment_map.cuh"
#include "types.cuh"

constexpr unsigned kAll = 0xffffffffu;
constexpr int kItems = 4, kRound = 32 * kItems;  // items of a lane, and of a round
constexpr int kRounds = 8, kSpan = kRounds * kRound;

// A number of the index as a segment. If no such segment exists, it is the number of segments.
template <class Index>
__device__ inline int as_segment(const SortedIndex& of, Index index) {
  return (unsigned long long)(long long)index < (unsigned long long)of.segments ? (int)index : (int)of.segments;
}
// The segment of an item. Before the first item it is -1, and behind the last item the number of segments.
template <class Index>
__device__ inline int segment_of(const SortedIndex& of, int64_t item) {
  if (item < 0) return -1;
  return item < of.items ? as_segment(of, ((const Index*)of.index)[item]) : (int)of.segments;
}
// The segments of kItems consecutive items.
template <class Index>
__device__ inline void load_segments(const SortedIndex& of, int64_t item, int (&segments)[kItems]) {
  const Index* const from = (const Index*)of.index + item;
  if (item + kItems <= of.items && (uint64_t)from % 16 == 0) {
    constexpr int kEach = 16 / sizeof(Index);
    unroll<kItems / kEach>([&](int j) {
      const auto some = ((const Vector<Index, kEach>*)from)[j];
      unroll<kEach>([&](int i) { segments[j * kEach + i] = as_segment(of, some.at[i]); });
    });
  } else {
    unroll<kItems>([&](int i) { segments[i] = segment_of<Index>(of, item + i); });
  }
}
__device__ inline void store_offset(const SortedIndex& of, int segment, int64_t item) {
  if (of.has_wide_offsets)
    ((int64_t*)of.offsets)[segment] = item;
  else
    ((int*)of.offsets)[segment] = (int)item;
}
// The segments after `before`, up to `last`, begin at the lane's item.
__device__ inline void begin_segments(const SortedIndex& of, int before, int last, int64_t item) {
  const bool has_many = last - before > 32;
#pragma unroll 1
  for (int segment = before + 1; !has_many && segment <= last; ++segment) store_offset(of, segment, item);
#pragma unroll 1
  for (uint32_t lanes = __ballot_sync(kAll, has_many); lanes; lanes &= lanes - 1) {  // all lanes store for one lane
    const int from = __ffs(lanes) - 1, end = __shfl_sync(kAll, last, from);
    const int64_t at = __shfl_sync(kAll, item, from);
#pragma unroll 1
    for (int segment = __shfl_sync(kAll, before, from) + 1 + (int)threadIdx.x % 32; segment <= end; segment += 32)
      store_offset(of, segment, at);
  }
}
// Stores the offsets of the segments that begin in a round. The lane has the items from `item` on, and `before` is the
// segment of the item before the round.
__device__ inline void store_offsets(const SortedIndex& of, const int (&segments)[kItems], int before, int64_t item) {
  const int neighbour = __shfl_up_sync(kAll, segments[kItems - 1], 1), first = threadIdx.x % 32 ? neighbour : before;
  const auto before_item = [&](int i) { return i ? segments[i - 1] : first; };
  const auto own = [&](int i) { return min(item + i, (int64_t)of.items); };
  bool has_gaps = false;
  unroll<kItems>([&](int i) { has_gaps |= segments[i] - before_item(i) > 1; });
  if (__any_sync(kAll, has_gaps)) {
    unroll<kItems>([&](int i) { begin_segments(of, before_item(i), segments[i], own(i)); });
  } else {
    unroll<kItems>([&](int i) {
      if (segments[i] > before_item(i)) store_offset(of, segments[i], own(i));
    });
  }
}

template <class Index>
__device__ inline void find_offsets(const SortedIndex& of) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = (int64_t)gridDim.x * blockDim.x / 32;
  for (int64_t span = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; span * kSpan <= of.items; span += warps) {
    const int64_t first = span * kSpan;
    const int before_round = segment_of<Index>(of, first + min(lane, kRounds) * kRound - 1);
    const bool is_one = before_round == __shfl_down_sync(kAll, before_round, 1);
    const uint32_t rounds = ~__ballot_sync(kAll, is_one);  // a bit for each round in which a segment begins
#pragma unroll 1
    for (int r = 0; r < kRounds; ++r) {
      const int before = __shfl_sync(kAll, before_round, r);
      if (!(rounds >> r & 1)) continue;
      int segments[kItems];
      load_segments<Index>(of, first + r * kRound + lane * kItems, segments);
      store_offsets(of, segments, before, first + r * kRound + lane * kItems);
    }
  }
}

extern "C" __global__ void onepass_kernel(const SortedIndex of) {
  if (of.has_wide_index)
    find_offsets<int64_t>(of);
  else
    find_offsets<int>(of);
}
