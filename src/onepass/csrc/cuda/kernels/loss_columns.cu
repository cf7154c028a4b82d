// loss_columns.cu: the terms of rows that lie side by side in memory, and the gradient of their elements. A vector has
// elements of one class and of neighbouring rows. Each element is read once, and the elements of the rows' own classes
// are read once more. `threads_x` threads of a block have neighbouring vectors, and the other threads have other
// classes of the same rows. Several blocks may share rows, each with a part of the classes.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
typedef C::Raw Raw;
typedef LossElements<C> Elements;
constexpr int V = C::kVecSize, kVecs = C::kVecs;

// V neighbouring rows, and the classes of them that a thread has.
struct Columns {
  const LossMap& map;
  int64_t row;  // the first row
  const T* x;   // the address of its class 0
  T* dx;
  int first, step, end;     // classes
  int64_t x_step, dx_step;  // from one of the thread's classes to the next

  // For the vector number `index`.
  __device__ Columns(const LossMap& map, int64_t index, int part, int y, int threads_y)
      : map(map),
        first((int)(part * map.part_n) + y),
        step(threads_y),
        end((int)min(map.n, (part + 1) * map.part_n)),
        x_step(threads_y * map.x_step),
        dx_step(threads_y * map.dx_step) {
    const Quotient slice = divide(index, map.slice_vecs, map.by_slice_vecs);
    const int64_t col = slice.rest * V, inner = map.sizes[map.dims - 1];
    const LossPlace place(map, slice.whole, map.dims - 1);
    row = slice.whole * inner + col;
    x = (const T*)map.x + place.x + col * map.x_strides[map.dims - 1];
    dx = (T*)map.dx + place.dx + col * map.dx_strides[map.dims - 1];
  }
  // Loads the vectors of kVecs classes, beginning with class c. Classes that do not exist become neutral.
  __device__ void load(Raw (&raw)[kVecs], int c) const {
    const T* from = x + c * map.x_step;
    unroll<kVecs>([&](int i) {
      if (c + i * step < end)
        raw[i] = Elements::load(from);
      else
        Elements::fill(raw[i], Elements::neutral());
      from += x_step;
    });
  }
};

// Reduces the thread's classes to the states of its rows.
__device__ inline void reduce_columns(const Columns& columns, LossState<C> (&states)[V]) {
  const LossNumbers<C> numbers = {columns.map};
  A factor[V], reference[V];
  unroll<V>([&](int v) { factor[v] = numbers.factor(columns.row + v); });
  if constexpr (C::has(kLossSpread)) {
    const Raw of_first = Elements::load(columns.x);
    unroll<V>([&](int v) { reference[v] = reference_of(numbers.score(Elements::get(of_first, v), factor[v])); });
  }
  for (int c = columns.first; c < columns.end; c += kVecs * columns.step) {
    Raw raw[kVecs];
    columns.load(raw, c);
    unroll<V>([&](int v) {
      A s[kVecs], highest = -infinity();
      unroll<kVecs>([&](int i) {
        const bool exists = C::kHasNeutral || c + i * columns.step < columns.end;
        s[i] = exists ? numbers.score(Elements::get(raw[i], v), factor[v]) : A(-infinity());
        highest = max_(highest, s[i]);
      });
      states[v].template add<kVecs>(highest, [&](int i) { return s[i]; });
      if constexpr (C::has(kLossSpread)) {
        unroll<kVecs>([&](int i) {
          const int at = c + i * columns.step;
          if (at < columns.end) states[v].spread += numbers.weight(at) * (s[i] - reference[v]);
        });
      }
    });
  }
}

// `ByBase`: only if all rows of the thread have a base.
template <bool ByBase>
__device__ inline void store_grads(const Columns& columns, const LossGrad<C> (&grads)[V]) {
  const LossNumbers<C> numbers = {columns.map};
  for (int c = columns.first; c < columns.end; c += kVecs * columns.step) {
    Raw raw[kVecs];
    columns.load(raw, c);
    T* dx = columns.dx + c * columns.map.dx_step;
    unroll<kVecs>([&](int i) {
      T* const to = dx;
      dx += columns.dx_step;
      const int at = c + i * columns.step;
      if (at >= columns.end) return;
      const A weight = C::has(kLossSpread) ? numbers.weight(at) : A(0);
      A made[V];
      unroll<V>([&](int v) {
        made[v] = grads[v].template of_score<ByBase>(numbers, Elements::get(raw[i], v), weight);
        if constexpr (C::has(kLossCross)) made[v] += at == grads[v].pick ? grads[v].of_pick : A(0);
      });
      if constexpr (C::has(kLossPicks) && !C::has(kLossCross)) {
#pragma unroll 1
        for (int k = 0; k < columns.map.picks; ++k) {
          const A* const of_picks = numbers.plane(columns.map.grads, numbers.kPickPlane + k) + columns.row;
          unroll<V>([&](int v) { made[v] -= numbers.pick(columns.row + v, k) == at ? of_picks[v] : A(0); });
        }
      }
      Vector<T, V> result;
      unroll<V>([&](int v) {
        const A grad = made[v] * numbers.slope(Elements::get(raw[i], v), grads[v].factor);
        result.at[v] = from_acc<T>(grads[v].is_ignored ? A(0) : grad);
      });
      store_vector(to, result);
    });
  }
}

__device__ inline void store_grads(const Columns& columns) {
  LossGrad<C> grads[V];
  unroll<V>([&](int v) { grads[v] = LossGrad<C>(columns.map, columns.row + v); });
  bool have_bases = true;
  unroll<V>([&](int v) { have_bases &= grads[v].has_base(); });
  if (have_bases)
    store_grads<LossGrad<C>::kHasBase>(columns, grads);
  else
    store_grads<false>(columns, grads);
}

// Stores the terms of rows all of whose classes this thread has seen.
__device__ inline void store_terms(const Columns& columns, const LossState<C> (&states)[V],
                                   const LossPick<C> (&picks)[V], LossSums<C>& sums) {
  const LossMap& map = columns.map;
  const LossNumbers<C> numbers = {map};
  const int64_t step = map.x_strides[map.dims - 1];
  constexpr int kPlanes = LossTerms<C>::kStoredPlanes, kTogether = V * sizeof(A) < 16 ? V : 16 / sizeof(A);
  Vector<A, kTogether> planes[kPlanes][V / kTogether];
  unroll<V>([&](int v) {
    const LossTerms<C> terms(map, columns.row + v, columns.x[v * step], picks[v], states[v], sums);
    unroll<kPlanes>([&](int p) { planes[p][v / kTogether].at[v % kTogether] = terms.planes[p]; });
    if constexpr (C::has(kLossCross)) terms.store_result(map, columns.row + v);
    LossTerms<C>::store_picks(map, columns.row + v, columns.x + v * step, map.x_step, states[v], 0, 1);
  });
  unroll<kPlanes>([&](int p) {
    A* const to = numbers.plane(map.terms, p) + columns.row;
    unroll<V / kTogether>([&](int i) { store_vector(to + i * kTogether, planes[p][i]); });
  });
}

// Merges the states of the threads of a block. Stores the terms of the rows or, if rows have several parts, the states.
__device__ inline void merge_and_store(const LossMap& map, int64_t tile, int part, const LossState<C> (&states)[V],
                                       LossSums<C>& sums) {
  constexpr int kStates = V * C::kBlockThreads;
  __shared__ A shared[C::kStateNumbers * kStates];
  const int threads_x = map.threads_x, threads_y = C::kBlockThreads / threads_x;
  const int64_t step = map.x_strides[map.dims - 1];
  __syncthreads();  // the states of another tile have been read
  unroll<V>([&](int v) { states[v].store(shared, v * C::kBlockThreads + threadIdx.x, kStates); });
  __syncthreads();
  for (int i = threadIdx.x; i < threads_x * V; i += C::kBlockThreads) {
    const int v = i / threads_x, at = i % threads_x;
    if (tile * threads_x + at >= map.vecs) continue;
    LossState<C> state = LossState<C>::empty();
    for (int k = 0; k < threads_y; ++k) {
      LossState<C> other = LossState<C>::empty();
      other.load(shared, v * C::kBlockThreads + k * threads_x + at, kStates);
      state.merge(other);
    }
    const Columns of(map, tile * threads_x + at, part, 0, threads_y);
    const T* const x = of.x + v * step;
    const int64_t row = of.row + v;
    if (map.parts > 1) {
      state.store(map.states, row * map.parts + part, map.rows * map.parts);
      continue;
    }
    LossPick<C> pick;
    pick.load_class(map, row, true), pick.load_element(x, map.x_step);
    LossTerms<C>(map, row, x[0], pick, state, sums).store(map, row);
    LossTerms<C>::store_picks(map, row, x, map.x_step, state, 0, 1);
  }
}

template <bool IsBackward>
__device__ inline void run(const LossMap& map) {
  const int threads_x = map.threads_x, threads_y = C::kBlockThreads / threads_x;
  const int x = threadIdx.x % threads_x, y = threadIdx.x / threads_x;
  const int64_t tiles = (map.vecs + threads_x - 1) / threads_x, items = tiles * map.parts;
  LossSums<C> sums = {};
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Quotient of = divide(item, map.parts, map.by_parts);
    const int64_t tile = of.whole;
    const int part = (int)of.rest;
    const int64_t index = tile * threads_x + x;
    const bool exists = index < map.vecs;
    const Columns columns(map, exists ? index : 0, part, y, threads_y);
    if constexpr (IsBackward) {
      if (exists) store_grads(columns);
    } else {
      LossState<C> states[V];
      unroll<V>([&](int v) { states[v] = LossState<C>::empty(); });
      const bool is_alone = threads_y == 1 && map.parts == 1;
      LossPick<C> picks[V];
      unroll<V>([&](int v) { picks[v].load_class(map, columns.row + v, is_alone && exists); });
      if (exists) reduce_columns(columns, states);
      const int64_t row_step = map.x_strides[map.dims - 1];
      unroll<V>([&](int v) { picks[v].load_element(columns.x + v * row_step, map.x_step); });
      unroll<V>([&](int v) { states[v].settle(); });
      if (!is_alone)
        merge_and_store(map, tile, part, states, sums);
      else if (exists)
        store_terms(columns, states, picks, sums);
    }
  }
  if constexpr (!IsBackward) sums.finish(map);
}

extern "C" __global__ void __launch_bounds__(C::kBlockThreads) onepass_kernel(const __grid_constant__ LossMap map) {
  let_next_start();
  run<C::kIsBackward>(map);
}
