// rows_staged.cu: short rows of any length that lie one after another, a tile of rows a block. The tile comes and goes
// as one piece of memory, in whole vectors, whatever the length of its rows; the rows are taken out of shared memory.
//
//   tile -> shared memory -> a few lanes a row: maximum, sum of exp -> finish -> shared memory -> tile
//
// One compiled instance a set of: IN, OUT, FUNCTION, LANES (threads a row, at most 32), ROWS (rows a block takes at a
// time), SLOTS (elements a thread keeps). The elements of a row go to the threads as in rows_onchip.cu with VECTOR 1,
// so that the bits are the same.
#include "row_fragment.cuh"
#include "block_reduce.cuh"
#include "async_copy.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr int kThreads = LANES * ROWS;
#if __CUDA_ARCH__ >= 900
constexpr int kOther = 32;  // registers beside the elements
#else
constexpr int kOther = 40;
#endif
constexpr int kFit = 65536 / (kThreads * (kOther + SLOTS * 9 / 8));
constexpr int kBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;
constexpr int kBytes = 16;  // of a vector

// A piece of `bytes` bytes at `memory` and its place in shared memory, which begins at the same byte of a vector.
struct Piece {
  int skip, bytes;  // of the first vector; altogether
  __device__ Piece(const void* memory, int64_t bytes) : skip((int)((uint64_t)memory % kBytes)), bytes((int)bytes) {}
  __device__ int vectors() const { return (skip + bytes + kBytes - 1) / kBytes; }
};

__device__ inline void fetch(const IN* memory, Piece piece, unsigned char* place) {
  const char* const window = reinterpret_cast<const char*>(memory) - piece.skip;
  for (int at = threadIdx.x * kBytes; at < piece.vectors() * kBytes; at += kThreads * kBytes) {
    if (at >= piece.skip && at + kBytes <= piece.skip + piece.bytes) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(place + at)),
                   "l"(window + at)
                   : "memory");
    } else {
      for (int i = at; i < at + kBytes; i += sizeof(IN)) {
        if (i >= piece.skip && i < piece.skip + piece.bytes)
          *reinterpret_cast<IN*>(place + i) = *reinterpret_cast<const IN*>(window + i);
      }
    }
  }
  commit_copies();
  await_copies<0>();
}

__device__ inline void write(OUT* memory, Piece piece, const unsigned char* place) {
  char* const window = reinterpret_cast<char*>(memory) - piece.skip;
  for (int at = threadIdx.x * kBytes; at < piece.vectors() * kBytes; at += kThreads * kBytes) {
    if (at >= piece.skip && at + kBytes <= piece.skip + piece.bytes) {
      store(window + at, *reinterpret_cast<const Vector<uint32_t, 4>*>(place + at));
    } else {
      for (int i = at; i < at + kBytes; i += sizeof(OUT)) {
        if (i >= piece.skip && i < piece.skip + piece.bytes)
          *reinterpret_cast<OUT*>(window + i) = *reinterpret_cast<const OUT*>(place + i);
      }
    }
  }
}

// `tile` rows a block, which are read at `dynamic_shared` and written `apart` bytes on; with `apart` 0 they are written
// where they were read.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride, int tile,
                   int apart) {
  typedef Accumulator<OUT>::type A;
  typedef Adder<OUT>::type L;
  const int n = (int)n64, lane = threadIdx.x % LANES;
  const A sign = FUNCTION == SOFTMIN ? A(-1) : A(1);

  for (int64_t begin = (int64_t)blockIdx.x * tile; begin < rows; begin += (int64_t)gridDim.x * tile) {
    const int here = rows - begin < tile ? (int)(rows - begin) : tile;
    const Piece from(x + begin * n, (int64_t)here * n * sizeof(IN)), to(y + begin * n, (int64_t)here * n * sizeof(OUT));
    const IN* const in = reinterpret_cast<const IN*>(dynamic_shared + from.skip);
    OUT* const out = reinterpret_cast<OUT*>(dynamic_shared + apart + to.skip);
    fetch(x + begin * n, from, dynamic_shared);
    __syncthreads();
    for (int first = 0; first < here; first += ROWS) {
      const int at = first + threadIdx.x / LANES, length = at < here ? n : 0;
      const IN* const x_row = in + at * n;
      A kept[SLOTS];
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) {
        const int j = i * LANES + lane;
        kept[i] = sign * load_value<IN, OUT>(j < length ? x_row[j] : nothing<FUNCTION, IN>());
      }
      A m = -INFINITY_;
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) m = max_(kept[i], m);
      m = warp_merge<LANES>(m, Max());
      const A s = shift(m);
      const L l = warp_merge<LANES>(tree_sum<OUT, SLOTS>([&](int i) {
                                      if (FUNCTION == LOG_SOFTMAX) return exp_to_add(kept[i] - s);
                                      return kept[i] = exp_<OUT>(kept[i] - s);
                                    }),
                                    Sum());
      if (at >= here) continue;
      const State<A> state = {m, value_of(l)};
      if constexpr (kReduces) {
        if (lane == 0) store_reduced<FUNCTION>(state, y + (begin + at) * y_stride, rows);
      } else {
        const Finish<FUNCTION, OUT, A> finish(state);
        OUT* const y_row = out + at * n;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
          const int j = i * LANES + lane;
          if (j < n) y_row[j] = narrow<OUT>(FUNCTION == LOG_SOFTMAX ? finish(kept[i]) : finish.from_exp(kept[i]));
        }
      }
    }
    __syncthreads();
    if (!kReduces) write(y + begin * n, to, dynamic_shared + apart);
    if (begin + (int64_t)gridDim.x * tile < rows) __syncthreads();  // before the next tile comes in
  }
}
