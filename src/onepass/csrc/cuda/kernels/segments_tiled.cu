// segments_tiled.cu: short rows of unequal length. A block takes a tile of neighbouring rows, as many as fit into its
// part of shared memory, while the next tile is being copied. Each thread has a strip of the tile: K consecutive items,
// of V heads. So all threads have equally many items, whichever rows these belong to. A row is a run of items
// (segment_runs.cuh).
#include "async_copy.cuh"
#include "segment_list.cuh"
#include "segment_runs.cuh"
#include "segment_types.cuh"
#include "segments.cuh"

// The V heads of a thread are neighbouring places of the inner dims.
constexpr int K = C::kVecs;  // items in a strip
constexpr int kThreads = C::kRowsPerBlock, kWarps = kThreads / 32;

typedef Vector<A, V> Values;

struct Tile {
  int64_t segment, rows;  // the first row, and how many there are
  int64_t begin;          // the first item
  int items;
  int shift;  // elements between a boundary of 16 bytes and the first item, in shared memory as in the first tensor
  int chunk;  // the chunk of heads
};

// How many rounds of offsets, one row per thread each, may be copied ahead, limited by shared memory. A tile with heads
// has few rows, so none are.
constexpr int kRounds = !C::kSingle ? 0 : (C::kHasSecond && sizeof(In) > 2 ? 128 : 512) / kThreads;

struct Shared {
  unsigned begins[2][kThreads + 1];  // of two tiles: for each strip, a bit for each item with which a row begins
  // Of two tiles: the begin and end of each row.
  Vector<int64_t, 2> offsets[2][kRounds ? kRounds : 1][kRounds ? kThreads : 1];
  Exchange<C> exchanges[2];      // used alternately
  Vector<A, 4> goes_on[kQuads];  // the table of Runs
};

// The offset of a tile's element in shared memory. There are padding bytes between the elements of neighbouring strips,
// so that the lanes of a warp access different banks.
constexpr int kPadBytes = C::kSingle ? 16 : 32;
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }
__device__ inline int padded_log2(const SegmentMap& map) { return C::kSingle ? log2_of(K) : map.padded_log2; }
// `memory`: the offset of the tile in dynamic shared memory.
template <class T>
__device__ inline int offset_in_tile(const SegmentMap& map, int memory, int element) {
  return memory + element * (int)sizeof(T) + (element >> padded_log2(map)) * kPadBytes;
}
template <class T>
__device__ inline T* in_tile(const SegmentMap& map, int memory, int element) {
  return (T*)(dynamic_smem + offset_in_tile<T>(map, memory, element));
}

// A thread's part of the tile.
struct Strip {
  const SegmentMap& map;
  const int head_lanes, number;  // the number of the strip in the tile
  const int head;                // its first head; an idle lane has the head of another lane
  const bool is_idle;

  __device__ explicit Strip(const SegmentMap& map)
      : map(map),
        head_lanes(C::kSingle ? 1 : 1 << map.head_lanes_log2),
        number(C::kSingle ? threadIdx.x : (int)threadIdx.x % (32 * map.group_warps) >> map.head_lanes_log2),
        head(C::kSingle ? 0 : min(own_head(), map.pitch - V)),
        is_idle(!C::kSingle && own_head() >= map.pitch) {}
  __device__ int own_head() const {
    return ((int)threadIdx.x / (32 * map.group_warps) * head_lanes + ((int)threadIdx.x & (head_lanes - 1))) * V;
  }
  // Calls f(k, elements of a vector, element of the tile) for the strip's vectors in shared memory.
  template <class T, class F>
  __device__ void for_vectors(int shift, F f) const {
    if constexpr (C::kSingle) {
      constexpr int kEach = 16 / sizeof(T) < K ? 16 / sizeof(T) : K;
      unroll<K / kEach>([&](int j) { f(j * kEach, Vector<T, kEach>(), number * K + j * kEach); });
    } else {
      unroll<K>([&](int k) { f(k, Vector<T, V>(), shift + (number * K + k) * map.pitch + head); });
    }
  }
  template <class T, class F>
  __device__ void load(int memory, int shift, F f) const {
    for_vectors<T>(shift, [&](int k, auto vector, int element) {
      typedef decltype(vector) Of;
      const Of of = *(const Of*)in_tile<T>(map, memory, element);
      constexpr int kCount = sizeof(Of) / sizeof(T);
      unroll<kCount>([&](int i) { f(C::kSingle ? k + i : k, C::kSingle ? 0 : i, of.at[i]); });
    });
  }
  template <class T, class F>
  __device__ void store(int memory, int shift, F f) const {
    for_vectors<T>(shift, [&](int k, auto of, int element) {
      typedef decltype(of) Of;
      constexpr int kCount = sizeof(Of) / sizeof(T);
      unroll<kCount>([&](int i) { of.at[i] = f(C::kSingle ? k + i : k, C::kSingle ? 0 : i); });
      if (!is_idle) *(Of*)in_tile<T>(map, memory, element) = of;
    });
  }
};

constexpr bool kNumbersInPlace = C::kReduces && sizeof(In) == sizeof(A);

// The tiles of a block.
struct BlockTiles {
  const SegmentMap& map;
  Shared& shared;
  const Strip strip;
  const int first_chunk, chunk_step, pitch, capacity;  // chunks of heads of the block; heads and items of a tile

  __device__ BlockTiles(const SegmentMap& map, Shared& shared)
      : map(map),
        shared(shared),
        strip(map),
        first_chunk(C::kSingle ? 0 : blockIdx.x % map.chunk_blocks),
        chunk_step(C::kSingle ? 1 : map.chunk_blocks),
        pitch(C::kSingle ? 1 : map.pitch),
        capacity(C::kSingle ? kThreads * K : (32 * map.group_warps >> map.head_lanes_log2) * K) {
    clear(0), clear(1);
    Runs<C>::fill(shared.goes_on);
    __syncthreads();
  }
  // The offsets of the elements of a tile's two tensors in shared memory.
  __device__ int first(int buffer) const { return buffer * map.buffer_bytes; }
  __device__ int second(int buffer) const { return first(buffer) + map.first_bytes; }
  // Two numbers of each row, stored at the item with which the row begins. In a reduction, the second number replaces
  // the scores, which have been read by then, if it has their size.
  __device__ A* numbers(int which, int buffer) const {
    const int each = capacity * pitch * (int)sizeof(A);
    if (kNumbersInPlace && which) return (A*)(dynamic_smem + first(buffer));
    return (A*)(dynamic_smem + 2 * map.buffer_bytes + which * each);
  }
  // Clears the bits of the rows' first items.
  __device__ void clear(int buffer) const { shared.begins[buffer][threadIdx.x] = 0; }
  // The offset of a place of the inner dims in a tensor.
  __device__ int64_t place_of(int tensor, int64_t column) const {
    if (C::kSingle || map.dims == 0) return 0;
    if (map.dims == 1) return column * map.strides[tensor][0];
    int64_t place = 0;
#pragma unroll 1
    for (int d = map.dims - 1; d >= 0; --d) {
      const int64_t whole = divide(column, map.sizes[d]);
      place += (column - whole * map.sizes[d]) * map.strides[tensor][d];
      column = whole;
    }
    return place;
  }
  // If the rows of the tile have another chunk of heads for this block, moves the tile to that chunk and returns true.
  __device__ bool moves_on(Tile& tile) const {
    if (C::kSingle || tile.chunk + chunk_step >= map.chunks) return false;
    tile.chunk += chunk_step;
    return true;
  }

  struct Bounds {
    int64_t from, to;
  };
  __device__ Bounds copied_bounds(int buffer, int row) const {
    const Vector<int64_t, 2> wide = shared.offsets[buffer][row / kThreads][row % kThreads];
    if (map.has_wide_indices) return {wide.at[0], wide.at[1]};
    return {(int)wide.at[0], (int)(wide.at[0] >> 32)};
  }
  // Begins to copy the offsets of the rows from `segment` to before `last`, up to `rounds` rounds of them.
  __device__ void fetch_offsets(int64_t segment, int64_t last, int buffer, int rounds) const {
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int64_t row = segment + round * kThreads + threadIdx.x;
      if (row >= last) return;
      const uint32_t to = smem_address(&shared.offsets[buffer][round][threadIdx.x]);
      const char* const from = (const char*)map.offsets + (row << (map.has_wide_indices ? 3 : 2));
      unroll<2>([&](int i) {
        if (map.has_wide_indices)
          AsyncCopy::start<8>(to + i * 8, from + i * 8);
        else
          AsyncCopy::start<4>(to + i * 4, from + i * 4);
      });
    }
  }
  // Finds the next tile of rows, from `segment`, whose first item is `begin`, to before `last`, and moves both behind
  // the tile. Rows that do not fit into any tile are skipped and listed. `rounds`: how many rounds of the thread's
  // offsets have been copied; it is set to how many are worth copying for the next tile. All threads pass at least one
  // barrier.
  __device__ Tile find(int64_t& segment, int64_t& begin, int64_t last, int buffer, int& rounds,
                       LongRowList& passed_over) {
    unsigned* const begins = shared.begins[buffer];
    const auto begins_at = [&](unsigned item) { atomicOr(&begins[item / K], 1u << item % K); };
    int copied = rounds;  // rounds of offsets that are in shared memory
    Tile tile = {};
    if (segment >= last) __syncthreads();
    while (segment < last) {
      tile.segment = segment, tile.begin = begin, tile.chunk = first_chunk, tile.shift = shift_of(begin);
      const int begin_at = C::kSingle ? tile.shift : 0;
      const unsigned room = (unsigned)min(map.items - begin, (int64_t)(capacity - begin_at));
      int passed = kThreads, round = 0;
      for (; passed == kThreads; ++round) {
        bool fits = false;
        if ((int)threadIdx.x < last - segment) {
          const Bounds bounds =
              round < copied ? copied_bounds(buffer, round * kThreads + (int)threadIdx.x)
                             : Bounds{offset_of(map, segment + threadIdx.x), offset_of(map, segment + threadIdx.x + 1)};
          const uint64_t from = bounds.from - begin, to = bounds.to - begin;
          const unsigned at = (unsigned)from, end = (unsigned)to;
          // If a row does not fit, no row after it does.
          fits = (from | to) >> 32 == 0 && end <= room && at <= end;
          if (fits && at < end) begins_at(at + begin_at);
        }
        passed = __syncthreads_count(fits);
        segment += passed;
      }
      tile.rows = segment - tile.segment;
      if (tile.rows == 0) {
        passed_over.add(segment++);
        begin = item_of(offset_of(map, segment));
        copied = 0;
        continue;
      }
      begin = item_of(round <= copied ? copied_bounds(buffer, (int)tile.rows - 1).to : offset_of(map, segment));
      rounds = min(round, kRounds);
      const uint64_t items = begin - tile.begin;
      tile.items = items > room ? 0 : (int)items;
      if (threadIdx.x == 0) begins_at(tile.items + begin_at);
      return tile;
    }
    tile.rows = 0;
    return tile;
  }
  __device__ int64_t item_of(int64_t offset) const { return min(max(offset, (int64_t)0), (int64_t)map.items); }
  // Begins to copy the elements of a tile to shared memory.
  __device__ void copy(const Tile& tile, int buffer) const {
    copy<In>(tile, kItemFirst, first(buffer));
    if constexpr (C::kHasSecond) copy<Second>(tile, kItemSecond, second(buffer));
  }
  // Stores the results of a tile. In shared memory they have replaced the first tensor.
  __device__ void store(const Tile& tile, int buffer) const {
    constexpr int kEach = 16 / sizeof(Out);
    const int memory = first(buffer);
    const int end = tile.shift + tile.items * pitch;
    if (is_flat<Out>(tile, kItemResult)) {
      Out* const to = (Out*)map.data[kItemResult] + tile.begin * pitch - tile.shift;
      for_vectors<Out>(memory, to, end, [&](int offset, Out* at, int element) {
        if (element >= tile.shift && element + kEach <= end)
          store_vector(at, *(const Vector<Out, kEach>*)(dynamic_smem + offset));
      });
      // The vectors that belong to the tile only in part.
      const auto store_one = [&](int at) {
        if (at >= tile.shift && at < end) to[at] = *in_tile<Out>(map, memory, at);
      };
      if (threadIdx.x < kEach) store_one((int)threadIdx.x), store_one(end / kEach * kEach + (int)threadIdx.x);
    } else if (is_in_vectors(tile, kItemResult)) {
      for_items<Out, kEach>(tile, kItemResult, [&](Out* to, int element) {
        store_vector(to, *(const Vector<Out, kEach>*)in_tile<Out>(map, memory, element));
      });
    } else {
      for_items<Out, 1>(tile, kItemResult, [&](Out* to, int element) { *to = *in_tile<Out>(map, memory, element); });
    }
  }

 private:
  __device__ int shift_of(int64_t begin) const {
    constexpr int kEach = 16 / sizeof(In);
    if (map.access[kItemFirst] != kSegmentFlat) return 0;
    const uint32_t at = (uint32_t)((uint64_t)map.data[kItemFirst] / sizeof(In)) + (uint32_t)begin * pitch;
    return (int)(at % kEach);
  }
  // Whether the vectors of 16 bytes in memory are vectors of the tile too; or whether the heads of an item are such
  // vectors.
  template <class T>
  __device__ bool is_flat(const Tile& tile, int tensor) const {
    const uint32_t at = (uint32_t)((uint64_t)map.data[tensor] / sizeof(T)) + (uint32_t)tile.begin * pitch - tile.shift;
    return map.access[tensor] == kSegmentFlat && at % (16 / sizeof(T)) == 0;
  }
  __device__ bool is_in_vectors(const Tile& tile, int tensor) const {
    return !C::kSingle && map.access[tensor] == kSegmentVectors && tile.shift == 0;
  }
  // Calls f(offset in shared memory, address at `data`, element) for the vectors of 16 bytes of a tile that ends at
  // `end`, and possibly for a few vectors beyond it.
  template <class T, class F>
  __device__ void for_vectors(int memory, T* data, int end, F f) const {
    constexpr int kEach = 16 / sizeof(T), kMost = V * K / kEach ? V * K / kEach : 1, kTurn = kThreads * kEach;
    const int first = (int)threadIdx.x * kEach;
    const int own = offset_in_tile<T>(map, memory, first);
    const int turn_bytes = kTurn * (int)sizeof(T) + (kTurn >> padded_log2(map)) * kPadBytes;
    unroll<kMost>([&](int j) { f(own + j * turn_bytes, data + first + j * kTurn, first + j * kTurn); });
    if (C::kSingle) return;
#pragma unroll 1
    for (int j = kMost; first + j * kTurn < end; ++j)
      f(own + j * turn_bytes, data + first + j * kTurn, first + j * kTurn);
  }
  // Calls f(address, element) for every `kEach` heads of the items of a tile.
  template <class T, int kEach, class F>
  __device__ void for_items(const Tile& tile, int tensor, F f) const {
    const int64_t first = (int64_t)tile.chunk * pitch;
#pragma unroll 1
    for (int i = threadIdx.x * kEach; i < tile.items * pitch; i += kThreads * kEach) {
      const int number = C::kSingle ? i : divide((unsigned)i, map.by_pitch), head = i - number * pitch;
      if (!C::kSingle && first + head >= map.columns) continue;
      const int64_t item = tile.begin + number;
      const int64_t place = C::kOrder ? index_at(map, map.order, item) : item;
      f((T*)map.data[tensor] + place * map.steps[tensor] + place_of(tensor, first + head), tile.shift + i);
    }
  }
  template <class T>
  __device__ void copy(const Tile& tile, int tensor, int memory) const {
    constexpr int kEach = 16 / sizeof(T);
    const uint32_t smem = dynamic_smem_address();
    if (is_flat<T>(tile, tensor)) {
      const int end = tile.shift + tile.items * pitch;
      const int64_t first = tile.begin * pitch - tile.shift, elements = map.items * pitch;
      T* const from = (T*)map.data[tensor] + first;
      if (first >= 0 && first + (end + kEach - 1) / kEach * kEach <= elements)
        return for_vectors<T>(memory, from, end, [&](int offset, T* at, int element) {
          if (element < end) AsyncCopy::start<16>(smem + offset, at);
        });
      // Near the ends of the tensor whole vectors might reach beyond it.
#pragma unroll 1
      for (int i = (int)threadIdx.x; i < end; i += kThreads)
        if (i >= tile.shift) *in_tile<T>(map, memory, i) = from[i];
    } else if (is_in_vectors(tile, tensor)) {
      for_items<T, kEach>(tile, tensor, [&](const T* at, int element) {
        AsyncCopy::start<16>(smem + offset_in_tile<T>(map, memory, element), at);
      });
    } else {
      for_items<T, 1>(tile, tensor, [&](const T* at, int element) { *in_tile<T>(map, memory, element) = *at; });
    }
  }
};

// The result of an element from its exponential (or its difference from the maximum) and the sum l of its row.
template <class Epilogue>
__device__ inline A result_of(A value, A l) {
  if constexpr (Epilogue::kTakesExp) {
    if constexpr (sizeof(A) == 8) return value / (l + (l - l));  // if l is inf, all results are NaN
    return value * (sizeof(Out) == 2 ? approximate_reciprocal(l) : reciprocal(l));
  } else if constexpr (!Epilogue::kOnePerRow) {
    return Epilogue(State<A>{0, l + (l - l)})(value);
  }
  return value;
}

// Whether all scores are small. Then none is a NaN.
__device__ inline bool are_small(const Values (&scores)[K]) {
  float most = 0;
  unroll<K>([&](int k) { unroll<V>([&](int v) { most = larger_or_nan(most, fabsf((float)scores[k].at[v])); }); });
  return most <= kSmall;
}
// Computes the results, or the gradients, of a tile whose elements are in shared memory.
__device__ inline void compute(const BlockTiles& tiles, const Tile& tile, const unsigned* begins, int buffer,
                               Shared& shared) {
  const SegmentMap& map = tiles.map;
  const Strip& strip = tiles.strip;
  const int shift = C::kSingle ? 0 : tile.shift, at = strip.number * K;
  const Runs<C> runs(begins[strip.number], shared.goes_on, strip.head_lanes, C::kSingle ? kWarps : map.group_warps);
  Values values[K], others[C::kSums ? K : 1], totals[K];
  const int first = tiles.first(buffer), second = tiles.second(buffer);
  const auto for_all = [](auto f) { unroll<K>([&](int k) { unroll<V>([&](int v) { f(k, v); }); }); };
  const A factor = factor_of<C>(map);
  const auto scale = [&] {
    if (factor != 1) for_all([&](int k, int v) { values[k].at[v] *= factor; });
  };
  // Loads the scores, or the operands of a gradient.
  const auto load = [&] {
    strip.load<In>(first, shift, [&](int k, int v, In of) { values[k].at[v] = to_acc(of); });
    if constexpr (!C::kSums) scale();
    if constexpr (C::kHasSecond) {
      strip.load<Second>(second, shift, [&](int k, int v, Second of) {
        if constexpr (C::kSums)
          others[k].at[v] = to_acc(of);
        else
          values[k].at[v] += A(to_acc(of));
      });
    }
  };
  // Memory of the tile before and behind its items must not count, not even for how sums are computed.
  const auto clear_outside = [&](Values(&numbers)[K]) {
    const int own = at - (C::kSingle ? tile.shift : 0);
    if (own >= 0 && own + K <= tile.items) return;
    for_all([&](int k, int v) {
      if (!is_inside(own + k, tile.items)) numbers[k].at[v] = 0;
    });
  };
  load();
  if constexpr (C::kSums) {
    for_all([&](int k, int v) { totals[k].at[v] = term_of<C>(values[k].at[v], others[k].at[v]); });
    clear_outside(totals);
    runs.add<false, false>(totals, shared.exchanges[0]);
    if constexpr (C::kSingle) load();  // again, so that no registers hold them meanwhile
    for_all([&](int k, int v) {
      values[k].at[v] = C::Policy::Grad::template result<Out>(values[k].at[v], others[k].at[v], totals[k].at[v]);
    });
    scale();
  } else if constexpr (C::kPointwise) {
    // Each item gets the number of its row's first item, where the numbers of the row are stored.
    for_all([&](int k, int v) { totals[k].at[v] = runs.has(k) ? A(at + k) : A(-1); });
    runs.reduce(totals, shared.exchanges[0], Max());
    for_all([&](int k, int v) {
      const int number = max((int)totals[k].at[v], 0) * tiles.pitch + strip.head + v;
      const A lse = tiles.numbers(0, buffer)[number], grad = tiles.numbers(1, buffer)[number];
      values[k].at[v] = factor * C::Policy::Grad::template result<Out>(values[k].at[v], grad, lse);
    });
  } else {
    const auto keep = [&](int which, auto number) {
      for_all([&](int k, int v) {
        if (runs.has(k) && !strip.is_idle)
          tiles.numbers(which, buffer)[(at + k) * tiles.pitch + strip.head + v] = number(totals[k].at[v]);
      });
    };
    const auto itself = [](A total) { return total; };
    // If all scores of the tile are small, no maxima are needed. Whether they are is known only together with the sums.
    bool is_done = false;
    clear_outside(values);
    if constexpr (kMayHaveNoMaxima<C>) {
      const bool are = are_small(values);
      for_all([&](int k, int v) { totals[k].at[v] = values[k].at[v] = exp_of_small<Out>((float)values[k].at[v]); });
      is_done = runs.add<true, true>(totals, shared.exchanges[1], are);
      if (C::kReduces && is_done) keep(0, [](A) { return A(0); });
    }
    if (!is_done) {
      if constexpr (kMayHaveNoMaxima<C>) load(), clear_outside(values);
      for_all([&](int k, int v) { totals[k] = values[k]; });
      runs.reduce(totals, shared.exchanges[0], Max());
      if constexpr (C::kReduces) keep(0, itself);
      for_all([&](int k, int v) {
        // If the maximum is infinite, the element becomes NaN, as all results of the row; a reduction has a result.
        A& value = values[k].at[v];
        value -= C::kReduces ? finite_for_sum(totals[k].at[v]) : totals[k].at[v];
        totals[k].at[v] = exp_for_sum<Out>(value);
        if constexpr (C::ElementEpilogue::kTakesExp) value = totals[k].at[v];
      });
      runs.add<true, false>(totals, shared.exchanges[1]);
    }
    if constexpr (C::kReduces) keep(1, itself);
    for_all([&](int k, int v) { values[k].at[v] = result_of<C::ElementEpilogue>(values[k].at[v], totals[k].at[v]); });
  }
  if constexpr (!C::kReduces)
    strip.store<Out>(first, shift, [&](int k, int v) { return from_acc<Out>(values[k].at[v]); });
}

// Calls f(row, column, index of the row's numbers, whether the row has items) for all rows of a tile.
template <class F>
__device__ inline void for_rows(const BlockTiles& tiles, const Tile& tile, F f) {
  const SegmentMap& map = tiles.map;
  for (int64_t i = threadIdx.x; i < tile.rows * tiles.pitch; i += kThreads) {
    const int64_t row = C::kSingle ? i : divide(i, tiles.pitch);
    const int head = (int)(i - row * tiles.pitch);
    const int64_t column = (int64_t)tile.chunk * tiles.pitch + head;
    if (!C::kSingle && column >= map.columns) continue;
    const int64_t begin = offset_of(map, tile.segment + row), end = offset_of(map, tile.segment + row + 1);
    const int64_t at = begin - tile.begin + (C::kSingle ? tile.shift : 0);
    const bool has_items = begin < end && at >= 0 && at < tiles.capacity;
    f(tile.segment + row, column, has_items ? (int)at * tiles.pitch + head : 0, has_items);
  }
}
template <class T>
__device__ inline T* at_row(const BlockTiles& tiles, int tensor, int64_t row, int64_t column) {
  return (T*)tiles.map.data[tensor] + row * tiles.map.steps[tensor] + tiles.place_of(tensor, column);
}
template <class Epilogue = C::Epilogue>
__device__ inline void store_rows(const BlockTiles& tiles, const Tile& tile, int buffer) {
  for_rows(tiles, tile, [&](int64_t row, int64_t column, int number, bool has_items) {
    State<A> state = {-A(infinity()), A(0)};
    if (has_items) state = {tiles.numbers(0, buffer)[number], tiles.numbers(1, buffer)[number]};
    Epilogue::store(state, at_row<Out>(tiles, kRowFirst, row, column), tiles.map.plane);
  });
}

constexpr int kMinWarps = sizeof(A) == 8           ? 12
                          : V > 1 || K > 16        ? 16
                          : C::kSingle || C::kSums ? 20
                                                   : 24;  // per multiprocessor

extern "C" __global__ void __launch_bounds__(kThreads, kMinWarps / kWarps > 0 ? kMinWarps / kWarps : 1)
    onepass_kernel(const __grid_constant__ SegmentMap map) {
  __shared__ Shared shared;
  BlockTiles tiles(map, shared);
  const int64_t range = blockIdx.x / map.chunk_blocks, ranges = gridDim.x / map.chunk_blocks;
  const int64_t bounds[2] = {range * map.range_items, (range + 1) * map.range_items};
  int64_t found[2];
  find_segments(map, bounds, found);
  int64_t segment = range ? found[0] : 0;
  const int64_t last = range + 1 < ranges ? found[1] : map.segments;
  int64_t begin = tiles.item_of(offset_of(map, segment));
  int buffer = 0, begins = 0, rounds = min(1, kRounds);
  LongRowList passed_over(map);
  tiles.fetch_offsets(segment, last, begins, rounds);
  AsyncCopy::commit();
  AsyncCopy::wait<0>();
  Tile tile = tiles.find(segment, begin, last, begins, rounds, passed_over);
  if (tile.items > 0) tiles.copy(tile, buffer);
  tiles.fetch_offsets(segment, last, begins ^ 1, rounds);
  AsyncCopy::commit();
  while (tile.rows > 0) {
    if constexpr (C::kPointwise) {
      for_rows(tiles, tile, [&](int64_t row, int64_t column, int number, bool has_items) {
        if (!has_items) return;
        tiles.numbers(0, buffer)[number] = *at_row<const A>(tiles, kRowFirst, row, column);
        tiles.numbers(1, buffer)[number] = *at_row<const A>(tiles, kRowSecond, row, column);
      });
    }
    AsyncCopy::wait<0>();
    Tile next = tile;
    const bool moves_on = tiles.moves_on(next);
    if (moves_on)
      __syncthreads();
    else
      next = tiles.find(segment, begin, last, begins ^ 1, rounds, passed_over);
    if (next.items > 0) tiles.copy(next, buffer ^ 1);
    if (!moves_on) tiles.fetch_offsets(segment, last, begins, rounds);
    AsyncCopy::commit();
    if (tile.items > 0) compute(tiles, tile, shared.begins[begins], buffer, shared);
    if (!moves_on) tiles.clear(begins), begins ^= 1;
    __syncthreads();
    if constexpr (C::kReduces)
      store_rows(tiles, tile, buffer);
    else
      tiles.store(tile, buffer);
    tile = next, buffer ^= 1;
  }
  passed_over.close();
}
