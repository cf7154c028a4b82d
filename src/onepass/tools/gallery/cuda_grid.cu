// cuda-grid: a few long rows, each shared by many blocks.
//
// Idea: several blocks take a row together and leave their pairs (maximum, sum) in memory for each other. Each thread
// keeps ITEMS vectors in registers. After a barrier of the whole grid every block reads the `share` pairs of its row
// and merges them. Blocks that wait for each other must all be resident, otherwise the last would never begin: the
// launch is cooperative, which the driver refuses if there are too many, and has one block per multiprocessor.
//
// Traffic: reads 2MN, writes MN; from memory reads MN, writes MN while a row fits the registers or the L2.
//
// Limit: what a row has beyond the registers, 16 vectors a thread, is read twice. While the whole grid waits at a
// barrier nothing is read, so that many rows take long.
#include "cuda_vector.cu"

// Adds 1 for each block to a word that the driver has cleared for cooperative launches, and 2^31 - (blocks - 1) for the
// first, which is 2^31 in all: its highest bit changes when the last one arrives, and the word needs no clearing.
__device__ void grid_sync() {
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile uint32_t* word;
    asm("mov.b64 %0, {%%envreg2, %%envreg1};" : "=l"(word));
    __threadfence();
    const uint32_t before = atomicAdd((uint32_t*)word + 1, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1);
    while (((before ^ word[1]) & 0x80000000u) == 0) continue;
    __threadfence();
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(512)
    softmax_grid(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                 int64_t y_stride, float2* pairs, int64_t share) {
  __shared__ Partials partials;
  const int64_t step = share * blockDim.x * V, group = blockIdx.x / share;
  for (int64_t first = 0; first < rows; first += gridDim.x / share, pairs += gridDim.x) {
    const int64_t row = first + group, count = row < rows ? n : 0;  // every block comes to every barrier
    const TYPE* in = x + row * x_stride;
    const int64_t begin = start_of(in) + (blockIdx.x % share * blockDim.x + threadIdx.x) * V;
    Vec kept[ITEMS];
    unroll<ITEMS>([&](int j) { kept[j] = load(in, begin + j * step, count, NOTHING); });
    float most = NOTHING, sum = 0, total = 0;
    unroll<ITEMS>([&](int j) { add(kept[j], most, sum); });
    for (int64_t i = begin + ITEMS * step; i < count; i += step) add(load(in, i, count, NOTHING), most, sum);
    const float own = block_max(most, partials.maximum);
    sum = block_sum(sum * fast_exp(most - (own == NOTHING ? 0 : own)), partials.sum);
    if (threadIdx.x == 0) pairs[blockIdx.x] = {own, sum};
    grid_sync();
    const float2* of_row = pairs + group * share;
    for (int64_t b = threadIdx.x; b < share; b += blockDim.x) most = fmaxf(most, __ldcg(&of_row[b].x));
    const float whole = block_max(most, partials.maximum);
    for (int64_t b = threadIdx.x; b < share; b += blockDim.x)
      total += __ldcg(&of_row[b].y) * fast_exp(__ldcg(&of_row[b].x) - whole);
    const float scale = 1 / block_sum(total, partials.sum);
    const auto write = [&](Vec v, int64_t i) {
      store(y + row * y_stride, i, count, pack([&](int k) { return fast_exp(get(v, k) - whole) * scale; }));
    };
    unroll<ITEMS>([&](int j) { write(kept[j], begin + j * step); });
    for (int64_t i = begin + ITEMS * step; i < count; i += step) write(load(in, i, count, NOTHING), i);
  }
}
