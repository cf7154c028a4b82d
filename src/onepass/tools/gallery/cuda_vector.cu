// cuda-vector: one block per row, 16 bytes at a time.
//
// Idea: one instruction loads or stores 16 bytes, a vector of four floats or eight half-precision numbers. A vector
// begins at a multiple of 16 bytes, which a row need not do. The first one therefore begins up to V - 1 elements before
// the row, and where a vector reaches beyond the row its elements are moved one by one (vectors.cuh). The pair
// (maximum, sum) is rescaled once a vector, and an exponential is a multiplication and one instruction.
//
// Traffic: reads 2MN, writes MN; from memory reads MN, writes MN while the rows in flight stay in the L1 or the L2.
//
// Limit: the second read. The rows in flight do not stay in the L1, so that the second read asks the L2, or memory.
#include "vectors.cuh"

// Takes a vector into the pair (maximum, sum). As long as all is -inf the sum is relative to 0, since -inf - -inf would
// be NaN.
__device__ void add(const Vec& v, float& maximum, float& sum) {
  float most = maximum;
  unroll<V>([&](int k) { most = fmaxf(most, get(v, k)); });
  const float base = most == NOTHING ? 0 : most;
  sum *= fast_exp(maximum - base);
  unroll<V>([&](int k) { sum += fast_exp(get(v, k) - base); });
  maximum = most;
}

extern "C" __global__ void softmax_vector(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n,
                                          int64_t x_stride, int64_t y_stride) {
  __shared__ Partials partials;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const TYPE* in = x + row * x_stride;
    const int64_t begin = start_of(in) + int64_t(threadIdx.x) * V, step = int64_t(blockDim.x) * V;
    float maximum = NOTHING, sum = 0;
    for (int64_t i = begin; i < n; i += step) add(load(in, i, n, NOTHING), maximum, sum);
    const float whole = block_max(maximum, partials.maximum);
    const float scale = 1 / block_sum(sum * fast_exp(maximum - whole), partials.sum);
    for (int64_t i = begin; i < n; i += step) {
      const Vec v = load(in, i, n, NOTHING);
      store(y + row * y_stride, i, n, pack([&](int k) { return fast_exp(get(v, k) - whole) * scale; }));
    }
  }
}
