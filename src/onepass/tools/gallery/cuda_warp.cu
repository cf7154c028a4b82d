// cuda-warp: one warp a row.
//
// Idea: the 32 lanes of a warp take every 32nd element of a row. They merge what each has found, first a maximum, then
// a sum, by butterfly shuffles, from register to register: each lane exchanges values with the lane whose number
// differs in one bit, masks 16, 8, 4, 2, 1, and after five exchanges every lane holds the whole. `onepass gallery
// shuffle` shows it. A warp takes every W-th row, W the number of warps.
//
// Traffic: reads 3MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L1 or the L2.
//
// Limit: the bytes in flight, 4 per lane, although a load could bring 16. And the caches: a GPU holds thousands of
// warps, so that thousands of rows are in flight at once, and a row of some thousand elements has left the caches
// before it is read again.
#include "types.cuh"

// Merges the values of the lanes of a warp; every lane gets the result.
__device__ float warp_max(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// The maximum of no elements is -inf. (With the least positive float instead, a row of negative numbers would keep it.)
#define NOTHING __int_as_float(0xff800000)

extern "C" __global__ void softmax_warp(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                        int64_t y_stride) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);  // 64 bits: row * stride exceeds 2^31
  for (int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    float maximum = NOTHING;
    for (int64_t i = lane; i < n; i += 32) maximum = fmaxf(maximum, to_acc(in[i]));
    maximum = warp_max(maximum);
    float sum = 0;
    for (int64_t i = lane; i < n; i += 32) sum += expf(to_acc(in[i]) - maximum);
    sum = warp_sum(sum);
    for (int64_t i = lane; i < n; i += 32) out[i] = from_acc<TYPE>(expf(to_acc(in[i]) - maximum) / sum);
  }
}
