// One warp merges the pairs of a row, each pair read once. Check it with
//   onepass gallery check merged.cu --like cuda-grid --emulate
#include "cuda_grid.cu"

extern "C" __global__ void __launch_bounds__(512)
    softmax_merged(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                   int64_t y_stride, float2* pairs, int64_t share) {
  __shared__ Partials partials;
  __shared__ float2 of_all;
  const int64_t step = share * blockDim.x * V, group = blockIdx.x / share;
  for (int64_t first = 0; first < rows; first += gridDim.x / share, pairs += gridDim.x) {
    const int64_t row = first + group, count = row < rows ? n : 0;
    const TYPE* in = x + row * x_stride;
    const int64_t begin = start_of(in) + (blockIdx.x % share * blockDim.x + threadIdx.x) * V;
    Vec kept[ITEMS];
    unroll<ITEMS>([&](int j) { kept[j] = load(in, begin + j * step, count, NOTHING); });
    float most = NOTHING, sum = 0;
    unroll<ITEMS>([&](int j) { add(kept[j], most, sum); });
    for (int64_t i = begin + ITEMS * step; i < count; i += step) add(load(in, i, count, NOTHING), most, sum);
    const float own = block_max(most, partials.maximum);
    sum = block_sum(sum * fast_exp(most - (own == NOTHING ? 0 : own)), partials.sum);
    if (threadIdx.x == 0) pairs[blockIdx.x] = {own, sum};
    grid_sync();
    if (threadIdx.x < 32) {
      float maximum = NOTHING, total = 0;
      for (int64_t b = threadIdx.x; b < share; b += 32) {
        const float2* pair = pairs + group * share + b;
        merge(maximum, total, __ldcg(&pair->x), __ldcg(&pair->y));
      }
      for (int mask = 16; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, maximum, mask);
        merge(maximum, total, other, __shfl_xor_sync(0xffffffff, total, mask));
      }
      if (threadIdx.x == 0) of_all = {maximum, 1 / total};
    }
    __syncthreads();
    const float2 whole = of_all;
    const auto write = [&](Vec v, int64_t i) {
      store(y + row * y_stride, i, count, pack([&](int k) { return fast_exp(get(v, k) - whole.x) * whole.y; }));
    };
    unroll<ITEMS>([&](int j) { write(kept[j], begin + j * step); });
    for (int64_t i = begin + ITEMS * step; i < count; i += step) write(load(in, i, count, NOTHING), i);
  }
}
