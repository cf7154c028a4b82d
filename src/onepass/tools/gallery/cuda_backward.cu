// cuda-backward: the gradient of cuda-registers.
//
// Idea: the gradient of the input is y * (g - sum(y * g)), with the result y of the forward and its gradient g. One
// block takes a row and holds y and g in registers, as they are stored. It needs one reduction and no exponential.
//
// Traffic: reads 2MN, writes MN.
//
// Limit: the registers. 512 threads of 8 vectors of each of the two hold a row of 16384 floats, or of 32768 elements
// of a half type. It has no fewer bytes than a sum of two matrices, which is what it is compared with.
#include "vectors.cuh"

extern "C" __global__ void __launch_bounds__(512)
    softmax_backward(const TYPE* __restrict__ y, const TYPE* __restrict__ g, TYPE* __restrict__ dx, int64_t rows,
                     int64_t n, int64_t y_stride, int64_t g_stride, int64_t dx_stride) {
  __shared__ float partials[2][32];  // in turn: there is one barrier a row
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t step = int64_t(blockDim.x) * V, begin = start_of(y + row * y_stride) + int64_t(threadIdx.x) * V;
    Vec results[ITEMS], grads[ITEMS];
    unroll<ITEMS>([&](int j) {
      results[j] = load(y + row * y_stride, begin + j * step, n, 0);
      grads[j] = load(g + row * g_stride, begin + j * step, n, 0);
    });
    float sum = 0;
    unroll<ITEMS * V>([&](int i) { sum += get(results[i / V], i % V) * get(grads[i / V], i % V); });
    sum = block_sum(sum, partials[turn]);
    unroll<ITEMS>([&](int j) {
      const Vec dx_vector = pack([&](int k) { return get(results[j], k) * (get(grads[j], k) - sum); });
      store(dx + row * dx_stride, begin + j * step, n, dx_vector);
    });
  }
}
