// rows_bias_grad.cu: the gradients of scored rows and, in the same launch, the gradient of a bias that several rows
// share. The gradient of a row of the bias is the sum of the score gradients of the rows that share it. The lanes of a
// warp, or a block, compute these rows one after another, so that the sums stay in registers. If the bias has few rows,
// several groups of threads share each one, and each group writes its own sums.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
typedef C::Out Out;
typedef C::Sum L;
typedef C::Bias Bias;  // the type in which the sums are written
typedef C::Rows Rows;

constexpr int V = C::kVecSize, kThreads = C::kBlockThreads;
constexpr bool kWarp = C::kThreadsPerRow > 0;
typedef Conditional<kWarp, WarpSumReduce<C::kThreadsPerRow, L>, BlockSumReduce<1, L>>::type Reduce;
typedef RowTails<C, kWarp ? C::kThreadsPerRow : 32> Tails;

// A thread's sums of score gradients, one sum for each of its elements of a row.
struct Sums {
  A of_vectors[C::kVecs * V], of_tails[Tails::kEach + 1];

  // Stores the sums to the row of sums that begins at `to`.
  __device__ void store(Bias* to, int thread, int before, int first, int step, int n) const {
    constexpr int kEach = !C::has(kScoreBiasVectors) ? 1 : 16 / sizeof(Bias) < V ? 16 / sizeof(Bias) : V;
    unroll<C::kVecs>([&](int i) {
      const int at = first + i * step;
      if (!is_full<C>(at, n)) return;
      unroll<V / kEach>([&](int j) {
        Vector<Bias, kEach> made;
        unroll<kEach>([&](int v) { made.at[v] = from_acc<Bias>(of_vectors[i * V + j * kEach + v]); });
        *reinterpret_cast<Vector<Bias, kEach>*>(to + at + j * kEach) = made;
      });
    });
    unroll<Tails::kEach>([&](int k) {
      const int at = tail_position<V>(thread + k * kTailThreads, before, n);
      if (at >= 0) to[at] = from_acc<Bias>(of_tails[k]);
    });
  }
  static constexpr int kTailThreads = kWarp ? C::kThreadsPerRow : 32;
};

// The gradient of element `at` of x. add(grad) gets the gradient of its score. `own`: the element of x, with a softcap.
template <bool HasOutsiders, class F>
__device__ inline A finish(const InputGrad<C>& grad, A y, A g, int at, typename C::Score::More own, F add) {
  if (HasOutsiders && !grad.score.takes_part(at)) return 0;
  const A of_score = C::Grad::result<Out>(y, g, grad.sum);
  add(of_score);
  return grad.score.template backward<false>(of_score, y, at, own);
}

template <bool HasOutsiders>
__device__ inline void finish_row(BackwardFragment<C, C::kVecs>& fragment, const Tails& tails, const InputGrad<C>& grad,
                                  Sums& sums, int thread, int before, int first, int step, int n) {
  Out* const to = grad.score.result;
  unroll<C::kVecs>([&](int i) {
    const int at = first + i * step;
    if (!is_full<C>(at, n)) return;
    fragment.y.replace(i, [&](int e) {
      const int v = e - i * V;
      const auto own = fragment.more[reads_x<C> ? i : 0][v];
      return finish<HasOutsiders>(grad, fragment.y.reconverted(e), fragment.g.reconverted(e), at + v, own,
                                  [&](A of_score) { sums.of_vectors[e] += of_score; });
    });
    store_predicated<C>(to, at, n, fragment.y.vec(i));
  });
  unroll<Tails::kEach>([&](int k) {
    const int at = tail_position<V>(thread + k * Sums::kTailThreads, before, n);
    if (at < 0) return;
    const auto own = grad.score.load_more_one(at);
    to[at] = from_acc<Out>(
        finish<HasOutsiders>(grad, tails.y[k], tails.g[k], at, own, [&](A of_score) { sums.of_tails[k] += of_score; }));
  });
}

// How many blocks should fit on a multiprocessor, estimated from the registers of a thread's elements and sums.
constexpr int kElementRegisters = C::kVecs * V * (sizeof(A) / 4 + 2 * sizeof(A) / (uses_half2<C> ? 8 : 4)) +
                                  (reads_x<C> ? C::kVecs * V * sizeof(Out) / 4 : 0);
constexpr int kFit = 65536 / (kThreads * (48 + kElementRegisters)), kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

// `sharing`: how many rows share a row of the bias. `parts` groups of threads take `part_rows` of these rows each.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ Rows rows, int sharing, int parts, int part_rows) {
  __shared__ Reduce reduce;
  const int threads = kWarp ? C::kThreadsPerRow : blockDim.x, step = threads * V, thread = threadIdx.x % threads;
  const unsigned group = blockIdx.x * C::kRowsPerBlock + threadIdx.x / threads;
  const unsigned bias_row = group / (unsigned)parts, part = group - bias_row * (unsigned)parts;
  const unsigned first_row = bias_row * (unsigned)sharing, count = rows.count;
  Sums sums = {};
  int before = 0, first = 0;
#pragma unroll 1
  for (int r = 0; r < part_rows; ++r) {
    const int number = (int)part * part_rows + r;
    // Threads without a row take part in the reductions, with no elements.
    const bool exists = number < sharing && first_row < count;
    const auto row = rows.row(first_row + number, exists);
    const int n = (int)row.n;
    if (exists) before = C::kAligned ? 0 : misalignment<C>(row.aligned());
    first = thread * V - before;
    BackwardFragment<C, C::kVecs> fragment;
    Tails tails;
    fragment.load(row, first, step, n);
    tails.load(row, thread, before, n);
    const L sum = reduce(add(fragment.partial_sum(), tails.partial_sum()), r);
    const InputGrad<C> grad = {row_sum<C>(sum, fragment.g[0], n), row.score};
    fragment.opaque_registers();
    if (grad.has_outsiders())
      finish_row<true>(fragment, tails, grad, sums, thread, before, first, step, n);
    else
      finish_row<false>(fragment, tails, grad, sums, thread, before, first, step, n);
  }
  if (first_row >= count) return;
  const RowOffsets<C, true> at(rows, first_row);
  const int64_t part_size = count / (unsigned)sharing * rows.n;
  Bias* const to = static_cast<Bias*>(rows.data[kMapBias]) + at.at[kMapBias] + part * part_size;
  sums.store(to, thread, before, first, step, (int)rows.n);
}
