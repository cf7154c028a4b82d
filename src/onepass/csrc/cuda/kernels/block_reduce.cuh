// block_reduce.cuh: reductions over the threads that share a row, level by level: lanes by shuffles, warps through
// shared memory, and the blocks of a cluster by writing to each other's shared memory. Every thread gets the result.
#pragma once

#include "cluster.cuh"
#include "warp_reduce.cuh"

// The shared memory of one reduction. Two consecutive reductions need one each, because no barrier follows the reads.
constexpr int kMaxClusterWarps = 16;  // of a block in a cluster
template <int ClusterSize, class T>
struct alignas(16) ReduceStorage {
  T partials[ClusterSize == 1 ? 32 : ClusterSize * kMaxClusterWarps];
  TxBarrier barrier;
};

// Sends a warp's partial result to all blocks of the cluster, and waits for the partial results of all their warps.
template <int ClusterSize, class T>
__device__ inline void exchange_in_cluster(T value, ReduceStorage<ClusterSize, T>& storage, uint32_t parity) {
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) storage.barrier.expect_tx(ClusterSize * warps * sizeof(T));
  if (lane < ClusterSize) store_async(&storage.partials[cluster_rank() * warps + warp], lane, value, &storage.barrier);
  storage.barrier.wait(parity);
}

// Reduces over a block of any number of warps, and over the blocks of its cluster. In a cluster, `parity` alternates
// between 0 and 1 from one use of `storage` to the next. No partial result is overwritten before it has been read: a
// warp sends its part of the next reduction only after it has read all of this one.
//
// `Warps`: the warps of a block, or 0 if the launch sets their number.
template <int ClusterSize, int Warps = 0, class T, class Op>
__device__ inline T block_reduce(T value, Op op, ReduceStorage<ClusterSize, T>& storage, uint32_t parity = 0) {
  value = warp_reduce<32>(value, op);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (ClusterSize == 1) {
    if (lane == 0) storage.partials[warp] = value;
    __syncthreads();
    if constexpr (Warps > 0 && Warps <= 8) {
      T result = storage.partials[0];
      unroll<Warps - 1>([&](int w) { result = op(result, storage.partials[w + 1]); });
      return result;
    }
    return warp_reduce<32>(lane < warps ? storage.partials[lane] : Op::template identity<T>(), op);
  } else {
    exchange_in_cluster(value, storage, parity);
    T result = Op::template identity<T>();
    for (int i = lane; i < ClusterSize * warps; i += 32) result = op(result, storage.partials[i]);
    return warp_reduce<32>(result, op);
  }
}

// Three ways to reduce the states of the threads that share a row. max() returns the maximum that a thread subtracts
// before exp, and sum() the state of the row. `iteration` counts the rows. Threads without a row take part too.

// The threads are up to 32 lanes of a warp.
template <int Lanes, class A, class L>
struct WarpStateReduce {
  __device__ void init() {}
  __device__ A max(A thread_max, uint32_t) { return warp_reduce<Lanes>(thread_max, Max()); }
  __device__ State<A> sum(A max, L thread_sum, uint32_t) {
    return {max, value_of(warp_reduce<Lanes>(thread_sum, Sum()))};
  }
};

// The threads are those of whole blocks: the maximum of the row is reduced first, then the sum.
template <int ClusterSize, class A, class L, int Warps = 0>
struct BlockStateReduce {
  ReduceStorage<ClusterSize, A> maxima;
  ReduceStorage<ClusterSize, L> sums;

  __device__ void init() { maxima.barrier.init(), sums.barrier.init(); }
  __device__ A max(A thread_max, uint32_t iteration) {
    return block_reduce<ClusterSize, Warps>(thread_max, Max(), maxima, iteration % 2);
  }
  __device__ State<A> sum(A max, L thread_sum, uint32_t iteration) {
    return {max, value_of(block_reduce<ClusterSize, Warps>(thread_sum, Sum(), sums, iteration % 2))};
  }
};

// The blocks of a cluster, with one exchange instead of two: each warp subtracts its own maximum before exp, and all
// warps send their states at once. This is for half types, whose epilogue computes exp again. Exponentials that are
// kept would need another factor per warp, with more than float's precision. Consecutive rows alternate between the
// storages.
struct alignas(8) FloatState {
  float m, l;
};
template <int ClusterSize>
struct ClusterStateReduce {
  ReduceStorage<ClusterSize, FloatState> storages[2];

  __device__ void init() { storages[0].barrier.init(), storages[1].barrier.init(); }
  __device__ float max(float thread_max, uint32_t) { return warp_reduce<32>(thread_max, Max()); }
  __device__ State<float> sum(float warp_max, float thread_sum, uint32_t iteration) {
    thread_sum = warp_reduce<32>(thread_sum, Sum());
    ReduceStorage<ClusterSize, FloatState>& storage = storages[iteration % 2];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    exchange_in_cluster(FloatState{warp_max, thread_sum}, storage, iteration / 2 % 2);
    float m = -infinity(), l = 0;
    for (int i = lane; i < ClusterSize * warps; i += 32) m = max_(m, storage.partials[i].m);
    m = warp_reduce<32>(m, Max());
    // fminf: the difference of two infinities is NaN.
    for (int i = lane; i < ClusterSize * warps; i += 32)
      l += storage.partials[i].l * exp2_(fminf(storage.partials[i].m - finite_or_zero(m), 0.0f) * kLog2e);
    return {m, warp_reduce<32>(l, Sum())};
  }
};
