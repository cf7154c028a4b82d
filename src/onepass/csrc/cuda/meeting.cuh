// meeting.cuh: the threads that share columns merge what they have of each: through shared memory, then over the blocks
// of a cluster, or over many blocks by messages through memory.
#pragma once

#include "grid.cuh"
#include "place.cuh"
#include "shelf.cuh"
#include "warp.cuh"

// A value from the lanes of a warp that have the same number below `from`: `merge` is told the distance of two.
template <class T, class Merge>
__device__ inline T over_lanes(T value, int from, Merge merge) {
  for (int mask = 16; mask >= from; mask /= 2) value = merge(value, shuffle(value, mask));
  return value;
}

template <class A>
struct alignas(2 * sizeof(A)) PairOf {
  A m, l;
};

template <class A, class L>
__device__ inline L begin_sum(A value) {
  if constexpr (sizeof(L) == sizeof(A))
    return value;
  else
    return {value, 0};
}

// What parts of columns are, and how they are merged: `over` has the parts number 0, 1, ... of one column, of which the
// lanes of a group take some each.
template <class A, class L>
struct States {
  typedef PairOf<A> Part;
  typedef A Scalar;
  static __device__ Part nothing() { return {-INFINITY_, 0}; }
  template <class Get>
  static __device__ Part over(int mine, int parts, int group, bool has, Get get) {
    A top = -INFINITY_;
    if (has) {
      for (int k = mine; k < parts; k += group) top = max_(top, get(k).m);
    }
    top = over_lanes(top, 32 / group, [](A a, A b) { return max_(a, b); });
    L sum = {};
    if (has) {
      for (int k = mine; k < parts; k += group) sum = add(sum, lowered(get(k), top));
    }
    return {top, value_of(over_lanes(sum, 32 / group, [](L a, L b) { return add(a, b); }))};
  }
  template <int Count>
  static __device__ Part two(Part before, const Part (&parts)[Count]) {
    A top = before.m;
#pragma unroll
    for (int i = 0; i < Count; ++i) top = max_(top, parts[i].m);
    L sum = lowered(before, top);
#pragma unroll
    for (int i = 0; i < Count; ++i) sum = add(sum, lowered(parts[i], top));
    return {top, value_of(sum)};
  }
  static __device__ Part of_lanes(Part part, int from) {
    const A top = over_lanes(part.m, from, [](A a, A b) { return max_(a, b); });
    return {top, value_of(over_lanes(lowered(part, top), from, [](L a, L b) { return add(a, b); }))};
  }

 private:
  // The smaller of the two: where both are infinite their difference is no number.
  static __device__ L lowered(Part part, A top) {
    return scaled(begin_sum<A, L>(part.l), exp_to_add(min_(part.m - shift(top))));
  }
  static __device__ float min_(float v) { return fminf(v, 0.0f); }
  static __device__ double min_(double v) { return fmin(v, 0.0); }
};
template <class A, class L>
struct Sums {
  typedef A Part;
  typedef A Scalar;
  static __device__ Part nothing() { return 0; }
  template <class Get>
  static __device__ Part over(int mine, int parts, int group, bool has, Get get) {
    L sum = {};
    if (has) {
      for (int k = mine; k < parts; k += group) sum = add(sum, begin_sum<A, L>(get(k)));
    }
    return of_lanes(value_of(sum), 32 / group);
  }
  template <int Count>
  static __device__ Part two(Part before, const Part (&parts)[Count]) {
    L sum = begin_sum<A, L>(before);
#pragma unroll
    for (int i = 0; i < Count; ++i) sum = add(sum, begin_sum<A, L>(parts[i]));
    return value_of(sum);
  }
  static __device__ Part of_lanes(Part part, int from) {
    return value_of(over_lanes(begin_sum<A, L>(part), from, [](L a, L b) { return add(a, b); }));
  }
};

// What the blocks of a group tell each other of a column.
template <class A>
struct Told {
  Message message;
  __device__ void write(PairOf<A> part, uint32_t turn) {
    if constexpr (sizeof(A) == 8)
      message.write(part.m, Total<double>{part.l, 0}, turn);
    else
      message.write(part.m, (double)part.l, turn);
  }
  __device__ void write(A part, uint32_t turn) { write(PairOf<A>{A(0), part}, turn); }
  __device__ bool read(PairOf<A>* part, uint32_t turn) const {
    if constexpr (sizeof(A) == 8) {
      Total<double> l;
      const bool there = message.read(&part->m, &l, turn);
      return part->l = l.sum, there;
    } else {
      return message.read(&part->m, &part->l, turn);
    }
  }
  __device__ bool read(A* part, uint32_t turn) const {
    PairOf<A> pair;
    const bool there = read(&pair, turn);
    return *part = pair.l, there;
  }
};
constexpr int kAtOnce = 6;  // messages that a lane has on their way at a time

// Where the threads that share columns meet. Dynamic shared memory: the vectors that wait there, what is used of whole
// columns, the parts of the block's threads, and what the blocks of a cluster send each other, in two boxes in turn.
template <class Merge, class Whole>
struct Meeting {
  typedef typename Merge::Part Part;
  Mailbox boxes[2];

  // Before the first meeting, by all threads.
  __device__ void open(const Tiles& tiles, Rendezvous* all_clear) {
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x == 0) boxes[0].open(), boxes[1].open();
      arrive_in_cluster();
    } else if constexpr (GRID) {
      // What the memory of the call held before may look like any message: every block clears its own, and none is
      // sent before all have.
      const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
      Message* const messages = reinterpret_cast<Message*>(tiles.messages);
      for (int c = threadIdx.x; c < 2 * tiles.pitch; c += blockDim.x)
        messages[((int64_t)(c / tiles.pitch) * blocks + block) * tiles.pitch + c % tiles.pitch].clear();
      __syncthreads();
      if (threadIdx.x == 0) all_clear->open(), all_clear->arrive(block, blocks);
    }
  }
  // Of each of its columns a thread's own part in, and what is made of the whole column, by one thread a column of the
  // block, out: `make(column, part)`.
  template <int Tensors, class Make>
  __device__ void meet(const Part (&own)[V], Whole (&out)[V], const Place<Tensors>& place, uint32_t round,
                       Rendezvous* all_clear, Make make) {
    const Tiles& tiles = place.tiles;
    const int pitch = tiles.pitch, group = tiles.group, side = 32 / group;
    unsigned char* const room = dynamic_shared + tiles.waiting;
    Whole* const wholes = reinterpret_cast<Whole*>(room);
    Part* const parts = reinterpret_cast<Part*>(room + (pitch * sizeof(Whole) + 15) / 16 * 16);
    Part* const sent = parts + tiles.across * tiles.down * V + round % 2 * CLUSTER * pitch;
    if (threadIdx.x < tiles.across * tiles.down) {
#pragma unroll
      for (int v = 0; v < V; ++v) parts[threadIdx.x * V + v] = own[v];
    }
    if (CLUSTER > 1 && round == 0) await_cluster();  // a peer's shared memory is there once it has started
    if (CLUSTER > 1 && threadIdx.x == 0) boxes[round % 2].expect(CLUSTER * pitch * sizeof(Part));
    if (GRID && threadIdx.x == 0 && round == 0) all_clear->wait();
    __syncthreads();
    const int lane = threadIdx.x % 32, column_of = threadIdx.x / 32 * side + lane % side, mine = lane / side;
    const int together = blockDim.x / 32 * side;
    Told<typename Merge::Scalar>* const told = reinterpret_cast<Told<typename Merge::Scalar>*>(tiles.messages) +
                                               ((int64_t)(round % 2) * gridDim.y + blockIdx.y) * gridDim.x * pitch;
    for (int begin = 0; begin < pitch; begin += together) {
      const int c = begin + column_of;
      const Part* const from = parts + (kSlab ? (c + place.phase) % pitch : c);
      const Part part = Merge::over(mine, tiles.parts, group, c < pitch, [&](int k) { return from[k * pitch]; });
      if constexpr (CLUSTER > 1) {
        if (c < pitch) {
          for (int peer = mine; peer < CLUSTER; peer += group)
            send(&sent[cluster_rank() * pitch + c], peer, part, &boxes[round % 2]);
        }
      } else if constexpr (GRID) {
        if (mine == 0 && c < pitch) told[(int64_t)blockIdx.x * pitch + c].write(part, round + 1);
      } else if (mine == 0 && c < pitch) {
        wholes[c] = make(c, part);
      }
    }
    if constexpr (CLUSTER > 1) {
      boxes[round % 2].wait(round / 2 % 2);
      for (int begin = 0; begin < pitch; begin += together) {
        const int c = begin + column_of;
        const Part part = Merge::over(mine, CLUSTER, group, c < pitch, [&](int k) { return sent[k * pitch + c]; });
        if (mine == 0 && c < pitch) wholes[c] = make(c, part);
      }
    } else if constexpr (GRID) {
      const int split = gridDim.x;
      for (int begin = 0; begin < pitch; begin += together) {
        const int c = begin + column_of;
        Part part = Merge::nothing();
        for (int first = mine; first < split && c < pitch; first += kAtOnce * group) {
          Part here[kAtOnce];
          bool there;
          do {
            there = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const int k = first + i * group;
              here[i] = Merge::nothing();
              if (k < split) there &= told[(int64_t)k * pitch + c].read(&here[i], round + 1);
            }
          } while (!there);
          part = Merge::two(part, here);
        }
        __syncwarp();
        part = Merge::of_lanes(part, side);
        if (mine == 0 && c < pitch) wholes[c] = make(c, part);
      }
    }
    __syncthreads();
    int c = place.own;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      out[v] = wholes[c];
      c = place.after(c);
    }
  }
};
