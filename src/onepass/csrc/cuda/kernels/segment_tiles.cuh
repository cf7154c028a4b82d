// segment_tiles.cuh: rows that no warp takes. A block has some tiles of all items. It takes the rows of middling length
// that begin there, one after another, and its part of each long row, whose states it exchanges with other blocks.
#pragma once

#include "grid_sync.cuh"
#include "segment_team.cuh"

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

// The first segments that begin at some items or after them. All lanes of a warp look for all of them at the same time;
// offsets that fall give some segment.
template <int Count>
__device__ inline void find_segments(const SegmentMap& map, const int64_t (&items)[Count], int64_t (&found)[Count]) {
  const int lane = threadIdx.x % 32;
  int64_t high[Count];
  unroll<Count>([&](int i) { found[i] = 0, high[i] = map.segments; });
  for (bool is_done = false; !is_done;) {
    int64_t step[Count];
    bool is_less[Count];
    is_done = true;
    unroll<Count>([&](int i) {
      step[i] = max((high[i] - found[i] + 31) / 32, (int64_t)1);
      const int64_t at = found[i] + (lane + 1) * step[i] - 1;
      is_less[i] = at < high[i] && offset_of(map, at) < items[i];
    });
    unroll<Count>([&](int i) {
      const int passed = __popc(__ballot_sync(0xffffffffu, is_less[i]));
      high[i] = min(high[i], found[i] + (passed + 1) * step[i] - 1);
      found[i] = min(found[i] + passed * step[i], high[i]);
      is_done &= found[i] == high[i];
    });
  }
}

// What a tile has of a long row: 0 of one that began in an earlier tile, 1 of one that begins here and goes on.
struct Part {
  int64_t begin;              // its first item
  int count;                  // items; 0 if there is no such part
  int64_t segment, from, to;  // the row, and its tiles

  __device__ bool exists() const { return count > 0; }
  // Whether it is finished when all tiles have been computed.
  __device__ bool is_deferred(const SegmentMap& map) const { return exists() && to - from >= map.most_tiles; }
  __device__ Row row() const { return {segment, begin, count}; }
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

// The rows of a chunk of heads that no warp takes: the tiles of this block.
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
        const bool is_middling = count > map.warp_items && count <= map.tile_items;
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
    const Row row = row_of(map, segment);
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
