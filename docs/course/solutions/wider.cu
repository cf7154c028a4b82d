// Sixteen lanes side by side. Check it with
//   onepass gallery check wider.cu --like cuda-columns --emulate
#include "vectors.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    softmax_wider(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                    int64_t y_stride) {
  __shared__ float2 pairs[32][16 * V];  // of each warp
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, step = blockDim.x / 16;
  for (int64_t tile = blockIdx.x; tile * 16 * V < n; tile += gridDim.x) {
    const int64_t column = (tile * 16 + threadIdx.x % 16) * V;
    float maximum[V], sum[V];
    unroll<V>([&](int k) { maximum[k] = NOTHING, sum[k] = 0; });
    Vec v[4];
    const auto fetch = [&](int j, int64_t row) {
      v[j] = load(x + row * x_stride, column, row < rows ? n : 0, NOTHING);
    };
    for (int64_t row = threadIdx.x / 16; row < rows; row += 4 * step) {
      unroll<4>([&](int j) { fetch(j, row + j * step); });
      unroll<V>([&](int k) {
        const float a = get(v[0], k), b = get(v[1], k), c = get(v[2], k), d = get(v[3], k);
        const float most = fmaxf(maximum[k], fmaxf(fmaxf(a, b), fmaxf(c, d))), base = most == NOTHING ? 0 : most;
        sum[k] *= fast_exp(maximum[k] - base), maximum[k] = most;
        sum[k] += (fast_exp(a - base) + fast_exp(b - base)) + (fast_exp(c - base) + fast_exp(d - base));
      });
    }
    for (int mask = 16; mask >= 16; mask /= 2)
      unroll<V>([&](int k) {
        const float other = __shfl_xor_sync(0xffffffff, maximum[k], mask);
        merge(maximum[k], sum[k], other, __shfl_xor_sync(0xffffffff, sum[k], mask));
      });
    __syncthreads();  // the pairs of the tile before are read
    if (threadIdx.x % 32 < 16) unroll<V>([&](int k) { pairs[warp][threadIdx.x % 16 * V + k] = {maximum[k], sum[k]}; });
    __syncthreads();
    for (int w = 1; w < warps; ++w)
      unroll<V>([&](int k) {
        const float2 pair = pairs[(warp + w) % warps][threadIdx.x % 16 * V + k];
        merge(maximum[k], sum[k], pair.x, pair.y);
      });
    unroll<V>([&](int k) { sum[k] = 1 / sum[k]; });
    for (int64_t row = threadIdx.x / 16; row < rows; row += 4 * step) {
      unroll<4>([&](int j) { fetch(j, row + j * step); });
      unroll<4>([&](int j) {
        const int64_t at = row + j * step, count = at < rows ? n : 0;
        const auto value = [&](int k) { return fast_exp(get(v[j], k) - maximum[k]) * sum[k]; };
        store(y + at * y_stride, column, count, pack(value));
      });
    }
  }
}
