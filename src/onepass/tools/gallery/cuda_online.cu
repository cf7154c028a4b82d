// cuda-online: one block per row, maximum and sum in one pass.
//
// Idea: each thread keeps the pair (maximum, sum) of the elements it has seen, and rescales the sum when a larger one
// comes (Milakov and Gimelshein, arXiv:1805.02867). Then the block finds the maximum of the maxima, each thread
// rescales its sum to it, and the sums are added up.
//
// Traffic: reads 2MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L1 or the L2.
//
// Limit: for rows that do not stay in the caches memory allows 0.67 of a copy's speed; for cuda-block it is 0.5. An
// H200 reaches 0.4: a thread asks for 4 bytes at a time, and each element waits for the pair of the one before it.
#include "cuda_block.cu"

extern "C" __global__ void softmax_online(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                          int64_t y_stride) {
  __shared__ Partials partials;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    float maximum = NOTHING, sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const float value = to_acc(in[i]);
      if (value == NOTHING) continue;  // adds nothing, and before the first other value -inf - -inf would be NaN
      if (value > maximum) {
        sum *= expf(maximum - value);
        maximum = value;
      }
      sum += expf(value - maximum);
    }
    const float whole = block_max(maximum, partials.maximum);
    sum = block_sum(sum * expf(maximum - whole), partials.sum);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = from_acc<TYPE>(expf(to_acc(in[i]) - whole) / sum);
  }
}
