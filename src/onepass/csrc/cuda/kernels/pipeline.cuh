// pipeline.cuh: a multi-stage pipeline of asynchronous copies. A stage is kStageVecs vectors of a thread. All vectors
// of a thread arrive in its part of shared memory, stage after stage and tile after tile. The first stages of a tile
// are moved to registers, as many as fit there. The other stages stay in shared memory until their results are stored.
// The place of each stage that is done is filled with the next one, at last with stages of the next tile. (Loads into
// registers would have to be waited for all together: the compiler has six counters for loads, but only one across a
// branch.)
#pragma once

#include "column_params.cuh"

constexpr int kStageVecs = 4;  // vectors in a stage

// Moves from one of a thread's vectors to the next. The address is opaque, because the compiler would otherwise compute
// each one anew, in ten instructions.
template <class T>
__device__ inline T* advance(T* at, long long stride) {
  at += stride;
  asm volatile("" : "+l"(at));
  __builtin_assume(__isGlobal(at));
  return at;
}

// `Copy` has start<Bytes>(to, from), commit() and wait<Pending>(), as AsyncCopy has. The values for moving from one
// vector to the next are kept in registers, because in short kernels each instruction counts.
template <class C, class Copy>
struct Pipeline {
  typedef typename C::In In;
  static constexpr int kOperands = C::kOperands;
  static constexpr int kSlotBytes = kOperands * C::kBlockThreads * C::kVecSize * (int)sizeof(In);  // of a vector
  static constexpr int kStageBytes = kStageVecs * kSlotBytes;
  unsigned begin, end, read, write;  // in shared memory: the buffer, and the next stage to read and to write
  const In* at[kOperands];           // the next vectors to copy,
  long long strides[kOperands];      // the strides from each to the next,
  int full, rest;                    // how many of the tile's remaining vectors are full, and how many there are
  bool first_is_partial;

  // `smem`: the address of the thread's first vector.
  __device__ Pipeline(const Tiles& tiles, unsigned smem) {
    const int vecs = (tiles.vecs_per_thread_max + kStageVecs - 1) / kStageVecs * kStageVecs;
    begin = read = write = smem, end = begin + (tiles.smem_vecs < vecs ? tiles.smem_vecs : vecs) * kSlotBytes;
    rest = 0;
  }
  // Makes the vectors of another tile the next ones to copy. Its operands are the tensors number `tensor` and `tensor`
  // + 1. If no such tile `exists`, nothing is copied.
  template <class Tile, class T>
  __device__ void begin_tile(const Tile& tile, bool exists, int tensor, const T* one, const In* other) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o)
      at[o] = (o ? other : (const In*)one) + tile.at[tensor + o], strides[o] = tile.tiles.vec_strides[tensor + o];
    full = exists ? tile.full : 0, rest = exists ? tile.tiles.vecs_per_thread_max : 1 << 30;
    first_is_partial = Tile::kMayBeginBefore && tile.first > 0;
  }
  // Begins to copy the next stage, into the place that has become free.
  __device__ void prefetch() {
#pragma unroll
    for (int i = 0; i < kStageVecs; ++i) {
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        if (i < full && !(i == 0 && first_is_partial))
          Copy::template start<C::kVecSize * sizeof(In)>(write + i * kSlotBytes + o * (kSlotBytes / kOperands), at[o]);
        at[o] = advance(at[o], strides[o]);
      }
    }
    Copy::commit();
    write = after(write), full -= kStageVecs, rest -= kStageVecs, first_is_partial = false;
  }
  // Begins to copy as many stages of the first tile as shared memory has places for.
  __device__ void fill() {
#pragma unroll 1
    do prefetch();
    while (write != begin);
  }
  // Waits for the next stage and returns its address. `kept`: how many stages that were read before are still in shared
  // memory. (It is AsyncCopy::wait_all_but in fewer instructions: with many pending stages it may wait for one too
  // many.)
  __device__ unsigned wait_next(int kept) {
    const int pending = (int)(end - begin) / kStageBytes - 1 - kept;
    if (pending >= 5)
      Copy::template wait<5>();
    else if (pending >= 3)
      Copy::template wait<3>();
    else if (pending == 2)
      Copy::template wait<2>();
    else if (pending == 1)
      Copy::template wait<1>();
    else
      Copy::template wait<0>();
    return next();
  }
  // The same for a stage that is known to have arrived.
  __device__ unsigned next() {
    const unsigned here = read;
    read = after(read);
    return here;
  }
  // Goes back by `count` stages, so that these are read again.
  __device__ void rewind(int count) {
    const unsigned bytes = count * kStageBytes;
    read = read - begin < bytes ? read + (end - begin) - bytes : read - bytes;
  }

 private:
  __device__ unsigned after(unsigned here) const { return here + kStageBytes == end ? begin : here + kStageBytes; }
};
