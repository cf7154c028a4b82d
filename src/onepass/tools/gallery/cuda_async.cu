// cuda-async: one block per row, the next row on its way while this one is computed.
//
// Idea: while a block computes a row, asynchronous copies bring the next one into shared memory. Such a copy (cp.async,
// compute capability 8.0) moves 16 bytes and takes no register; the thread goes on at once and waits later. So a block
// reads from memory even while its threads wait for each other. It has room for two rows, and a thread reads only what
// it has copied itself. Few blocks are launched; each takes many rows.
//
// Traffic: reads MN, writes MN.
//
// Limit: the shared memory, which holds two rows: 227 KB a block on an H200, 28000 floats. It also limits how many
// blocks are resident, and short rows leave each of them little to compute.
#include "cuda_vector.cu"

extern __shared__ Vec room[];  // for two rows

// Begins to copy a row. Vectors that reach beyond the row are loaded and stored at once.
__device__ void fetch(Vec* to, const TYPE* in, int64_t n) {
  for (int64_t j = threadIdx.x, i = start_of(in) + j * V; i < n; j += blockDim.x, i = start_of(in) + j * V) {
    if (is_whole(in, i, n))
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to + j))),
                   "l"(in + i)
                   : "memory");
    else
      to[j] = load(in, i, n, NOTHING);
  }
}

extern "C" __global__ void __launch_bounds__(1024)
    softmax_async(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                  int64_t y_stride) {
  __shared__ Partials partials;
  Vec *here = room, *next = room + (n + V - 1) / V + 1;  // a row that begins within a vector takes one vector more
  if (blockIdx.x < rows) fetch(here, x + blockIdx.x * x_stride, n);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (row + gridDim.x < rows) fetch(next, x + (row + gridDim.x) * x_stride, n);
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");  // all but the last group are there: this row
    const int64_t start = start_of(x + row * x_stride);
    float maximum = NOTHING, sum = 0;
    for (int64_t j = threadIdx.x; start + j * V < n; j += blockDim.x) add(load_shared(here + j), maximum, sum);
    const float whole = block_max(maximum, partials.maximum);
    const float scale = 1 / block_sum(sum * fast_exp(maximum - whole), partials.sum);
    for (int64_t j = threadIdx.x; start + j * V < n; j += blockDim.x) {
      const Vec v = load_shared(here + j);
      store(y + row * y_stride, start + j * V, n, pack([&](int k) { return fast_exp(get(v, k) - whole) * scale; }));
    }
    Vec* const free = here;
    here = next, next = free;
  }
}
