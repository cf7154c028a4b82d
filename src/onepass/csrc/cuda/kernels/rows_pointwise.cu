// rows_pointwise.cu: the gradient of logsumexp, dx = g exp(x - lse): of a row g and lse are one number each, so that
// nothing is merged, and a row's pieces go to any blocks.
//
// One compiled instance a set of: IN (of g and lse), OUT (of x and dx), SLOTS (vectors a thread has in flight), VECTOR,
// EDGES (see vector_access.cuh), and
//   LANES, ROWS   threads a row, at most 32, and rows a block holds
//   LANES 0       a piece of a row a block, of which a row has `pieces`
#include "row_fragment.cuh"

typedef Accumulator<IN>::type A;
constexpr bool kWarp = LANES > 0;
constexpr int kThreads = kWarp ? LANES * ROWS : 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    onepass_kernel(OUT* dx, const OUT* x, const IN* g, int64_t rows, int64_t n, int64_t dx_stride, int64_t x_stride,
                   int64_t g_stride, const IN* lse, int64_t lse_stride, int64_t pieces) {
  const int64_t step = (int64_t)(kWarp ? LANES : blockDim.x) * VECTOR,
                lane = threadIdx.x % (kWarp ? LANES : blockDim.x);
  const int64_t groups = kWarp ? (rows + ROWS - 1) / ROWS : rows * pieces;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t row = kWarp ? group * ROWS + threadIdx.x / LANES : group / pieces;
    if (row >= rows) continue;
    const int64_t piece = kWarp ? 0 : group % pieces;
    const OUT* const x_row = x + row * x_stride;
    OUT* const dx_row = dx + row * dx_stride;
    const int64_t phase = kApart || kWhole ? 0 : (int64_t)((uint64_t)x_row / sizeof(OUT) % VECTOR);
    const int64_t first = piece * step * SLOTS + lane * VECTOR - phase;
    Vector<OUT, VECTOR> raw[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int64_t at = first + i * step;
      if (in_one<VECTOR>(at, n)) {
        raw[i] = load<OUT, VECTOR, false>(x_row + at);
      } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) raw[i].at[v] = inside(at + v, n) ? x_row[at + v] : narrow<OUT>(0.0f);
      }
    }
    const A of_g = to_wide(g[row * g_stride]), of_lse = to_wide(lse[row * lse_stride]);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      Vector<OUT, VECTOR> made;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) made.at[v] = narrow<OUT>(of_g * exp_<OUT>(to_wide(raw[i].at[v]) - of_lse));
      store_window(dx_row, first + i * step, n, made);
    }
  }
}
