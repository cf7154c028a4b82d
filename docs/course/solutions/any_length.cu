// The gradient of rows of any length, which are read twice. Check it with
//   onepass gallery check any_length.cu --like cuda-backward --emulate
#include "vectors.cuh"

extern "C" __global__ void __launch_bounds__(512)
    softmax_backward_any(const TYPE* __restrict__ y, const TYPE* __restrict__ g, TYPE* __restrict__ dx, int64_t rows,
                         int64_t n, int64_t y_stride, int64_t g_stride, int64_t dx_stride) {
  __shared__ float partials[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const TYPE *result = y + row * y_stride, *grad = g + row * g_stride;
    const int64_t step = int64_t(blockDim.x) * V, begin = start_of(result) + int64_t(threadIdx.x) * V;
    float sum = 0;
    for (int64_t i = begin; i < n; i += step) {
      const Vec a = load(result, i, n, 0), b = load(grad, i, n, 0);
      unroll<V>([&](int k) { sum += get(a, k) * get(b, k); });
    }
    sum = block_sum(sum, partials[turn]);
    for (int64_t i = begin; i < n; i += step) {
      const Vec a = load(result, i, n, 0), b = load(grad, i, n, 0);
      store(dx + row * dx_stride, i, n, pack([&](int k) { return get(a, k) * (get(b, k) - sum); }));
    }
  }
}
