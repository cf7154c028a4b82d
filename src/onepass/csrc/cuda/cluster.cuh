// cluster.cuh: thread block clusters (compute capability 9.0): a block writes into the shared memory of its peers.
#pragma once

#include "convert.cuh"

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster arrive here before any goes on; what they have written until then is seen by all.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores `value` where `at`, an address in this block's shared memory, lies in the block `peer` of the cluster.
template <class T>
__device__ inline void store_to_peer(T* at, int peer, T value) {
  uint32_t here = (uint32_t)__cvta_generic_to_shared(at), there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(peer));
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) / 4); ++i)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there + 4 * i), "r"(words[i]) : "memory");
}
