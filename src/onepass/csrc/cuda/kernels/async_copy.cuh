// async_copy.cuh: vectors in shared memory that only the thread that fetched them reads: more registers, in effect,
// that can be filled while the thread does something else. No barrier guards them.
#pragma once

#include "vector_access.cuh"

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

// Its address. Opaque: the compiler would else compute it again wherever it is used.
__device__ inline uint32_t shelf_address() {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(dynamic_shared);
  asm volatile("" : "+r"(at));
  return at;
}
template <class Raw>
__device__ inline Raw load_shared(uint32_t at) {
  uint32_t words[sizeof(Raw) / 4];
  if constexpr (sizeof(Raw) == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
  } else {
    for (int w = 0; w < (int)sizeof(Raw) / 4; ++w)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[w]) : "r"(at + w * 4));
  }
  Raw raw;
  memcpy(&raw, words, sizeof(Raw));
  return raw;
}
template <class Raw>
__device__ inline void store_shared(uint32_t at, Raw raw) {
  uint32_t words[sizeof(Raw) / 4];
  memcpy(words, &raw, sizeof(Raw));
  if constexpr (sizeof(Raw) == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else {
    for (int w = 0; w < (int)sizeof(Raw) / 4; ++w)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + w * 4), "r"(words[w]) : "memory");
  }
}

// Begins to fetch 4, 8 or 16 bytes.
template <int Bytes>
__device__ inline void fetch(uint32_t to, const void* at) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(at), "n"(Bytes) : "memory");
  }
}
// A row to fetch. `inner`: the elements just before and after it are the tensor's too, so that its first and its last
// vector may be read whole.
template <class T, class Index>
struct Source {
  const T* row;
  Index n;
  bool inner;
};

template <int V, class T>
struct Shelf {
  static constexpr int kBytes = V * sizeof(T);
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);

  static __device__ T* slot(int i) { return reinterpret_cast<T*>(dynamic_shared) + (i * blockDim.x + threadIdx.x) * V; }

  static __device__ void fetch_whole(int i, const T* at) {
    ::fetch<kBytes>((uint32_t)__cvta_generic_to_shared(slot(i)), at);
  }
  // Begins to fetch the vector at element `first`. One that is the row's in part is fetched whole where the rest is the
  // tensor's too, or else element by element.
  template <class Index>
  static __device__ void fetch(int i, const Source<T, Index>& from, Index first) {
    if (!touches<V>(first, from.n)) return;
    const T* const at = from.row + first;
    if (!kApart && (kWhole || from.inner || whole<V>(first, from.n))) {
      fetch_whole(i, at);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (inside(first + v, from.n)) slot(i)[v] = at[v];
      }
    }
  }
};
