// cuda-rows: short rows, several of them a warp.
//
// Idea: LANES lanes share a row, 1 to 32 of them, and hold it in registers, so that a warp takes 32 / LANES rows at a
// time. What the lanes have found is merged by shuffles with the masks below LANES. No thread waits for another warp.
//
// Traffic: reads MN, writes MN.
//
// Limit: the registers of a warp: 32 lanes of 32 elements hold a row of 1024. In rows that do not begin at multiples of
// 16 bytes the elements at both ends are moved one by one, and of a short row these are many.
#include "vectors.cuh"

template <class Merge>
__device__ float merge_lanes(float value, Merge merge) {
  for (int mask = LANES / 2; mask > 0; mask /= 2) value = merge(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}

extern "C" __global__ void __launch_bounds__(1024)
    softmax_rows(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                 int64_t y_stride) {
  constexpr int kRows = 32 / LANES;  // of a warp
  const int64_t warp = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
  // All lanes of a warp go on together, as shuffles want it. Lanes without a row have one of no elements.
  for (int64_t first = warp * kRows; first < rows; first += warps * kRows) {
    const int64_t row = first + threadIdx.x % 32 / LANES, count = row < rows ? n : 0;
    const TYPE* in = x + row * x_stride;
    const int64_t begin = start_of(in) + int64_t(threadIdx.x) % LANES * V;
    Vec vectors[ITEMS];
    unroll<ITEMS>([&](int j) { vectors[j] = load(in, begin + j * LANES * V, count, NOTHING); });
    float values[ITEMS * V], maximum = NOTHING, sum = 0;
    unroll<ITEMS * V>([&](int i) {
      values[i] = get(vectors[i / V], i % V);
      maximum = fmaxf(maximum, values[i]);
    });
    maximum = merge_lanes(maximum, [](float a, float b) { return fmaxf(a, b); });
    unroll<ITEMS * V>([&](int i) {
      values[i] = fast_exp(values[i] - maximum);
      sum += values[i];
    });
    const float scale = 1 / merge_lanes(sum, [](float a, float b) { return a + b; });
    unroll<ITEMS>([&](int j) {
      store(y + row * y_stride, begin + j * LANES * V, count, pack([&](int k) { return values[j * V + k] * scale; }));
    });
  }
}
