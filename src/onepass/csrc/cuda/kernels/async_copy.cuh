// async_copy.cuh: copies from global to shared memory. AsyncCopy is for vectors that only the thread that copied them
// reads: they are like more registers, filled while the thread does something else, and need no barrier. BulkCopy
// copies whole spans; the threads of a block wait for it at a barrier.
#pragma once

#include "cluster.cuh"
#include "vector_access.cuh"

// Asynchronous copies from global to shared memory. A thread waits for groups of copies, in the order of their commits.
struct AsyncCopy {
  // Begins to copy 4, 8 or 16 bytes.
  template <int Bytes>
  static __device__ void start(uint32_t to, const void* from) {
    if constexpr (Bytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
    }
  }
  static __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Waits until at most the last `Pending` groups have not arrived.
  template <int Pending>
  static __device__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
  }
  static __device__ void wait_all_but(int pending) {
    switch (pending) {
      case 0: return wait<0>();
      case 1: return wait<1>();
      case 2: return wait<2>();
      case 3: return wait<3>();
      case 4: return wait<4>();
      case 5: return wait<5>();
      default: return wait<6>();
    }
  }
};

// Copies of whole vectors of 16 bytes, any number of them, which one thread starts (compute capability 9.0). They see
// what threads have stored to shared memory only after a fence.
struct BulkCopy {
#if __CUDA_ARCH__ >= 900
  static constexpr bool kExists = true;
#else
  static constexpr bool kExists = false;
#endif
  // To shared memory. `barrier` counts the bytes that have arrived.
  static __device__ void load(uint32_t to, const void* from, int bytes, const TxBarrier* barrier) {
    if constexpr (kExists)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                   "l"(from), "r"(bytes), "r"(smem_address(barrier))
                   : "memory");
  }
  static __device__ void store(void* to, uint32_t from, int bytes) {
    if constexpr (kExists)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                   : "memory");
  }
  static __device__ void commit_stores() {
    if constexpr (kExists) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  // Waits until the data of all stores that this thread has started has been read from shared memory.
  static __device__ void wait_until_read() {
    if constexpr (kExists) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  static __device__ void fence() {
    if constexpr (kExists) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
};

// Dynamic shared memory, beyond what the kernel declares. The launch sets its size.
extern __shared__ __align__(16) unsigned char dynamic_smem[];

// The address of dynamic_smem. It is opaque, because the compiler would otherwise compute it again at each use.
__device__ inline uint32_t dynamic_smem_address() {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(dynamic_smem);
  asm volatile("" : "+r"(at));
  return at;
}
template <class Raw>
__device__ inline Raw load_smem(uint32_t at) {
  uint32_t words[sizeof(Raw) / 4];
  if constexpr (sizeof(Raw) == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
  } else if constexpr (sizeof(Raw) == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at));
  } else {
    for (int w = 0; w < (int)sizeof(Raw) / 4; ++w)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[w]) : "r"(at + w * 4));
  }
  Raw raw;
  memcpy(&raw, words, sizeof(Raw));
  return raw;
}
template <class Raw>
__device__ inline void store_smem(uint32_t at, Raw raw) {
  uint32_t words[sizeof(Raw) / 4];
  memcpy(words, &raw, sizeof(Raw));
  if constexpr (sizeof(Raw) == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof(Raw) == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    for (int w = 0; w < (int)sizeof(Raw) / 4; ++w)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + w * 4), "r"(words[w]) : "memory");
  }
}

// A row to copy from. `has_neighbours`: the elements just before and after the row belong to the tensor too, so that
// the first and last vector of the row may be read whole.
template <class T, class Index>
struct RowSource {
  const T* row;
  Index n;
  bool has_neighbours;
};

// A thread's vectors of a row in shared memory; slot(i) is vector i.
template <class C>
struct SmemVecs {
  typedef typename C::In T;
  static constexpr int V = C::kVecSize, kBytes = V * sizeof(T);
  static_assert(!C::kUsesSmemVecs || kBytes == 4 || kBytes == 8 || kBytes == 16);

  static __device__ T* slot(int i) { return reinterpret_cast<T*>(dynamic_smem) + (i * blockDim.x + threadIdx.x) * V; }

  static __device__ void copy_full(int i, const T* at) {
    AsyncCopy::start<kBytes>((uint32_t)__cvta_generic_to_shared(slot(i)), at);
  }
  // Begins to copy the vector at element `first`. If it belongs to the row only in part, it is copied whole if the rest
  // of it belongs to the tensor, and otherwise element by element.
  template <class Index>
  static __device__ void copy(int i, const RowSource<T, Index>& from, Index first) {
    if (!overlaps_row<C>(first, from.n)) return;
    const T* const at = from.row + first;
    if (!C::kScalar && (C::kAligned || from.has_neighbours || is_full<C>(first, from.n))) {
      copy_full(i, at);
    } else {
      unroll<V>([&](int v) {
        if (is_inside(first + v, from.n)) slot(i)[v] = at[v];
      });
    }
  }
};
