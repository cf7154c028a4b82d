// cuda-registers: one block per row, the row in registers.
//
// Idea: the threads of a block hold a whole row in their registers. All loads are issued before the first element is
// used, so that a thread has ITEMS * 16 bytes on their way. The elements become exponentials in place. The launch has
// as many threads as the row needs; ITEMS is a constant of the compilation, because registers have no addresses.
//
// Traffic: reads MN, writes MN.
//
// Limit: the registers. 1024 threads of 32 elements hold a row of 32768. Between its loads and its stores a block waits
// twice for all of its threads, and only other blocks of the multiprocessor keep memory busy in the meantime. A row of
// some hundred elements leaves a block next to nothing to do.
#include "vectors.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_registers(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                      int64_t y_stride) {
  __shared__ Partials partials;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const TYPE* in = x + row * x_stride;
    const int64_t begin = start_of(in) + int64_t(threadIdx.x) * V, step = int64_t(blockDim.x) * V;
    Vec vectors[ITEMS];
    unroll<ITEMS>([&](int j) { vectors[j] = load(in, begin + j * step, n, NOTHING); });
    float values[ITEMS * V], maximum = NOTHING, sum = 0;
    unroll<ITEMS * V>([&](int i) {
      values[i] = get(vectors[i / V], i % V);
      maximum = fmaxf(maximum, values[i]);
    });
    maximum = block_max(maximum, partials.maximum);
    unroll<ITEMS * V>([&](int i) {
      values[i] = fast_exp(values[i] - maximum);
      sum += values[i];
    });
    const float scale = 1 / block_sum(sum, partials.sum);
    unroll<ITEMS>([&](int j) {
      store(y + row * y_stride, begin + j * step, n, pack([&](int k) { return values[j * V + k] * scale; }));
    });
  }
}
