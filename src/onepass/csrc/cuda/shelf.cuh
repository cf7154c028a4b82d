// shelf.cuh: vectors in shared memory that only the thread that fetched them reads: more registers, in effect, that can
// be filled while the thread does something else. No barrier guards them.
#pragma once

#include "window.cuh"

#ifndef MESSENGERS
#define MESSENGERS 0  // threads of a block that keep nothing: the last ones
#endif

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Until at most `pending` of the last groups of copies are on their way.
__device__ inline void await_all_but(int pending) {
  switch (pending) {
    case 0: return await_copies<0>();
    case 1: return await_copies<1>();
    case 2: return await_copies<2>();
    case 3: return await_copies<3>();
    case 4: return await_copies<4>();
    case 5: return await_copies<5>();
    default: return await_copies<6>();
  }
}

// Shared memory beyond what the kernel declares, as much as the launch asked for.
extern __shared__ __align__(16) unsigned char dynamic_shared[];

// A row to fetch. `inner`: the elements just before and after it are the tensor's too, so that its first and its last
// vector may be read whole.
template <class T, class Index>
struct Source {
  const T* row;
  Index n;
  bool inner;
};

// `Once`: as in load().
template <int V, class T, bool Once = false>
struct Shelf {
  static constexpr int kBytes = V * sizeof(T);
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);

  static __device__ T* slot(int i) {
    return reinterpret_cast<T*>(dynamic_shared) + (i * (blockDim.x - MESSENGERS) + threadIdx.x) * V;
  }

  static __device__ void fetch_whole(int i, const T* at) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(slot(i));
    if constexpr (kBytes == 16) {
      if constexpr (Once) {
        uint64_t first_to_go;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_go));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(at), "l"(first_to_go)
                     : "memory");
      } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at) : "memory");
      }
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(at), "n"(kBytes) : "memory");
    }
  }
  // Begins to fetch the vector at element `first`. One that is the row's in part is fetched whole where the rest is the
  // tensor's too, or else element by element.
  template <class Index>
  static __device__ void fetch(int i, const Source<T, Index>& from, Index first) {
    if (!touches<V>(first, from.n)) return;
    const T* const at = from.row + first;
    if (!APART && (from.inner || whole<V>(first, from.n))) {
      fetch_whole(i, at);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (inside(first + v, from.n)) slot(i)[v] = at[v];
      }
    }
  }
};
