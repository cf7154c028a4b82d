// A cluster that exchanges maxima first, and sums relative to the row's maximum after them. Check it with
//   onepass gallery check maxima.cu --like cuda-cluster --emulate
#include "cuda_cluster.cu"

extern "C" __global__ void __launch_bounds__(512)
    softmax_maxima(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                   int64_t y_stride) {
  __shared__ Partials partials;
  __shared__ float2 maxima[2][CLUSTER], sums[2][CLUSTER];
  const uint32_t rank = blockIdx.x % CLUSTER;
  cluster_sync();
  int turn = 0;
  for (int64_t row = blockIdx.x / CLUSTER; row < rows; row += gridDim.x / CLUSTER, turn ^= 1) {
    const TYPE* in = x + row * x_stride;
    const int64_t step = int64_t(blockDim.x) * V, begin = start_of(in) + rank * ITEMS * step + threadIdx.x * V;
    Vec vectors[ITEMS];
    unroll<ITEMS>([&](int j) { vectors[j] = load(in, begin + j * step, n, NOTHING); });
    float values[ITEMS * V], whole = NOTHING, sum = 0, total = 0;
    unroll<ITEMS * V>([&](int i) { whole = fmaxf(whole, values[i] = get(vectors[i / V], i % V)); });
    whole = block_max(whole, partials.maximum);
    if (threadIdx.x < CLUSTER) send(&maxima[turn][rank], threadIdx.x, whole, 0);
    cluster_sync();
    unroll<CLUSTER>([&](int r) { whole = fmaxf(whole, maxima[turn][r].x); });
    unroll<ITEMS * V>([&](int i) { sum += values[i] = fast_exp(values[i] - whole); });
    sum = block_sum(sum, partials.sum);
    if (threadIdx.x < CLUSTER) send(&sums[turn][rank], threadIdx.x, sum, 0);
    cluster_sync();
    unroll<CLUSTER>([&](int r) { total += sums[turn][r].x; });
    const float scale = 1 / total;
    unroll<ITEMS>([&](int j) {
      store(y + row * y_stride, begin + j * step, n, pack([&](int k) { return values[j * V + k] * scale; }));
    });
  }
}
