// pipeline.cuh: a multi-stage pipeline of asynchronous copies. All vectors of a thread arrive through its shared
// memory, stage after stage and tile after tile. The first stages of a tile, as many as registers keep, move on to
// those; the others stay in shared memory until their results are stored. Each place that falls free takes the next
// stage, in the end of the next tile. (The thread would have to wait for loads into registers all together: the
// compiler has six counters for them, and across a branch one.)
#pragma once

#include "column_params.cuh"

constexpr int kStageVecs = 4;  // vectors of a stage

// Moves from a thread's vector to its next. It is opaque because the compiler would compute each address anew, in ten
// instructions.
template <class T>
__device__ inline T* advance(T* at, long long stride) {
  at += stride;
  asm volatile("" : "+l"(at));
  return at;
}

// `Copy` has start<Bytes>(to, from), commit() and wait<Pending>(), as AsyncCopy. What a move from one vector to the
// next needs is kept ready, because in short kernels each instruction counts.
template <class C, class Copy>
struct Pipeline {
  typedef typename C::In In;
  static constexpr int kOperands = C::kOperands;
  static constexpr int kSlotBytes = kOperands * C::kBlockThreads * C::kVecSize * (int)sizeof(In);  // of a vector
  static constexpr int kStageBytes = kStageVecs * kSlotBytes;
  unsigned begin, end, read, write;  // in shared memory: the buffer, the next stage to read and to write
  const In* at[kOperands];           // the next vectors to copy,
  long long strides[kOperands];      // from each to the next,
  int full, rest;                    // how many of those are full, and how many the tile has
  bool first_is_partial;

  // `smem`: the address of the thread's first vector.
  __device__ Pipeline(const Tiles& tiles, unsigned smem) {
    const int vecs = (tiles.vecs_per_thread_max + kStageVecs - 1) / kStageVecs * kStageVecs;
    begin = read = write = smem, end = begin + (tiles.smem_vecs < vecs ? tiles.smem_vecs : vecs) * kSlotBytes;
    rest = 0;
  }
  // Sets the next vectors to those of another tile, in the tensor `tensor` and the one after it; of no tile, if none
  // `exists`.
  template <class Tile, class T>
  __device__ void begin_tile(const Tile& tile, bool exists, int tensor, const T* one, const In* other) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o)
      at[o] = (o ? other : (const In*)one) + tile.at[tensor + o], strides[o] = tile.tiles.vec_strides[tensor + o];
    full = exists ? tile.full : 0, rest = exists ? tile.tiles.vecs_per_thread_max : 1 << 30;
    first_is_partial = Tile::kMayBeginBefore && tile.first > 0;
  }
  // Begins to copy the next stage, into the place that has fallen free.
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
  // Begins to copy as many stages of the first tile as there are places.
  __device__ void fill() {
#pragma unroll 1
    do prefetch();
    while (write != begin);
  }
  // Waits for the next stage and returns its address; `kept` of the stages read before are still in shared memory.
  // (AsyncCopy::wait_all_but in fewer instructions: with many stages on their way it may wait for one too many.)
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
  // Makes the last `count` stages the next ones again.
  __device__ void rewind(int count) {
    const unsigned bytes = count * kStageBytes;
    read = read - begin < bytes ? read + (end - begin) - bytes : read - bytes;
  }

 private:
  __device__ unsigned after(unsigned here) const { return here + kStageBytes == end ? begin : here + kStageBytes; }
};
