// rows_onchip.cu: rows that fit the registers, and the shared memory, of the threads that share them. Each element is
// read once and written once.
//
//   load -> maximum (merged over the threads of the row) -> sum of exp (merged) -> finish what was kept -> store
//
// One compiled instance a set of: IN, OUT (types), FUNCTION, SLOTS (vectors a thread keeps in registers), VECTOR
// (elements of one), EDGES (see vector_access.cuh), and
//   LANES, ROWS   the tier `warp`: threads a row, at most 32, and rows a block holds
//   LANES 0       the tiers `block` and `cluster`: all threads of CLUSTER blocks share a row, whatever their number
//   SHELVED       (LANES 0) threads keep vectors in shared memory too, any number, so that more blocks fit a
//                 multiprocessor, and one computes while another waits
#include "row_fragment.cuh"
#include "block_reduce.cuh"

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

// How the threads of a row meet.
template <bool Warp, bool AtOnce, class A, class L>
struct Meeting {
  typedef InTwoTrips<CLUSTER, A, L> type;
};
template <class A, class L>
struct Meeting<true, false, A, L> {
  typedef InWarp<LANES, A, L> type;
};
template <class A, class L>
struct Meeting<false, true, A, L> {
  typedef InOneTrip<CLUSTER> type;
};
constexpr bool kAtOnce = CLUSTER > 1 && kHalves == 2;
typedef Meeting<kWarp, kAtOnce, Accumulator<OUT>::type, Adder<OUT>::type>::type Merge;

#if SHELVED
constexpr int kChunk = 2;  // vectors that are taken from the shelf at a time
// Exponentials go back to the shelf where they fit the place of an element.
constexpr bool kGiveBack = sizeof(IN) == sizeof(Accumulator<OUT>::type) && (FUNCTION == SOFTMAX);
typedef Keep<FUNCTION, VECTOR, kChunk, IN, OUT, kGiveBack>::type Chunk;
typedef Shelf<VECTOR, IN> Shared;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride, int shelf) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  __shared__ Merge merge;
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) merge.open();
    arrive_in_cluster();
  }
  uint32_t round = 0;
  bool first_time = true;
  const int lanes = kWarp ? LANES : blockDim.x * CLUSTER, step = lanes * VECTOR;
  const int lane = kWarp ? threadIdx.x % LANES : (CLUSTER == 1 ? 0 : cluster_rank() * blockDim.x) + threadIdx.x;

  for (int64_t group = blockIdx.x / CLUSTER; group * ROWS < rows; group += gridDim.x / CLUSTER) {
    const int64_t row = group * ROWS + (kWarp ? threadIdx.x / LANES : 0);
    const bool present = row < rows;  // absent rows go through the merges, for their neighbours' sake, as nothing
    const IN* const x_row = x + row * x_stride;
    const int n = present ? (int)n64 : 0;
    const int phase = present && !kApart && !kWhole ? (int)((uint64_t)x_row / sizeof(IN) % VECTOR) : 0;
    int from = lane * VECTOR - phase;
    if (!kWarp) asm volatile("" : "+r"(from));
    Keep<FUNCTION, VECTOR, SLOTS, IN, OUT, true>::type kept;
#if SHELVED
    const Source<IN, int> source = {x_row, n, row > 0 && row + 1 < rows && x_stride >= VECTOR};
    const int shelved = from;
    for (int c = 0; c < shelf; c += kChunk) {
      for_slots<VECTOR, kChunk>(
          shelved + c * step, step, n, [&](int i, int at) { Shared::fetch_whole(c + i, x_row + at); },
          [&](int i, int at) { Shared::fetch(c + i, source, at); });
      commit_copies();
    }
    from += shelf * step;
#endif
    kept.load(x_row, from, step, n);
    if (CLUSTER > 1 && first_time) await_cluster();  // a peer's shared memory is there once it has started
    first_time = false;

    A largest = kept.maximum();
#if SHELVED
    for (int c = 0; c < shelf; c += kChunk) {
      await_all_but((shelf - c) / kChunk - 1);
      Chunk chunk;
      chunk.take(c, shelved + c * step, step, n);
      largest = max_(largest, chunk.maximum());
    }
#endif
    const A top = merge.top(largest, round);
    kept.forget();
    kept.lower(top);
    L part = kept.sum(top);
#if SHELVED
    for (int c = 0; c < shelf; c += kChunk) {
      Chunk chunk;
      chunk.take(c, shelved + c * step, step, n);
      chunk.lower(top);
      part = add(part, chunk.sum(top));
      if constexpr (kGiveBack) chunk.give(c);
    }
#endif
    const State<A> state = merge.state(top, part, round);
    ++round;

    kept.forget();
    if (!present) continue;
    if constexpr (kReduces) {
      if (lane == 0) store_reduced<FUNCTION>(state, y + row * y_stride, rows);
      continue;
    }
    OUT* const y_row = y + row * y_stride;
    if (!kWarp) asm volatile("" : "+r"(from));  // else the positions of the loads are kept for the stores, in registers
    kept.finish_and_store(state, y_row, from, step, n);
#if SHELVED
    for (int c = 0; c < shelf; c += kChunk) {
      Chunk chunk;
      if (kGiveBack)
        chunk.take(c, 0, 0, VECTOR);
      else
        chunk.take(c, shelved + c * step, step, n), chunk.lower(top);
      chunk.finish(state);
      chunk.store(y_row, shelved + c * step, step, n);
    }
#endif
  }
}
