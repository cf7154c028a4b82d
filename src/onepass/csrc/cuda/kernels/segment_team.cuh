// segment_team.cuh: a row, or a part of one, as the lanes that share it compute it: some of a warp, a warp or a block.
#pragma once

#include "config.cuh"
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

// A row, or a part of one.
struct Row {
  int64_t segment, begin;  // the first item
  int count;               // items
};

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
          [&](int line) { places[line] += (column - whole * map.sizes[d]) * map.strides[tensor_of(line)][d]; });
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

 private:
  // The tensor of a line of the places.
  static __device__ int tensor_of(int line) {
    if (line >= C::kItemTensors) return kRowFirst + line - C::kItemTensors;
    return line == 0 && !C::kHasResult ? kItemFirst : line == C::kItemTensors - 1 && C::kHasResult ? kItemResult : line;
  }
};

// Some items of a row in registers, `step` apart from `from` on.
struct Chunk {
  const Lane& lane;
  const Row& row;
  const int from, step;
  const int most;                             // items that the lane with most of them has, at most
  Values first[K], second[C::kSums ? K : 1];  // scores; of a gradient the results and their gradients

  __device__ Chunk(const Lane& lane, const Row& row, int from, int step, int most)
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
  __device__ States states(const Row& row) const {
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
  __device__ void finish(const Row& row, const Finish<C> (&finish)[V]) const {
#pragma unroll 1
    for (int begin = 0; begin < row.count; begin += K * step)
      Chunk(lane, row, begin + at, step, most_of(row.count - begin)).template store<false>(finish);
  }
  __device__ int most_of(int items) const { return (items + step - 1) / step; }
};

// What makes the results of a row, of which the lane has items.
__device__ inline void make_finish(const Lane& lane, const Row& row, const States& states, Finish<C> (&finish)[V]) {
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
__device__ inline void compute_kept(const Team& team, const Row& row, int most, bool stores, Reduce& reduce) {
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
__device__ inline void compute_row(const Team& team, const Row& row, Reduce& reduce) {
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

// A row by its offsets; of offsets that are none, one of nothing.
__device__ inline Row row_of(const SegmentMap& map, int64_t segment, int64_t begin, int64_t end) {
  const bool is_valid = begin >= 0 && begin <= end && end <= map.items;
  return {segment, is_valid ? begin : 0, is_valid ? (int)min(end - begin, (int64_t)0x7fffffff) : 0};
}

__device__ inline Row row_of(const SegmentMap& map, int64_t segment) {
  return row_of(map, segment, offset_of(map, segment), offset_of(map, segment + 1));
}
