// Eight lanes a row, four rows a warp. Check it with
//   onepass gallery check eighths.cu --emulate
#include "cuda_warp.cu"

template <class Merge>
__device__ float merge_eight(float value, Merge merge) {
  for (int mask = 4; mask > 0; mask /= 2) value = merge(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}

extern "C" __global__ void softmax_eighths(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                           int64_t y_stride) {
  const int lane = threadIdx.x % 8;
  const int64_t warp = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t first = warp * 4; first < rows; first += warps * 4) {
    const int64_t row = first + threadIdx.x % 32 / 8, count = row < rows ? n : 0;
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    float maximum = NOTHING, sum = 0;
    for (int64_t i = lane; i < count; i += 8) maximum = fmaxf(maximum, to_acc(in[i]));
    maximum = merge_eight(maximum, [](float a, float b) { return fmaxf(a, b); });
    for (int64_t i = lane; i < count; i += 8) sum += expf(to_acc(in[i]) - maximum);
    sum = merge_eight(sum, [](float a, float b) { return a + b; });
    for (int64_t i = lane; i < count; i += 8) out[i] = from_acc<TYPE>(expf(to_acc(in[i]) - maximum) / sum);
  }
}
