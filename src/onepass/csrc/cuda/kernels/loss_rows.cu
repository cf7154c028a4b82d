// loss_rows.cu: the terms of rows whose classes are adjacent in memory, and the gradient of their elements. Each
// element is read once, in vectors. A thread has kVecs vectors in flight, also across the end of a row. Up to 32 lanes
// share a row, or a block does, chunk after chunk, or several blocks do, with a part of the row each.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
typedef C::Raw Raw;
typedef LossElements<C> Elements;
constexpr int V = C::kVecSize, kVecs = C::kVecs;
constexpr bool kWarp = C::kThreadsPerRow > 0;
// If blocks share a row, its vectors are counted from the beginning of a cache line, so that warps load and store whole
// lines.
constexpr int kLine = C::kScalar || kWarp ? V : 128 / sizeof(T);

constexpr int kThreads = kWarp ? C::kThreadsPerRow : C::kBlockThreads;  // that share a row or a part of it
constexpr int kStep = kThreads * V;    // elements from one vector of a thread to the next
constexpr int kChunk = kVecs * kStep;  // elements from one chunk, the kVecs vectors in flight, to the next

// A part of a row, and the vectors of it that one thread has.
struct Part {
  const LossMap& map;
  int64_t row, x, dx;    // offsets of class 0. (With pointers the compiler would not know that they are global.)
  bool edges_are_whole;  // whether vectors that belong to the row only in part may be read whole
  int n, end;            // classes of the row; the end of the part
  int at;                // the thread's next vector

  __device__ Part(const LossMap& map, int64_t group) : map(map), n((int)map.n) { move_to(group); }
  // Moves to the thread's part of group number `group`. A row that does not exist has no elements.
  __device__ void move_to(int64_t group) {
    Quotient of = {group, 0};
    if constexpr (!kWarp) of = divide(group, map.parts, map.by_parts);
    row = of.whole * C::kRowsPerBlock + threadIdx.x / kThreads;
    const bool exists = row < map.rows;
    const LossPlace place(map, exists ? row : 0, map.dims);
    x = place.x, dx = place.dx;
    edges_are_whole = !C::kScalar && map.dims == 1 && map.x_strides[0] >= V && row > 0 && row + 1 < map.rows;
    const int before = C::kScalar || (C::kAligned && kWarp) ? 0 : (int)((uint64_t)row_x() / sizeof(T) % kLine);
    const int64_t begin = of.rest * map.part_n - before;
    end = !exists ? (int)begin : kWarp ? n : (int)min(map.n, begin + map.part_n);
    at = (int)begin + (int)threadIdx.x % kThreads * V;
  }
  // The address of class 0.
  __device__ const T* row_x() const { return (const T*)map.x + x; }
  // Whether a vector belongs to the row as a whole; whether any of its elements belongs to the part.
  __device__ bool is_whole(int at) const {
    return at < end && (C::kScalar || (C::kAligned ? at >= 0 : is_full<C>(at, n)));
  }
  __device__ bool overlaps(int at) const { return is_inside(at + V - 1, end + V - 1); }
  // Whether all vectors of a chunk belong to the row as a whole.
  __device__ bool are_whole(int at) const { return is_whole(at) && is_whole(at + kChunk - kStep); }
  // Begins to load a chunk. Elements outside the row have any values.
  __device__ void load(Raw (&raw)[kVecs]) const {
    const T* const from = row_x() + at;
    if (are_whole(at)) {
      unroll<kVecs>([&](int i) { raw[i] = Elements::load(from + i * kStep); });
      return;
    }
    unroll<kVecs>([&](int i) {
      const int own = at + i * kStep;
      if (C::kAligned || C::kScalar || edges_are_whole ? overlaps(own) : is_whole(own))
        raw[i] = Elements::load(from + i * kStep);
      else
        load_elements(raw[i], own);
    });
  }
  // Makes elements outside the part neutral.
  __device__ void mask(Raw (&raw)[kVecs], int at) const {
    unroll<kVecs>([&](int i) {
      const int from = at + i * kStep;
      if (is_whole(from)) return;
      unroll<V>([&](int v) {
        if (from >= end || !is_inside(from + v, n)) Elements::set(raw[i], v, Elements::neutral());
      });
    });
  }
  // The class of a chunk's element, and whether it exists.
  __device__ int class_of(int at, int i) const { return at + i / V * kStep + i % V; }
  __device__ bool has(int at, int i) const { return at + i / V * kStep < end && is_inside(class_of(at, i), n); }

 private:
  // Loads the elements of a vector that belong to the row.
  __device__ void load_elements(Raw& raw, int from) const {
    if (C::kAligned || C::kScalar || edges_are_whole || !overlaps(from)) return;
    unroll<V>([&](int v) {
      if (is_inside(from + v, n)) Elements::set(raw, v, row_x()[from + v]);
    });
  }
};

// Values that are the same for all elements of a row.
struct Row {
  LossNumbers<C> numbers;
  A factor, reference;

  __device__ Row(const LossMap& map, const Part& part)
      : numbers{map},
        factor(C::has(kLossScale) && part.row < map.rows ? numbers.factor(part.row) : A(1)),
        reference(0) {
    if constexpr (C::has(kLossSpread)) reference = reference_of(numbers.score(part.row_x()[0], factor));
  }
  // Adds the chunk that begins at `at` to the state of the thread.
  __device__ void absorb(LossState<C>& state, Raw (&raw)[kVecs], const Part& part, int at) const {
    if (part.are_whole(at)) return add<true>(state, raw, part, at);
    if (C::kHasNeutral) part.mask(raw, at);
    add<false>(state, raw, part, at);
  }

 private:
  static constexpr bool kSumsRaw = sizeof(T) == 2 && C::kHasNeutral;  // the scores are the elements, of a half type

  template <bool AreWhole>
  __device__ void add(LossState<C>& state, Raw (&raw)[kVecs], const Part& part, int at) const {
    const auto score = [&](int i) {
      const A s = numbers.score(Elements::get(raw[i / V], i % V), factor);
      return AreWhole || C::kHasNeutral || part.has(at, i) ? s : A(-infinity());
    };
    A highest = -infinity();
    if (C::kHasNeutral) {
      highest = Elements::max(raw);
      unroll<kVecs>([&](int i) { Elements::opaque(raw[i]); });
    } else {
      unroll<kVecs * V>([&](int i) { highest = max_(highest, score(i)); });
    }
    bool has_finite = false;
    if constexpr (C::has(kLossEntropy) && kSumsRaw && C::kHalf2 && AreWhole)
      has_finite = Elements::have_finite_products(raw);
    state.template add<kVecs * V>(highest, score, has_finite);
    if constexpr (C::has(kLossSpread) && kSumsRaw && !C::has(kLossWeight) && AreWhole) {
      // So few elements of a half type have a sum that is as exact as the sum of their differences.
      state.spread += pairwise_sum<kVecs * V, 0>(score) - kVecs * V * reference;
    } else if constexpr (C::has(kLossSpread)) {
      state.spread += pairwise_sum<kVecs * V, 0>([&](int i) {
        if (!AreWhole && !part.has(at, i)) return A(0);
        return numbers.weight(part.class_of(at, i)) * (score(i) - reference);
      });
    }
  }
};

// Merges the states of the threads that share a part. All threads get the result.
__device__ inline void reduce(LossState<C>& state) {
  if constexpr (kWarp) {
    state.template reduce_in_warp<C::kThreadsPerRow>();
  } else {
    __shared__ LossState<C> of_warps[C::kBlockThreads / 32];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    state.template reduce_in_warp<32>();
    __syncthreads();  // the states of another row have been read
    if (lane == 0) of_warps[threadIdx.x / 32] = state;
    __syncthreads();
    state = lane < warps ? of_warps[lane] : LossState<C>::empty();
    state.template reduce_in_warp<32>();
  }
}

__device__ inline void compute_terms(const LossMap& map, int64_t groups) {
  const int thread = threadIdx.x % kThreads;
  // The sums of the first thread of each row. In registers they would take the place of vectors.
  __shared__ LossSums<C> of_rows[C::kRowsPerBlock];
  LossSums<C>& sums = of_rows[threadIdx.x / kThreads];
  if (thread == 0) sums = {};
  // The part that is loaded while the chunk before it is computed.
  Part next(map, blockIdx.x);
  Raw next_raw[kVecs];
  LossPick<C> next_pick;
  const auto load_class = [&] {
    next_pick.load_class(map, next.row, thread == 0 && map.parts == 1 && next.row < map.rows);
  };
  next.load(next_raw), load_class(), next_pick.load_element(next.row_x(), 1);
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const Part part = next;
    const LossPick<C> pick = next_pick;
    const Row row(map, part);
    LossState<C> state = LossState<C>::empty();
    bool is_last;
    do {
      Raw raw[kVecs];
      unroll<kVecs>([&](int i) { raw[i] = next_raw[i]; });
      const int at = next.at;
      next.at += kChunk;
      is_last = next.at >= part.end;
      if (is_last) next.move_to(group + gridDim.x), load_class();
      next.load(next_raw);
      row.absorb(state, raw, part, at);
    } while (!is_last);
    next_pick.load_element(next.row_x(), 1);
    reduce(state);
    if (part.row >= map.rows) continue;
    if (map.parts > 1) {
      if (thread == 0) state.store(map.states, group, groups);
    } else {
      if (thread == 0) LossTerms<C>(map, part.row, part.row_x()[0], pick, state, sums).store(map, part.row);
      LossTerms<C>::store_picks(map, part.row, part.row_x(), 1, state, thread, kThreads);
    }
  }
  LossSums<C> own = {};
  if (thread == 0) own = sums;
  own.finish(map);
}

// The gradients of the elements of a vector, which begins with class `from`.
template <bool ByBase>
__device__ inline Vector<T, V> grads_of(const LossMap& map, const Part& part, const LossGrad<C>& grad, const Raw& raw,
                                        int from) {
  const LossNumbers<C> numbers = {map};
  A made[V];
  unroll<V>([&](int v) {
    const A weight = C::has(kLossSpread) && is_inside(from + v, part.n) ? numbers.weight(from + v) : A(0);
    made[v] = grad.template of_score<ByBase>(numbers, Elements::get(raw, v), weight);
  });
  const auto add_pick = [&](int c, A of_pick) {
    if (is_inside(c - from, V)) unroll<V>([&](int v) { made[v] += v == c - from ? of_pick : A(0); });
  };
  if constexpr (C::has(kLossCross)) {
    add_pick(grad.pick, grad.of_pick);
  } else if constexpr (C::has(kLossPicks)) {
    const A* const of_picks = numbers.plane(map.grads, numbers.kPickPlane) + part.row;
    for (int k = 0; k < map.picks; ++k) add_pick((int)numbers.pick(part.row, k), -of_picks[k * map.rows]);
  }
  Vector<T, V> grads;
  unroll<V>([&](int v) { grads.at[v] = from_acc<T>(made[v] * numbers.slope(Elements::get(raw, v), grad.factor)); });
  return grads;
}

__device__ inline void store_grads(const LossMap& map, Part part) {
  Raw next[kVecs];
  part.load(next);
  const LossGrad<C> grad(map, part.row);
  T* const dx = (T*)map.dx + part.dx;
  while (part.at < part.end) {
    Raw raw[kVecs];
    unroll<kVecs>([&](int i) { raw[i] = next[i]; });
    const int at = part.at;
    part.at += kChunk;
    if (part.at < part.end) part.load(next);
    unroll<kVecs>([&](int i) {
      const int from = at + i * kStep;
      if (!part.overlaps(from)) return;
      Vector<T, V> grads = {};
      if (!grad.is_ignored && grad.has_base())
        grads = grads_of<LossGrad<C>::kHasBase>(map, part, grad, raw[i], from);
      else if (!grad.is_ignored)
        grads = grads_of<false>(map, part, grad, raw[i], from);
      store_predicated<C>(dx, from, part.n, grads);
    });
  }
}

template <bool IsBackward>
__device__ inline void run(const LossMap& map) {
  const int64_t groups = (map.rows + C::kRowsPerBlock - 1) / C::kRowsPerBlock * map.parts;
  if constexpr (IsBackward) {
    for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
      const Part part(map, group);
      if (part.row < map.rows) store_grads(map, part);
    }
  } else {
    compute_terms(map, groups);
  }
}

// How many blocks should fit on a multiprocessor: for 64 registers per thread, or 80. More blocks hide more of the
// latency at the end of a row.
constexpr int kMinThreads = C::has(kLossSpread) ? 768 : 1024;
constexpr int kMinBlocks = sizeof(T) < 8 ? kMinThreads / C::kBlockThreads : 1;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ LossMap map) {
  let_next_start();
  run<C::kIsBackward>(map);
}
