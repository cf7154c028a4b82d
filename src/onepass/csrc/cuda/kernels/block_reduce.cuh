// block_reduce.cuh: merges over the threads that share a row, level by level: lanes by shuffles, warps through shared
// memory, the blocks of a cluster through each other's shared memory. Every thread ends with the whole.
#pragma once

#include "cluster.cuh"
#include "warp_reduce.cuh"

// Room for the parts of one merge. Two merges that follow one another need one each: there is no barrier after the
// reads.
constexpr int kWarps = 16;  // of a block in a cluster, at most
template <int Cluster, class T>
struct alignas(16) Parts {
  T at[Cluster == 1 ? 32 : Cluster * kWarps];
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

// Three ways to merge the states of the threads that share a row. top() gives what a thread's exponentials are to be
// relative to, and state() the state of the row; `round` counts the rows. Threads that share no row go through it too.

// Up to 32 lanes of a warp.
template <int Lanes, class A, class L>
struct InWarp {
  __device__ void open() {}
  __device__ A top(A largest, uint32_t) { return warp_merge<Lanes>(largest, Max()); }
  __device__ State<A> state(A top, L part, uint32_t) { return {top, value_of(warp_merge<Lanes>(part, Sum()))}; }
};

// Blocks: the maximum of the row first, the sum then.
template <int Cluster, class A, class L>
struct InTwoTrips {
  Parts<Cluster, A> maxima;
  Parts<Cluster, L> sums;

  __device__ void open() { maxima.box.open(), sums.box.open(); }
  __device__ A top(A largest, uint32_t round) { return block_merge(largest, Max(), maxima, round % 2); }
  __device__ State<A> state(A top, L part, uint32_t round) {
    return {top, value_of(block_merge(part, Sum(), sums, round % 2))};
  }
};

// The blocks of a cluster: each warp's exponentials are relative to its own maximum, and all states are sent at one go.
// For half types, which compute an exponential again to finish; those that are kept would need another factor a warp,
// of more than float's precision. Two rows that follow one another take the two boxes in turn.
struct alignas(8) Pair {
  float m, l;
};
template <int Cluster>
struct InOneTrip {
  Parts<Cluster, Pair> boxes[2];

  __device__ void open() { boxes[0].box.open(), boxes[1].box.open(); }
  __device__ float top(float largest, uint32_t) { return warp_merge<32>(largest, Max()); }
  __device__ State<float> state(float top, float part, uint32_t round) {
    part = warp_merge<32>(part, Sum());
    Parts<Cluster, Pair>& parts = boxes[round % 2];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) parts.box.expect(Cluster * warps * sizeof(Pair));
    if (lane < Cluster) send(&parts.at[cluster_rank() * warps + warp], lane, Pair{top, part}, &parts.box);
    parts.box.wait(round / 2 % 2);
    float m = -INFINITY_, l = 0;
    for (int i = lane; i < Cluster * warps; i += 32) m = max_(m, parts.at[i].m);
    m = warp_merge<32>(m, Max());
    // The smaller of the two: where both are infinite their difference is no number.
    for (int i = lane; i < Cluster * warps; i += 32)
      l += parts.at[i].l * exp2_(fminf(parts.at[i].m - shift(m), 0.0f) * kLog2e);
    return {m, warp_merge<32>(l, Sum())};
  }
};
