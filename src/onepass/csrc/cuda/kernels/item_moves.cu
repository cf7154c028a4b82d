// item_moves.cu: moves items of a few bytes from memory into another order, or back. A single item takes as long to
// move as a whole sector of memory. So all items are moved in two passes, and lie in buckets in between. There is one
// bucket for each chunk of kMoveChunk places of the order. Within a bucket, items are sorted by the chunk of memory
// that they come from. Each pass has a chunk of memory, or a bucket, in shared memory, and reads and writes global
// memory in runs (as the scatter of a radix sort does: Merrill and Grimshaw, 2011).
//
//   memory -- chunk by chunk, by `local` and `places` --> buckets -- bucket by bucket, by `local` --> order
#include "async_copy.cuh"
#include "config.cuh"
#include "segment_map.cuh"

typedef ForwardConfig::In Item;

extern "C" __global__ void __launch_bounds__(kMoveThreads) onepass_kernel(const MoveMap map) {
  Item* const held = (Item*)dynamic_smem;
  const Item* const from = (const Item*)map.from;
  Item* const to = (Item*)map.to;
  const int64_t first = (int64_t)blockIdx.x * kMoveChunk;
  const int count = (int)min((int64_t)kMoveChunk, map.items - first);
  const auto local = [&](int i) { return (int)((const uint16_t*)map.local)[first + i]; };
  const auto place = [&](int i) { return map.places ? (int64_t)((const int*)map.places)[first + i] : first + i; };
  if (map.is_into_order) {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kMoveThreads) held[i] = from[first + i];
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kMoveThreads) to[place(i)] = held[local(i)];
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kMoveThreads) held[local(i)] = from[place(i)];
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kMoveThreads) to[first + i] = held[i];
  }
}
