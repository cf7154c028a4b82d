// rows_twopass_backward.cu: gradients of rows that do not fit on the chip, one block per row. Both operands are read
// twice.
//
//   first pass: each thread sums over its tiles; the block reduces the sums
//   second pass, from the last tile, which is still in the L2 cache, to the first: epilogue -> store
//
// A block has any number of threads up to 512; kVecs vectors of each operand are on their way in each.
#include "config.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
typedef C::Sum L;

extern "C" __global__ void __launch_bounds__(512, 1)
    onepass_kernel(C::Out* dx, const C::In* y, const C::In* g, int64_t rows, int64_t n, int64_t dx_stride,
                   int64_t y_stride, int64_t g_stride) {
  __shared__ ReduceStorage<1, L> storages[2];
  uint32_t iteration = 0;
  const int64_t step = (int64_t)blockDim.x * C::kVecSize, tile = step * C::kVecs;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const C::In* const y_row = y + row * y_stride;
    const C::In* const g_row = g + row * g_stride;
    C::Out* const dx_row = dx + row * dx_stride;
    const int before = C::kScalar ? 0 : misalignment<C>(y_row);
    const int64_t first = (int64_t)threadIdx.x * C::kVecSize - before;
    BackwardFragment<C, C::kVecs> fragment;
    RowTails<C, 32> tails;
    tails.load(y_row, g_row, threadIdx.x, before, n);
    L sum = tails.partial_sum();
    if constexpr (!needs_no_reduction<C>) {
      for (int64_t at = first; at < n; at += tile) {
        fragment.load(y_row, g_row, at, step, n);
        sum = add(sum, fragment.partial_sum());
      }
      sum = block_reduce(sum, Sum(), storages[iteration++ % 2]);
    }
    const A s = row_sum<C>(sum, to_acc(*g_row), n);
    const int64_t tiles = first < n ? (n - first + tile - 1) / tile : 0;
    for (int64_t t = tiles - 1; t >= 0; --t) {
      fragment.load(y_row, g_row, first + t * tile, step, n);
      fragment.apply_epilogue_and_store(s, dx_row, first + t * tile, step, n);
    }
    tails.store(s, dx_row, threadIdx.x, before, n);
  }
}
