// loss_staged.cu: the terms of short rows without gaps, and the gradient of their elements. A block copies as many rows
// as it has threads through shared memory, in whole vectors wherever rows begin; a thread computes a row there.
#include "async_copy.cuh"
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef C::In T;
constexpr int kRows = C::kBlockThreads, kUnit = 16 / sizeof(T);

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

__device__ inline LossState<C> state_of(const LossNumbers<C>& numbers, const T* row, int n, A factor) {
  LossState<C> state = LossState<C>::empty();
  const auto score = [&](int c) { return numbers.score(row[c], factor); };
  A top = -infinity(), reference = 0;
  for (int c = 0; c < n; ++c) top = max_(top, score(c));
  state.rebase(top);
  if constexpr (C::has(kLossSpread)) reference = reference_of(score(0));
  for (int c = 0; c < n; ++c) {
    const A s = score(c);
    state.template add<1>([&](int) { return s; });
    if constexpr (C::has(kLossSpread)) state.spread += numbers.weight(c) * (s - reference);
  }
  return state;
}

// Puts the gradients in the places of the elements.
__device__ inline void replace_by_grads(const LossNumbers<C>& numbers, T* row, int n, int64_t index) {
  const LossGrad<C> grad(numbers.map, index);
  for (int c = 0; c < n; ++c) {
    const T raw = row[c];
    A made = grad.of_score(numbers, raw, C::has(kLossSpread) ? numbers.weight(c) : A(0));
    if constexpr (C::has(kLossCross)) {
      made += c == grad.pick ? grad.of_pick : A(0);
    } else if constexpr (C::has(kLossPicks)) {
      for (int k = 0; k < numbers.map.picks; ++k) {
        const A* const of_picks = numbers.plane(numbers.map.grads, numbers.kPickPlane + k);
        if (numbers.pick(index, k) == c) made -= of_picks[index];
      }
    }
    row[c] = from_acc<T>(grad.is_ignored ? A(0) : made * numbers.slope(raw, grad.factor));
  }
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
