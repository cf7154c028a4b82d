// column_reduce.cuh: the threads that share columns merge the partial states of each column: through shared memory,
// then over the blocks of a cluster, or over many blocks by messages through memory.
#pragma once

#include "async_copy.cuh"
#include "column_tile.cuh"
#include "grid_sync.cuh"
#include "warp_reduce.cuh"

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
  typedef L Sum;
  static constexpr bool kTops = true;
  static __device__ Part of(A top, A sum) { return {top, sum}; }
  static __device__ Part nothing() { return {-INFINITY_, 0}; }
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
  typedef L Sum;
  static constexpr bool kTops = false;
  static __device__ Part of(A, A sum) { return sum; }
  static __device__ Part nothing() { return 0; }
  template <int Count>
  static __device__ Part two(Part before, const Part (&parts)[Count]) {
    return value_of(
        add(begin_sum<A, L>(before), begin_sum<A, L>(plain_sum<Count, 0>([&](int i) { return parts[i]; }))));
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

constexpr int kAtATime = 4;  // parts of a column that a lane takes at a time

// A thread's values of its columns, to and from shared memory, in pieces of 16 bytes where they lie together.
template <class T>
__device__ inline void put_together(T* at, const T (&values)[V]) {
  constexpr int kPiece = V * sizeof(T) < 16 ? V : 16 / sizeof(T);
#pragma unroll
  for (int v = 0; v < V; v += kPiece) {
    Vector<T, kPiece> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.at[i] = values[v + i];
    *reinterpret_cast<Vector<T, kPiece>*>(at + v) = piece;
  }
}
template <class T>
__device__ inline void get_together(const T* at, T (&values)[V]) {
  if constexpr (V * sizeof(T) % 16 == 0) {
    typedef Vector<uint32_t, 4> Piece;
    Piece pieces[V * sizeof(T) / 16];
#pragma unroll
    for (int p = 0; p < (int)(V * sizeof(T) / 16); ++p) pieces[p] = reinterpret_cast<const Piece*>(at)[p];
    memcpy(values, pieces, sizeof(pieces));
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = at[v];
  }
}

// Where the threads that share columns meet. Dynamic shared memory: the vectors that wait there, what is used of whole
// columns, the parts of the block's threads with their maxima, or the block's, and what the blocks of a cluster send
// each other, in two boxes in turn. OwnTops: a thread's sum of a column is relative to its own maximum, and not to the
// block's: one trip less through shared memory, and a longer one.
template <class Merge, class Whole, bool OwnTops>
struct Meeting {
  typedef typename Merge::Part Part;
  typedef typename Merge::Scalar A;
  typedef typename Merge::Sum L;
  Mailbox boxes[2];

  // Before the first meeting, by all threads.
  __device__ void open(const Tiles& tiles, Rendezvous* all_clear) {
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x == 0) boxes[0].open(), boxes[1].open();
      arrive_in_cluster();
    } else if constexpr (GRID) {
      // What the memory of the call held before may look like any message: every block clears its own, and none is
      // read before all have. By the last warp: the others have their loads to ask for.
      const int last = blockDim.x - 32;
      if ((int)threadIdx.x >= last) {
        for (int turn = 0; turn < 2; ++turn) {
          for (int c = threadIdx.x - last; c < tiles.pitch; c += 32) told(tiles, turn, c, blockIdx.x)->message.clear();
        }
        __syncwarp();
        if ((int)threadIdx.x == last) {
          const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
          all_clear->open(), all_clear->arrive(block, blocks);
        }
      }
    }
  }
  // By all threads, once, before the first meeting: well after it is open, as none has to wait then.
  __device__ void await_clear(Rendezvous* all_clear) const {
    if (GRID && threadIdx.x == blockDim.x - 32) all_clear->wait();
  }

  // Of each of its columns a thread's own maximum in, and the block's out.
  template <int Tensors>
  __device__ void highest(A (&own)[V], const Place<Tensors>& place) {
    const Room room(place.tiles);
    room.put(room.parts, own, place);
    __syncthreads();
    const Lanes lanes(place.tiles);
    for (int c = lanes.column; c - lanes.slot < place.tiles.pitch; c += lanes.together) {
      A top = -INFINITY_;
      room.for_parts(c, lanes, place, A(-INFINITY_), [&](const A(&parts)[kAtATime]) {
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) top = max_(top, parts[i]);
      });
      top = over_lanes(top, lanes.side, [](A a, A b) { return max_(a, b); });
      if (lanes.mine == 0 && c < place.tiles.pitch) room.tops[c] = top;
    }
    __syncthreads();
    room.get(room.tops, own, place);
  }

  // Of each of its columns a thread's own sum in. Does any thread of the block say so?
  template <int Tensors>
  __device__ bool tell(const A (&own)[V], const Place<Tensors>& place, bool so) {
    const Room room(place.tiles);
    room.put(room.parts, own, place);
    return __syncthreads_or(so);
  }
  // Of each of its columns a thread's own sum in (if it has not told it), relative to `tops` if those are its own, and
  // what is made of the whole column, by one thread a column of the block, out: `make(column, part, the block's
  // maximum)`, which there is where sums are relative to it.
  template <bool HasTold, int Tensors, class Make>
  __device__ void meet(const A (&tops)[V], const A (&own)[V], Whole (&out)[V], const Place<Tensors>& place,
                       uint32_t round, Make make) {
    const Tiles& tiles = place.tiles;
    const int pitch = tiles.pitch;
    const Room room(tiles);
    const Lanes lanes(tiles);
    Part* const sent = room.sent + round % 2 * CLUSTER * pitch;
    if constexpr (!HasTold) room.put(room.parts, own, place);
    if constexpr (OwnTops) room.put(room.tops, tops, place);
    if (CLUSTER > 1 && round == 0) await_cluster();  // a peer's shared memory is there once it has started
    if (CLUSTER > 1 && threadIdx.x == 0) boxes[round % 2].expect(CLUSTER * pitch * sizeof(Part));
    if constexpr (!HasTold) __syncthreads();
    for (int c = lanes.column; c - lanes.slot < pitch; c += lanes.together) {
      const Part part = room.merged(c, lanes, place);
      if (c >= pitch) continue;
      if constexpr (CLUSTER > 1) {
        for (int peer = lanes.mine; peer < CLUSTER; peer += tiles.group)
          send(&sent[cluster_rank() * pitch + c], peer, part, &boxes[round % 2]);
      } else if constexpr (GRID) {
        if (lanes.mine == 0) told(tiles, round % 2, c, blockIdx.x)->write(part, round + 1);
      } else if (lanes.mine == 0) {
        room.wholes[c] = make(c, part, room.top_of(c));
      }
    }
    if constexpr (CLUSTER > 1) {
      boxes[round % 2].wait(round / 2 % 2);
      for (int c = lanes.column; c - lanes.slot < pitch; c += lanes.together) {
        Part part = Merge::nothing();
        for (int first = lanes.mine; first < CLUSTER && c < pitch; first += kAtATime * tiles.group) {
          Part here[kAtATime];
#pragma unroll
          for (int i = 0; i < kAtATime; ++i) {
            const int k = first + i * tiles.group;
            here[i] = k < CLUSTER ? sent[k * pitch + c] : Merge::nothing();
          }
          part = Merge::two(part, here);
        }
        __syncwarp();
        part = Merge::of_lanes(part, lanes.side);
        if (lanes.mine == 0 && c < pitch) room.wholes[c] = make(c, part, room.top_of(c));
      }
    } else if constexpr (GRID) {
      const int split = gridDim.x;
      for (int c = lanes.column; c - lanes.slot < pitch; c += lanes.together) {
        Part part = Merge::nothing();
        const Told<A>* const of_column = told(tiles, round % 2, c, 0);
        for (int first = lanes.mine; first < split && c < pitch; first += kAtOnce * tiles.group) {
          Part here[kAtOnce];
          bool there;
          do {
            there = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const int k = first + i * tiles.group;
              here[i] = Merge::nothing();
              if (k < split) there &= of_column[k].read(&here[i], round + 1);
            }
          } while (!there);
          part = Merge::two(part, here);
        }
        __syncwarp();
        part = Merge::of_lanes(part, lanes.side);
        if (lanes.mine == 0 && c < pitch) room.wholes[c] = make(c, part, room.top_of(c));
      }
    }
    __syncthreads();
    room.get(room.wholes, out, place);
  }

 private:
  // The message of a block of this group, of two in turn. Those of a column lie together: they are read together.
  static __device__ Told<A>* told(const Tiles& tiles, uint32_t turn, int column, int block) {
    const int64_t columns = ((int64_t)turn * gridDim.y + blockIdx.y) * tiles.pitch + column;
    return reinterpret_cast<Told<A>*>(tiles.messages) + columns * gridDim.x + block;
  }
  // Which columns a lane merges: `column`, and every `together`th from there; of its parts the number `mine` and every
  // `group`th from there.
  struct Lanes {
    int side, slot, column, mine, together;
    __device__ Lanes(const Tiles& tiles) {
      const int lane = threadIdx.x % 32, bits = 5 - tiles.group_bits;
      side = 1 << bits;
      mine = lane >> bits;
      slot = lane & (side - 1);
      column = (threadIdx.x / 32 << bits) + slot;
      together = blockDim.x / 32 << bits;
    }
  };
  struct Room {
    const Tiles& tiles;
    Whole* wholes;
    A *parts, *tops;
    Part* sent;
    __device__ Room(const Tiles& tiles) : tiles(tiles) {
      const auto up = [](int bytes) { return (bytes + 15) / 16 * 16; };
      unsigned char* at = dynamic_shared + tiles.waiting;
      wholes = reinterpret_cast<Whole*>(at), at += up(tiles.pitch * sizeof(Whole));
      parts = reinterpret_cast<A*>(at), at += up(tiles.parts * tiles.stride * sizeof(A));
      tops = reinterpret_cast<A*>(at);
      at += !Merge::kTops ? 0 : up((OwnTops ? tiles.parts * tiles.stride : tiles.pitch) * sizeof(A));
      sent = reinterpret_cast<Part*>(at);
    }
    template <int Tensors>
    __device__ void put(A* to, const A (&own)[V], const Place<Tensors>& place) const {
      if (threadIdx.x < tiles.across * tiles.down)
        put_together(to + (kSlab ? threadIdx.x * V : place.line * tiles.stride + place.own), own);
    }
    template <class T, int Tensors>
    __device__ void get(const T* from, T (&out)[V], const Place<Tensors>& place) const {
      if constexpr (!kSlab) {
        get_together(from + place.own, out);
      } else {
        int c = place.own;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          out[v] = from[c];
          c = place.after(c);
        }
      }
    }
    // What the block has of a column.
    template <int Tensors>
    __device__ Part merged(int column, const Lanes& lanes, const Place<Tensors>& place) const {
      if constexpr (OwnTops) {
        Part part = Merge::nothing();
        if (column < tiles.pitch) {
          const A *sum = parts + first_of(column, lanes, place), *top = tops + (sum - parts);
          for (int left = tiles.parts - lanes.mine; left > 0; left -= kAtATime << tiles.group_bits) {
            Part here[kAtATime];
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
              const int at = i * tiles.stride << tiles.group_bits;
              here[i] = Merge::nothing();
              if (i << tiles.group_bits < left) here[i] = Merge::of(top[at], sum[at]);
            }
            part = Merge::two(part, here);
            sum += kAtATime * tiles.stride << tiles.group_bits, top += kAtATime * tiles.stride << tiles.group_bits;
          }
        }
        __syncwarp();
        return Merge::of_lanes(part, lanes.side);
      } else {
        L sum = {};
        for_parts(column, lanes, place, A(0), [&](const A(&parts)[kAtATime]) {
          sum = add(sum, begin_sum<A, L>(plain_sum<kAtATime, 0>([&](int i) { return parts[i]; })));
        });
        sum = over_lanes(sum, lanes.side, [](L a, L b) { return add(a, b); });
        return Merge::of(column < tiles.pitch ? top_of(column) : A(0), value_of(sum));
      }
    }
    __device__ A top_of(int column) const {
      if constexpr (Merge::kTops && !OwnTops)
        return tops[column];
      else
        return 0;
    }
    // The first part that a lane has.
    template <int Tensors>
    __device__ int first_of(int column, const Lanes& lanes, const Place<Tensors>& place) const {
      int first = kSlab ? column + place.phase : column;
      if (kSlab && first >= tiles.pitch) first %= tiles.pitch;
      return first + lanes.mine * tiles.stride;
    }
    // A lane's parts of a column, so many at a time.
    template <int Tensors, class F>
    __device__ void for_parts(int column, const Lanes& lanes, const Place<Tensors>& place, A none, F f) const {
      if (column >= tiles.pitch) return;
      const A* from = parts + first_of(column, lanes, place);
      for (int left = tiles.parts - lanes.mine; left > 0; left -= kAtATime << tiles.group_bits) {
        A here[kAtATime];
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
          here[i] = none;
          if (i << tiles.group_bits < left) here[i] = from[i * tiles.stride << tiles.group_bits];
        }
        f(here);
        from += kAtATime * tiles.stride << tiles.group_bits;
      }
    }
  };
};
