// rows_twopass.cu: rows of unit stride that do not fit on the chip, one block per row. Two reads and one write; a
// reduction reads once.
//
//   first pass: each thread reduces its tiles online, with one rescaling per tile; the block reduces the states
//   second pass: load -> epilogue -> store
//
// A block has any number of threads; kVecs vectors of each are on their way at a time.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_fragment.cuh"

typedef ForwardConfig C;
typedef C::Acc A;
typedef C::Sum L;

extern "C" __global__ void __launch_bounds__(sizeof(A) == 8 ? 512 : 1024, 1)
    onepass_kernel(const C::In* x, C::Out* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride) {
  __shared__ ReduceStorage<1, A> maxima;
  __shared__ ReduceStorage<1, L> sums;
  const int64_t step = (int64_t)blockDim.x * C::kVecSize, tile = step * C::kVecs;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const C::In* const x_row = x + row * x_stride;
    const int64_t before = C::kScalar ? 0 : (int64_t)misalignment<C>(x_row);
    const int64_t first = (int64_t)threadIdx.x * C::kVecSize - before;
    A m = -infinity();
    L l = begin_sum<L>(A(0));
    RowFragment<C, C::kVecs, false> fragment;
    for (int64_t at = first; at < n; at += tile) {
      fragment.load(x_row, at, step, n);
      const A old_m = m;
      m = max_(m, fragment.max());
      fragment.opaque_registers();
      l = add(scale(l, exp_<A>(old_m - finite_or_zero(m))), begin_sum<L>(fragment.sum_exp_relative_to(m)));
    }
    // The maximum is reduced first, then the sums relative to it: one rescaling per thread.
    const A max = block_reduce(m, Max(), maxima);
    l = block_reduce(scale(l, exp_<A>(m - finite_or_zero(max))), Sum(), sums);
    const State<A> state = {max, value_of(l)};

    if constexpr (C::kIsReduction) {
      if (threadIdx.x == 0) store_reduction<C>(state, y + row * y_stride, rows);
      continue;
    }
    C::Out* const y_row = y + row * y_stride;
    for (int64_t at = first; at < n; at += tile) {
      fragment.load(x_row, at, step, n);
      fragment.subtract_max(max);
      fragment.apply_epilogue(state);
      fragment.store(y_row, at, step, n);
    }
  }
}
