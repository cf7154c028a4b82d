// cluster.cuh: thread block clusters (compute capability 9.0): a block writes into the shared memory of its peers, and
// waits for what they write into its own by counting bytes. No barrier of the whole cluster, which would also wait
// until all that its threads have stored before is out.
#pragma once

#include "types.cuh"

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster have arrived before any goes on from its await.
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ inline uint32_t shared_address(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }

// Where `at`, an address in this block's shared memory, lies in the block `peer` of the cluster.
__device__ inline uint32_t at_peer(const void* at, int peer) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(peer));
  return there;
}

// Counts the bytes that arrive in this block, over and over: one round after another.
struct Mailbox {
  uint64_t barrier;

  // By one thread, before it arrives in the cluster.
  __device__ void open() {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(&barrier))
        : "memory");
  }
  // By one thread: this round ends when so many bytes have come.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
  }
  // Until the round is over. `odd` says which it is: 0 for the first, 1 for the second, 0 for the third.
  __device__ void wait(uint32_t odd) {
    uint32_t over;
    do {
      asm volatile(
          "{\n.reg .pred over;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n}"
          : "=r"(over)
          : "r"(shared_address(&barrier)), "r"(odd)
          : "memory");
    } while (!over);
  }
};

// Stores `value` where `at` lies in the block `peer`, which counts it in `box`.
template <class T>
__device__ inline void send(T* at, int peer, T value, const Mailbox* box) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  uint32_t w[4];
  memcpy(w, &value, sizeof(T));
  const uint32_t there = at_peer(at, peer), counter = at_peer(box, peer);
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
