// rows_onchip.cu: rows that fit into the registers and the shared memory of the threads that share them. Each element
// is read once, and each result is written once.
//
//   forward:  load -> maximum (reduced over the threads of the row) -> sum of exp (reduced) -> epilogue -> store
//   backward: load -> sum (reduced) -> epilogue -> store
//
// The kernel serves three tiers. In `warp`, kThreadsPerRow lanes share a row, and a block has kRowsPerBlock rows. In
// `block` and `cluster`, kThreadsPerRow is 0: all threads of kClusterSize blocks share a row, however many they are.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

// A thread's part of a row. thread: its number among the threads of the row. before: the elements between the start of
// the row's aligned span and the row. first: the thread's first element. step: the distance between the first elements
// of its vectors. n: the elements of the row.
struct Part {
  int thread, before, first, step, n;
};

// With kUsesSmemVecs, the threads of a block or a cluster also keep any number of vectors in shared memory; the
// elements of the fragment come after these. Then more blocks fit on a multiprocessor, and one computes while another
// waits.
template <class Config>
struct Forward {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename C::Rows Rows;
  static constexpr int kPerRegister =
      sizeof(In) + sizeof(Out) == 4 && C::kVecSize > 1 && !C::kIsScored ? 2 : 1;  // elements per register
  static constexpr int kElementRegisters = C::kVecs * C::kVecSize * sizeof(A) / (4 * kPerRegister);
  static constexpr bool kOnePerRow = C::Epilogue::kOnePerRow;
  static constexpr bool kOneExchange = C::kClusterSize > 1 && kPerRegister == 2;
  typedef typename Conditional<
      (C::kThreadsPerRow > 0), WarpStateReduce<C::kThreadsPerRow, A, L>,
      typename Conditional<kOneExchange, ClusterStateReduce<C::kClusterSize>,
                           BlockStateReduce<C::kClusterSize, A, L, C::kIsScored ? C::kBlockThreads / 32 : 0>>::type>::
      type Reduce;
  // Vectors in shared memory are read in chunks of 2. Exponentials are written back if they have the size of an
  // element.
  static constexpr int kChunkVecs = 2;
  typedef RowFragment<C, kChunkVecs, sizeof(In) == sizeof(A)> Chunk;
  // Scores replace their elements in shared memory, if they have the same size.
  static constexpr bool kKeepsScores = C::kIsScored && sizeof(In) == sizeof(A);

  static constexpr bool kHasTails = C::kIsScored && !C::kAligned && !C::kScalar && C::kVecSize > 1 && !C::kUsesSmemVecs;
  typedef ScoredTails<C, (C::kThreadsPerRow > 0 ? C::kThreadsPerRow : 32), C::Epilogue::kTakesExp> Tails;

  RowFragment<C, C::kVecs, true> fragment;
  typename Conditional<kHasTails, Tails, NoTails>::type tails;
  const ForwardRow<C> row;
  const int smem_vecs, first_in_smem, step, n;
  const bool is_first_thread;
  int first;
  A max;

  __device__ Forward(const Rows& rows, int64_t index, const ForwardRow<C>& row, Part part, int smem_vecs)
      : row(row),
        smem_vecs(smem_vecs),
        first_in_smem(part.first),
        step(part.step),
        n(part.n),
        is_first_thread(part.thread == 0),
        first(part.first + (kHasTails && part.before ? C::kVecSize : 0)) {
    const RowSource<In, int> source = {row.x, n, index > 0 && index + 1 < rows.count && rows.x_stride >= C::kVecSize};
    for_each_chunk([&](int c) {
      for_each_vec<C, kChunkVecs>(
          first_in_smem + c * step, step, n, [&](int i, int at) { SmemVecs<C>::copy_full(c + i, row.x + at); },
          [&](int i, int at) { SmemVecs<C>::copy(c + i, source, at); });
      AsyncCopy::commit();
    });
    if constexpr (C::kUsesSmemVecs) first += smem_vecs * step;
    if constexpr (kHasTails) tails.load(row, part.thread, part.before, n);
    fragment.template load<kHasTails>(row, first, step, n);
  }
  __device__ State<A> reduce(Reduce& reduce, uint32_t iteration) {
    A thread_max = fragment.max();
    if constexpr (kHasTails) tails.score(row), thread_max = max_(thread_max, tails.max());
    for_each_chunk([&](int c) {
      AsyncCopy::wait_all_but((smem_vecs - c) / kChunkVecs - 1);
      Chunk chunk;
      chunk.load_smem(row, c, first_in_smem + c * step, step, n);
      if constexpr (kKeepsScores) chunk.write_back(c);
      thread_max = max_(thread_max, chunk.max());
    });
    if constexpr (C::kIsScored) thread_max = row.operand.max_with_sink(thread_max, is_first_thread);
    max = reduce.max(thread_max, iteration);
    fragment.opaque_registers();
    fragment.subtract_max(max);
    L thread_sum = fragment.sum_exp(max);
    if constexpr (kHasTails) thread_sum = add(thread_sum, tails.sum_exp(max));
    for_each_chunk([&](int c) {
      Chunk chunk;
      if constexpr (kKeepsScores)
        chunk.read_back(c);
      else
        chunk.load_smem(row, c, first_in_smem + c * step, step, n);
      chunk.subtract_max(max);
      thread_sum = add(thread_sum, chunk.sum_exp(max));
      if constexpr (Chunk::kKeepsExp) chunk.write_back(c);
    });
    if constexpr (C::kIsScored)
      return row.operand.finish(reduce.sum(max, row.operand.add_sink(thread_sum, max, is_first_thread), iteration),
                                is_first_thread);
    else
      return reduce.sum(max, thread_sum, iteration);
  }
  __device__ void store(State<A> state, Out* to) {
    if constexpr (kHasTails)
      fragment.template apply_epilogue_and_store<true>(state, to, first, step, n), tails.store(state, to);
    else
      fragment.apply_epilogue_and_store(state, to, first, step, n);
    for_each_chunk([&](int c) {
      Chunk chunk;
      if constexpr (Chunk::kKeepsExp || kKeepsScores)
        chunk.read_back(c);
      else
        chunk.load_smem(row, c, first_in_smem + c * step, step, n), chunk.subtract_max(max);
      chunk.apply_epilogue(state);
      chunk.store(to, first_in_smem + c * step, step, n);
    });
  }

 private:
  // Calls f(c) for each chunk in shared memory, whose first vector is c.
  template <class F>
  __device__ void for_each_chunk(F f) const {
    if constexpr (C::kUsesSmemVecs) {
      for (int c = 0; c < smem_vecs; c += kChunkVecs) f(c);
    }
  }
};

template <class Config>
struct Backward {
  typedef Config C;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename C::Rows Rows;
  static constexpr int kElementRegisters =
      C::kVecs * C::kVecSize * (C::kBroadcastGrad ? 1 : 2) * sizeof(A) / (uses_half2<C> ? 8 : 4);
  static constexpr bool kOnePerRow = false, kWarp = C::kThreadsPerRow > 0;
  typedef
      typename Conditional<kWarp, WarpSumReduce<C::kThreadsPerRow, L>, BlockSumReduce<C::kClusterSize, L>>::type Reduce;

  BackwardFragment<C, C::kVecs> fragment;
  RowTails<C, kWarp ? C::kThreadsPerRow : 32> tails;
  const BackwardRow<C> row;
  const Part part;
  int first;

  __device__ Backward(const Rows&, int64_t, const BackwardRow<C>& row, Part part, int)
      : row(row), part(part), first(part.first) {
    fragment.load(row, first, part.step, part.n);
    tails.load(row, part.thread, part.before, part.n);
  }
  __device__ InputGrad<C> reduce(Reduce& reduce, uint32_t iteration) {
    L sum = {};
    if constexpr (!needs_no_reduction<C>) sum = reduce(add(fragment.partial_sum(), tails.partial_sum()), iteration);
    return {row_sum<C>(sum, fragment.g[0], row.n), row.score};
  }
  __device__ void store(const InputGrad<C>& grad, typename C::Out* to) {
    fragment.apply_epilogue_and_store(grad, to, first, part.step, part.n);
    tails.store(grad, to, part.thread, part.before, part.n);
  }
};

typedef KernelOp<Forward, Backward> Op;
typedef Op::C C;
constexpr bool kWarp = C::kThreadsPerRow > 0;
// The most threads of a block. From it the compiler derives how many registers a thread may use: 64, or 72 or 80 where
// 64 would spill.
#if __CUDA_ARCH__ == 900
constexpr int kAnyThreads = 1024;
#else
constexpr int kAnyThreads = C::kClusterSize > 1 ? 768 : 896;
#endif
constexpr int kMaxThreads = C::kIsScored && C::kBlockThreads < kAnyThreads ? C::kBlockThreads : kAnyThreads;
constexpr int kThreads = kWarp ? C::kThreadsPerRow * C::kRowsPerBlock : kMaxThreads;
// How many blocks should fit on a multiprocessor, estimated from the registers of a thread's elements. Without this
// bound the compiler uses up to half as many registers more to overlap vectors, and the lower occupancy costs 2 to 15%.
// Narrow vectors need more registers, and so do vectors of a bias or a mask.
constexpr bool kHas16Bytes = C::kVecSize * sizeof(C::In) == 16 || C::kVecSize * sizeof(C::Out) == 16;
constexpr bool kHasFewScores = C::kIsScored && !C::kIsBackward && !C::has(kScoreBias) && !C::has(kScoreMask);
constexpr int kFit = kWarp && kHas16Bytes && kHasFewScores ? 65536 / (kThreads * (40 + Op::kElementRegisters))
                     : kWarp && kHas16Bytes                ? 65536 / (kThreads * (28 + Op::kElementRegisters * 15 / 8))
                     : C::kIsScored                        ? 65536 / (kThreads * (48 + Op::kElementRegisters))
                                                           : 1;
constexpr int kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

template <class Op>
__device__ inline void compute(const typename Op::Rows& rows, int smem_vecs) {
  __shared__ typename Op::Reduce reduce;
  if (C::kClusterSize > 1) {
    if (threadIdx.x == 0) reduce.init();
    cluster_arrive();
  }
  uint32_t iteration = 0;
  bool is_first = true;
  const int threads = kWarp ? C::kThreadsPerRow : blockDim.x * C::kClusterSize, step = threads * C::kVecSize;
  const int thread =
      kWarp ? threadIdx.x % C::kThreadsPerRow : (C::kClusterSize == 1 ? 0 : cluster_rank() * blockDim.x) + threadIdx.x;

  typedef Conditional<C::kIsScored, unsigned, int64_t>::type Index;
  const Index count = rows.count;
  for (Index group = blockIdx.x / C::kClusterSize; group * C::kRowsPerBlock < count;
       group += gridDim.x / C::kClusterSize) {
    const Index index = group * C::kRowsPerBlock + (kWarp ? threadIdx.x / C::kThreadsPerRow : 0);
    const bool exists = index < count;  // threads without a row take part in the reductions, with no elements
    const auto row = rows.row(index, exists);
    const int n = (int)row.n, before = C::kScalar || C::kAligned ? 0 : misalignment<C>(row.aligned());
    int first = thread * C::kVecSize - before;
    if (!kWarp) asm volatile("" : "+r"(first));
    Op op(rows, index, row, {thread, before, first, step, n}, smem_vecs);
    if (C::kClusterSize > 1 && is_first) cluster_wait();  // a peer's shared memory exists once the peer has started
    is_first = false;

    const auto state = op.reduce(reduce, iteration);
    ++iteration;
    op.fragment.opaque_registers();
    if (!exists) {
    } else if constexpr (Op::kOnePerRow) {
      if (thread == 0) Op::C::Epilogue::store(state, rows.result(index, row), rows.count);
    } else {
      // Opaque: the compiler would otherwise keep the positions of the loads in registers for the stores.
      if (!kWarp) asm volatile("" : "+r"(op.first));
      op.store(state, rows.result(index, row));
    }
    if (C::kIsScored) break;  // one block per group; without a loop nothing is computed ahead of it
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) onepass_kernel(const Op::Rows rows, int smem_vecs) {
  compute<Op>(rows, smem_vecs);
}
