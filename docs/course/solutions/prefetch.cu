// The next row on its way to registers while this one is computed. Check it with
//   onepass gallery check prefetch.cu --like cuda-registers --blocks 2 --emulate
#include "vectors.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_prefetch(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                     int64_t y_stride) {
  __shared__ Partials partials;
  const int64_t step = int64_t(blockDim.x) * V;
  const auto begin_of = [&](int64_t row) { return start_of(x + row * x_stride) + int64_t(threadIdx.x) * V; };
  Vec next[ITEMS];
  const auto fetch = [&](int64_t row) {
    const int64_t count = row < rows ? n : 0;
    unroll<ITEMS>([&](int j) { next[j] = load(x + row * x_stride, begin_of(row) + j * step, count, NOTHING); });
  };
  fetch(blockIdx.x);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float values[ITEMS * V], maximum = NOTHING, sum = 0;
    unroll<ITEMS * V>([&](int i) { maximum = fmaxf(maximum, values[i] = get(next[i / V], i % V)); });
    fetch(row + gridDim.x);
    maximum = block_max(maximum, partials.maximum);
    unroll<ITEMS * V>([&](int i) { sum += values[i] = fast_exp(values[i] - maximum); });
    const float scale = 1 / block_sum(sum, partials.sum);
    unroll<ITEMS>([&](int j) {
      const Vec v = pack([&](int k) { return values[j * V + k] * scale; });
      store(y + row * y_stride, begin_of(row) + j * step, n, v);
    });
  }
}
