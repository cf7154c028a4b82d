// One warp a row, and a butterfly of pairs: a row is read twice. Check it with
//   onepass gallery check pairs.cu --emulate
#include "cuda_warp.cu"

struct Pair {
  float m, l;
};

__device__ Pair merge(Pair a, Pair b) {
  const float m = fmaxf(a.m, b.m), base = m == NOTHING ? 0 : m;  // of nothing: -inf - -inf would be NaN
  return {m, a.l * expf(a.m - base) + b.l * expf(b.m - base)};
}

extern "C" __global__ void softmax_pairs(const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride,
                                         int64_t y_stride) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
    const TYPE* in = x + row * x_stride;
    TYPE* out = y + row * y_stride;
    Pair pair = {NOTHING, 0};
    for (int64_t i = lane; i < n; i += 32) pair = merge(pair, {to_acc(in[i]), 1});
    for (int mask = 16; mask > 0; mask /= 2) {
      const float m = __shfl_xor_sync(0xffffffff, pair.m, mask), l = __shfl_xor_sync(0xffffffff, pair.l, mask);
      pair = merge(pair, {m, l});
    }
    for (int64_t i = lane; i < n; i += 32) out[i] = from_acc<TYPE>(expf(to_acc(in[i]) - pair.m) / pair.l);
  }
}
