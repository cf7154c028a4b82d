// grid.cuh: a barrier for all blocks of a cooperative launch, which the driver starts together or not at all.
#pragma once

#include "state.cuh"

// The word that the driver gives every cooperative launch for its barrier, and cleared at least once: the launch's own,
// so that launches on several streams, or one graph replayed while another runs, do not meet.
__device__ inline uint32_t* barrier_word() {
  uint32_t* workspace;
  asm("mov.b64 %0, {%%envreg2, %%envreg1};" : "=l"(workspace));
  return workspace + 1;
}

// By one thread a block: what it has written is seen by all that come out. Every block adds 1, but the first so much
// that all together add 2^31: the highest bit turns over when the last has come, and the word needs no clearing.
__device__ inline void grid_barrier() {
  uint32_t* const word = barrier_word();
  const uint32_t mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
  uint32_t before, now;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(mine) : "memory");
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  } while (((before ^ now) & 0x80000000u) == 0);
}

// What a block tells the others of its part of a row. Read past the L1 cache, which other blocks' writes do not reach.
template <class A>
struct alignas(4 * sizeof(A)) Part {
  A m, sum, rest, unused;
};
__device__ inline Part<float> read_part(const Part<float>* at) {
  Part<float> p;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(p.m), "=f"(p.sum), "=f"(p.rest), "=f"(p.unused)
               : "l"(at));
  return p;
}
__device__ inline Part<double> read_part(const Part<double>* at) {
  Part<double> p;
  asm volatile("ld.relaxed.gpu.global.v2.f64 {%0, %1}, [%2];" : "=d"(p.m), "=d"(p.sum) : "l"(at));
  asm volatile("ld.relaxed.gpu.global.f64 %0, [%1];" : "=d"(p.rest) : "l"(&at->rest));
  return p;
}

template <class A>
__device__ inline Part<A> part_of(A m, Total<A> l) {
  return {m, l.sum, l.rest, 0};
}
__device__ inline Part<float> part_of(float m, float l) { return {m, l, 0, 0}; }
template <class Out, class A>
__device__ inline typename Adder<Out>::type sum_of(Part<A> part) {
  if constexpr (sizeof(Out) == 2)
    return part.sum;
  else
    return {part.sum, part.rest};
}
