// cluster.cuh: thread block clusters (compute capability 9.0). A block writes into the shared memory of its peers, and
// waits for the peers' writes into its own by counting bytes (an mbarrier). A barrier of the whole cluster would also
// wait for all earlier stores of its threads.
#pragma once

#include "types.cuh"

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// No thread of the cluster returns from cluster_wait before all have called cluster_arrive.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ inline uint32_t smem_address(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }

// The address in the block `peer` of the cluster that corresponds to `at` in this block's shared memory.
__device__ inline uint32_t peer_address(const void* at, int peer) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(at)), "r"(peer));
  return there;
}

// A transaction barrier (mbarrier): it counts the bytes that arrive in this block. It is used for one phase after
// another.
struct TxBarrier {
  uint64_t barrier;

  // One thread calls this, before its cluster_arrive.
  __device__ void init() {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(smem_address(&barrier))
        : "memory");
  }
  // One thread calls this: the phase ends when `bytes` bytes have arrived.
  __device__ void expect_tx(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)), "r"(bytes)
                 : "memory");
  }
  // Waits for the end of a phase, by the parity of its number: 0 for the first, 1 for the second, 0 for the third.
  __device__ void wait(uint32_t parity) {
    uint32_t over;
    do {
      asm volatile(
          "{\n.reg .pred over;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n}"
          : "=r"(over)
          : "r"(smem_address(&barrier)), "r"(parity)
          : "memory");
    } while (!over);
  }
};

// Stores `value` at the address `at` of the block `peer`, and counts its bytes on the peer's barrier.
template <class T>
__device__ inline void store_async(T* at, int peer, T value, const TxBarrier* barrier) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  uint32_t w[4];
  memcpy(w, &value, sizeof(T));
  const uint32_t there = peer_address(at, peer), counter = peer_address(barrier, peer);
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(w[0]),
                 "r"(counter)
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
                 "r"(w[0]), "r"(w[1]), "r"(counter)
                 : "memory");
  } else {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
        "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(counter)
        : "memory");
  }
}
