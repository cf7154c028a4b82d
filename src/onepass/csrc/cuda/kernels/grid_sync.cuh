// grid_sync.cuh: how the blocks of a cooperative launch wait for each other and exchange partial states. The driver
// starts all blocks of such a launch together, or none.
#pragma once

#include "state.cuh"

// The word that the driver provides for the barrier of every cooperative launch. It has been cleared at least once.
// Each launch has its own word, so that launches on several streams, or a graph replayed while another runs, do not
// interfere.
__device__ inline uint32_t* barrier_word() {
  uint32_t* workspace;
  asm("mov.b64 %0, {%%envreg2, %%envreg1};" : "=l"(workspace));
  return workspace + 1;
}

// A barrier of all blocks, which one thread per block passes. After it, these threads see what any of them wrote before
// it arrived. Every block adds 1 to the word, except that the first block adds the rest of 2^31. So the highest bit
// flips when the last block arrives, and the word needs no clearing. init, arrive and wait are separate because a round
// trip to the L2 cache is slow while it queues behind the loads of a block.
struct GridBarrier {
  uint32_t before;

  __device__ void init() {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(barrier_word()) : "memory");
  }
  __device__ void arrive(int block, int blocks) {
    const uint32_t added = block == 0 ? 0x80000000u - (blocks - 1) : 1;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(barrier_word()), "r"(added) : "memory");
  }
  __device__ void wait() {
    uint32_t now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(barrier_word()) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
};

// The type in which the partial sums of several blocks are added: double if results are float.
template <class Sum>
using GridSumType = typename Conditional<is_same<Sum, Compensated<float>>, double, Sum>::type;

// 16 bytes that are loaded and stored by one instruction, past the L1 cache. kOverRanks: by threads of several GPUs.
template <bool kOverRanks>
struct alignas(16) Word128 {
  uint64_t low, high;

  __device__ void store(uint64_t new_low, uint64_t new_high) {
    if constexpr (kOverRanks)
      asm volatile("{\n.reg .b128 w;\nmov.b128 w, {%1, %2};\nst.relaxed.sys.global.b128 [%0], w;\n}" ::"l"(this),
                   "l"(new_low), "l"(new_high)
                   : "memory");
    else
      asm volatile("{\n.reg .b128 w;\nmov.b128 w, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], w;\n}" ::"l"(this),
                   "l"(new_low), "l"(new_high)
                   : "memory");
  }
  __device__ void load(uint64_t* low, uint64_t* high) const {
    if constexpr (kOverRanks)
      asm volatile("{\n.reg .b128 w;\nld.relaxed.sys.global.b128 w, [%2];\nmov.b128 {%0, %1}, w;\n}"
                   : "=l"(*low), "=l"(*high)
                   : "l"(this)
                   : "memory");
    else
      asm volatile("{\n.reg .b128 w;\nld.relaxed.gpu.global.b128 w, [%2];\nmov.b128 {%0, %1}, w;\n}"
                   : "=l"(*low), "=l"(*high)
                   : "l"(this)
                   : "memory");
  }
};

// A wait for messages that never gives up. (rows_over_ranks.cu has one with a time limit.)
struct Endless {
  __device__ bool is_over() const { return false; }
};

// The partial state of a block, and an epoch in the same 16 bytes. A reader that finds the epoch has the state too, so
// one round trip to the L2 cache is both message and barrier. `C` is the kernel's config: doubles take three words.
template <class C>
struct GridMessage {
  static constexpr int kWords = sizeof(typename C::In) == 8 || sizeof(typename C::Out) == 8 ? 3 : 1;
  Word128<C::kOverRanks> words[kWords];

  __device__ void clear() {
    for (int i = 0; i < kWords; ++i) words[i].store(0, 0);
  }
  __device__ void write(float m, double l, uint32_t epoch) {
    words[0].store((uint64_t)__double_as_longlong(l), (uint64_t)epoch << 32 | (uint64_t)__float_as_uint(m));
  }
  __device__ void write(double m, Compensated<double> l, uint32_t epoch) {
    const double values[] = {m, l.hi, l.lo};
    for (int i = 0; i < kWords; ++i) words[i].store(__double_as_longlong(values[i]), epoch);
  }
  __device__ bool has_arrived(uint32_t epoch) const {
    typename C::Acc m;
    typename Conditional<kWords == 1, double, Compensated<double>>::type l;
    return read(&m, &l, epoch);
  }
  // Whether the message of this epoch has arrived.
  __device__ bool read(float* m, double* l, uint32_t epoch) const {
    uint64_t low, high;
    words[0].load(&low, &high);
    *m = __uint_as_float((uint32_t)high), *l = __longlong_as_double((long long)low);
    return (uint32_t)(high >> 32) == epoch;
  }
  __device__ bool read(float* m, float* l, uint32_t epoch) const {
    double wide;
    const bool arrived = read(m, &wide, epoch);
    *l = (float)wide;
    return arrived;
  }
  __device__ bool read(double* m, Compensated<double>* l, uint32_t epoch) const {
    uint64_t values[kWords];
    bool arrived = true;
    for (int i = 0; i < kWords; ++i) {
      uint64_t of;
      words[i].load(values + i, &of);
      arrived &= of == epoch;
    }
    *m = __longlong_as_double(values[0]);
    *l = {__longlong_as_double(values[1]), __longlong_as_double(values[2])};
    return arrived;
  }
};

// A row of the grid tier: head elements up to a multiple of 16 bytes, then whole vectors, then tail elements.
template <class C>
struct AlignedRow {
  typedef typename C::In In;
  static constexpr int kUnit = 16 / sizeof(In);  // elements: chunks begin at multiples of 16 bytes
  const In* data;
  int head;
  int64_t vectors;

  __device__ AlignedRow(const In* data, int64_t n) : data(data) {
    const int before = C::kScalar ? 0 : (int)(-(uint64_t)data / sizeof(In) % kUnit);
    head = before < n ? before : (int)n;
    vectors = (uint64_t)(n - head) / kUnit * (kUnit / C::kVecSize);
  }
  // The head or tail element of this lane, or -1. They are handled by the communication warp of the row's first block.
  __device__ int64_t head_or_tail(int lane, int64_t n) const {
    const int64_t after = head + vectors * C::kVecSize + lane - 8;
    return lane < head ? lane : lane >= 8 && lane < 16 && after < n ? after : -1;
  }
};
