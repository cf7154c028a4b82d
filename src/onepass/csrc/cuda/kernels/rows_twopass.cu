// rows_twopass.cu: the tier `twopass`, for rows of unit stride that do not fit on the chip. A block computes a row. It
// reads the operands twice, or once for a reduction.
//
//   first pass: each thread reduces its tiles; the block reduces the partial states of the threads
//   second pass: load -> epilogue -> store
//
// A block may have any number of threads. Each thread loads kVecs vectors of each operand at a time.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

template <class Config>
struct Forward : ThreadState<Config, typename Config::Sum> {
  typedef Config C;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename C::Rows Rows;
  typedef RowFragment<C, C::kVecs, false> Fragment;
  static constexpr int kMaxThreads = sizeof(A) == 8 ? 512 : 1024;
  static constexpr bool kOnePerRow = C::Epilogue::kOnePerRow, kReduces = true;
  struct Storage {
    ReduceStorage<1, A> maxima;
    ReduceStorage<1, L> sums;
  };

  __device__ Forward(const ForwardRow<C>&, int) {}
  // The maximum is reduced first, then the sums relative to it: so each thread rescales its sum once.
  __device__ State<A> reduce(Storage& storage, uint32_t, const ForwardRow<C>& row) {
    if constexpr (C::has(kScoreRow)) {
      if (threadIdx.x == 0) absorb_sink(row.operand.sink);
    }
    const A max = block_reduce(this->m, Max(), storage.maxima);
    const L sum = block_reduce(scale(this->l, exp_<A>(this->m - finite_or_zero(max))), Sum(), storage.sums);
    if constexpr (C::kIsScored)
      return row.operand.finish({max, value_of(sum)}, threadIdx.x == 0);
    else
      return {max, value_of(sum)};
  }
  template <class F>
  static __device__ void for_each_tile(int64_t first, int64_t tile, int64_t n, F f) {
    for (int64_t at = first; at < n; at += tile) f(at);
  }
  static __device__ void store(Fragment& fragment, State<A> state, typename C::Out* row, int64_t at, int64_t step,
                               int64_t n) {
    fragment.subtract_max(state.m);
    fragment.apply_epilogue(state);
    fragment.store(row, at, step, n);
  }
  __device__ void store_tails(State<A>, typename C::Out*, int, int64_t) const {}

 private:
  __device__ void absorb_sink(A sink) {
    const A old_m = this->m, m = this->m = max_(old_m, sink);
    this->l = add(scale(this->l, exp_<A>(old_m - finite_or_zero(m))), exp_<A>(sink - finite_or_zero(m)));
  }
};

template <class Config>
struct Backward {
  typedef Config C;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename C::Rows Rows;
  typedef BackwardFragment<C, C::kVecs> Fragment;
  static constexpr int kMaxThreads = 512;
  static constexpr bool kOnePerRow = false, kReduces = !needs_no_reduction<C>;
  struct Storage {
    ReduceStorage<1, L> sums[2];
  };
  RowTails<C, 32> tails;
  L sum;

  __device__ Backward(const BackwardRow<C>& row, int before) {
    tails.load(row, threadIdx.x, before, row.n);
    sum = tails.partial_sum();
  }
  __device__ void absorb(const Fragment& fragment) { sum = add(sum, fragment.partial_sum()); }
  __device__ InputGrad<C> reduce(Storage& storage, uint32_t iteration, const BackwardRow<C>& row) {
    if constexpr (kReduces) sum = block_reduce(sum, Sum(), storage.sums[iteration % 2]);
    return {row_sum<C>(sum, to_acc(*row.g), row.n), row.score};
  }
  // Goes from the last tile, which is still in the L2 cache, to the first.
  template <class F>
  static __device__ void for_each_tile(int64_t first, int64_t tile, int64_t n, F f) {
    const int64_t tiles = first < n ? (n - first + tile - 1) / tile : 0;
    for (int64_t t = tiles - 1; t >= 0; --t) f(first + t * tile);
  }
  static __device__ void store(Fragment& fragment, const InputGrad<C>& grad, typename C::Out* row, int64_t at,
                               int64_t step, int64_t n) {
    fragment.apply_epilogue_and_store(grad, row, at, step, n);
  }
  __device__ void store_tails(const InputGrad<C>& grad, typename C::Out* row, int before, int64_t n) const {
    tails.store(grad, row, threadIdx.x, before, n);
  }
};

template <class Op>
__device__ inline void compute(const typename Op::Rows& rows) {
  typedef typename Op::C C;
  __shared__ typename Op::Storage storage;
  uint32_t iteration = 0;
  const int64_t step = (int64_t)blockDim.x * C::kVecSize, tile = step * C::kVecs;

  for (int64_t index = blockIdx.x; index < rows.count; index += gridDim.x) {
    const auto row = rows.row(index);
    const auto result = rows.result(index, row);
    const int64_t n = row.n;
    const int before = C::kScalar ? 0 : misalignment<C>(row.aligned());
    const int64_t first = (int64_t)threadIdx.x * C::kVecSize - before;
    typename Op::Fragment fragment;
    Op op(row, before);
    if constexpr (Op::kReduces) {
      for (int64_t at = first; at < n; at += tile) {
        fragment.load(row, at, step, n);
        op.absorb(fragment);
      }
    }
    const auto state = op.reduce(storage, iteration++, row);
    if constexpr (Op::kOnePerRow) {
      if (threadIdx.x == 0) C::Epilogue::store(state, result, rows.count);
    } else {
      Op::for_each_tile(first, tile, n, [&](int64_t at) {
        fragment.load(row, at, step, n);
        Op::store(fragment, state, result, at, step, n);
      });
      op.store_tails(state, result, before, n);
    }
  }
}

typedef KernelOp<Forward, Backward> Op;
extern "C" __global__ void __launch_bounds__(Op::kMaxThreads, 1) onepass_kernel(const Op::Rows rows) {
  compute<Op>(rows);
}
