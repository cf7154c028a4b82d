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
  __shared__ Parts<LANES, 1, A> maxima, sums;

  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const IN* x_row = x + row * x_stride;
    State<A> state = {-INFINITY_, 0};
    A values[VALUES];
    for (int64_t tile = 0; tile < n; tile += kTile) {
#pragma unroll
      for (int i = 0; i < VALUES; i += VECTOR) {
        load_vector<FUNCTION, VECTOR, OUT>(x_row, tile + i * LANES + threadIdx.x * VECTOR, n, values + i);
      }
      A m = state.m;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) m = max_(values[i], m);
      const A s = shift(m);
      const A l = tree_sum<VALUES>([&](int i) { return exp_<OUT>(values[i] - s); });
      state = {m, state.l * exp_<A>(state.m - s) + l};
    }
    // The merge of all the pairs, with one rescaling a thread: the maximum first, then the sum of what it scales l to.
    const A m = row_merge<LANES, 1>(state.m, Max(), maxima);
    state = {m, row_merge<LANES, 1>(state.l * exp_<A>(state.m - shift(m)), Sum(), sums)};

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
