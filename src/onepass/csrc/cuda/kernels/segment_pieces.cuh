// segment_pieces.cuh: pieces of the rows that do not fit into a tile, and how the threads of a block read and write
// them. The next pieces are copied to shared memory while one is computed.
#pragma once

#include "async_copy.cuh"
#include "segment_types.cuh"
#include "segments.cuh"

constexpr int H = C::kSingle ? 1 : V;  // heads of a thread; without heads a vector has V neighbouring items of one row
constexpr int kThreads = C::kRowsPerBlock, kWarps = kThreads / 32;
constexpr int kAtOnce = 2;  // vectors that a thread loads together

// A piece of a row. Its vectors go to the threads in turns. Without heads, the first and the last vector may belong to
// the row only in part.
struct Piece {
  int64_t segment, begin;            // the row, and the item with which the first vector begins
  int low, high;                     // without heads: which elements of the vectors belong to the row
  int first_whole, last_whole;       // vectors with elements of the row only: from the first to before the last
  int vectors, turns;                // how many vectors there are, and how many turns of all threads
  int number, first_number, of_row;  // the piece, the first piece of the row, and how many pieces the row has

  __device__ bool is_deferred(const SegmentMap& map) const { return of_row > map.most_waiting; }
};

// The heads of a thread, and their offsets in the tensors.
struct Lane {
  const SegmentMap& map;
  const int lanes_log2, lanes, chunk;  // threads that share the heads of an item; the block's chunk of heads
  const int head;                      // the thread's first head, in the chunk
  bool is_there;                       // whether these heads exist
  int64_t places[C::kItemTensors + C::kRowTensors];

  __device__ explicit Lane(const SegmentMap& map)
      : map(map),
        lanes_log2(C::kSingle ? 0 : map.head_lanes_log2),
        lanes(1 << lanes_log2),
        chunk(C::kSingle ? 0 : blockIdx.x % map.chunks),
        head(((int)threadIdx.x & (lanes - 1)) * H) {
    int64_t column = (int64_t)chunk * lanes * H + head;
    is_there = column < map.columns;
    unroll<C::kItemTensors + C::kRowTensors>([&](int line) { places[line] = 0; });
    for (int d = map.dims - 1; d >= 0 && is_there; --d) {
      const int64_t whole = divide(column, map.sizes[d]);
      unroll<C::kItemTensors + C::kRowTensors>(
          [&](int line) { places[line] += (column - whole * map.sizes[d]) * map.strides[C::tensor_of(line)][d]; });
      column = whole;
    }
  }
  __device__ int heads() const { return lanes * H; }  // of the block
  template <class T>
  __device__ T* at_item(int tensor, int line, int64_t item) const {
    T* const data = (T*)map.data[tensor];
    if constexpr (C::kSingle) return data + item;
    return data + (C::kOrder ? index_at(map, map.order, item) : item) * map.steps[tensor] + places[line];
  }
  // Without heads: the elements between a boundary of 16 bytes and the item; and whether another tensor has aligned
  // vectors where the first tensor has them.
  __device__ int misalignment(int64_t item) const {
    return (int)(((uint64_t)map.data[kItemFirst] / sizeof(In) + (uint64_t)item) % V);
  }
  template <class T>
  __device__ bool is_aligned(int tensor) const {
    return !C::kSingle || ((uint64_t)map.data[tensor] / sizeof(T) - misalignment(0)) % V == 0;
  }
  // The address of the row's number for head `v`.
  template <class T>
  __device__ T* at_row(int line, int64_t segment, int v) const {
    const int64_t head_step = H == 1 || map.dims == 0 ? 0 : map.strides[kRowFirst + line][map.dims - 1];
    return (T*)map.data[kRowFirst + line] + segment * map.steps[kRowFirst + line] + places[C::kItemTensors + line] +
           v * head_step;
  }
};

// The addresses of the thread's vectors of a piece in a tensor.
template <class T>
struct Walk {
  const Lane& lane;
  const int tensor, line, items;  // items: from a turn to the next
  const int64_t item, step;       // the item of the first turn; elements from a turn to the next
  T* first;

  __device__ Walk(const Lane& lane, const Piece& piece, int tensor, int line)
      : lane(lane),
        tensor(tensor),
        line(line),
        items(C::kSingle ? kThreads * V : kThreads >> lane.lanes_log2),
        item(piece.begin + (C::kSingle ? (int)threadIdx.x * V : (int)threadIdx.x >> lane.lanes_log2)),
        step(C::kSingle ? items : items * lane.map.steps[tensor]) {
    if constexpr (!C::kOrder) first = lane.at_item<T>(tensor, line, item);
  }
  // The vector of turn `turn + i`.
  __device__ T* at(int turn, int i) const {
    if constexpr (C::kOrder) return lane.at_item<T>(tensor, line, item + (turn + i) * items);
    return first + turn * step + i * step;
  }
};

// A ring in shared memory for the vectors of pieces that have arrived or are being copied. A thread reads only what it
// has copied itself, so no barrier is needed.
struct Ring {
  const SegmentMap& map;
  const Lane lane;
  const uint32_t memory;

  __device__ explicit Ring(const SegmentMap& map)
      : map(map), lane(map), memory(dynamic_smem_address() + threadIdx.x * (int)sizeof(Vector<In, V>)) {}
  __device__ int second() const {
    return map.turns * kTurnBytes<In> + (int)threadIdx.x * (int)(sizeof(Vector<Second, V>) - sizeof(Vector<In, V>));
  }
  __device__ int bytes() const { return map.turns * (kTurnBytes<In> + C::kHasSecond * kTurnBytes<Second>); }
  // The address of the thread's vectors of a piece whose turns begin at `turn`.
  __device__ uint32_t first_at(int turn) const { return memory + turn * kTurnBytes<In>; }
  __device__ uint32_t second_at(int turn) const { return memory + second() + turn * kTurnBytes<Second>; }

  // Begins to copy a piece.
  __device__ void copy(const Piece& piece, int turn) const {
    copy<In>(piece, kItemFirst, 0, first_at(turn));
    if constexpr (C::kHasSecond) copy<Second>(piece, kItemSecond, 1, second_at(turn));
    AsyncCopy::commit();
  }
  // Calls f(turn, i, first vector, second vector, belongs) for the thread's vectors of a piece. belongs(v) says whether
  // element v belongs to the row.
  template <class F>
  __device__ void for_vectors(const Piece& piece, int turn, F f) const {
    const uint32_t first = first_at(turn), second = second_at(turn);
    for_turns(piece, [&](auto count, int turn, auto belongs) {
      Vector<In, V> one[count.value];
      Vector<Second, V> two[count.value] = {};
      unroll<count.value>([&](int i) {
        one[i] = load<In>(first + (turn + i) * kTurnBytes<In>);
        if constexpr (C::kHasSecond) two[i] = load<Second>(second + (turn + i) * kTurnBytes<Second>);
      });
      unroll<count.value>([&](int i) { f(turn, i, one[i], two[i], belongs); });
    });
  }
  // Replaces a vector of the first tensor by numbers of the same size.
  __device__ void put(int turn, const Vector<A, V>& values) const {
    if constexpr (sizeof(A) == sizeof(In)) store_smem(first_at(turn), values);
  }

 private:
  template <class T>
  static constexpr int kTurnBytes = kThreads * sizeof(Vector<T, V>);
  template <int Count>
  struct Number {
    static constexpr int value = Count;
  };
  struct All {
    __device__ bool operator()(int) const { return true; }
  };
  struct Some {
    const Piece& piece;
    const int vector;
    __device__ bool operator()(int v) const {
      if (!C::kSingle) return vector < piece.last_whole;
      return vector * V + v >= piece.low && vector * V + v < piece.high;
    }
  };

  // Calls f(count, turn, belongs) for all turns, `count` at a time. Only in the first and the last turn may a vector of
  // a warp belong to the row in part.
  template <class F>
  __device__ void for_turns(const Piece& piece, F f) const {
    if (!lane.is_there) return;
    const int warp = threadIdx.x & ~31;
    const int end = (piece.last_whole - warp + kThreads - 32) / kThreads;
    int turn = warp < piece.first_whole;
#pragma unroll 1
    for (; turn + kAtOnce <= end; turn += kAtOnce) f(Number<kAtOnce>(), turn, All());
#pragma unroll 1
    for (; turn < end; ++turn) f(Number<1>(), turn, All());
#pragma unroll 1
    for (int i = warp < piece.first_whole ? 0 : turn; warp + i * kThreads < piece.vectors;
         i = i < turn ? turn : piece.turns)
      f(Number<1>(), i, Some{piece, i * kThreads + (int)threadIdx.x});
  }
  template <class T>
  static __device__ Vector<T, V> load(uint32_t at) {
    if constexpr (sizeof(Vector<T, V>) >= 4) {
      return load_smem<Vector<T, V>>(at);
    } else {
      Vector<T, V> vector;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(vector.at[0].bits) : "r"(at));
      return vector;
    }
  }
  template <class T>
  __device__ void copy(const Piece& piece, int tensor, int line, uint32_t at) const {
    constexpr int kBytes = sizeof(Vector<T, V>);
    const bool is_aligned = lane.is_aligned<T>(tensor);
    const Walk<const T> walk(lane, piece, tensor, line);
    for_turns(piece, [&](auto count, int turn, auto belongs) {
      unroll<count.value>([&](int i) {
        const uint32_t to = at + (turn + i) * kTurnBytes<T>;
        if (!C::kSingle && !belongs(0)) return;
        // A vector that belongs to the row only in part is copied whole if all of it belongs to the tensor.
        bool is_whole = is_same<decltype(belongs), All> || !C::kSingle;
        if (!is_whole) {
          const int element = ((turn + i) * kThreads + (int)threadIdx.x) * V;
          const int64_t item = piece.begin + element;
          is_whole = element < piece.high && item >= 0 && item + V <= map.items;
        }
        const T* const from = walk.at(turn, i);
        if constexpr (kBytes < 4) {
          asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(from->bits) : "memory");
        } else if (is_aligned && is_whole) {
          AsyncCopy::start<kBytes>(to, from);
        } else {
          unroll<V>([&](int v) {
            if (!belongs(v)) return;
            if constexpr (sizeof(T) >= 4)
              AsyncCopy::start<sizeof(T)>(to + v * (int)sizeof(T), from + v);
            else
              asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + v * (int)sizeof(T)), "h"(from[v].bits) : "memory");
          });
        }
      });
    });
  }
};
