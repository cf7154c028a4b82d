// rows.cu: rows of unit stride that fit the registers of the threads that share them. Each element is read once and
// written once.
//
//   load -> maximum (merged over the threads of the row) -> sum of exp (merged) -> finish from registers -> store
//
// One compiled instance a set of: IN, OUT (types), FUNCTION, SLOTS (vectors a thread keeps), VECTOR (elements of one),
// APART (see window.cuh), and
//   LANES, ROWS   the tier `warp`: threads a row, at most 32, and rows a block holds
//   LANES 0       the tiers `block` and `cluster`: all threads of CLUSTER blocks share a row, whatever their number
//   AHEAD         (LANES 0) a block stays for many rows, and fetches the next into shared memory while it merges and
//                 writes one
#include "kept.cuh"
#include "merge.cuh"
#include "shelf.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr bool kWarp = LANES > 0;
constexpr int kHalves = sizeof(IN) + sizeof(OUT) == 4 && VECTOR > 1 ? 2 : 1;
// The most threads of a block, which tells the compiler how many registers a thread may take: 64, or 72 or 80 where
// less would spill.
#if __CUDA_ARCH__ == 900
constexpr int kShared = 1024;
#else
constexpr int kShared = CLUSTER > 1 ? 768 : 896;
#endif
constexpr int kThreads = kWarp ? LANES * ROWS : kShared;
// Registers that a thread's elements take, and from there the blocks that should fit a multiprocessor: left to itself
// the compiler takes up to half as many registers more to overlap slots, and the threads that are missing then cost 2
// to 15%. Narrow vectors take more.
constexpr int kHeld = SLOTS * VECTOR * sizeof(Accumulator<OUT>::type) / (4 * kHalves);
constexpr bool kFull = VECTOR * sizeof(IN) == 16 || VECTOR * sizeof(OUT) == 16;
constexpr int kFit = kWarp && kFull ? 65536 / (kThreads * (28 + kHeld * 15 / 8)) : 1;
constexpr int kBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

template <class T, class Merge>
__device__ inline T row_merge(T value, Merge merge_two, Parts<CLUSTER, T>& parts, uint32_t odd) {
  if constexpr (kWarp)
    return warp_merge<LANES>(value, merge_two);
  else
    return block_merge(value, merge_two, parts, odd);
}

// Of a row, the element that the first vector of the thread `lane` begins with.
__device__ inline int first_of(int lane, const IN* row) {
  return lane * VECTOR - (APART ? 0 : (int)((uint64_t)row / sizeof(IN) % VECTOR));
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  __shared__ Parts<CLUSTER, A> maxima;
  __shared__ Parts<CLUSTER, L> sums;
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) maxima.box.open(), sums.box.open();
    cluster_barrier();  // a peer's shared memory is there once it has started
  }
  uint32_t odd = 0;
  const int lanes = kWarp ? LANES : blockDim.x * CLUSTER;
  const int lane = kWarp ? threadIdx.x % LANES : (CLUSTER == 1 ? 0 : cluster_rank() * blockDim.x) + threadIdx.x;
  const int64_t step = gridDim.x / CLUSTER;

#if AHEAD
  typedef Shelf<FUNCTION, VECTOR, IN> Next;
  const auto fetch = [&](int64_t row) {
    if (row < rows) {
      const Source<IN, int> from = {x + row * x_stride, (int)n64, row > 0 && row + 1 < rows && x_stride >= VECTOR};
      const int first = first_of(lane, from.row);
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) Next::fetch(i, from, first + i * lanes * VECTOR);
    }
    commit_copies();
  };
  fetch(blockIdx.x / CLUSTER);
#endif
  for (int64_t group = blockIdx.x / CLUSTER; group * ROWS < rows; group += step) {
    const int64_t row = group * ROWS + (kWarp ? threadIdx.x / LANES : 0);
    const bool present = row < rows;  // absent rows go through the merges, for their neighbours' sake, as nothing
    const IN* const x_row = x + row * x_stride;
    const int n = present ? (int)n64 : 0;
    int from = present ? first_of(lane, x_row) : lane * VECTOR;
    if (!kWarp) asm volatile("" : "+r"(from));
    Keep<FUNCTION, VECTOR, SLOTS, IN, OUT>::type kept;
#if AHEAD
    await_copies<0>();
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) kept.put(i, Next::take(i, from + i * lanes * VECTOR, n));
    A largest = kept.maximum();
    settle(largest);  // all slots have been read: they may be filled again
    fetch(group + step);
#else
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) kept.load(i, x_row, from + i * lanes * VECTOR, n);
    const A largest = kept.maximum();
#endif

    const A m = row_merge(largest, Max(), maxima, odd);
    kept.forget();
    const A s = shift(m);
    const L l = row_merge(tree_sum<OUT, SLOTS * VECTOR>([&](int i) { return kept.exp(i, s); }), Sum(), sums, odd);
    odd ^= 1;

    kept.forget();
    if (!present) continue;
    const State<A> state = {m, value_of(l)};
    if constexpr (kReduces) {
      if (lane == 0) store_reduced<FUNCTION>(state, y + row * y_stride, rows);
      continue;
    }
    const Finish<FUNCTION, OUT, A> finish(state);
    OUT* const y_row = y + row * y_stride;
    if (!kWarp) asm volatile("" : "+r"(from));  // else the positions of the loads are kept for the stores, in registers
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) kept.store(i, y_row, from + i * lanes * VECTOR, n, finish);
  }
}
