// rows_twopass.cu: rows of unit stride that fit nothing on the chip, a block a row. Two reads, one write (logsumexp:
// one read).
//
//   read: each thread an online state over its tiles, rescaled once a tile; merged over the block
//   read again: finish -> store
//
// One compiled instance a set of: IN, OUT, FUNCTION, SLOTS (vectors a thread has in flight), VECTOR, EDGES (see
// vector_access.cuh). Any number of threads.
#include "row_fragment.cuh"
#include "block_reduce.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr int kValues = SLOTS * VECTOR;

extern "C" __global__ void __launch_bounds__(sizeof(Accumulator<OUT>::type) == 8 ? 512 : 1024, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  __shared__ Parts<1, A> maxima;
  __shared__ Parts<1, L> sums;
  const int64_t step = (int64_t)blockDim.x * VECTOR, tile = step * SLOTS;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const IN* const x_row = x + row * x_stride;
    const int64_t phase = kApart ? 0 : (int64_t)((uint64_t)x_row / sizeof(IN) % VECTOR);
    const int64_t first = (int64_t)threadIdx.x * VECTOR - phase;
    A m = -INFINITY_;
    L l = Adder<OUT>::of(0);
    Keep<FUNCTION, VECTOR, SLOTS, IN, OUT, false>::type kept;
    for (int64_t at = first; at < n; at += tile) {
      kept.load(x_row, at, step, n);
      const A before = m;
      m = max_(m, kept.maximum());
      kept.forget();
      l = add(scaled(l, exp_<A>(before - shift(m))), Adder<OUT>::of(kept.sum_below(m)));
    }
    // The merge of all the pairs, with one rescaling a thread: the maximum first, then the sum of what it scales l to.
    const A whole = block_merge(m, Max(), maxima);
    l = block_merge(scaled(l, exp_<A>(m - shift(whole))), Sum(), sums);
    const State<A> state = {whole, value_of(l)};

    if constexpr (kReduces) {
      if (threadIdx.x == 0) store_reduced<FUNCTION>(state, y + row * y_stride, rows);
      continue;
    }
    OUT* const y_row = y + row * y_stride;
    for (int64_t at = first; at < n; at += tile) {
      kept.load(x_row, at, step, n);
      kept.lower(whole);
      kept.finish(state);
      kept.store(y_row, at, step, n);
    }
  }
}
