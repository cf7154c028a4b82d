// loss_staged.cu: the terms of short rows without gaps, and the gradient of their elements. A block copies as many rows
// as it has threads through shared memory, in whole vectors wherever rows begin; a thread computes a row there.
#include "async_copy.cuh"
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
constexpr int kRows = C::kBlockThreads, kUnit = 16 / sizeof(T);
constexpr int kTogether = C::kVecs;  // elements of a row that a thread takes at a time

// The rows of a block as one piece of memory, which begins at the same place of a vector in shared memory.
struct Tile {
  T* const smem;            // the first element
  const int count, skip;    // elements, and those of the first vector that come before
  const bool begins, ends;  // whether the tensor begins or ends here

  __device__ Tile(char* memory, const LossMap& map, const void* tensor, int64_t first_row)
      : smem((T*)memory + (uint64_t)((const T*)tensor + first_row * map.n) / sizeof(T) % kUnit),
        count((int)(min(map.rows - first_row, (int64_t)kRows) * map.n)),
        skip((int)((uint64_t)((const T*)tensor + first_row * map.n) / sizeof(T) % kUnit)),
        begins(first_row == 0),
        ends(first_row + kRows >= map.rows) {}
  __device__ bool is_whole(int at) const { return at >= 0 && at + kUnit <= count; }
  // Copies the rows at `from` to shared memory. Vectors that other rows share are read too.
  __device__ void load(const T* from) const {
    for (int at = (int)threadIdx.x * kUnit - skip; at < count; at += kRows * kUnit) {
      if (is_whole(at) || (at < 0 ? !begins : !ends))
        AsyncCopy::start<16>(smem_address(smem + at), from + at);
      else
        for (int i = max(at, 0); i < min(at + kUnit, count); ++i) smem[i] = from[i];
    }
    AsyncCopy::commit();
    AsyncCopy::wait<0>();
    __syncthreads();
  }
  // Copies the rows from shared memory.
  __device__ void store(T* to) const {
    __syncthreads();
    for (int at = (int)threadIdx.x * kUnit - skip; at < count; at += kRows * kUnit) {
      if (is_whole(at))
        store_vector(to + at, *reinterpret_cast<const Vector<T, kUnit>*>(smem + at));
      else
        for (int i = max(at, 0); i < min(at + kUnit, count); ++i) to[i] = smem[i];
    }
  }
};

// Some elements of a row, which begin at class c, as many as fit the registers; and whether all of them exist.
template <bool AreAll>
struct Lot {
  T raw[kTogether];
  int c, count;

  __device__ Lot(const T* row, int c, int n) : c(c), count(n - c) {
    unroll<kTogether>([&](int i) { raw[i] = row[has(i) ? c + i : c]; });
  }
  __device__ bool has(int i) const { return AreAll || i < count; }
};
// Calls f for one lot of a row after another.
template <class F>
__device__ inline void for_lots(const T* row, int n, F f) {
  int c = 0;
  for (; c + kTogether <= n; c += kTogether) f(Lot<true>(row, c, n));
  if (c < n) f(Lot<false>(row, c, n));
}

__device__ inline LossState<C> state_of(const LossNumbers<C>& numbers, const T* row, int n, A factor) {
  LossState<C> state = LossState<C>::empty();
  A reference = 0;
  if constexpr (C::has(kLossSpread)) reference = reference_of(numbers.score(row[0], factor));
  for_lots(row, n, [&](const auto& lot) {
    A s[kTogether], highest = -infinity();
    unroll<kTogether>([&](int i) {
      s[i] = lot.has(i) ? numbers.score(lot.raw[i], factor) : A(-infinity());
      highest = max_(highest, s[i]);
      if constexpr (C::has(kLossSpread)) {
        if (lot.has(i)) state.spread += numbers.weight(lot.c + i) * (s[i] - reference);
      }
    });
    state.template add<kTogether>(highest, [&](int i) { return s[i]; });
  });
  state.settle();
  return state;
}

// Puts the gradients in the places of the elements.
template <bool ByBase>
__device__ inline void replace_by_grads(const LossNumbers<C>& numbers, const LossGrad<C>& grad, T* row, int n,
                                        int64_t index) {
  for_lots(row, n, [&](const auto& lot) {
    A made[kTogether];
    unroll<kTogether>([&](int i) {
      const A weight = C::has(kLossSpread) && lot.has(i) ? numbers.weight(lot.c + i) : A(0);
      made[i] = grad.template of_score<ByBase>(numbers, lot.raw[i], weight);
      if constexpr (C::has(kLossCross)) made[i] += i == grad.pick - lot.c ? grad.of_pick : A(0);
    });
    if constexpr (C::has(kLossPicks) && !C::has(kLossCross)) {
      for (int k = 0; k < numbers.map.picks; ++k) {
        const int64_t pick = numbers.pick(index, k) - lot.c;
        const A of_pick = numbers.plane(numbers.map.grads, numbers.kPickPlane + k)[index];
        unroll<kTogether>([&](int i) { made[i] -= i == pick ? of_pick : A(0); });
      }
    }
    unroll<kTogether>([&](int i) {
      if (lot.has(i)) row[lot.c + i] = from_acc<T>(made[i] * numbers.slope(lot.raw[i], grad.factor));
    });
  });
}
__device__ inline void replace_by_grads(const LossNumbers<C>& numbers, T* row, int n, int64_t index) {
  const LossGrad<C> grad(numbers.map, index);
  if (grad.is_ignored)
    for (int c = 0; c < n; ++c) row[c] = from_acc<T>(A(0));
  else if (grad.has_base())
    replace_by_grads<LossGrad<C>::kHasBase>(numbers, grad, row, n, index);
  else
    replace_by_grads<false>(numbers, grad, row, n, index);
}

extern "C" __global__ void __launch_bounds__(kRows) onepass_kernel(const __grid_constant__ LossMap map) {
  extern __shared__ __align__(16) char memory[];
  const LossNumbers<C> numbers = {map};
  const int n = (int)map.n;
  LossSums<C> sums = {};
  for (int64_t first_row = (int64_t)blockIdx.x * kRows; first_row < map.rows; first_row += (int64_t)gridDim.x * kRows) {
    const int64_t index = first_row + threadIdx.x;
    const Tile tile(memory, map, map.x, first_row);
    T* const row = tile.smem + threadIdx.x * n;
    LossPick<C> pick;
    pick.load_class(map, index, !C::kIsBackward && index < map.rows);
    tile.load((const T*)map.x + first_row * n);
    if (index < map.rows) {
      if constexpr (C::kIsBackward) {
        replace_by_grads(numbers, row, n, index);
      } else {
        const LossState<C> state = state_of(numbers, row, n, numbers.factor(index));
        pick.load_element(row, 1);
        LossTerms<C>(map, index, row[0], pick, state, sums).store(map, index);
        LossTerms<C>::store_picks(map, index, row, 1, state, 0, 1);
      }
    }
    if constexpr (C::kIsBackward) tile.store((T*)map.dx + first_row * n);
    __syncthreads();  // the next rows take the place of these
  }
  if constexpr (!C::kIsBackward) sums.finish(map);
}
