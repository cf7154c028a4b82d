// rows_onchip_backward.cu: gradients of rows that fit the registers of the threads that share them. Each element of y
// and of its gradient is read once, and dx is written once. It has the shape of rows_onchip.cu, with one number as the
// state:
//
//   load -> sum (reduced over the threads of the row) -> epilogue -> store
//
// The tier `warp` has kThreadsPerRow and kRowsPerBlock. In the tiers `block` and `cluster` kThreadsPerRow is 0: all
// threads of kClusterSize blocks share a row, whatever their number.
#include "config.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
typedef C::Sum L;

constexpr bool kWarp = C::kThreadsPerRow > 0;
// The most threads of a block. It tells the compiler how many registers a thread may take, as in rows_onchip.cu.
#if __CUDA_ARCH__ == 900
constexpr int kMaxThreads = 1024;
#else
constexpr int kMaxThreads = C::kClusterSize > 1 ? 768 : 896;
#endif
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : kMaxThreads;
constexpr int kElementRegisters =
    C::kVecs * C::kVecSize * (C::kBroadcastGrad ? 1 : 2) * sizeof(A) / (uses_half2<C> ? 8 : 4);
constexpr bool kHas16Bytes = C::kVecSize * sizeof(C::In) == 16 || C::kVecSize * sizeof(C::Out) == 16;
constexpr int kFit = kWarp && kHas16Bytes ? 65536 / (kThreads * (28 + kElementRegisters * 15 / 8)) : 1;
constexpr int kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

// The reduction of a row's sum: over lanes, or over blocks, where rows alternate between two storages.
struct WarpSumReduce {
  __device__ void init() {}
  __device__ L reduce(L sum, uint32_t) { return warp_reduce<C::kThreadsPerRow>(sum, Sum()); }
};
struct BlockSumReduce {
  ReduceStorage<C::kClusterSize, L> storages[2];
  __device__ void init() { storages[0].barrier.init(), storages[1].barrier.init(); }
  __device__ L reduce(L sum, uint32_t iteration) {
    return block_reduce(sum, Sum(), storages[iteration % 2], iteration / 2 % 2);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(C::Out* dx, const C::In* y, const C::In* g, int64_t rows, int64_t n64, int64_t dx_stride,
                   int64_t y_stride, int64_t g_stride) {
  __shared__ Conditional<kWarp, WarpSumReduce, BlockSumReduce>::type sum_reduce;
  if (C::kClusterSize > 1) {
    if (threadIdx.x == 0) sum_reduce.init();
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
    const C::In* const y_row = y + (exists ? row : 0) * y_stride;
    const C::In* const g_row = g + (exists ? row : 0) * g_stride;
    const int n = exists ? (int)n64 : 0;
    const int before = !C::kScalar && !C::kAligned ? misalignment<C>(y_row) : 0;
    int first = thread * C::kVecSize - before;
    if (!kWarp) asm volatile("" : "+r"(first));
    BackwardFragment<C, C::kVecs> fragment;
    RowTails<C, kWarp ? C::kThreadsPerRow : 32> tails;
    fragment.load(y_row, g_row, first, step, n);
    tails.load(y_row, g_row, thread, before, n);
    if (C::kClusterSize > 1 && is_first) cluster_wait();  // a peer's shared memory exists once the peer has started
    is_first = false;

    L sum = {};
    if constexpr (!needs_no_reduction<C>)
      sum = sum_reduce.reduce(add(fragment.partial_sum(), tails.partial_sum()), iteration++);
    const A s = row_sum<C>(sum, fragment.g[0], n64);
    fragment.opaque_registers();
    if (!exists) continue;
    // Opaque: the compiler would keep the positions of the loads in registers for the stores.
    if (!kWarp) asm volatile("" : "+r"(first));
    C::Out* const dx_row = dx + row * dx_stride;
    fragment.apply_epilogue_and_store(s, dx_row, first, step, n);
    tails.store(s, dx_row, thread, before, n);
  }
}
