// merge.cuh: merges over the threads that share a row, level by level: lanes by shuffles, warps through shared memory,
// the blocks of a cluster through each other's shared memory. Every thread ends with the whole.
#pragma once

#include "cluster.cuh"
#include "warp.cuh"

// Room for the parts of one merge. Two merges that follow one another need one each: there is no barrier after the
// reads.
template <int Cluster, class T>
struct alignas(16) Parts {
  T at[Cluster * 32];
  Mailbox box;
};

// Over a whole block of any number of warps, and over the blocks of its cluster. `odd`: of a cluster, whether this
// merge is the second, fourth, ... through these parts. A part is not overwritten before it has been read: a warp sends
// its part of the next merge when it has read all of this one.
template <int Cluster, class T, class Merge>
__device__ inline T block_merge(T value, Merge merge_two, Parts<Cluster, T>& parts, uint32_t odd = 0) {
  value = warp_merge<32>(value, merge_two);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (Cluster == 1) {
    if (lane == 0) parts.at[warp] = value;
    __syncthreads();
    return warp_merge<32>(lane < warps ? parts.at[lane] : Merge::template identity<T>(), merge_two);
  } else {
    if (threadIdx.x == 0) parts.box.expect(Cluster * warps * sizeof(T));
    if (lane < Cluster) send(&parts.at[cluster_rank() * warps + warp], lane, value, &parts.box);
    parts.box.wait(odd);
    T whole = Merge::template identity<T>();
    for (int i = lane; i < Cluster * warps; i += 32) whole = merge_two(whole, parts.at[i]);
    return warp_merge<32>(whole, merge_two);
  }
}

struct Max {
  template <class A>
  static __device__ A identity() {
    return -INFINITY_;
  }
  template <class A>
  __device__ A operator()(A a, A b) const {
    return max_(a, b);
  }
};
struct Sum {
  template <class T>
  static __device__ T identity() {
    return T{};
  }
  template <class T>
  __device__ T operator()(T a, T b) const {
    return add(a, b);
  }
};
