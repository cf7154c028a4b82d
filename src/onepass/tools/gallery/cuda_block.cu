// cuda-block: one block per row.
//
// Idea: all threads of a block take a row together. Each warp merges its lanes by shuffles, as in cuda-warp, and leaves
// the result in shared memory; after a barrier every warp reads the results of all warps and merges them once more. A
// block takes every B-th row, B the number of blocks.
//
// Traffic: reads 3MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L1 or the L2.
//
// Limit: three passes, each of which waits for the one before: while a block waits at a barrier it loads nothing.
// Short rows leave most threads idle; long rows fall out of the caches between the passes.
#include "cuda_warp.cu"

// The maximum and the sum have an array each, because there is no barrier after the reads: with one array a warp that
// is ahead would overwrite a maximum that a warp behind has yet to read. Before an array is written again, for the
// next row, all warps have passed the barrier of the other array.
struct Partials {
  float maximum[32], sum[32];
};

__device__ float block_max(float value, float* partials) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : NOTHING);
}

__device__ float block_sum(float value, float* partials) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : 0);
}

extern "C" __global__ void softmax_block(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                         int64_t y_stride) {
  __shared__ Partials partials;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    float maximum = NOTHING;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) maximum = fmaxf(maximum, to_acc(in[i]));
    maximum = block_max(maximum, partials.maximum);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += expf(to_acc(in[i]) - maximum);
    sum = block_sum(sum, partials.sum);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = from_acc<TYPE>(expf(to_acc(in[i]) - maximum) / sum);
  }
}
