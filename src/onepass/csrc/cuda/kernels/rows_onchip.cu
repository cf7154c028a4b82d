// rows_onchip.cu: rows that fit the registers, and the shared memory, of the threads that share them. Each element is
// read once and written once.
//
//   load -> maximum (reduced over the threads of the row) -> sum of exp (reduced) -> epilogue -> store
//
// The tier `warp` has kThreadsPerRow and kRowsPerBlock. In the tiers `block` and `cluster` kThreadsPerRow is 0: all
// threads of kClusterSize blocks share a row, whatever their number, and with kUsesSmemVecs they keep any number of
// vectors in shared memory too. More blocks then fit a multiprocessor, and one computes while another waits.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_fragment.cuh"

typedef ForwardConfig C;
typedef C::Acc A;
typedef C::Sum L;

constexpr bool kWarp = C::kThreadsPerRow > 0;
constexpr int kPerRegister = sizeof(C::In) + sizeof(C::Out) == 4 && C::kVecSize > 1 ? 2 : 1;  // elements
// The most threads of a block. It tells the compiler how many registers a thread may take: 64, or 72 or 80 where 64
// would spill.
#if __CUDA_ARCH__ == 900
constexpr int kMaxThreads = 1024;
#else
constexpr int kMaxThreads = C::kClusterSize > 1 ? 768 : 896;
#endif
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : kMaxThreads;
// The registers of a thread's elements, and from there the blocks that should fit a multiprocessor. Without this bound
// the compiler takes up to half as many registers more to overlap vectors, and the missing threads cost 2 to 15%.
// Narrow vectors take more registers.
constexpr int kElementRegisters = C::kVecs * C::kVecSize * sizeof(A) / (4 * kPerRegister);
constexpr bool kHas16Bytes = C::kVecSize * sizeof(C::In) == 16 || C::kVecSize * sizeof(C::Out) == 16;
constexpr int kFit = kWarp && kHas16Bytes ? 65536 / (kThreads * (28 + kElementRegisters * 15 / 8)) : 1;
constexpr int kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

constexpr bool kOneExchange = C::kClusterSize > 1 && kPerRegister == 2;
typedef Conditional<kWarp, WarpStateReduce<C::kThreadsPerRow, A, L>,
                    Conditional<kOneExchange, ClusterStateReduce<C::kClusterSize>,
                                BlockStateReduce<C::kClusterSize, A, L>>::type>::type StateReduce;

// Vectors in shared memory are read as chunks of 2. Exponentials are written back where they fit the place of an
// element.
constexpr int kChunkVecs = 2;
constexpr bool kWritesBack = sizeof(C::In) == sizeof(A) && C::kFunction == Function::softmax;
typedef RowFragment<C, kChunkVecs, kWritesBack> Chunk;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(const C::In* x, C::Out* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride,
                   int smem_vecs) {
  __shared__ StateReduce state_reduce;
  if (C::kClusterSize > 1) {
    if (threadIdx.x == 0) state_reduce.init();
    cluster_arrive();
  }
  uint32_t iteration = 0;
  bool is_first = true;
  const int threads = kWarp ? C::kThreadsPerRow : blockDim.x * C::kClusterSize, step = threads * C::kVecSize;
  const int thread =
      kWarp ? threadIdx.x % C::kThreadsPerRow : (C::kClusterSize == 1 ? 0 : cluster_rank() * blockDim.x) + threadIdx.x;

  for (int64_t group = blockIdx.x / C::kClusterSize; group * C::kRowsPerBlock < rows;
       group += gridDim.x / C::kClusterSize) {
    const int64_t row = group * C::kRowsPerBlock + (kWarp ? threadIdx.x / C::kThreadsPerRow : 0);
    const bool exists = row < rows;  // threads without a row take part in the reductions, with no elements
    const C::In* const x_row = x + row * x_stride;
    const int n = exists ? (int)n64 : 0;
    const int before = exists && !C::kScalar && !C::kAligned ? misalignment<C>(x_row) : 0;
    int first = thread * C::kVecSize - before;
    if (!kWarp) asm volatile("" : "+r"(first));
    RowFragment<C, C::kVecs, true> fragment;
    const RowSource<C::In, int> source = {x_row, n, row > 0 && row + 1 < rows && x_stride >= C::kVecSize};
    const int first_in_smem = first;
    // Calls f(c) for the first vector c of each chunk in shared memory.
    const auto for_each_chunk = [&](auto f) {
      if constexpr (C::kUsesSmemVecs) {
        for (int c = 0; c < smem_vecs; c += kChunkVecs) f(c);
      }
    };
    for_each_chunk([&](int c) {
      for_each_vec<C, kChunkVecs>(
          first_in_smem + c * step, step, n, [&](int i, int at) { SmemVecs<C>::copy_full(c + i, x_row + at); },
          [&](int i, int at) { SmemVecs<C>::copy(c + i, source, at); });
      AsyncCopy::commit();
    });
    if constexpr (C::kUsesSmemVecs) first += smem_vecs * step;
    fragment.load(x_row, first, step, n);
    if (C::kClusterSize > 1 && is_first) cluster_wait();  // a peer's shared memory exists once the peer has started
    is_first = false;

    A thread_max = fragment.max();
    for_each_chunk([&](int c) {
      AsyncCopy::wait_all_but((smem_vecs - c) / kChunkVecs - 1);
      Chunk chunk;
      chunk.load_smem(c, first_in_smem + c * step, step, n);
      thread_max = max_(thread_max, chunk.max());
    });
    const A max = state_reduce.max(thread_max, iteration);
    fragment.opaque_registers();
    fragment.subtract_max(max);
    L thread_sum = fragment.sum_exp(max);
    for_each_chunk([&](int c) {
      Chunk chunk;
      chunk.load_smem(c, first_in_smem + c * step, step, n);
      chunk.subtract_max(max);
      thread_sum = add(thread_sum, chunk.sum_exp(max));
      if constexpr (kWritesBack) chunk.write_back(c);
    });
    const State<A> state = state_reduce.sum(max, thread_sum, iteration);
    ++iteration;

    fragment.opaque_registers();
    if (!exists) continue;
    if constexpr (C::kIsReduction) {
      if (thread == 0) store_reduction<C>(state, y + row * y_stride, rows);
      continue;
    }
    C::Out* const y_row = y + row * y_stride;
    // Opaque: the compiler would keep the positions of the loads in registers for the stores.
    if (!kWarp) asm volatile("" : "+r"(first));
    fragment.apply_epilogue_and_store(state, y_row, first, step, n);
    for_each_chunk([&](int c) {
      Chunk chunk;
      if (kWritesBack)
        chunk.load_smem(c, 0, 0, C::kVecSize);
      else
        chunk.load_smem(c, first_in_smem + c * step, step, n), chunk.subtract_max(max);
      chunk.apply_epilogue(state);
      chunk.store(y_row, first_in_smem + c * step, step, n);
    });
  }
}
