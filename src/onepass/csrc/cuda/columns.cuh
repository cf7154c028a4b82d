// columns.cuh: tiles of columns, softmaxes whose neighbouring elements are apart in memory and whose neighbours lie
// side by side. A thread has vectors of V columns, each as far from the last as the next, so that it makes V states;
// those of the threads that share a column are merged through shared memory, then over the blocks of a cluster.
//
//   tile     `across` threads side by side, `down` of them down the columns
//   slab     a piece of memory that holds all of some columns, whose number need not be one of whole vectors: threads
//            take vectors one after another, in turns of a whole number of lines of the slab, so that a thread's
//            columns are always the same
//   strided  any strides, element by element
//
// AHEAD 1: a block takes one tile after another, and of the next one whole vectors are fetched into shared memory while
// it is busy with this one. SHELVED 1: of this one, those that registers do not hold. GRID 1: the blocks of one y share
// columns, by messages through memory, in a cooperative launch.
#pragma once

#include "cluster.cuh"
#include "grid.cuh"
#include "shelf.cuh"
#include "tiles.cuh"
#include "warp.cuh"

constexpr bool kSlab = EDGES == 3 || EDGES == 4, kStrided = EDGES == 5;
constexpr bool kFull = EDGES == 2 || EDGES == 4;  // a vector is there as a whole or not at all
constexpr int V = VECTOR;

// How many blocks should fit a multiprocessor, of threads that hold so many registers. Left to itself the compiler
// takes up to twice as many as they need.
__device__ constexpr int blocks_of(int held) {
  const int fit = 65536 / (THREADS * (held + 34));
  return fit < 1 ? 1 : fit * THREADS > 2048 ? 2048 / THREADS : fit;
}

// Blocks that share columns, and which of them this is.
__device__ inline int sharing() { return GRID ? gridDim.x : CLUSTER; }
__device__ inline int sharing_rank() { return GRID ? blockIdx.x : CLUSTER == 1 ? 0 : cluster_rank(); }

// 64-bit divisions take a hundred instructions, of 32 bits twenty.
__device__ inline int64_t divided(int64_t a, int64_t b) {
  if (((uint64_t)a | (uint64_t)b) >> 32 == 0) return (uint32_t)a / (uint32_t)b;
  return a / b;
}

// Where element `index` of some dims lies, in each of so many tensors: added to `at`.
template <int Tensors>
__device__ inline void locate(const TileDims& dims, int64_t index, int64_t* at) {
#pragma unroll 1
  for (int d = dims.count - 1; d >= 0; --d) {
    const int64_t size = dims.sizes[d], next = d ? divided(index, size) : 0, here = index - next * size;
#pragma unroll
    for (int t = 0; t < Tensors; ++t) at[t] += here * dims.steps[t][d];
    index = next;
  }
}

// A thread's part of a tile: vectors number 0, 1, ... of those that `blocks` blocks share in turns, at `at`,
// `at + step`, ... in each tensor.
template <int Tensors>
struct Place {
  const Tiles& tiles;
  int64_t at[Tensors], step[Tensors];
  int own;                  // the place among the columns of the tile of the thread's first
  int phase;                // slab: the element of a vector that it begins with
  int first, whole, count;  // those of [first, whole) are whole vectors, and none is there beyond `count`
  int64_t rest;             // tile: columns from the thread's first on. slab: the place of its first element
  int64_t outer;            // tile, slab: which of those that lie apart
  int64_t column;           // tile, strided: the first of the tile
  int64_t origin;           // tile, slab: where the columns begin in the second tensor

  // `begins`: the element of a vector that the tensor begins with.
  __device__ Place(const Tiles& tiles, int64_t tile, int rank, uint64_t begins)
      : tiles(tiles), at{}, phase(0), first(0), count(0) {
    const unsigned thread = threadIdx.x, across = tiles.across;
    const int y = thread / across, x = thread - y * across;
    const bool works = y < tiles.down;
    outer = divided(tile, tiles.side);
    column = (tile - outer * tiles.side) * tiles.pitch;
    locate<Tensors>(tiles.outer, kStrided ? (column + x < tiles.inner ? column + x : 0) : outer, at);
    origin = at[1];
    own = x * V;
    if constexpr (kSlab) {
      phase = (int)((begins + (uint64_t)at[0]) % V);
      const int begin = (int)thread * V - phase;
      own = begin % tiles.pitch;
      if (own < 0) own += tiles.pitch;
      const int64_t turn = (int64_t)tiles.across * V, size = tiles.n * tiles.inner;
      first = begin < 0 && rank == 0;
      rest = begin + rank * turn;
      whole = works && rest + V <= size ? (int)divided(size - V - rest, turn * sharing()) + 1 : 0;
      count = works && rest < size ? (int)divided(size - 1 - rest, turn * sharing()) + 1 : 0;
#pragma unroll
      for (int t = 0; t < Tensors; ++t) at[t] += rest, step[t] = turn * sharing();
    } else {
      rest = tiles.inner - column - own;
      const int64_t row = y + rank * tiles.down;
      if (works && rest > 0 && row < tiles.n) count = (int)divided(tiles.n - row - 1, tiles.down * sharing()) + 1;
      whole = rest >= V ? count : 0;
      if constexpr (!kStrided) {
#pragma unroll
        for (int t = 0; t < Tensors; ++t) {
          at[t] += column + own + row * tiles.steps[t];
          step[t] = tiles.down * sharing() * tiles.steps[t];
        }
      }
    }
  }
  __device__ bool is_whole(int q) const { return q < whole && (!kSlab || kFull || q >= first); }
  __device__ bool all_whole(int q, int count) const { return q + count <= whole && (!kSlab || kFull || q >= first); }
  // Is element v of the vector q there? (Of one that is not whole.)
  __device__ bool has(int q, int v) const {
    if (q >= count) return false;
    if constexpr (kSlab) {
      const int64_t p = rest + q * step[0] + v;
      return p >= 0 && p < tiles.n * tiles.inner;
    } else {
      return v < rest;
    }
  }
  __device__ int64_t element(int tensor, int q) const {
    if constexpr (kStrided) {
      int64_t there[Tensors];
#pragma unroll
      for (int t = 0; t < Tensors; ++t) there[t] = at[t];
      const int64_t row = threadIdx.x / tiles.across + ((int64_t)q * sharing() + sharing_rank()) * tiles.down;
      locate<Tensors>(tiles.reduced, row, there);
      return there[tensor];
    } else {
      return at[tensor] + q * step[tensor];
    }
  }
  __device__ int after(int column) const { return !kSlab || column + 1 < tiles.pitch ? column + 1 : 0; }
};

// Vectors as they were read: halves two in a register. (As a vector of halves it would be taken apart, and each load
// waited for.)
template <class T, int Slots, bool Paired = sizeof(T) == 2 && (V > 1)>
struct Held {
  typedef Vector<T, V> Raw;
  Raw at[Slots];
  __device__ void put(int slot, Raw raw) { at[slot] = raw; }
  __device__ void put(int slot, int v, T value) { at[slot].at[v] = value; }
  __device__ void fill(int slot, T value) {
#pragma unroll
    for (int v = 0; v < V; ++v) at[slot].at[v] = value;
  }
  __device__ void forget() {}
  __device__ T get(int slot, int v) const { return at[slot].at[v]; }
  __device__ T again(int slot, int v) const { return at[slot].at[v]; }
};
template <class T, int Slots>
struct Held<T, Slots, true> {
  typedef Vector<uint32_t, (V + 1) / 2> Raw;
  Raw at[Slots];
  __device__ void put(int slot, Raw raw) { at[slot] = raw; }
  __device__ void put(int slot, int v, T value) {
    uint32_t& word = at[slot].at[v / 2];
    word = v % 2 ? (word & 0xffff) | (uint32_t)value.bits << 16 : (word & 0xffff0000) | value.bits;
  }
  __device__ void fill(int slot, T value) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) at[slot].at[w] = value.bits * 0x10001u;
  }
  // Between two passes: else the compiler keeps what it has widened in the first, in twice the registers.
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
#pragma unroll
      for (int w = 0; w < V / 2; ++w) asm volatile("" : "+r"(at[i].at[w]));
    }
  }
  __device__ T get(int slot, int v) const { return T{(uint16_t)(at[slot].at[v / 2] >> v % 2 * 16)}; }
};

// Where a thread's vectors wait in shared memory, each vector of all operands together.
__device__ inline uint32_t place_of(int operand, int slot) {
  constexpr int kBytes = V * sizeof(IN);
  return shelf_address() + ((slot * kOperands + operand) * THREADS + threadIdx.x) * kBytes;
}
// Begins to fetch the whole one of the vectors q, q + 1, ... of a tensor to the slots 0, 1, ...
template <class T, int Tensors>
__device__ inline void fetch_vectors(int operand, const T* from, const Place<Tensors>& place, int tensor, int q,
                                     int count) {
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    if (place.is_whole(q + i)) fetch<V * sizeof(IN)>(place_of(operand, i), from + place.element(tensor, q + i));
  }
}
constexpr int kChunk = 4;  // vectors that are taken from the shelf at a time

// From a thread's vector to its next. Opaque: the compiler would else compute each address anew, in ten instructions.
template <class T>
__device__ inline T* next(T* at, int64_t step) {
  at += step;
  asm volatile("" : "+l"(at));
  return at;
}

// Loads a vector of global memory, which the compiler does not know an opaque address to be of.
template <class Raw>
__device__ inline Raw load_global(const void* at) {
  constexpr int kBytes = sizeof(Raw);
  uint32_t words[4] = {};
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(at));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(at));
  } else {
    return *reinterpret_cast<const Raw*>(at);
  }
  Raw raw;
  memcpy(&raw, words, kBytes);
  return raw;
}

// Takes the vectors q, q + 1, ... of a tensor, of which those that are not there become `none`. Whole ones may wait in
// shared memory, from the slot `waits` on.
template <bool Waits, class T, int Slots, int Tensors>
__device__ inline void take(Held<T, Slots>& held, const T* from, const Place<Tensors>& place, int tensor, int q, T none,
                            int operand, int waits) {
  typedef typename Held<T, Slots>::Raw Raw;
  const T* at = kStrided ? from : from + place.element(tensor, q);
  const auto whole = [&](int i) {
    if constexpr (Waits)
      return load_shared<Raw>(place_of(operand, waits + i));
    else
      return load_global<Raw>(kStrided ? from + place.element(tensor, q + i) : at);
  };
  if (!kStrided && place.all_whole(q, Slots)) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) held.put(i, whole(i)), at = next(at, place.step[tensor]);
    return;
  }
#pragma unroll
  for (int i = 0; i < Slots; ++i) {
    if (place.is_whole(q + i)) {
      held.put(i, whole(i));
    } else {
      held.fill(i, none);
      if constexpr (!kFull && !kStrided) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.has(q + i, v)) held.put(i, v, at[v]);
        }
      }
    }
    if constexpr (!kStrided) at = next(at, place.step[tensor]);
  }
}

// Stores a vector, if so. Not by a branch: the compiler would move into it what is stored, and work on one vector at a
// time.
template <class T, int Count>
__device__ inline void store_if(bool yes, T* at, Vector<T, Count> vector) {
  constexpr int kBytes = sizeof(vector);
  uint32_t words[4] = {};
  memcpy(words, &vector, kBytes);
  if constexpr (kBytes == 16) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                     (uint32_t)yes),
                 "l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"((uint32_t)yes),
        "l"(at), "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    if (yes) *reinterpret_cast<Vector<T, Count>*>(at) = vector;
  }
}

// Stores the vectors q, q + 1, ..., the results of `result(slot, v)`.
template <int Slots, class T, int Tensors, class F>
__device__ inline void give(T* to, const Place<Tensors>& place, int tensor, int q, F result) {
  T* at = kStrided ? to : to + place.element(tensor, q);
#pragma unroll
  for (int i = 0; i < Slots; ++i) {
    const bool whole = place.is_whole(q + i);
    if constexpr (kStrided) at = to + (whole ? place.element(tensor, q + i) : 0);
    Vector<T, V> made;
    if constexpr (sizeof(T) == 2 && V > 1) {
      Vector<uint32_t, (V + 1) / 2> pairs;
#pragma unroll
      for (int w = 0; w < V / 2; ++w) pairs.at[w] = pack<T>(result(i, 2 * w), result(i, 2 * w + 1));
      memcpy(&made, &pairs, sizeof(made));
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) made.at[v] = narrow<T>(result(i, v));
    }
    store_if(whole, at, made);
    if constexpr (!kFull && !kStrided) {
      if (!whole) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.has(q + i, v)) at[v] = made.at[v];
        }
      }
    }
    if constexpr (!kStrided) at = next(at, place.step[tensor]);
  }
}

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
