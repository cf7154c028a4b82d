// loss_staged.cu: the terms of short rows without gaps, and the gradient of their elements. A block has a tile of as
// many rows as it has threads. It copies the tile to shared memory in vectors of 16 bytes, wherever rows begin. Each
// thread computes one row there, while the next tile is being copied.
#include "async_copy.cuh"
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
typedef C::Raw Raw;
typedef LossElements<C> Elements;
constexpr int kRows = C::kBlockThreads, kVector = 16 / sizeof(T);
// A thread reads its row in vectors of W elements. Unless rows are aligned, the vectors at the edges of a row also have
// elements of the neighbouring rows.
constexpr int W = C::kVecSize, kVecs = C::kVecs;
constexpr bool kSharesEdges = !C::kAligned && W > 1;
// Rows of whole vectors of 16 bytes are an odd number of vectors apart in shared memory, so that neighbouring rows are
// in different banks.
constexpr bool kPadded = C::kAligned && W == kVector;

// A tile: the rows of a block. It begins at the same place of a vector of 16 bytes in shared memory as in global
// memory.
struct Tile {
  const LossMap& map;
  const int64_t at;         // the first element in the tensor
  const int count, skip;    // elements of the tile, and elements of the first vector before it
  const bool begins, ends;  // whether the tile is the first, or the last, of the tensor
  T* const smem;            // the first element in shared memory

  __device__ Tile(char* memory, const LossMap& map, const void* tensor, int64_t first_row)
      : map(map),
        at(first_row * map.n),
        count((int)(min(map.rows - first_row, (int64_t)kRows) * map.n)),
        skip(kPadded ? 0 : (int)((uint64_t)((const T*)tensor + at) / sizeof(T) % kVector)),
        begins(first_row == 0),
        ends(first_row + kRows >= map.rows),
        smem((T*)memory + skip) {}
  __device__ T* row_of_thread() const { return smem + (int)threadIdx.x * (kPadded ? pitch() : (int)map.n); }
  // Begins to copy the rows to shared memory. Vectors that also have elements of other rows are read too.
  __device__ void load(const T* tensor) const {
    const T* const from = tensor + at;
    for_vectors([&](int own, T* to, bool is_whole) {
      if (is_whole || (own < 0 ? !begins : !ends))
        AsyncCopy::start<16>(smem_address(to), from + own);
      else
        for (int i = max(own, 0); i < min(own + kVector, count); ++i) to[i - own] = from[i];
    });
  }
  // Copies the rows from shared memory.
  __device__ void store(T* tensor) const {
    T* const to = tensor + at;
    for_vectors([&](int own, const T* from, bool is_whole) {
      if (is_whole)
        store_vector(to + own, *reinterpret_cast<const Vector<T, kVector>*>(from));
      else
        for (int i = max(own, 0); i < min(own + kVector, count); ++i) to[i] = from[i - own];
    });
  }

 private:
  __device__ int pitch() const { return ((int)map.n / kVector | 1) * kVector; }
  // Calls f for the thread's vectors of 16 bytes, with the number of the first element in the tile, its address in
  // shared memory, and whether the whole vector belongs to the tile.
  template <class F>
  __device__ void for_vectors(F f) const {
    if constexpr (kPadded) {
      for (int own = (int)threadIdx.x * kVector; own < count; own += kRows * kVector) {
        const Quotient of = divide(own / kVector, map.slice_vecs, map.by_slice_vecs);
        f(own, smem + (int)of.whole * pitch() + (int)of.rest * kVector, true);
      }
    } else {
      for (int own = (int)threadIdx.x * kVector - skip; own < count; own += kRows * kVector)
        f(own, smem + own, own >= 0 && own + kVector <= count);
    }
  }
};

// A row in shared memory, and its vectors. The first vector has `before` elements before the row.
struct Row {
  T* const x;
  const int n, before, vecs;

  __device__ Row(T* x, int n)
      : x(x), n(n), before(kSharesEdges ? (int)(smem_address(x) / sizeof(T) % W) : 0), vecs((n + before + W - 1) / W) {}
  __device__ T* vec(int at) const { return x - before + at * W; }
};

// `Count` consecutive vectors of a row, as far as they precede vector `end`. Elements that do not exist are neutral.
template <int Count, bool AreAll>
struct Lot {
  static constexpr int kCount = Count * W;
  const Row& row;
  const int at, end;
  Raw raw[Count];

  __device__ Lot(const Row& row, int at, int end) : row(row), at(at), end(end) {
    unroll<Count>([&](int i) {
      if (has_vec(i))
        raw[i] = Elements::load(row.vec(at + i));
      else
        Elements::fill(raw[i], Elements::neutral());
    });
    if constexpr (kSharesEdges) {  // W is 2: the first vector's first element, the last vector's second
      if (!has(0)) Elements::set(raw[0], 0, Elements::neutral());
      if (Count == 1 && !has(1)) Elements::set(raw[0], 1, Elements::neutral());
    }
  }
  __device__ bool has_vec(int i) const { return AreAll || at + i < end; }
  __device__ int class_of(int i) const { return at * W + i - row.before; }
  __device__ bool has(int i) const { return has_vec(i / W) && (!kSharesEdges || is_inside(class_of(i), row.n)); }
  __device__ T get(int i) const { return Elements::get(raw[i / W], i % W); }
};
// Calls f for all lots of a row, one after another.
template <class F>
__device__ inline void for_lots(const Row& row, F f) {
  const int end = row.vecs - kSharesEdges;
  int at = 0;
  for (; at + kVecs <= end; at += kVecs) f(Lot<kVecs, true>(row, at, end));
  if (at < end) f(Lot<kVecs, false>(row, at, end));
  if constexpr (kSharesEdges) f(Lot<1, true>(row, end, row.vecs));
}

// Values that are the same for all elements of a row, and their scores.
struct Scores {
  const LossNumbers<C>& numbers;
  const A factor, reference;

  __device__ Scores(const LossNumbers<C>& numbers, const Row& row, A factor)
      : numbers(numbers),
        factor(factor),
        reference(C::has(kLossSpread) ? reference_of(numbers.score(row.x[0], factor)) : A(0)) {}
  template <class Lot>
  __device__ A of(const Lot& lot, int i) const {
    return C::kHasNeutral || lot.has(i) ? numbers.score(lot.get(i), factor) : A(-infinity());
  }
  template <int Count, bool AreAll>
  __device__ A highest(const Lot<Count, AreAll>& lot) const {
    if constexpr (C::kHasNeutral) return Elements::max(lot.raw);
    A highest = -infinity();
    unroll<Count * W>([&](int i) { highest = max_(highest, of(lot, i)); });
    return highest;
  }
  template <int Count, bool AreAll>
  __device__ void add(LossState<C>& state, const Lot<Count, AreAll>& lot) const {
    state.template add<Count * W>(-infinity(), [&](int i) { return of(lot, i); });
    if constexpr (C::has(kLossSpread)) {
      state.spread += pairwise_sum<Count * W, 0>(
          [&](int i) { return lot.has(i) ? numbers.weight(lot.class_of(i)) * (of(lot, i) - reference) : A(0); });
    }
  }
};

// The maximum is computed first: in shared memory, reading a row twice is cheap.
__device__ inline LossState<C> state_of(const Scores& scores, const Row& row) {
  A top = -infinity();
  for_lots(row, [&](const auto& lot) { top = max_(top, scores.highest(lot)); });
  LossState<C> state = LossState<C>::of_maximum(top);
  for_lots(row, [&](const auto& lot) { scores.add(state, lot); });
  return state;
}

// Replaces the elements of a lot by their gradients.
template <bool ByBase, int Count, bool AreAll>
__device__ inline void replace_by_grads(const LossNumbers<C>& numbers, const LossGrad<C>& grad,
                                        const Lot<Count, AreAll>& lot, int64_t index) {
  A made[Count * W];
  const int first = lot.class_of(0);
  unroll<Count * W>([&](int i) {
    const A weight = C::has(kLossSpread) && lot.has(i) ? numbers.weight(first + i) : A(0);
    made[i] = grad.template of_score<ByBase>(numbers, lot.get(i), weight);
    if constexpr (C::has(kLossCross)) made[i] += i == grad.pick - first ? grad.of_pick : A(0);
  });
  if constexpr (C::has(kLossPicks) && !C::has(kLossCross)) {
    for (int k = 0; k < numbers.map.picks; ++k) {
      const int64_t pick = numbers.pick(index, k) - first;
      const A of_pick = numbers.plane(numbers.map.grads, numbers.kPickPlane + k)[index];
      unroll<Count * W>([&](int i) { made[i] -= i == pick ? of_pick : A(0); });
    }
  }
  unroll<Count>([&](int vec) {
    Vector<T, W> grads;
    unroll<W>([&](int v) {
      const int i = vec * W + v;
      grads.at[v] = from_acc<T>(grad.is_ignored ? A(0) : made[i] * numbers.slope(lot.get(i), grad.factor));
    });
    if (lot.has_vec(vec)) *reinterpret_cast<Vector<T, W>*>(lot.row.vec(lot.at + vec)) = grads;
  });
}

extern "C" __global__ void __launch_bounds__(kRows) onepass_kernel(const __grid_constant__ LossMap map) {
  let_next_start();
  extern __shared__ __align__(16) char memory[];  // two tiles
  const LossNumbers<C> numbers = {map};
  const int64_t step = (int64_t)gridDim.x * kRows;
  LossSums<C> sums = {};
  LossPick<C> next_pick;
  int64_t next_row = (int64_t)blockIdx.x * kRows;
  int which = 0;
  // Begins to load the next tile.
  const auto load_next = [&] {
    const int64_t index = next_row + threadIdx.x;
    if (next_row < map.rows) Tile(memory + which * map.part_n, map, map.x, next_row).load((const T*)map.x);
    AsyncCopy::commit();
    next_pick.load_class(map, index, !C::kIsBackward && index < map.rows);
  };
  load_next();
  while (next_row < map.rows) {
    const Tile tile(memory + which * map.part_n, map, map.x, next_row);
    const int64_t index = next_row + threadIdx.x;
    LossPick<C> pick = next_pick;
    next_row += step, which ^= 1;
    load_next();
    const Row row(tile.row_of_thread(), (int)map.n);
    if constexpr (C::kIsBackward) {
      const LossGrad<C> grad(map, min(index, (int64_t)map.rows - 1));
      AsyncCopy::wait<1>();
      __syncthreads();
      if (index < map.rows && !grad.is_ignored && grad.has_base())
        for_lots(row, [&](const auto& lot) { replace_by_grads<LossGrad<C>::kHasBase>(numbers, grad, lot, index); });
      else if (index < map.rows)
        for_lots(row, [&](const auto& lot) { replace_by_grads<false>(numbers, grad, lot, index); });
      __syncthreads();
      tile.store((T*)map.dx);
    } else {
      AsyncCopy::wait<1>();
      __syncthreads();
      if (index < map.rows) {
        const LossState<C> state = state_of(Scores(numbers, row, numbers.factor(index)), row);
        pick.load_element(row.x, 1);
        LossTerms<C>(map, index, row.x[0], pick, state, sums).store(map, index);
        LossTerms<C>::store_picks(map, index, row.x, 1, state, 0, 1);
      }
    }
    __syncthreads();  // the tile after the next replaces this one
  }
  if constexpr (!C::kIsBackward) sums.finish(map);
}
