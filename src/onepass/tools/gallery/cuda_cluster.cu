// cuda-cluster: one cluster of blocks per row, the row in their registers.
//
// Idea: the blocks of a cluster hold a row in their registers and write into each other's shared memory. A cluster
// (compute capability 9.0) is up to 8 blocks that run at the same time on neighbouring multiprocessors. Each block has
// the exponentials of its part relative to its own maximum, and writes its pair (maximum, sum) into the shared memory
// of every block. After a barrier of the cluster each block has all pairs and merges them.
//
// Traffic: reads MN, writes MN.
//
// Limit: 8 blocks of 512 threads of 64 elements hold a row of 262144. At the barrier a block waits for the slowest of
// its cluster, which a row that fits one block need not do; and a row has no more than 8 multiprocessors.
#include "vectors.cuh"

__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes a pair at `at` in the shared memory of block `peer` of the cluster.
__device__ void send(float2* at, uint32_t peer, float maximum, float sum) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(uint32_t(__cvta_generic_to_shared(at))), "r"(peer));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(maximum), "f"(sum) : "memory");
}

extern "C" __global__ void __launch_bounds__(512)
    softmax_cluster(const TYPE* __restrict__ x, TYPE* __restrict__ y, int64_t rows, int64_t n, int64_t x_stride,
                    int64_t y_stride) {
  __shared__ Partials partials;
  __shared__ float2 pairs[2][CLUSTER];  // for rows in turn: a block that is ahead sends the pair of its next row
  const uint32_t rank = blockIdx.x % CLUSTER;
  cluster_sync();  // all blocks have begun
  int turn = 0;
  for (int64_t row = blockIdx.x / CLUSTER; row < rows; row += gridDim.x / CLUSTER, turn ^= 1) {
    const TYPE* in = x + row * x_stride;
    const int64_t step = int64_t(blockDim.x) * V, begin = start_of(in) + rank * ITEMS * step + threadIdx.x * V;
    Vec vectors[ITEMS];
    unroll<ITEMS>([&](int j) { vectors[j] = load(in, begin + j * step, n, NOTHING); });
    float values[ITEMS * V], own = NOTHING, sum = 0, whole = NOTHING, total = 0;
    unroll<ITEMS * V>([&](int i) { own = fmaxf(own, values[i] = get(vectors[i / V], i % V)); });
    own = block_max(own, partials.maximum);
    unroll<ITEMS * V>([&](int i) { sum += values[i] = fast_exp(values[i] - (own == NOTHING ? 0 : own)); });
    sum = block_sum(sum, partials.sum);
    if (threadIdx.x < CLUSTER) send(&pairs[turn][rank], threadIdx.x, own, sum);
    cluster_sync();
    unroll<CLUSTER>([&](int r) { whole = fmaxf(whole, pairs[turn][r].x); });
    unroll<CLUSTER>([&](int r) { total += pairs[turn][r].y * fast_exp(pairs[turn][r].x - whole); });
    const float scale = fast_exp(own - whole) / total;
    unroll<ITEMS>([&](int j) {
      store(y + row * y_stride, begin + j * step, n, pack([&](int k) { return values[j * V + k] * scale; }));
    });
  }
}
