// rows_onchip_backward.cu: gradients of rows that fit the registers of the threads that share them. Each element of y
// and of its gradient is read once, and dx written once. The shape is that of rows_onchip.cu, with another state, one
// number:
//
//   load -> sum (merged over the threads of the row) -> finish what was kept -> store
//
// One compiled instance a set of: IN, OUT, FUNCTION, EVEN (see row_backward.cuh), SLOTS (vectors of each operand that a
// thread keeps), VECTOR, EDGES (see vector_access.cuh), and
//   LANES, ROWS   the tier `warp`: threads a row, at most 32, and rows a block holds
//   LANES 0       the tiers `block` and `cluster`: all threads of CLUSTER blocks share a row, whatever their number
#include "row_backward.cuh"

constexpr bool kWarp = LANES > 0;
// The most threads of a block, which tells the compiler how many registers a thread may take, as in rows_onchip.cu.
#if __CUDA_ARCH__ == 900
constexpr int kShared = 1024;
#else
constexpr int kShared = CLUSTER > 1 ? 768 : 896;
#endif
constexpr int kThreads = kWarp ? LANES * ROWS : kShared;
constexpr int kHeld = SLOTS * VECTOR * (EVEN ? 1 : 2) * sizeof(A) / (kPack ? 8 : 4);  // registers of the elements
constexpr bool kFull = VECTOR * sizeof(IN) == 16 || VECTOR * sizeof(OUT) == 16;
constexpr int kFit = kWarp && kFull ? 65536 / (kThreads * (28 + kHeld * 15 / 8)) : 1;
constexpr int kBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;

// How the threads of a row meet: one merge a row, through two boxes in turn.
template <bool Warp>
struct Meeting {
  Parts<CLUSTER, L> boxes[2];
  __device__ void open() { boxes[0].box.open(), boxes[1].box.open(); }
  __device__ L merge(L part, uint32_t round) { return block_merge(part, Sum(), boxes[round % 2], round / 2 % 2); }
};
template <>
struct Meeting<true> {
  __device__ void open() {}
  __device__ L merge(L part, uint32_t) { return warp_merge<LANES>(part, Sum()); }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    onepass_kernel(OUT* dx, const IN* y, const IN* g, int64_t rows, int64_t n64, int64_t dx_stride, int64_t y_stride,
                   int64_t g_stride) {
  __shared__ Meeting<kWarp> meeting;
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) meeting.open();
    arrive_in_cluster();
  }
  uint32_t round = 0;
  bool first_time = true;
  const int lanes = kWarp ? LANES : blockDim.x * CLUSTER, step = lanes * VECTOR;
  const int lane = kWarp ? threadIdx.x % LANES : (CLUSTER == 1 ? 0 : cluster_rank() * blockDim.x) + threadIdx.x;

  for (int64_t group = blockIdx.x / CLUSTER; group * ROWS < rows; group += gridDim.x / CLUSTER) {
    const int64_t row = group * ROWS + (kWarp ? threadIdx.x / LANES : 0);
    const bool present = row < rows;  // absent rows go through the merges, for their neighbours' sake, as nothing
    const IN* const y_row = y + (present ? row : 0) * y_stride;
    const IN* const g_row = g + (present ? row : 0) * g_stride;
    const int n = present ? (int)n64 : 0;
    const int phase = !kApart && !kWhole ? (int)((uint64_t)y_row / sizeof(IN) % VECTOR) : 0;
    int from = lane * VECTOR - phase;
    if (!kWarp) asm volatile("" : "+r"(from));
    Terms<SLOTS> terms;
    Loose<kWarp ? LANES : 32> loose;
    terms.load(y_row, g_row, from, step, n);
    loose.load(y_row, g_row, lane, phase, n);
    if (CLUSTER > 1 && first_time) await_cluster();  // a peer's shared memory is there once it has started
    first_time = false;

    L total = {};
    if constexpr (!(EVEN && kLog)) total = meeting.merge(add(terms.part(), loose.part()), round++);
    const A s = sum_of(total, terms.g[0], n64);
    terms.forget();
    if (!present) continue;
    if (!kWarp) asm volatile("" : "+r"(from));  // else the positions of the loads are kept for the stores, in registers
    OUT* const dx_row = dx + row * dx_stride;
    terms.finish_and_store(s, dx_row, from, step, n);
    loose.store(s, dx_row, lane, phase, n);
  }
}
