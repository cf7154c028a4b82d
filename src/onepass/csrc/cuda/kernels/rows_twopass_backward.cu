// rows_twopass_backward.cu: gradients of rows that fit nothing on the chip, a block a row: both operands are read
// twice.
//
//   read: each thread a sum over its tiles; merged over the block
//   read again, the last tile first, since that is still in the L2 cache: finish -> store
//
// One compiled instance a set of: IN, OUT, FUNCTION, EVEN (see row_backward.cuh), SLOTS (vectors of each operand that a
// thread has in flight), VECTOR, EDGES (see vector_access.cuh). Any number of threads up to 512.
#include "row_backward.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
    onepass_kernel(OUT* dx, const IN* y, const IN* g, int64_t rows, int64_t n, int64_t dx_stride, int64_t y_stride,
                   int64_t g_stride) {
  __shared__ Parts<1, L> boxes[2];
  uint32_t round = 0;
  const int64_t step = (int64_t)blockDim.x * VECTOR, tile = step * SLOTS;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const IN* const y_row = y + row * y_stride;
    const IN* const g_row = g + row * g_stride;
    OUT* const dx_row = dx + row * dx_stride;
    const int phase = kApart ? 0 : (int)((uint64_t)y_row / sizeof(IN) % VECTOR);
    const int64_t first = (int64_t)threadIdx.x * VECTOR - phase;
    Terms<SLOTS> terms;
    Loose<32> loose;
    loose.load(y_row, g_row, threadIdx.x, phase, n);
    L total = loose.part();
    if constexpr (!(EVEN && kLog)) {
      for (int64_t at = first; at < n; at += tile) {
        terms.load(y_row, g_row, at, step, n);
        total = add(total, terms.part());
      }
      total = block_merge(total, Sum(), boxes[round++ % 2]);
    }
    const A s = sum_of(total, to_wide(*g_row), n);
    const int64_t tiles = first < n ? (n - first + tile - 1) / tile : 0;
    for (int64_t t = tiles - 1; t >= 0; --t) {
      terms.load(y_row, g_row, first + t * tile, step, n);
      terms.finish_and_store(s, dx_row, first + t * tile, step, n);
    }
    loose.store(s, dx_row, threadIdx.x, phase, n);
  }
}
