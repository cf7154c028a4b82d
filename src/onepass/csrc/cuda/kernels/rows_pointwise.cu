// rows_pointwise.cu: the gradient of logsumexp, dx = g exp(x - lse). g and lse have one value per row, so nothing is
// reduced, and the chunks of a row go to any blocks.
//
// In is the type of g and lse, Out that of x and dx. kVecs vectors of a thread are on their way at a time. Where
// kThreadsPerRow is 0 a block takes a chunk of a row, which has `chunks` of them.
#include "config.cuh"
#include "row_fragment.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
constexpr bool kWarp = C::kThreadsPerRow > 0;
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    onepass_kernel(C::Out* dx, const C::Out* x, const C::In* g, int64_t rows, int64_t n, int64_t dx_stride,
                   int64_t x_stride, int64_t g_stride, const C::In* lse, int64_t lse_stride, int64_t chunks) {
  typedef C::Out Out;
  constexpr int V = C::kVecSize;
  const int64_t step = (int64_t)(kWarp ? C::kThreadsPerRow : blockDim.x) * V,
                thread = threadIdx.x % (kWarp ? C::kThreadsPerRow : blockDim.x);
  const int64_t groups = kWarp ? (rows + C::kRowsPerBlock - 1) / C::kRowsPerBlock : rows * chunks;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t row = kWarp ? group * C::kRowsPerBlock + threadIdx.x / C::kThreadsPerRow : group / chunks;
    if (row >= rows) continue;
    const int64_t chunk = kWarp ? 0 : group % chunks;
    const Out* const x_row = x + row * x_stride;
    Out* const dx_row = dx + row * dx_stride;
    const int64_t before = C::kScalar || C::kAligned ? 0 : (int64_t)misalignment<C>(x_row);
    const int64_t first = chunk * step * C::kVecs + thread * V - before;
    Vector<Out, V> elements[C::kVecs];
#pragma unroll
    for (int i = 0; i < C::kVecs; ++i) {
      const int64_t at = first + i * step;
      if (moves_as_vector<C>(at, n)) {
        elements[i] = load_vector<Out, V, false>(x_row + at);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) elements[i].at[v] = is_inside(at + v, n) ? x_row[at + v] : from_acc<Out>(0.0f);
      }
    }
    const A row_g = to_acc(g[row * g_stride]), row_lse = to_acc(lse[row * lse_stride]);
#pragma unroll
    for (int i = 0; i < C::kVecs; ++i) {
      Vector<Out, V> result;
#pragma unroll
      for (int v = 0; v < V; ++v) result.at[v] = from_acc<Out>(row_g * exp_<Out>(to_acc(elements[i].at[v]) - row_lse));
      store_predicated<C>(dx_row, first + i * step, n, result);
    }
  }
}
