// stream.cu: rows of unit stride that fit nothing on the chip, a block a row. Two reads, one write (logsumexp: one
// read).
//
//   read: each thread an online state over its tiles, rescaled once a tile; merged over the block
//   read again: finish -> store
//
// One compiled instance a set of: IN, OUT, FUNCTION, LANES (threads), VALUES (elements a thread has in flight), VECTOR.
#include "access.cuh"
#include "block.cuh"

constexpr bool kLse = FUNCTION == LOGSUMEXP;
constexpr int64_t kTile = (int64_t)LANES * VALUES;

extern "C" __global__ void __launch_bounds__(LANES, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  __shared__ Parts<LANES, 1, A> maxima;
  __shared__ Parts<LANES, 1, L> sums;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const IN* x_row = x + row * x_stride;
    A m = -INFINITY_;
    L l = Adder<OUT>::of(0);
    A values[VALUES];
    for (int64_t tile = 0; tile < n; tile += kTile) {
#pragma unroll
      for (int i = 0; i < VALUES; i += VECTOR) {
        load_vector<FUNCTION, VECTOR, OUT>(x_row, tile + i * LANES + threadIdx.x * VECTOR, n, values + i);
      }
      const A before = m;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) m = max_(values[i], m);
      const A s = shift(m);
      l = add(scaled(l, exp_<A>(before - s)), tree_sum<OUT, VALUES>([&](int i) { return exp_<OUT>(values[i] - s); }));
    }
    // The merge of all the pairs, with one rescaling a thread: the maximum first, then the sum of what it scales l to.
    const A whole = row_merge<LANES, 1>(m, Max(), maxima);
    l = row_merge<LANES, 1>(scaled(l, exp_<A>(m - shift(whole))), Sum(), sums);
    const State<A> state = {whole, value_of(l)};

    if (kLse) {
      if (threadIdx.x == 0) y[row * y_stride] = narrow<OUT>(logsumexp(state));
    } else {
      const Finish<FUNCTION, OUT, A> finish(state);
      OUT* y_row = y + row * y_stride;
      for (int64_t tile = 0; tile < n; tile += kTile) {
#pragma unroll
        for (int i = 0; i < VALUES; i += VECTOR) {
          load_vector<FUNCTION, VECTOR, OUT>(x_row, tile + i * LANES + threadIdx.x * VECTOR, n, values + i);
#pragma unroll
          for (int v = i; v < i + VECTOR; ++v) values[v] = finish(values[v]);
          store_vector<VECTOR>(y_row, tile + i * LANES + threadIdx.x * VECTOR, n, values + i);
        }
      }
    }
  }
}
