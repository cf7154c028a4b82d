// pipeline.cuh: all vectors of a thread come through its shelf, chunk after chunk and tile after tile. Of a tile the
// first chunks, as many as registers keep, go on to those; the others stay on the shelf until they are finished. Into
// each place that falls free comes the next chunk, in the end of the next tile. (Loads into registers would be waited
// for all together: the compiler has six counters for them, and across a branch one.)
#pragma once

// What a step from one vector to the next takes is kept ready: of the instructions of short kernels each one counts.
struct Ring {
  static constexpr int kSlot = kOperands * THREADS * V * (int)sizeof(IN), kStep = kChunk * kSlot;  // bytes
  uint32_t begin, end, from, to;  // in shared memory: the shelf, the next chunk to take, and the next to come
  const IN* at[kOperands];        // the next vectors to ask for,
  int64_t jump[kOperands];        // from each to the next,
  int whole, rest;                // of those from there on so many are whole, and so many of the tile
  bool part;                      // the first is not whole

  __device__ explicit Ring(const Tiles& tiles) {
    const int turns = (tiles.turns + kChunk - 1) / kChunk * kChunk;
    begin = from = to = place_of(0, 0), end = begin + (tiles.shelf < turns ? tiles.shelf : turns) * kSlot;
    rest = 0;
  }
  // To ask for the vectors of another tile, at `place` of the tensor number `first` and the next; of none, if there is
  // none.
  template <class T, int Tensors>
  __device__ void turn_to(const Place<Tensors>& place, bool is, int first, const T* one, const IN* other) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o)
      at[o] = (o ? other : (const IN*)one) + place.at[first + o], jump[o] = place.tiles.jump[first + o];
    whole = is ? place.whole : 0, rest = is ? place.tiles.turns : 1 << 30;
    part = kSlab && !kFull && place.first > 0;
  }
  // Asks for the next chunk, into the place that has fallen free.
  __device__ void ask() {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        if (i < whole && !(i == 0 && part)) fetch<V * sizeof(IN)>(to + i * kSlot + o * (kSlot / kOperands), at[o]);
        at[o] = next(at[o], jump[o]);
      }
    }
    commit_copies();
    to = after(to), whole -= kChunk, rest -= kChunk, part = false;
  }
  // Asks for as many as there are places for, of the first tile.
  __device__ void fill() {
#pragma unroll 1
    do ask();
    while (to != begin);
  }
  // Where the next chunk is, when it is there; `kept` chunks of those taken are on the shelf still. (await_all_but in
  // fewer instructions: with many on their way it may wait for one more than it has to.)
  __device__ uint32_t take(int kept) {
    const int pending = (int)(end - begin) / kStep - 1 - kept;
    if (pending >= 5)
      await_copies<5>();
    else if (pending >= 3)
      await_copies<3>();
    else if (pending == 2)
      await_copies<2>();
    else if (pending == 1)
      await_copies<1>();
    else
      await_copies<0>();
    return again();
  }
  // The same of one that is known to be there.
  __device__ uint32_t again() {
    const uint32_t here = from;
    from = after(from);
    return here;
  }
  // The last `count` chunks taken come once more.
  __device__ void back(int count) {
    const uint32_t way = count * kStep;
    from = from - begin < way ? from + (end - begin) - way : from - way;
  }

 private:
  __device__ uint32_t after(uint32_t here) const { return here + kStep == end ? begin : here + kStep; }
};
