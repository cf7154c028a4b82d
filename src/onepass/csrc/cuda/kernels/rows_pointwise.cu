// rows_pointwise.cu: the gradient of logsumexp, dx = g exp(x - lse). g and lse have one value per row, so nothing is
// reduced, and the chunks of a row go to any blocks.
//
// In is the type of g and lse, Out that of x and dx. kVecs vectors of a thread are on their way at a time. Where
// kThreadsPerRow is 0 a block takes a chunk of a row, which has `chunks` of them.
#include "config.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
constexpr bool kWarp = C::kThreadsPerRow > 0;
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    onepass_kernel(const BackwardRows<C, C::Out> rows, const C::In* lse, int64_t lse_stride, int64_t chunks) {
  typedef C::Out Out;
  constexpr int V = C::kVecSize;
  const int64_t step = (int64_t)(kWarp ? C::kThreadsPerRow : blockDim.x) * V,
                thread = threadIdx.x % (kWarp ? C::kThreadsPerRow : blockDim.x);
  const int64_t groups = kWarp ? (rows.count + C::kRowsPerBlock - 1) / C::kRowsPerBlock : rows.count * chunks;
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const int64_t index = kWarp ? group * C::kRowsPerBlock + threadIdx.x / C::kThreadsPerRow : group / chunks;
    if (index >= rows.count) continue;
    const auto row = rows.row(index);
    const int64_t n = row.n;
    const int64_t chunk = kWarp ? 0 : group % chunks;
    Out* const dx_row = rows.result(index);
    const int64_t before = C::kScalar || C::kAligned ? 0 : (int64_t)misalignment<C>(row.aligned());
    const int64_t first = chunk * step * C::kVecs + thread * V - before;
    Vector<Out, V> elements[C::kVecs];
    unroll<C::kVecs>([&](int i) {
      const int64_t at = first + i * step;
      if (moves_as_vector<C>(at, n)) {
        elements[i] = load_vector<Out, V, false>(row.y + at);
      } else {
        unroll<V>([&](int v) { elements[i].at[v] = is_inside(at + v, n) ? row.y[at + v] : from_acc<Out>(0.0f); });
      }
    });
    const A row_g = to_acc(*row.g), row_lse = to_acc(lse[index * lse_stride]);
    unroll<C::kVecs>([&](int i) {
      Vector<Out, V> result;
      unroll<V>([&](int v) {
        result.at[v] = from_acc<Out>(
            row.score.backward(LogSumExpGrad::result<Out>(row.score(to_acc(elements[i].at[v])), row_g, row_lse)));
      });
      store_predicated<C>(dx_row, first + i * step, n, result);
    });
  }
}
