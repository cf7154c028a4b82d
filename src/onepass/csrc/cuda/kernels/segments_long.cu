// segments_long.cu: rows of unequal length that fit no tile of segments_tiled.cu. A block takes a row of middling
// length. All blocks together take the long rows, each a tile of some thousand elements, and the states of the tiles of
// a row go through global memory. Elements are read from where they are. A row that fits the registers of those who
// take it stays there; elements of all others are read a second time, from a cache.
#include "config.cuh"
#include "grid_sync.cuh"
#include "segments.cuh"

typedef SegmentConfig C;
typedef C::A A;
typedef C::In In;
typedef C::Out Out;
typedef C::Second Second;
typedef State<A> RowState;  // backward: l is the sum

constexpr int V = C::kVecSize;        // heads of a lane: neighbouring places of the inner dims
constexpr int K = C::kVecs;           // items of a lane in registers
constexpr int kStep = K < 4 ? K : 4;  // items that a warp looks at, or does not, at a time

typedef Vector<A, V> Values;

// A lane, and where its heads are in the tensors.
struct Lane {
  const SegmentMap& map;
  const int head_lanes, head;  // the first head of its chunk
  bool is_there;               // whether there are such heads
  int64_t places[C::kItemTensors + C::kRowTensors];

  __device__ explicit Lane(const SegmentMap& map)
      : map(map),
        head_lanes(1 << (C::kSingle ? 0 : map.head_lanes_log2)),
        head(((int)threadIdx.x & (head_lanes - 1)) * V) {
    int64_t column = (int64_t)(blockIdx.x % map.chunks) * head_lanes * V + head;
    is_there = column < map.columns;
    unroll<C::kItemTensors + C::kRowTensors>([&](int line) { places[line] = 0; });
    for (int d = map.dims - 1; d >= 0 && is_there; --d) {
      const int64_t whole = divide(column, map.sizes[d]);
      unroll<C::kItemTensors + C::kRowTensors>(
          [&](int line) { places[line] += (column - whole * map.sizes[d]) * map.strides[C::tensor_of(line)][d]; });
      column = whole;
    }
  }
  // From a head to the next in a tensor of rows.
  __device__ int64_t row_head_step(int line) const {
    return V == 1 || map.dims == 0 ? 0 : map.strides[kRowFirst + line][map.dims - 1];
  }
  // The number of this lane among `lanes` that take items, of a warp or of all.
  __device__ int at(int lanes) const {
    return (C::kSingle ? threadIdx.x : threadIdx.x >> map.head_lanes_log2) & (lanes - 1);
  }

  template <class T>
  __device__ T* at_item(int tensor, int line, int64_t item) const {
    T* const data = (T*)map.data[tensor];
    const int64_t place = C::kOrder ? index_at(map, map.order, item) : item;
    if constexpr (C::kSingle) return data + place;
    return data + place * map.steps[tensor] + places[line];
  }
  template <class T>
  __device__ T* at_row(int tensor, int64_t segment) const {
    return (T*)map.data[tensor] + segment * map.steps[tensor] + places[C::kItemTensors + tensor - kRowFirst];
  }
};

// Some items of a row in registers, `step` apart from `from` on.
struct Chunk {
  const Lane& lane;
  const RowItems& row;
  const int from, step;
  const int most;                             // items that the lane with most of them has, at most
  Values first[K], second[C::kSums ? K : 1];  // scores; of a gradient the results and their gradients

  __device__ Chunk(const Lane& lane, const RowItems& row, int from, int step, int most)
      : lane(lane), row(row), from(from), step(step), most(most) {
    Vector<In, V> one[K];
    Vector<Second, V> other[C::kHasSecond ? K : 1];
    Walk<const In> from_first(*this, kItemFirst, 0);
    Walk<const Second> from_second(*this, C::kHasSecond ? kItemSecond : kItemFirst, C::kHasSecond);
    for_all([&](int i) {
      if (has(i)) {
        one[i] = *reinterpret_cast<const Vector<In, V>*>(from_first.at(i));
        if constexpr (C::kHasSecond) other[i] = *reinterpret_cast<const Vector<Second, V>*>(from_second.at(i));
      }
      from_first.move(), from_second.move();
    });
    for_all([&](int i) {
      unroll<V>([&](int v) {
        if constexpr (C::kSums) {
          first[i].at[v] = has(i) ? to_acc(one[i].at[v]) : A(0);
          second[i].at[v] = has(i) ? to_acc(other[i].at[v]) : A(0);
        } else {
          first[i].at[v] =
              has(i) ? score_of<C>(lane.map, one[i].at[v], other[C::kHasSecond ? i : 0].at[v]) : -infinity();
        }
      });
    });
  }
  // Calls f(i) for all items, whether they are there or not.
  template <class F>
  __device__ void for_all(F f) const {
    unroll<K / kStep>([&](int s) {
      if (s == 0 || s * kStep < most) unroll<kStep>([&](int i) { f(s * kStep + i); });
    });
  }
  __device__ bool has(int i) const { return lane.is_there && from + i * step < row.count; }
  __device__ int64_t item(int i) const { return row.begin + (from + i * step); }

  // Where the items are in a tensor, one after another.
  template <class T>
  struct Walk {
    const Chunk& chunk;
    const int tensor, line;
    T* now;

    __device__ Walk(const Chunk& chunk, int tensor, int line) : chunk(chunk), tensor(tensor), line(line) {
      if constexpr (!C::kOrder) now = chunk.lane.at_item<T>(tensor, line, chunk.item(0));
    }
    __device__ T* at(int i) const {
      if constexpr (C::kOrder) return chunk.lane.at_item<T>(tensor, line, chunk.item(i));
      return now;
    }
    __device__ void move() {
      if constexpr (!C::kOrder) now += C::kSingle ? chunk.step : chunk.step * chunk.lane.map.steps[tensor];
    }
  };
  // The maxima of a lane's heads.
  __device__ Values maxima() const {
    Values m;
    unroll<V>([&](int v) { m.at[v] = -infinity(); });
    for_all([&](int i) { unroll<V>([&](int v) { m.at[v] = max_(m.at[v], first[i].at[v]); }); });
    return m;
  }
  // Sums; exp(s - base) takes the place of the score s, where results are made of that.
  __device__ Values sums(const Values& base) {
    Values l = {};
    for_all([&](int i) {
      unroll<V>([&](int v) {
        A term;
        if constexpr (C::kSums)
          term = term_of<C>(first[i].at[v], second[i].at[v]);
        else
          term = exp_for_sum<Out>(first[i].at[v] - base.at[v]);
        if constexpr (kKeepsExp) first[i].at[v] = term;
        l.at[v] += term;
      });
    });
    return l;
  }
  // Stores results. `kKnowsExp`: whether `sums` has replaced the scores.
  template <bool kKnowsExp>
  __device__ void store(const Finish<C> (&finish)[V]) const {
    if constexpr (!C::kReduces) {
      Walk<Out> to(*this, kItemResult, C::kItemTensors - 1);
      for_all([&](int i) {
        Vector<Out, V> made;
        unroll<V>([&](int v) {
          const A value = first[i].at[v];
          const A other = second[C::kSums ? i : 0].at[v];
          made.at[v] = from_acc<Out>(kKnowsExp && kKeepsExp ? finish[v].from_exp(value) : finish[v](value, other));
        });
        if (has(i)) *reinterpret_cast<Vector<Out, V>*>(to.at(i)) = made;
        to.move();
      });
    }
  }

  static constexpr bool kKeepsExp = !C::kIsBackward && !C::kReduces && C::ElementEpilogue::kTakesExp;
};

// The states of a lane's heads.
struct States {
  Values m, l;

  __device__ RowState of(int v) const { return {m.at[v], l.at[v]}; }
  // Merges them over the lanes that `reduce(values, op)` combines; all of these get the result.
  template <class Reduce>
  __device__ void reduce(Reduce& reduce) {
    if constexpr (!C::kSums) {
      const Values all = reduce(m, Max());
      unroll<V>([&](int v) {
        const A apart = finite_for_sum(m.at[v]) - finite_for_sum(all.at[v]);
        l.at[v] = l.at[v] == 0 ? A(0) : l.at[v] * exp_<A>(apart);
      });
      m = all;
    }
    l = reduce(l, Sum());
  }
};
__device__ inline Values bases(const Values& m) {
  Values made;
  unroll<V>([&](int v) { made.at[v] = C::kSums ? A(0) : finite_for_sum(m.at[v]); });
  return made;
}

// Some lanes that share a row; a lane has the items from `at` on, `step` apart.
struct Team {
  const Lane& lane;
  const int at, step;

  // The states of what this lane has of a row.
  __device__ States states(const RowItems& row) const {
    States own;
    unroll<V>([&](int v) { own.m.at[v] = C::kSums ? A(0) : -A(infinity()), own.l.at[v] = 0; });
#pragma unroll 1
    for (int begin = 0; begin < row.count; begin += K * step) {
      Chunk chunk(lane, row, begin + at, step, most_of(row.count - begin));
      Values m = own.m;
      if constexpr (!C::kSums) {
        m = chunk.maxima();
        unroll<V>([&](int v) { m.at[v] = max_(m.at[v], own.m.at[v]); });
      }
      const Values base = bases(m), l = chunk.sums(base), before = bases(own.m);
      unroll<V>([&](int v) {
        const A scale = C::kSums ? A(1) : exp_<A>(before.at[v] - base.at[v]);
        own.l.at[v] = (own.l.at[v] == 0 ? A(0) : own.l.at[v] * scale) + l.at[v];
      });
      own.m = m;
    }
    return own;
  }
  // Reads the elements again and stores their results.
  __device__ void finish(const RowItems& row, const Finish<C> (&finish)[V]) const {
#pragma unroll 1
    for (int begin = 0; begin < row.count; begin += K * step)
      Chunk(lane, row, begin + at, step, most_of(row.count - begin)).template store<false>(finish);
  }
  __device__ int most_of(int items) const { return (items + step - 1) / step; }
};

// What makes the results of a row, of which the lane has items.
__device__ inline void make_finish(const Lane& lane, const RowItems& row, const States& states,
                                   Finish<C> (&finish)[V]) {
  unroll<V>([&](int v) {
    finish[v] = Finish<C>(lane.map, states.of(v));
    if constexpr (C::kPointwise) {
      const bool is_there = lane.is_there && row.count > 0;
      finish[v].lse = is_there ? lane.at_row<const A>(kRowFirst, row.segment)[v * lane.row_head_step(0)] : A(0);
      finish[v].grad = is_there ? lane.at_row<const A>(kRowSecond, row.segment)[v * lane.row_head_step(1)] : A(0);
    }
  });
}
template <class Epilogue = C::Epilogue>
__device__ inline void store_row(const Lane& lane, int64_t segment, int v, RowState state) {
  if constexpr (C::kReduces) {
    if (lane.is_there)
      Epilogue::store(state, lane.at_row<Out>(kRowFirst, segment) + v * lane.row_head_step(0), lane.map.plane);
  }
}

// A row of which each lane has at most K items: they stay in registers. `reduce(values, op)`: over the lanes of the
// row.
template <class Reduce>
__device__ inline void compute_kept(const Team& team, const RowItems& row, int most, bool stores, Reduce& reduce) {
  Chunk chunk(team.lane, row, team.at, team.step, most);
  States states = {};
  if constexpr (!C::kPointwise) {
    if constexpr (!C::kSums) states.m = reduce(chunk.maxima(), Max());
    states.l = reduce(chunk.sums(bases(states.m)), Sum());
  }
  if constexpr (C::kReduces) {
    if (stores) unroll<V>([&](int v) { store_row(team.lane, row.segment, v, states.of(v)); });
  } else {
    Finish<C> finish[V];
    make_finish(team.lane, row, states, finish);
    chunk.template store<true>(finish);
  }
}
// A row that all lanes of a team have together.
template <class Reduce>
__device__ inline void compute_row(const Team& team, const RowItems& row, Reduce& reduce) {
  if (row.count <= K * team.step) return compute_kept(team, row, team.most_of(row.count), team.at == 0, reduce);
  States states = {};
  if constexpr (!C::kPointwise) {
    states = team.states(row);
    states.reduce(reduce);
  }
  if constexpr (C::kReduces) {
    if (team.at == 0) unroll<V>([&](int v) { store_row(team.lane, row.segment, v, states.of(v)); });
  } else {
    Finish<C> finish[V];
    make_finish(team.lane, row, states, finish);
    team.finish(row, finish);
  }
}

// Over the lanes of a warp that have the same heads.
struct WarpReduce {
  const int head_lanes;

  template <class Op>
  __device__ Values operator()(Values values, Op op) const {
    unroll<V>([&](int v) { values.at[v] = warp_reduce_strided(values.at[v], head_lanes, op); });
    return values;
  }
};

typedef GridMessage<C> Message;

constexpr int kWarps = kSegmentWarps, kThreads = 32 * kWarps;  // of a block
constexpr int kFewTiles = 4;                                   // of a row
constexpr int kAhead = 16;                                     // tiles that a block looks at at a time
constexpr int kLooks = 4;                                      // segments that a thread looks at at a time
constexpr int kMostHeads = 32 * V;                             // of a chunk

__device__ inline RowState join(RowState a, RowState b) {
  if constexpr (C::kSums) return {A(0), a.l + b.l};
  const A m = max_(a.m, b.m), base = finite_for_sum(m);
  const auto scaled = [&](RowState s) { return s.l == 0 ? A(0) : s.l * exp_<A>(finite_for_sum(s.m) - base); };
  return {m, scaled(a) + scaled(b)};
}
__device__ inline RowState nothing() { return {-A(infinity()), A(0)}; }

__device__ inline void send(Message& message, State<float> state) { message.write(state.m, (double)state.l, 1); }
__device__ inline void send(Message& message, State<double> state) {
  message.write(state.m, Compensated<double>{state.l, 0}, 1);
}
// Whether the message is there.
__device__ inline bool receive(const Message& message, State<float>* state) {
  return message.read(&state->m, &state->l, 1);
}
__device__ inline bool receive(const Message& message, State<double>* state) {
  Compensated<double> sum;
  const bool is_there = message.read(&state->m, &sum, 1);
  state->l = sum.hi;
  return is_there;
}

// What a tile has of a long row: 0 of one that began in an earlier tile, 1 of one that begins here and goes on.
struct Part {
  int64_t begin;              // its first item
  int count;                  // items; 0 if there is no such part
  int64_t segment, from, to;  // the row, and its tiles

  __device__ bool exists() const { return count > 0; }
  // Whether it is finished when all tiles have been computed.
  __device__ bool is_deferred(const SegmentMap& map) const { return exists() && to - from >= map.most_tiles; }
  __device__ RowItems row() const { return {segment, begin, count}; }
};

struct Tile {
  Part parts[2];
  int64_t first, last;  // the segments that begin in it, from the first to before the last
};

struct Shared {
  Tile tiles[kAhead];
  int64_t found;  // the first tile of those that are there, or -1
  unsigned middling[kLooks * kWarps];
  Values of_warps[2][kWarps][32];
  RowState states[2][kMostHeads];
};

// Over the threads of a block that have the same heads, which all have to take part. The two buffers take turns, so
// that nobody writes what others still read.
struct BlockReduce {
  const Lane& lane;
  Shared& shared;
  int turn;

  template <class Op>
  __device__ Values operator()(const Values& values, Op op) {
    const int lane_at = threadIdx.x % 32, of_heads = lane_at & (lane.head_lanes - 1);
    const Values own = WarpReduce{lane.head_lanes}(values, op);
    auto& of_warps = shared.of_warps[turn];
    turn ^= 1;
    if (lane_at < lane.head_lanes) of_warps[threadIdx.x / 32][of_heads] = own;
    __syncthreads();
    Values all = of_warps[0][of_heads];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      const Values other = of_warps[i][of_heads];
      unroll<V>([&](int v) { all.at[v] = op(all.at[v], other.at[v]); });
    }
    return all;
  }
};

// The rows of a chunk of heads that fit no tile of short ones: the tiles of this block.
struct LongRows {
  const Lane& lane;
  Shared& shared;
  const SegmentMap& map;
  const int chunk, warp;
  const int64_t first_tile, step;
  const Team team;
  BlockReduce reduce;
  int64_t known_lead = -1, known_tail = -1;  // the rows whose states are there

  __device__ LongRows(const Lane& lane, Shared& shared)
      : lane(lane),
        shared(shared),
        map(lane.map),
        chunk(blockIdx.x % map.chunks),
        warp(threadIdx.x / 32),
        first_tile(blockIdx.x / map.chunks),
        step(gridDim.x / map.chunks),
        team{lane, lane.at(kThreads / lane.head_lanes), kThreads / lane.head_lanes},
        reduce{lane, shared, 0} {}

  // Calls f(tile, what is in it) for all tiles of the block. All threads take part.
  template <class F>
  __device__ void for_tiles(F f) const {
    for (int64_t first = first_tile; first < map.tiles; first += kAhead * step) {
      if (shared.found != first) {
        __syncthreads();  // the tiles before have been read
        find_parts(first);
        if (threadIdx.x == 0) shared.found = first;
        __syncthreads();
      }
#pragma unroll 1
      for (int i = 0; i < kAhead && first + i * step < map.tiles; ++i) f(first + i * step, shared.tiles[i]);
    }
  }
  __device__ int heads() const { return lane.head_lanes * V; }
  __device__ Message& message(int64_t tile, int k, int head) const {
    return ((Message*)map.messages)[((tile * map.chunks + chunk) * 2 + k) * heads() + head];
  }
  __device__ void clear(int64_t tile) const {
    for (int i = threadIdx.x; i < 2 * heads(); i += kThreads) (&message(tile, 0, 0))[i].clear();
  }
  // Sends the states of the parts of a tile to all that wait for them. A part that does not exist has the state of
  // nothing: where offsets are wrong, others may wait for it.
  __device__ void send_states(int64_t tile, const Part* parts) {
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      if (!parts[k].exists()) {
        for (int head = threadIdx.x; head < heads(); head += kThreads) send(message(tile, k, head), nothing());
        continue;
      }
      States states = team.states(parts[k].row());
      states.reduce(reduce);
      if (team.at == 0) unroll<V>([&](int v) { send(message(tile, k, lane.head + v), states.of(v)); });
    }
  }
  // Computes the rows of middling length that begin in a tile, one after another.
  __device__ void compute_middling(const Tile& tile) {
#pragma unroll 1
    for (int64_t first = tile.first; first < tile.last; first += kLooks * kThreads) {
      bool has_any = false;
      unroll<kLooks>([&](int i) {
        const int64_t segment = first + i * kThreads + threadIdx.x;
        const int count = segment < tile.last ? row_of(map, segment).count : 0;
        const bool is_middling = count > map.short_items && count <= map.tile_items;
        const unsigned those = __ballot_sync(0xffffffffu, is_middling);
        if (threadIdx.x % 32 == 0) shared.middling[i * kWarps + warp] = those;
        has_any |= is_middling;
      });
      if (!__syncthreads_or(has_any)) continue;
#pragma unroll 1
      for (int i = 0; i < kLooks * kWarps; ++i) {
#pragma unroll 1
        for (unsigned left = shared.middling[i]; left; left &= left - 1)
          compute_row(team, row_of(map, first + i * 32 + __ffs((int)left) - 1), reduce);
      }
      __syncthreads();  // they have been read
    }
  }
  // Whether the tile makes results of a part. A reduction has one where the row begins.
  __device__ static bool has_results(const Part* parts, int k) { return parts[k].exists() && (!C::kReduces || k == 1); }
  // Makes the results of the parts of a tile that `takes(k)`, from the messages of all tiles of their rows.
  template <class Takes>
  __device__ void finish(const Part* parts, bool waits, Takes takes) {
    if (!takes(0) && !takes(1)) return;
    // The states of the rows of the tile before may be known.
    const auto needs = [&](int k) { return takes(k) && parts[k].segment != (k ? known_tail : known_lead); };
    if (!C::kPointwise && (needs(0) || needs(1))) {
      __syncthreads();  // the states before have been read
      merge(parts, waits, needs);
      if (takes(0)) known_lead = parts[0].segment;
      if (takes(1)) known_tail = parts[1].segment;
      __syncthreads();
    }
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      if (!takes(k)) continue;
      States states = {};
      if constexpr (!C::kPointwise) {
        unroll<V>([&](int v) {
          const RowState of = shared.states[k][lane.head + v];
          states.m.at[v] = of.m, states.l.at[v] = of.l;
        });
      }
      if constexpr (C::kReduces) {
        if (team.at == 0) unroll<V>([&](int v) { store_row(lane, parts[k].segment, v, states.of(v)); });
      } else {
        Finish<C> finish[V];
        make_finish(lane, parts[k].row(), states, finish);
        team.finish(parts[k].row(), finish);
      }
    }
  }

 private:
  __device__ void find_parts(int64_t first) const {
    constexpr int kPerWarp = kAhead / kWarps;
    const int own = warp * kPerWarp;
    int64_t bounds[2 * kPerWarp], found[2 * kPerWarp];
    unroll<2 * kPerWarp>([&](int i) { bounds[i] = (first + (own + i / 2) * step + i % 2) * map.tile_items; });
    find_segments(map, bounds, found);
    if (threadIdx.x % 32) return;
#pragma unroll 1
    for (int i = 0; i < kPerWarp; ++i) {
      const int64_t begin = i == 0 ? bounds[0] : bounds[2], end = i == 0 ? bounds[1] : bounds[3];
      const int64_t of_begin = i == 0 ? found[0] : found[2], of_end = i == 0 ? found[1] : found[3];
      shared.tiles[own + i].first = of_begin, shared.tiles[own + i].last = of_end;
      Part* const parts = shared.tiles[own + i].parts;
      parts[0].count = parts[1].count = 0;
      if (begin >= map.items) continue;
      fill(parts[0], of_begin - 1, begin, end);
      if (of_end > of_begin && end < map.items) fill(parts[1], of_end - 1, begin, end);
    }
    static_assert(kPerWarp == 2, "");
  }
  // The part of a row in the tile of the items from `begin` to `end`.
  __device__ void fill(Part& part, int64_t segment, int64_t begin, int64_t end) const {
    if (segment < 0) return;
    const RowItems row = row_of(map, segment);
    const int64_t row_end = min(max(offset_of(map, segment + 1), row.begin), (int64_t)map.items);
    const int64_t from = max(row.begin, begin), to = min(row_end, end);
    if (row.count <= map.tile_items || to <= from) return;
    part = {from, (int)(to - from), segment, divide(row.begin, map.tile_items), divide(row_end - 1, map.tile_items)};
  }
  template <class Takes>
  __device__ void merge(const Part* parts, bool waits, Takes takes) const {
    const auto is_long = [&](int k) { return takes(k) && parts[k].to - parts[k].from >= kFewTiles; };
    const int log2 = is_long(0) || is_long(1) ? 5 : 2, lanes = 1 << log2, at = threadIdx.x & (lanes - 1);
    for (int round = warp << (5 - log2); round < 2 * heads(); round += kThreads >> log2) {
      const int i = round + ((int)threadIdx.x % 32 >> log2), k = i >= heads(), head = k ? i - heads() : i;
      const bool is_there = i < 2 * heads() && takes(k);
      RowState state = nothing();
      if (is_there) {
        for (int64_t tile = parts[k].from + at; tile <= parts[k].to; tile += lanes)
          state = join(state, await(tile, tile == parts[k].from, head, waits));
      }
      for (int by = lanes / 2; by > 0; by /= 2) {
        const RowState there = {shuffle_xor(state.m, by), shuffle_xor(state.l, by)};
        state = at & by ? join(there, state) : join(state, there);
      }
      if (is_there && at == 0) shared.states[k][head] = state;
    }
  }
  // The state of the first tile of a row is that of the part which begins there.
  __device__ RowState await(int64_t tile, int k, int head, bool waits) const {
    RowState state;
    while (!receive(message(tile, k, head), &state) && waits) {
    }
    return state;
  }
};

// What all blocks of that kernel said together.
__device__ inline int longer_rows(const SegmentMap& map) {
  uint32_t all = 0;
  for (int i = threadIdx.x; i * 16 < map.row_blocks; i += kThreads) {
    const Vector<uint32_t, 4> of = ((const Vector<uint32_t, 4>*)map.has_long)[i];
    unroll<4>([&](int k) { all |= of.at[k]; });
  }
  const bool has_middling = __syncthreads_or(all & 0x01010101u * kHasMiddling);
  const bool has_long = __syncthreads_or(all & 0x01010101u * kHasLong);
  return has_middling * kHasMiddling + has_long * kHasLong;
}

__device__ inline void compute_long_rows(const SegmentMap& map, Shared& shared) {
  const int has = longer_rows(map);
  if (!has) return;
  const Lane lane(map);
  LongRows rows(lane, shared);
  if constexpr (C::kPointwise) {
    return rows.for_tiles([&](int64_t, const Tile& in) {
      rows.compute_middling(in);
      rows.finish(in.parts, false, [&](int k) { return in.parts[k].exists(); });
    });
  }
  const bool has_long = has & kHasLong, is_cooperative = map.steps_run == 3;
  bool has_deferred = false;
  if (map.steps_run & 1) {
    GridBarrier barrier;
    bool awaits_barrier = is_cooperative && has_long;
    if (awaits_barrier) {
      if (threadIdx.x == 0) barrier.init();
      for (int64_t tile = rows.first_tile; tile < map.tiles; tile += rows.step) rows.clear(tile);
      __syncthreads();
      if (threadIdx.x == 0) barrier.arrive(blockIdx.x, gridDim.x);
    }
    rows.for_tiles([&](int64_t tile, const Tile& in) {
      const Part* const parts = in.parts;
      if (has_long) rows.send_states(tile, parts);
      rows.compute_middling(in);  // while messages travel
      if (!has_long) return;
      // No message is read before all have been cleared.
      if (awaits_barrier && threadIdx.x == 0) barrier.wait();
      awaits_barrier = false;
      has_deferred |= parts[0].is_deferred(map) || parts[1].is_deferred(map);
      rows.finish(parts, true, [&](int k) { return LongRows::has_results(parts, k) && !parts[k].is_deferred(map); });
    });
  }
  if (!has_long || !(map.steps_run & 2) || (is_cooperative && !has_deferred)) return;
  rows.for_tiles([&](int64_t, const Tile& in) {
    rows.finish(in.parts, is_cooperative,
                [&](int k) { return LongRows::has_results(in.parts, k) && in.parts[k].is_deferred(map); });
  });
}

constexpr int kMinWarps = sizeof(A) == 8 ? 8 : 32;  // of a multiprocessor

extern "C" __global__ void __launch_bounds__(kThreads, kMinWarps / kWarps)
    onepass_kernel(const __grid_constant__ SegmentMap map) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.found = -1;
  compute_long_rows(map, shared);
}
