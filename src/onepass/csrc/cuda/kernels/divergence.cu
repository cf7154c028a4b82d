// divergence.cu: the terms of rows of two tensors, and the gradients of both. Each element is read once. A block has
// several rows, and several threads share a row. If the classes of a row are adjacent in memory, neighbouring threads
// share a row and read vectors of it. Otherwise neighbouring threads have neighbouring rows. Several blocks may share
// rows, each with a part of the classes.
#include "config.cuh"
#include "divergence.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
typedef C::Raw Raw;
typedef LossElements<C> Elements;
typedef DivergenceRowState<C> RowState;
constexpr int V = C::kVecSize, kVecs = C::kVecs, kCount = V * kVecs;
constexpr bool kColumns = C::has(kLossColumns);

// A row, and a thread's classes of it: V classes from `first` on, V from first + step on, and so on. Vectors are
// aligned in memory, so that the first one may begin before the row.
struct Row {
  const DivergenceMap& map;
  int64_t row;
  bool exists;
  const T *x, *y;
  int first, step, end;

  __device__ Row(const DivergenceMap& map, int part, const DivergencePlace& place, int64_t row, int at, int threads)
      : map(map), row(row), exists(row < map.rows), x((const T*)map.x + place.x), y((const T*)map.y + place.y) {
    const int before = C::kScalar || C::kAligned ? 0 : misalignment<C>(x);
    const int64_t begin = part * map.part_n - before;
    first = (int)begin + at * V, step = threads * V;
    end = exists ? (int)min(map.n, begin + map.part_n) : 0;
  }
  __device__ bool has(int c) const { return is_inside(c, end); }
  __device__ bool is_whole(int c) const { return c >= 0 && c + V <= end; }
  // Whether all vectors that a thread loads together, from class c on, are whole.
  __device__ bool are_whole(int c) const { return c >= 0 && c + (kVecs - 1) * step + V <= end; }
  __device__ Raw load(const T* from, int64_t class_step, int c) const {
    if (is_whole(c)) return Elements::load(from);
    Raw raw;
    Elements::fill(raw, Elements::neutral());
    unroll<V>([&](int v) {
      if (has(c + v)) Elements::set(raw, v, from[v * class_step]);
    });
    return raw;
  }
  __device__ void load(Raw (&raw)[kVecs], const T* tensor, int64_t class_step, int c) const {
    const T* from = tensor + c * class_step;
    unroll<kVecs>([&](int i) { raw[i] = load(from, class_step, c + i * step), from += step * class_step; });
  }
  // Vectors of both tensors.
  __device__ void load(Raw (&of_x)[kVecs], Raw (&of_y)[kVecs], int c) const {
    load(of_x, x, map.x_step, c), load(of_y, y, map.y_step, c);
  }
  __device__ int class_of(int c, int i) const { return c + i / V * step + i % V; }
};

template <bool AreWhole>
__device__ inline void add(RowState& state, const Row& row, const DivergenceNumbers<C>& numbers, int c) {
  Raw of_x[kVecs], of_y[kVecs];
  row.load(of_x, of_y, c);
  const auto exists = [&](int i) { return AreWhole || row.has(row.class_of(c, i)); };
  A s[kCount], u[kCount];
  unroll<kCount>([&](int i) {
    const bool is_there = exists(i);
    s[i] = is_there ? numbers.score_of(Elements::get(of_x[i / V], i % V)) : A(-infinity());
    u[i] = is_there ? numbers.of_y(Elements::get(of_y[i / V], i % V), row.class_of(c, i)) : A(-infinity());
  });
  state.add(s, u, exists);
}

__device__ inline RowState state_of(const Row& row, const DivergenceNumbers<C>& numbers) {
  RowState state = RowState::empty();
  for (int c = row.first; c < row.end; c += kVecs * row.step) {
    if (row.are_whole(c))
      add<true>(state, row, numbers, c);
    else
      add<false>(state, row, numbers, c);
  }
  state.settle();
  return state;
}

// Merges the states of the threads that share a row. The first of these threads gets the result.
__device__ inline void reduce(RowState& state, int at, int threads, int rows) {
  __shared__ RowState shared[C::kBlockThreads];
  const int lanes = kColumns ? 1 : min(threads, 32), groups = threads / lanes;
  state.reduce_in_warp(lanes);
  if (groups == 1) return;
  // In `shared`, the states of a row are `stride` apart.
  const int stride = kColumns ? rows : 1, own = kColumns ? threadIdx.x : threadIdx.x / 32;
  __syncthreads();  // the states of another row have been read
  if (threadIdx.x % lanes == 0) shared[own] = state;
  __syncthreads();
  if (at) return;
  for (int k = 1; k < groups; ++k) state.merge(shared[own + k * stride]);
}

__device__ inline void store_grads(const Row& row, const DivergenceNumbers<C>& numbers, const DivergencePlace& place) {
  constexpr bool kProduct = C::has(kLossProduct);
  const DivergenceMap& map = row.map;
  const auto term = [&](int plane) {
    return kProduct && plane ? A(0) : ((const A*)map.terms + plane * map.rows)[row.row];
  };
  const auto grad = [&](int plane) { return kProduct ? A(0) : ((const A*)map.grads + plane * map.rows)[row.row]; };
  const A m = term(0), log_l = term(1), third = term(C::has(kLossKl) ? 2 : 3);
  const A other_m = C::has(kLossKl) ? term(3) : A(0), other_log_l = C::has(kLossKl) ? term(4) : A(0);
  const A g = grad(2), of_p = C::has(kLossKl) ? g * numbers.factor : g * third + grad(1);
  T *const dx = (T*)map.dx + place.dx, *const dy = (T*)map.dy + place.dy;
  for (int c = row.first; c < row.end; c += kVecs * row.step) {
    Raw of_x[kVecs], of_y[kVecs];
    row.load(of_x, of_y, c);
    unroll<kVecs>([&](int i) {
      const int from = c + i * row.step;
      if (from >= row.end) return;
      Vector<T, V> x_grads, y_grads;
      unroll<V>([&](int v) {
        const T x = Elements::get(of_x[i], v), y = Elements::get(of_y[i], v);
        if constexpr (kProduct) {
          x_grads.at[v] = from_acc<T>(to_acc(x) * (to_acc(y) - m));
          return;
        }
        const int64_t own = row.has(from + v) ? from + v : 0;
        const A log_p = (numbers.score_of(x) - m) - log_l, p = exp_<T>(log_p);
        if constexpr (C::has(kLossKl)) {
          const A log_q = (numbers.of_y(y, own) - other_m) - other_log_l;
          x_grads.at[v] = from_acc<T>(p == 0 ? A(0) : of_p * p * ((log_p - log_q) - third));
          y_grads.at[v] = from_acc<T>(of_p * (exp_<T>(log_q) - p));
        } else {
          const A ds = of_p * p - g * numbers.share_of(y, own);
          x_grads.at[v] = from_acc<T>(ds * numbers.slope(x, numbers.factor));
          y_grads.at[v] = from_acc<T>(-numbers.kept * numbers.weight(own) * g * log_p);
        }
      });
      const auto store = [&](T* to, int64_t step, const Vector<T, V>& grads) {
        if (row.is_whole(from)) return store_vector(to + from * step, grads);
        unroll<V>([&](int v) {
          if (row.has(from + v)) to[(from + v) * step] = grads.at[v];
        });
      };
      if constexpr (C::has(kLossOfX)) store(dx, map.dx_step, x_grads);
      if constexpr (C::has(kLossOfY)) store(dy, map.dy_step, y_grads);
    });
  }
}

// How many blocks should fit on a multiprocessor: for 64 registers per thread.
constexpr int kMinBlocks = sizeof(T) < 8 ? 1024 / C::kBlockThreads : 1;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ DivergenceMap map) {
  let_next_start();
  const int rows = map.threads_x, threads = C::kBlockThreads / rows;  // rows of a block, and threads of a row
  const int own_row = kColumns ? threadIdx.x % rows : threadIdx.x / threads;
  const int at = kColumns ? threadIdx.x / rows : threadIdx.x % threads;
  const int64_t items = (map.rows + rows - 1) / rows * map.parts;
  const DivergenceNumbers<C> numbers(map);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Quotient of = divide(item, map.parts, map.by_parts);
    const int64_t index = of.whole * rows + own_row;
    const int part = (int)of.rest;
    const DivergencePlace place(map, index < map.rows ? index : 0);
    const Row row(map, part, place, index, at, threads);
    if constexpr (C::kIsBackward) {
      if (row.exists) store_grads(row, numbers, place);
    } else {
      RowState state = state_of(row, numbers);
      reduce(state, at, threads, rows);
      if (at || !row.exists) continue;
      if (map.parts > 1)
        state.store(map.states, index * map.parts + part, map.rows * map.parts);
      else
        state.store_terms(map, index);
    }
  }
}
