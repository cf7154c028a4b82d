// rows_pointwise.cu: the gradient of logsumexp, dx = g exp(x - lse). g and lse have one value per row, so there is no
// reduction, and any block may compute any chunk of a row.
//
// In is the type of g and lse, Out that of x and dx. A thread loads kVecs vectors at a time. A row has `chunks` chunks.
// One chunk is computed by kThreadsPerRow lanes, or by a block if kThreadsPerRow is 0.
#include "config.cuh"
#include "division.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
constexpr bool kWarp = C::kThreadsPerRow > 0;
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    onepass_kernel(const BackwardRows<C, C::Out> rows, const C::In* lse, int64_t lse_stride, int64_t chunks,
                   const FastDivisor by_chunks) {
  typedef C::Out Out;
  constexpr int V = C::kVecSize;
  const int64_t step = (int64_t)(kWarp ? C::kThreadsPerRow : blockDim.x) * V,
                thread = threadIdx.x % (kWarp ? C::kThreadsPerRow : blockDim.x);
  constexpr int kEach = kWarp ? C::kRowsPerBlock : 1;  // chunks that a block computes at a time
  const int64_t all = rows.count * chunks, own = kWarp ? threadIdx.x / C::kThreadsPerRow : 0;
  for (int64_t item = blockIdx.x * (int64_t)kEach + own; item < all; item += gridDim.x * (int64_t)kEach) {
    const auto [index, chunk] = divide(item, chunks, by_chunks);
    const auto row = rows.row(index);
    const int64_t n = row.n;
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
