// loss_rows.cu: the terms of rows whose classes lie side by side, and the gradient of their elements. Each element is
// read once, in vectors of which a thread has kVecs on their way at a time, those of the next row too. Up to 32 lanes
// share a row, or blocks do, which take it chunk after chunk, or a part of it each.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
typedef C::Raw Raw;
typedef LossElements<C> Elements;
constexpr int V = C::kVecSize, kVecs = C::kVecs;
constexpr bool kWarp = C::kThreadsPerRow > 0;
// Where blocks share a row, its vectors are counted from the beginning of a cache line on, so that warps load and store
// whole lines.
constexpr int kLine = C::kScalar || kWarp ? V : 128 / sizeof(T);

// Some of a row's classes, and how the threads that share them take them.
struct Part {
  const T* x;
  int64_t row, dx;       // dx: where the gradient of class 0 is
  bool edges_are_whole;  // whether vectors that belong to the row in part may be read as a whole
  int n, end;            // classes of the row; where the part ends
  int first, step;       // the thread's first element, and from one of its vectors to the next

  // The part of a group of rows that the thread has. A row that does not exist has no elements.
  __device__ Part(const LossMap& map, int64_t group, int thread, int threads) : n((int)map.n), step(threads * V) {
    const int64_t of_rows = map.parts == 1 ? group : group / map.parts;
    const int part = map.parts == 1 ? 0 : (int)(group % map.parts);
    row = of_rows * C::kRowsPerBlock + threadIdx.x / threads;
    const bool exists = row < map.rows;
    const LossPlace place(map, exists ? row : 0, map.dims);
    x = (const T*)map.x + place.x, dx = place.dx;
    edges_are_whole = !C::kScalar && map.dims == 1 && map.x_strides[0] >= V && row > 0 && row + 1 < map.rows;
    const int before = C::kScalar || (C::kAligned && kWarp) ? 0 : (int)((uint64_t)x / sizeof(T) % kLine);
    const int64_t begin = part * map.part_n - before;
    end = exists ? (int)min(map.n, begin + map.part_n) : (int)begin;
    first = (int)begin + thread * V;
  }
  __device__ bool is_whole(int at) const {
    return at < end && (C::kScalar || (C::kAligned ? at >= 0 : is_full<C>(at, n)));
  }
  // Whether any element of a vector is of the part.
  __device__ bool overlaps(int at) const { return at < end && at > -V; }
  // Loads the vectors that begin at `at`, `at` + step, ... Elements that are not of the row are neutral.
  __device__ void load(Raw (&raw)[kVecs], int at) const {
    if constexpr (C::kAligned) {
      unroll<kVecs>([&](int i) {
        Elements::fill(raw[i], Elements::neutral());
        if (is_whole(at + i * step)) raw[i] = Elements::load(x + at + i * step);
      });
      return;
    }
    if (is_whole(at) && is_whole(at + (kVecs - 1) * step)) {
      unroll<kVecs>([&](int i) { raw[i] = Elements::load(x + at + i * step); });
      return;
    }
    unroll<kVecs>([&](int i) {
      const int from = at + i * step;
      if (!overlaps(from))
        Elements::fill(raw[i], Elements::neutral());
      else if (edges_are_whole || is_whole(from))
        raw[i] = Elements::load(x + from);
    });
    if (C::kAligned || C::kScalar) return;
    unroll<kVecs>([&](int i) {
      const int from = at + i * step;
      if (!overlaps(from) || is_whole(from)) return;
      unroll<V>([&](int v) {
        if (!is_inside(from + v, n))
          Elements::set(raw[i], v, Elements::neutral());
        else if (!edges_are_whole)
          Elements::set(raw[i], v, x[from + v]);
      });
    });
  }
  // The class of a vector's element, and whether it exists.
  __device__ int class_of(int at, int i) const { return at + i / V * step + i % V; }
  __device__ bool has(int at, int i) const { return at + i / V * step < end && is_inside(class_of(at, i), n); }
};

// What does not change along a row.
struct Row {
  LossNumbers<C> numbers;
  A factor, reference;

  __device__ Row(const LossMap& map, const Part& part)
      : numbers{map},
        factor(C::has(kLossScale) && part.row < map.rows ? numbers.factor(part.row) : A(1)),
        reference(0) {
    if constexpr (C::has(kLossSpread)) reference = reference_of(numbers.score(part.x[0], factor));
  }
  // Adds the vectors that begin at `at`, `at` + step, ... to the state of the thread.
  __device__ void absorb(LossState<C>& state, Raw (&raw)[kVecs], const Part& part, int at) const {
    const auto score = [&](int i) {
      const A s = numbers.score(Elements::get(raw[i / V], i % V), factor);
      return C::kHasNeutral || part.has(at, i) ? s : A(-infinity());
    };
    A top = -infinity();
    if (C::kHasNeutral) {
      top = Elements::max(raw);
      unroll<kVecs>([&](int i) { Elements::opaque(raw[i]); });
    } else {
      unroll<kVecs * V>([&](int i) { top = max_(top, score(i)); });
    }
    state.rebase(max_(state.m, top));
    state.template add<kVecs * V>(score);
    if constexpr (C::has(kLossSpread)) {
      const auto weighed = [&](int i) { return numbers.weight(part.class_of(at, i)) * (score(i) - reference); };
      if (part.is_whole(at) && part.is_whole(at + (kVecs - 1) * part.step))
        state.spread += pairwise_sum<kVecs * V, 0>(weighed);
      else
        state.spread += pairwise_sum<kVecs * V, 0>([&](int i) { return part.has(at, i) ? weighed(i) : A(0); });
    }
  }
};

// Merges the states of the threads that share a part. All of them get the result.
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

__device__ inline void compute_terms(const LossMap& map, int64_t groups, int thread, int threads) {
  // The sums of the first threads of rows; in registers they would take the place of vectors.
  __shared__ LossSums<C> of_rows[C::kRowsPerBlock];
  LossSums<C>& sums = of_rows[threadIdx.x / threads];
  if (thread == 0) sums = {};
  Raw next[kVecs];
  LossPick<C> next_pick;
  const T* next_x;
  // Begins to load the first chunk of a group's rows.
  const auto begin = [&](int64_t group) {
    const Part part(map, group, thread, threads);
    part.load(next, part.first);
    next_pick.load_class(map, part.row, thread == 0 && map.parts == 1 && part.row < map.rows);
    next_x = part.x;
  };
  begin(blockIdx.x);
  next_pick.load_element(next_x, 1);
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const Part part(map, group, thread, threads);
    const LossPick<C> pick = next_pick;
    const Row row(map, part);
    LossState<C> state = LossState<C>::empty();
    int at = part.first;
    do {
      Raw raw[kVecs];
      unroll<kVecs>([&](int i) { raw[i] = next[i]; });
      const int then = at + kVecs * part.step;
      if (then < part.end)
        part.load(next, then);
      else
        begin(group + gridDim.x);
      row.absorb(state, raw, part, at);
      at = then;
    } while (at < part.end);
    next_pick.load_element(next_x, 1);
    reduce(state);
    if (part.row >= map.rows) continue;
    if (map.parts > 1) {
      if (thread == 0) state.store(map.states, group, groups);
    } else {
      if (thread == 0) LossTerms<C>(map, part.row, part.x[0], pick, state, sums).store(map, part.row);
      LossTerms<C>::store_picks(map, part.row, part.x, 1, state, thread, threads);
    }
  }
  LossSums<C> own = {};
  if (thread == 0) own = sums;
  own.finish(map);
}

__device__ inline void store_grads(const LossMap& map, const Part& part) {
  Raw next[kVecs];
  part.load(next, part.first);
  const LossNumbers<C> numbers = {map};
  const LossGrad<C> grad(map, part.row);
  T* const dx = (T*)map.dx + part.dx;
  for (int at = part.first; at < part.end; at += kVecs * part.step) {
    Raw raw[kVecs];
    unroll<kVecs>([&](int i) { raw[i] = next[i]; });
    if (at + kVecs * part.step < part.end) part.load(next, at + kVecs * part.step);
    unroll<kVecs>([&](int i) {
      const int from = at + i * part.step;
      if (!part.overlaps(from)) return;
      A made[V];
      unroll<V>([&](int v) {
        const A weight = C::has(kLossSpread) && is_inside(from + v, part.n) ? numbers.weight(from + v) : A(0);
        made[v] = grad.of_score(numbers, Elements::get(raw[i], v), weight);
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
      Vector<T, V> result;
      unroll<V>([&](int v) {
        const A dx = made[v] * numbers.slope(Elements::get(raw[i], v), grad.factor);
        result.at[v] = from_acc<T>(grad.is_ignored ? A(0) : dx);
      });
      store_predicated<C>(dx, from, part.n, result);
    });
  }
}

template <bool IsBackward>
__device__ inline void run(const LossMap& map) {
  const int threads = kWarp ? C::kThreadsPerRow : blockDim.x, thread = threadIdx.x % threads;
  const int64_t groups = (map.rows + C::kRowsPerBlock - 1) / C::kRowsPerBlock * map.parts;
  if constexpr (IsBackward) {
    for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
      const Part part(map, group, thread, threads);
      if (part.row < map.rows) store_grads(map, part);
    }
  } else {
    compute_terms(map, groups, thread, threads);
  }
}

// Blocks that should fit a multiprocessor: 64 registers a thread. More of them hide more of what a row ends with.
constexpr int kMinBlocks = sizeof(T) < 8 ? 1024 / C::kBlockThreads : 1;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ LossMap map) {
  run<C::kIsBackward>(map);
}
