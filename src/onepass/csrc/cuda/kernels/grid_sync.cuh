// grid_sync.cuh: a barrier for all blocks of a cooperative launch, which the driver starts together or not at all.
#pragma once

#include "vector_access.cuh"

// The word that the driver gives every cooperative launch for its barrier, and cleared at least once: the launch's own,
// so that launches on several streams, or one graph replayed while another runs, do not meet.
__device__ inline uint32_t* barrier_word() {
  uint32_t* workspace;
  asm("mov.b64 %0, {%%envreg2, %%envreg1};" : "=l"(workspace));
  return workspace + 1;
}

// By one thread a block: what it has written before it arrives is seen by all that come out. Every block adds 1, but
// the first so much that all together add 2^31: the highest bit turns over when the last has come, and the word needs
// no clearing. In three steps, as a trip to the L2 cache takes long where it has to queue behind what a block reads.
struct Rendezvous {
  uint32_t before;

  // Before it arrives.
  __device__ void open() {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(barrier_word()) : "memory");
  }
  __device__ void arrive(int block, int blocks) {
    const uint32_t mine = block == 0 ? 0x80000000u - (blocks - 1) : 1;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(barrier_word()), "r"(mine) : "memory");
  }
  __device__ void wait() {
    uint32_t now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(barrier_word()) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
};

// What the sums of exponentials of a row's parts are added up in: doubles where results are floats.
template <class Out>
struct Merged : Adder<Out> {};
template <>
struct Merged<float> {
  typedef double type;
  static __device__ double of(float value) { return value; }
};
__device__ inline double add(double a, double b) { return a + b; }
__device__ inline double scaled(double total, float factor) { return total * factor; }
__device__ inline float value_of(double total) { return (float)total; }

// 16 bytes that are read and written as one, past the L1 cache.
__device__ inline void write_as_one(void* at, uint64_t low, uint64_t high) {
  asm volatile("{\n.reg .b128 both;\nmov.b128 both, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], both;\n}" ::"l"(at),
               "l"(low), "l"(high)
               : "memory");
}
__device__ inline void read_as_one(const void* at, uint64_t* low, uint64_t* high) {
  asm volatile("{\n.reg .b128 both;\nld.relaxed.gpu.global.b128 both, [%2];\nmov.b128 {%0, %1}, both;\n}"
               : "=l"(*low), "=l"(*high)
               : "l"(at)
               : "memory");
}

// What a block tells the others of its part of a row, and the turn it is of: who reads the turn has the part too, so
// that one trip to the L2 cache is both message and barrier.
struct Part {
  uint64_t low, high;
};
constexpr int kParts = sizeof(IN) == 8 || sizeof(OUT) == 8 ? 3 : 1;  // that hold one state, whichever counts

struct Message {
  Part parts[kParts];

  __device__ void clear() {
    for (int i = 0; i < kParts; ++i) write_as_one(parts + i, 0, 0);
  }
  __device__ void write(float m, double l, uint32_t turn) {
    write_as_one(parts, (uint64_t)__double_as_longlong(l), words(m, turn));
  }
  __device__ void write(double m, Total<double> l, uint32_t turn) {
    const double values[] = {m, l.sum, l.rest};
    for (int i = 0; i < kParts; ++i) write_as_one(parts + i, __double_as_longlong(values[i]), turn);
  }
  // Whether this turn's message was there.
  __device__ bool read(float* m, double* l, uint32_t turn) const {
    uint64_t low, high;
    read_as_one(parts, &low, &high);
    *m = __uint_as_float((uint32_t)high), *l = __longlong_as_double((long long)low);
    return (uint32_t)(high >> 32) == turn;
  }
  __device__ bool read(float* m, float* l, uint32_t turn) const {
    double wide;
    const bool there = read(m, &wide, turn);
    *l = (float)wide;
    return there;
  }
  __device__ bool read(double* m, Total<double>* l, uint32_t turn) const {
    uint64_t values[kParts];
    bool there = true;
    for (int i = 0; i < kParts; ++i) {
      uint64_t of;
      read_as_one(parts + i, values + i, &of);
      there &= of == turn;
    }
    *m = __longlong_as_double(values[0]);
    *l = {__longlong_as_double(values[1]), __longlong_as_double(values[2])};
    return there;
  }

 private:
  static __device__ uint64_t words(float low, uint32_t high) {
    return (uint64_t)high << 32 | (uint64_t)__float_as_uint(low);
  }
};

constexpr int kUnit = 16 / sizeof(IN);  // elements: chunks begin at multiples of 16 bytes

// A row: loose elements up to a multiple of 16 bytes, whole vectors, and loose elements again.
struct Row {
  const IN* at;
  int head;
  int64_t vectors;

  __device__ Row(const IN* at, int64_t n) : at(at) {
    const int before = kApart ? 0 : (int)(-(uint64_t)at / sizeof(IN) % kUnit);
    head = before < n ? before : (int)n;
    vectors = (uint64_t)(n - head) / kUnit * (kUnit / VECTOR);
  }
  // The loose element of a lane of the messenger of the row's first block, or -1.
  __device__ int64_t loose(int lane, int64_t n) const {
    const int64_t after = head + vectors * VECTOR + lane - 8;
    return lane < head ? lane : lane >= 8 && lane < 16 && after < n ? after : -1;
  }
};
