// rows.cu: rows of unit stride that fit the registers of a warp or a block. Each element is read once and written once.
//
//   load -> maximum (merged over the lanes of the row) -> exp -> sum (merged) -> finish from registers -> store
//
// One compiled instance a set of: IN, OUT (types), FUNCTION, LANES (threads a row), ROWS (rows a block holds), VALUES
// (elements a thread keeps), VECTOR (elements an access moves). LANES <= 32 is the tier `warp`, more the tier `block`.
#include "access.cuh"
#include "block.cuh"

constexpr bool kLse = FUNCTION == LOGSUMEXP;
constexpr bool kKeepExp = FUNCTION == SOFTMAX || FUNCTION == SOFTMIN;  // finish from e; the others from x

extern "C" __global__ void __launch_bounds__(LANES* ROWS, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  __shared__ Parts<LANES, ROWS, A> maxima;
  __shared__ Parts<LANES, ROWS, L> sums;
  const int n = (int)n64, lane = threadIdx.x % LANES;

  for (int64_t group = blockIdx.x; group * ROWS < rows; group += gridDim.x) {
    const int64_t row = group * ROWS + threadIdx.x / LANES;
    const bool present = row < rows;  // absent rows go through the merges, for their neighbours' sake, as -inf
    const IN* x_row = x + row * x_stride;
    A values[VALUES];
    A m = -INFINITY_;
#pragma unroll
    for (int i = 0; i < VALUES; i += VECTOR) {
      load_vector<FUNCTION, VECTOR, OUT>(x_row, i * LANES + lane * VECTOR, present ? n : 0, values + i);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) m = max_(values[i], m);
    m = row_merge<LANES, ROWS>(m, Max(), maxima);

    const A s = shift(m);
    L l = tree_sum<OUT, VALUES>([&](int i) {
      const A e = exp_<OUT>(values[i] - s);
      if (kKeepExp) values[i] = e;
      return e;
    });
    l = row_merge<LANES, ROWS>(l, Sum(), sums);

    if (!present) continue;
    const State<A> state = {m, value_of(l)};
    if (kLse) {
      if (lane == 0) y[row * y_stride] = narrow<OUT>(logsumexp(state));
      continue;
    }
    const Finish<FUNCTION, OUT, A> finish(state);
    OUT* y_row = y + row * y_stride;
#pragma unroll
    for (int i = 0; i < VALUES; i += VECTOR) {
#pragma unroll
      for (int v = i; v < i + VECTOR; ++v) values[v] = kKeepExp ? finish.from_exp(values[v]) : finish(values[v]);
      store_vector<VECTOR>(y_row, i * LANES + lane * VECTOR, n, values + i);
    }
  }
}
