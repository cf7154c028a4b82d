// segments.cu: rows of unequal length. Whatever their lengths, a block takes tiles of equal size in turn, which are
// read and written in vectors, while the next one is on its way. In shared memory some lanes share each row, or all
// threads do share a long one. A row that crosses the edge of a tile has a part in each of its tiles; their states go
// through global memory, so that a row of any length has as many blocks as it has tiles.
#include "config.cuh"
#include "grid_sync.cuh"
#include "segments.cuh"

typedef SegmentConfig C;
typedef C::A A;
typedef C::In In;
typedef C::Out Out;
typedef C::Second Second;
typedef State<A> RowState;  // backward: l is the sum

typedef GridMessage<C> Message;
constexpr int V = C::kVecSize, kVecs = C::kVecs, kThreads = C::kBlockThreads, kWarps = kThreads / 32;
constexpr int kMinBlocks = sizeof(A) < 8 ? 1024 / kThreads : 1;  // of a multiprocessor: 64 registers a thread
constexpr int kKeep = 4;                                         // elements of a lane that stay in registers
constexpr int kFewTiles = 4;                                     // of a row
constexpr int kAhead = 2 * kWarps;  // tiles whose first segments a block looks for at a time
constexpr int kWarpItems = 512;     // of a row, beyond which all threads share it

// The first segment that begins at `item` or after it. All lanes of a warp look for it; offsets that fall give some
// segment.
__device__ inline int64_t find_segment(const SegmentMap& map, int64_t item) {
  const int lane = threadIdx.x % 32;
  int64_t low = 0, high = map.segments;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, at = low + (lane + 1) * step - 1;
    const int passed = __reduce_max_sync(0xffffffffu, at < high && offset_of(map, at) < item ? lane + 1 : 0);
    high = min(high, low + (passed + 1) * step - 1);
    low += passed * step;
  }
  return min(low, high);
}

// The elements of a tile in registers.
struct Raw {
  Vector<In, V> first[kVecs];
  Vector<Second, V> second[kVecs];
};

// Where the places of the inner dims are in the tensors.
struct HeadTable {
  int64_t at[C::kItemTensors + C::kRowTensors][kSegmentHeads];
};
// The tensor of a line of the table.
__device__ inline int tensor_of(int line) {
  if (line >= C::kItemTensors) return kRowFirst + line - C::kItemTensors;
  return line == 0 && !C::kHasResult ? kItemFirst : line == C::kItemTensors - 1 && C::kHasResult ? kItemResult : line;
}

template <class M>
__device__ inline void write(M& message, State<float> state) {
  message.write(state.m, (double)state.l, 1);
}
template <class M>
__device__ inline void write(M& message, State<double> state) {
  message.write(state.m, Compensated<double>{state.l, 0}, 1);
}
// Whether the message is there.
template <class M>
__device__ inline bool read(const M& message, State<float>* state) {
  return message.read(&state->m, &state->l, 1);
}
template <class M>
__device__ inline bool read(const M& message, State<double>* state) {
  Compensated<double> sum;
  const bool is_there = message.read(&state->m, &sum, 1);
  state->l = sum.hi;
  return is_there;
}

struct Block {
  const SegmentMap& map;
  const HeadTable& table;
  A *const first, *const second;  // the elements of the tile in shared memory: scores, or results and gradients
  A* const scratch;               // a number of each thread, and a neutral one
  RowState* const part_states;    // of both parts, for each head
  const int heads, valid_heads;   // of a tile, and those that exist
  const int chunk;
  int64_t tile, begin;  // the number of the tile, and its first item
  int count;            // items

  __device__ Block(const SegmentMap& map, const HeadTable& table, A* planes, A* scratch, RowState* part_states)
      : map(map),
        table(table),
        first(planes),
        second(planes + map.tile_items * map.heads),
        scratch(scratch),
        part_states(part_states),
        heads(C::kSingle ? 1 : map.heads),
        valid_heads((int)min((int64_t)map.heads, map.columns - (int64_t)(blockIdx.x % map.chunks) * map.heads)),
        chunk(blockIdx.x % map.chunks) {}
  __device__ void move_to(int64_t to) {
    tile = to, begin = tile * map.tile_items;
    count = (int)max((int64_t)0, min((int64_t)map.tile_items, map.items - begin));
  }
  __device__ bool is_last() const { return tile + 1 == map.tiles; }
  __device__ int split(int element, int* head) const {
    if (C::kSingle) {
      *head = 0;
      return element;
    }
    const int item = divide((unsigned)element, map.by_heads);
    *head = element - item * heads;
    return item;
  }
  __device__ int64_t place_of(int item) const {
    return map.order ? index_at(map, map.order, begin + item) : begin + item;
  }

  // Begins to load a tile.
  __device__ void load(Raw& raw) const {
    const In* const from = (const In*)map.data[kItemFirst];
    const Second* const other = (const Second*)map.data[kItemSecond];
    const int elements = count * heads;
    unroll<kVecs>([&](int i) {
      const int element = (i * kThreads + (int)threadIdx.x) * V;
      if constexpr (C::kFlat) {
        const int64_t at = begin * heads + element;
        if (element + V <= elements) {
          raw.first[i] = *reinterpret_cast<const Vector<In, V>*>(from + at);
          if constexpr (C::kHasSecond) raw.second[i] = *reinterpret_cast<const Vector<Second, V>*>(other + at);
        } else {
          unroll<V>([&](int v) {
            if (element + v >= elements) return;
            raw.first[i].at[v] = from[at + v];
            if constexpr (C::kHasSecond) raw.second[i].at[v] = other[at + v];
          });
        }
      } else {
        int head;
        const int item = split(element, &head);
        if (item >= count || head >= valid_heads) return;
        const int64_t place = place_of(item);
        raw.first[i].at[0] = from[place * map.steps[kItemFirst] + table.at[0][head]];
        if constexpr (C::kHasSecond) raw.second[i].at[0] = other[place * map.steps[kItemSecond] + table.at[1][head]];
      }
    });
  }
  // Moves them to shared memory.
  __device__ void fill(const Raw& raw) const {
    unroll<kVecs>([&](int i) {
      const int element = (i * kThreads + (int)threadIdx.x) * V;
      if (element >= map.tile_items * heads) return;
      Vector<A, V> made, other;
      unroll<V>([&](int v) {
        if constexpr (C::kSums)
          made.at[v] = to_acc(raw.first[i].at[v]), other.at[v] = to_acc(raw.second[i].at[v]);
        else
          made.at[v] = score_of<C>(map, raw.first[i].at[v], raw.second[i].at[v]);
      });
      *reinterpret_cast<Vector<A, V>*>(first + element) = made;
      if constexpr (C::kSums) *reinterpret_cast<Vector<A, V>*>(second + element) = other;
    });
  }
  // Stores the results of some items from shared memory.
  __device__ void store(int from, int to) const {
    Out* const result = (Out*)map.data[kItemResult];
    unroll<kVecs>([&](int i) {
      const int element = (i * kThreads + (int)threadIdx.x) * V;
      if constexpr (C::kFlat) {
        if (element + V <= from * heads || element >= to * heads) return;
        Out* const at = result + begin * heads + element;
        const Vector<A, V> wide = *reinterpret_cast<const Vector<A, V>*>(first + element);
        Vector<Out, V> made;
        unroll<V>([&](int v) { made.at[v] = from_acc<Out>(wide.at[v]); });
        if (element >= from * heads && element + V <= to * heads) return store_vector(at, made);
        unroll<V>([&](int v) {
          if (element + v >= from * heads && element + v < to * heads) at[v] = made.at[v];
        });
      } else {
        int head;
        const int item = split(element, &head);
        if (item < from || item >= to || head >= valid_heads) return;
        result[result_at(item, head)] = from_acc<Out>(first[element]);
      }
    });
  }
  __device__ int64_t result_at(int item, int head) const {
    return place_of(item) * map.steps[kItemResult] + table.at[C::kItemTensors - 1][head];
  }

  // The message of a part: 0 of a row that began in an earlier tile, 1 of one that begins here and goes on.
  __device__ Message& message(int64_t of_tile, int part, int head) const {
    return ((Message*)map.messages)[((of_tile * map.chunks + chunk) * 2 + part) * heads + head];
  }
  // Sends the states of both parts, whatever the offsets are, for others wait for them.
  __device__ void send_parts() const {
    for (int i = threadIdx.x; i < 2 * heads; i += kThreads) {
      const int part = i >= heads, head = part ? i - heads : i;
      write(message(tile, part, head), part_states[i]);
    }
  }
  __device__ void clear_parts() const {
    for (int i = threadIdx.x; i < 2 * heads; i += kThreads) part_states[i] = {-infinity(), A(0)};
  }

  __device__ Finish<C> finish_of(RowState state, int64_t segment, int head) const {
    Finish<C> finish(map, state);
    if constexpr (C::kPointwise) {
      const auto number = [&](int tensor, int line) {
        return head < valid_heads ? ((const A*)map.data[tensor])[segment * map.steps[tensor] + table.at[line][head]]
                                  : A(0);
      };
      finish.lse = number(kRowFirst, C::kItemTensors), finish.grad = number(kRowSecond, C::kItemTensors + 1);
    }
    return finish;
  }
  template <class Epilogue = C::Epilogue>
  __device__ void store_row(RowState state, int64_t segment, int head) const {
    Out* const to = (Out*)map.data[kRowFirst] + segment * map.steps[kRowFirst];
    if constexpr (C::kReduces) {
      if (head < valid_heads) Epilogue::store(state, to + table.at[C::kItemTensors][head], map.plane);
    }
  }
};

// Where the heads of a block are.
__device__ inline void fill_table(const Block& block, HeadTable& table) {
  const SegmentMap& map = block.map;
  for (int i = threadIdx.x; i < block.valid_heads; i += kThreads) {
#pragma unroll 1
    for (int line = 0; line < C::kItemTensors + C::kRowTensors; ++line) {
      const int tensor = tensor_of(line);
      int64_t index = (int64_t)block.chunk * map.heads + i, at = 0;
      for (int d = map.dims - 1; d >= 0; --d) {
        const int64_t whole = divide(index, map.sizes[d]);
        at += (index - whole * map.sizes[d]) * map.strides[tensor][d];
        index = whole;
      }
      table.at[line][i] = at;
    }
  }
}

__device__ inline A sum_of(const A (&y)[kKeep], const A (&grad)[kKeep]) {
  return pairwise_sum<kKeep, 0>([&](int j) { return term_of<C>(y[j], grad[j]); });
}

// Some threads that share a row: one has the items from `at` on, every `step`-th. `reduce(v, op)` gives all of them
// what they have together.
template <class Reduce>
__device__ inline RowState state_of(const Block& block, int head, int at, int end, int step, Reduce reduce) {
  const A* const row = block.first + head;
  RowState state = {A(0), A(0)};
  if constexpr (C::kSums) {
    const A* const other = block.second + head;
    for (int k = at; k < end; k += step) state.l += term_of<C>(row[k * block.heads], other[k * block.heads]);
    state.l = reduce(state.l, Sum());
  } else {
    A m = -infinity();
#pragma unroll 4
    for (int k = at; k < end; k += step) m = max_(m, row[k * block.heads]);
    state.m = reduce(m, Max());
    const A base = finite_for_sum(state.m);
#pragma unroll 4
    for (int k = at; k < end; k += step) state.l += exp_for_sum<Out>(row[k * block.heads] - base);
    state.l = reduce(state.l, Sum());
  }
  return state;
}
__device__ inline void finish_items(const Block& block, const Finish<C>& finish, int head, int at, int end, int step) {
  for (int k = at; k < end; k += step) {
    A& value = block.first[k * block.heads + head];
    value = finish(value, C::kSums ? block.second[k * block.heads + head] : A(0));
  }
}

// A part of a row that goes beyond its tile.
struct Part {
  int begin, end;  // items of the tile; none if there is no such part
  int64_t segment;
  int64_t from, to;  // the tiles of the row

  __device__ void find(const Block& block, int64_t of_segment, int from_item, int to_item) {
    const SegmentMap& map = block.map;
    begin = from_item, end = to_item, segment = of_segment;
    if (!exists()) return;
    const int64_t last = map.items - 1;
    const int64_t first_item = min(max(offset_of(map, segment), (int64_t)0), last);
    const int64_t last_item = min(max(offset_of(map, segment + 1) - 1, first_item), last);
    from = divide(first_item, map.tile_items), to = divide(last_item, map.tile_items);
  }
  __device__ bool exists() const { return end > begin; }
  // Whether it is finished when all tiles have been computed.
  __device__ bool is_deferred(const SegmentMap& map) const { return exists() && to - from >= map.most_tiles; }
};

// All threads: those of a head are `head_lanes` apart.
struct WholeBlock {
  const Block& block;
  int lanes, head, at, step;

  __device__ explicit WholeBlock(const Block& block) : block(block) {
    for (lanes = 1; lanes < block.heads;) lanes *= 2;
    head = threadIdx.x % lanes, at = threadIdx.x / lanes, step = kThreads / lanes;
  }
  __device__ bool exists() const { return head < block.heads; }
  template <class T, class Op>
  __device__ T reduce(T value, Op op) const {
    for (int mask = 16; mask >= lanes; mask /= 2) value = op(value, shuffle_xor(value, mask));
    __syncthreads();  // what was reduced before has been read
    block.scratch[threadIdx.x] = value;
    __syncthreads();
    const int apart = max(lanes, 32), column = threadIdx.x % lanes;
    value = block.scratch[column];
    for (int i = apart; i < kThreads; i += apart) value = op(value, block.scratch[i + column]);
    return value;
  }
  __device__ RowState state(int begin, int end) const {
    return state_of(block, head, exists() ? begin + at : end, end, step,
                    [&](A value, auto op) { return reduce(value, op); });
  }
  __device__ void store_row(RowState state, int64_t segment) const {
    if (exists() && at == 0) block.store_row(state, segment, head);
  }
  __device__ void finish(RowState state, int64_t segment, int begin, int end) const {
    if (exists()) finish_items(block, block.finish_of(state, segment, head), head, begin + at, end, step);
  }
  // Finishes elements that are read again.
  __device__ void finish_again(RowState state, const Part& part) const {
    if (head >= block.valid_heads) return;
    const SegmentMap& map = block.map;
    const Finish<C> finish = block.finish_of(state, part.segment, head);
    for (int k = part.begin + at; k < part.end; k += step) {
      const int64_t place = block.place_of(k);
      const In raw = ((const In*)map.data[kItemFirst])[place * map.steps[kItemFirst] + block.table.at[0][head]];
      Second second = {};
      if constexpr (C::kHasSecond)
        second = ((const Second*)map.data[kItemSecond])[place * map.steps[kItemSecond] + block.table.at[1][head]];
      const A value = C::kSums ? A(to_acc(raw)) : score_of<C>(map, raw, second);
      ((Out*)map.data[kItemResult])[block.result_at(k, head)] = from_acc<Out>(finish(value, A(to_acc(second))));
    }
  }
  // The state of the row of a part, from the messages of all of its parts.
  __device__ RowState merge(const Part& part, bool waits) const {
    const int64_t from = part.from, to = part.to;
    RowState own = {-infinity(), A(0)};
    if (to - from < kFewTiles) {  // each thread that needs it for itself
      const bool needs = exists() && (C::kReduces ? at == 0 : part.begin + at < part.end);
      for (int64_t tile = from; needs && tile <= to; ++tile) {
        own = join(own, await(tile, tile == from, waits));
      }
      return own;
    }
    for (int64_t tile = from + at; exists() && tile <= to; tile += step) {
      own = join(own, await(tile, tile == from, waits));
    }
    if constexpr (C::kSums) return {A(0), reduce(own.l, Sum())};
    const A m = reduce(own.m, Max());
    return {m, reduce(join(own, {m, A(0)}).l, Sum())};
  }

 private:
  __device__ RowState await(int64_t tile, int part, bool waits) const {
    RowState state;
    while (!read(block.message(tile, part, head), &state) && waits) {
    }
    return state;
  }
  static __device__ RowState join(RowState a, RowState b) {
    if constexpr (C::kSums) return {A(0), a.l + b.l};
    const A m = max_(a.m, b.m), base = finite_for_sum(m);
    const auto scaled = [&](RowState s) { return s.l == 0 ? A(0) : s.l * exp_<A>(finite_for_sum(s.m) - base); };
    return {m, scaled(a) + scaled(b)};
  }
};

// The segments of a tile, as many as a block has threads at a time: items of the tile where they begin; one more than
// the tile has for what comes after it.
struct Segments {
  const Block& block;
  int* const bounds;    // in shared memory, kThreads + 1
  int* const how_many;  // of them begin in the tile
  int64_t first;
  int own;  // the same

  // Where the segments of a thread and its neighbour begin.
  struct Offsets {
    int64_t begin, next;
  };
  static __device__ Offsets load(const SegmentMap& map, int64_t first) {
    const int64_t at = first + (int)threadIdx.x, last = map.segments;
    return {offset_of(map, min(at, last)), offset_of(map, min(at + 1, last))};
  }
  __device__ void fill(int64_t from, const Offsets& offsets) {
    first = from;
    const int i = threadIdx.x, begin = in_tile(offsets.begin), next = in_tile(offsets.next);
    const bool has_own = begins_here(i, begin), has_next = begins_here(i + 1, next);
    bounds[i] = begin;
    if (i == kThreads - 1) bounds[kThreads] = next;
    if (has_own && (!has_next || i == kThreads - 1)) *how_many = i + 1;
    if (!has_own && i == 0) *how_many = 0;
  }
  __device__ void count() { own = *how_many; }
  // The items of a segment in the tile; that of -1 is the one before.
  __device__ int begin(int i) const { return i < 0 ? 0 : min(bounds[i], block.count); }
  __device__ int end(int i) const { return max(begin(i), min(bounds[i + 1], block.count)); }
  __device__ bool goes_on(int i) const { return bounds[i + 1] > block.count && bounds[i] < block.count; }

 private:
  __device__ int in_tile(int64_t item) const {
    return (int)min(max(item - block.begin, (int64_t)0), (int64_t)block.count + 1);
  }
  __device__ bool begins_here(int i, int bound) const {
    return first + i < block.map.segments && (bound < block.count || block.is_last());
  }
};

// Computes the rows from segment `from` to `to` of those at hand, but those of many items. `part_at(i)`: which
// message takes the state of a row, or -1. Answers whether there are rows of many items.
template <class PartAt>
__device__ inline bool compute_rows(const Block& block, const Segments& segments, int from, int to, PartAt part_at) {
  constexpr int kLanes = C::kThreadsPerRow;  // of a row, head_lanes apart
  const SegmentMap& map = block.map;
  const int shift = C::kSingle ? 0 : map.head_lanes_log2, head_lanes = 1 << shift;
  const int lane = threadIdx.x % 32, at = lane >> shift & (kLanes - 1);
  const int slots = 32 / kLanes >> shift, slot = (int)threadIdx.x / 32 * slots + (lane / kLanes >> shift);
  const int head_parts = C::kSingle ? 1 : (block.heads + head_lanes - 1) >> shift;
  const int rows = (to - from) * head_parts;
  const auto reduce = [&](A value, auto op) {
    unroll<31>([&](int i) {
      if (1 << i < kLanes) value = op(value, shuffle_xor(value, head_lanes << i));
    });
    return value;
  };
  bool has_long = false;
  for (int round = 0; round < rows; round += kWarps * slots) {
    const int row = min(round + slot, rows - 1);
    const int part_of_heads = head_parts == 1 ? 0 : row % head_parts,
              i = from + (head_parts == 1 ? row : row / head_parts);
    const int head = C::kSingle ? 0 : (part_of_heads << shift) + (lane & (head_lanes - 1));
    int begin = segments.begin(i), end = segments.end(i);
    const bool is_long = end - begin > kWarpItems, is_there = round + slot < rows && head < block.heads && !is_long;
    has_long |= is_long;
    if (!is_there) end = begin;
    const int part = is_there ? part_at(i) : -1;
    const int64_t segment = segments.first + i;
    begin += at;
    // The first items of a lane stay in registers.
    A* const x = block.first + head;
    const A* const other = block.second + head;
    const int pitch = block.heads, step = kLanes * pitch, past = begin + kKeep * kLanes;
    A* const own = x + begin * pitch;
    const auto has = [&](int j) { return begin + j * kLanes < end; };
    // An element that is not there is read from where there is a neutral one: that takes no branch.
    const auto load = [&](const A* plane, int j) {
      const A* const from = plane + begin * pitch + j * step;
      return *(has(j) ? from : block.scratch + kThreads);
    };
    A value[kKeep], e[kKeep];
    RowState state = {};
    unroll<kKeep>([&](int j) { value[j] = load(x, j); });
    if constexpr (C::kSums) {
      unroll<kKeep>([&](int j) { e[j] = load(other, j); });
      state.l = sum_of(value, e);
      for (int k = past; k < end; k += kLanes) state.l += term_of<C>(x[k * pitch], other[k * pitch]);
      state.l = reduce(state.l, Sum());
    } else if constexpr (C::kPointwise) {
      unroll<kKeep>([&](int j) { e[j] = 0; });
    } else {
      A m = value[0];
      unroll<kKeep - 1>([&](int j) { m = max_(m, value[j + 1]); });
      for (int k = past; k < end; k += kLanes) m = max_(m, x[k * pitch]);
      state.m = reduce(m, Max());
      const A base = finite_for_sum(state.m);
      unroll<kKeep>([&](int j) { e[j] = exp_<Out>(value[j] - base); });
      state.l = pairwise_sum<kKeep, 0>([&](int j) { return e[j]; });
      for (int k = past; k < end; k += kLanes) state.l += exp_for_sum<Out>(x[k * pitch] - base);
      state.l = reduce(state.l, Sum());
    }
    if (part >= 0) {
      if (at == 0) block.part_states[part * block.heads + head] = state;
    } else if constexpr (C::kReduces) {
      if (at == 0 && is_there) block.store_row(state, segment, head);
    } else {
      const Finish<C> finish = block.finish_of(state, segment, head);
      unroll<kKeep>([&](int j) {
        if (has(j)) own[j * step] = finish.known(value[j], e[j]);
      });
      for (int k = past; k < end; k += kLanes) x[k * pitch] = finish(x[k * pitch], C::kSums ? other[k * pitch] : A(0));
    }
  }
  return has_long;
}
// The same for those of many items, which all threads share. Each of them has an item whose number is a multiple of
// kWarpItems.
template <class PartAt>
__device__ inline void compute_long_rows(const Block& block, const WholeBlock& all, const Segments& segments, int from,
                                         int to, PartAt part_at) {
  int last = from - 1;
  for (int item = 0; item < block.count; item += kWarpItems) {
    int low = last + 1, high = to;  // the first segment that ends after the item
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (segments.end(middle) > item)
        high = middle;
      else
        low = middle + 1;
    }
    if (low == to) return;
    const int begin = segments.begin(low), end = segments.end(low);
    if (begin > item || end - begin <= kWarpItems) continue;
    last = low;
    RowState state = {};
    if constexpr (!C::kPointwise) state = all.state(begin, end);
    const int part = part_at(low);
    if (part >= 0) {
      if (all.exists() && all.at == 0) block.part_states[part * block.heads + all.head] = state;
    } else if (C::kReduces) {
      all.store_row(state, segments.first + low);
    } else {
      all.finish(state, segments.first + low, begin, end);
    }
  }
}

// The parts of a tile: 0 of a row that began in an earlier tile, 1 of one that begins here and goes on. One thread
// finds them, when the bounds of the segments are there; `is_first`: of the tile.
__device__ inline void find_parts(const Block& block, const Segments& segments, bool is_first, Part (&parts)[2]) {
  if (threadIdx.x) return;
  if (is_first) {
    parts[0].find(block, segments.first - 1, 0, segments.first > 0 ? segments.begin(0) : 0);
    parts[1].find(block, 0, 0, 0);
  }
  const int i = segments.own - 1;
  if (i >= 0 && segments.goes_on(i)) parts[1].find(block, segments.first + i, segments.begin(i), block.count);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ SegmentMap map) {
  extern __shared__ __align__(16) char memory[];
  __shared__ HeadTable table;
  __shared__ A scratch[kThreads + 1];  // the last one is that of an element that is not there
  __shared__ int bounds[kThreads + 1];
  __shared__ int64_t first_segments[kAhead];
  __shared__ int has_long, how_many;
  __shared__ Part parts[2];
  __shared__ RowState part_states[2 * kSegmentHeads];
  Block block(map, table, (A*)memory, scratch, part_states);
  const WholeBlock all(block);
  Segments segments = {block, bounds, &how_many, 0, 0};
  const int64_t step = gridDim.x / map.chunks, first_tile = blockIdx.x / map.chunks;
  // Whether blocks send each other the states of rows.
  const bool has_messages = !C::kPointwise && map.tiles > 1, is_cooperative = has_messages && map.steps_run == 3;
  fill_table(block, table);
  if (threadIdx.x == 0) scratch[kThreads] = C::kSums ? A(0) : A(-infinity());
  GridBarrier barrier;
  if (is_cooperative) {
    if (threadIdx.x == 0) barrier.init();
    for (int64_t tile = first_tile; tile < map.tiles; tile += step) {
      for (int i = threadIdx.x; i < 2 * map.heads; i += kThreads) (&block.message(tile, 0, 0))[i].clear();
    }
  }
  __syncthreads();
  if (is_cooperative && threadIdx.x == 0) barrier.arrive(blockIdx.x, gridDim.x);
  bool awaits_barrier = is_cooperative, has_deferred = false;
  // The first segment of a tile, which all warps look for, those of some tiles to come too.
  const auto find_firsts = [&](int64_t tile) {
    const int turn = (int)((tile - first_tile) / step % kAhead);
    if (turn == 0) {
      __syncthreads();
      for (int i = threadIdx.x / 32; i < kAhead && tile + i * step < map.tiles; i += kWarps) {
        const int64_t found = find_segment(map, (tile + i * step) * map.tile_items);
        if (threadIdx.x % 32 == 0) first_segments[i] = found;
      }
      __syncthreads();
    }
    return first_segments[turn];
  };

  // Before its first tile a block loads that alone.
  Raw raw;
  Segments::Offsets offsets;
  int64_t next_first = 0;
  for (int64_t tile = map.steps_run & 1 ? first_tile - step : map.tiles; tile < map.tiles; tile += step) {
    const bool is_tile = tile >= 0, has_next = tile + step < map.tiles;
    const int64_t first = next_first;
    __syncthreads();  // the tile before has been stored
    if (is_tile) block.move_to(tile), block.fill(raw), segments.fill(first, offsets);
    if (threadIdx.x == 0) has_long = 0;
    block.clear_parts();
    block.move_to(tile + step);
    if (has_next) block.load(raw);
    block.move_to(tile);
    if (awaits_barrier && is_tile && threadIdx.x == 0) barrier.wait();
    awaits_barrier &= !is_tile;
    __syncthreads();
    for (bool is_first = true; is_tile; is_first = false) {
      segments.count();
      find_parts(block, segments, is_first, parts);
      const auto part_at = [&](int i) {
        if (C::kPointwise) return -1;
        return i < 0 ? 0 : segments.goes_on(i) ? 1 : -1;
      };
      const int begin = is_first && first > 0 && segments.begin(0) > 0 ? -1 : 0;
      if (compute_rows(block, segments, begin, segments.own, part_at)) has_long = 1;
      __syncthreads();
      if (has_long) compute_long_rows(block, all, segments, begin, segments.own, part_at);
      if (segments.own < kThreads) break;
      offsets = Segments::load(map, segments.first + kThreads);
      __syncthreads();  // the bounds have been read
      segments.fill(segments.first + kThreads, offsets);
      __syncthreads();
    }
    if (has_next) {
      next_first = find_firsts(tile + step);
      offsets = Segments::load(map, next_first);
    }
    if (!is_tile) continue;
    int stored_from = 0, stored_to = block.count;
    if (has_messages) {
      __syncthreads();  // the rows have been computed
      block.send_parts();
#pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        const Part part = parts[k];
        if (part.is_deferred(map)) {
          has_deferred = true;
          if (k)
            stored_to = part.begin;
          else
            stored_from = part.end;
        } else if (part.exists() && (!C::kReduces || part.from == tile)) {
          const RowState state = all.merge(part, true);
          if (C::kReduces)
            all.store_row(state, part.segment);
          else
            all.finish(state, part.segment, part.begin, part.end);
        }
      }
    }
    if constexpr (!C::kReduces) {
      __syncthreads();
      block.store(stored_from, stored_to);
    }
  }
  if (C::kPointwise || !(map.steps_run & 2) || (is_cooperative && !has_deferred)) return;

  // Rows of more tiles than there are blocks, whose elements are read again.
  int64_t merged = -1;
  RowState state = {};
  for (int64_t tile = first_tile; tile < map.tiles; tile += step) {
    block.move_to(tile);
    const int64_t first = find_firsts(tile);
    for (int64_t from = first;; from += kThreads) {
      segments.fill(from, Segments::load(map, from));
      __syncthreads();
      segments.count();
      find_parts(block, segments, from == first, parts);
      __syncthreads();
      if (segments.own < kThreads) break;
    }
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      const Part part = parts[k];
      if (!part.is_deferred(map) || (C::kReduces && part.from != tile)) continue;
      const bool is_known = part.segment == merged && part.to - part.from >= kFewTiles;
      if (!is_known) merged = part.segment, state = all.merge(part, is_cooperative);
      if (C::kReduces)
        all.store_row(state, part.segment);
      else
        all.finish_again(state, part);
    }
  }
}
