// One block a row, the row in shared memory: it is read once. Rows of at most 8192 elements. Check it with
//   onepass gallery check shared.cu --emulate
#include "cuda_block.cu"

extern "C" __global__ void softmax_shared(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                          int64_t y_stride) {
  __shared__ Partials partials;
  __shared__ float kept[8192];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    float maximum = NOTHING, sum = 0;
    // A thread reads only what it has written itself, so that no barrier stands between the loops.
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) maximum = fmaxf(maximum, kept[i] = to_acc(in[i]));
    maximum = block_max(maximum, partials.maximum);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += kept[i] = expf(kept[i] - maximum);
    sum = block_sum(sum, partials.sum);
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = from_acc<TYPE>(kept[i] / sum);
  }
}
