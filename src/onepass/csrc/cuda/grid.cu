// grid.cu: long rows over many blocks of the whole chip, launched cooperatively. What fits is kept in registers and in
// shared memory while the parts of a row meet; what does not is read again, most of it from the L2 cache.
//
//   load all that fits -> each thread an online state, chunk by chunk as they arrive -> block -> the row's other blocks
//   -> finish: what has to be read again, then what was kept -> store
//
// One warp more than those that compute sends the block's part of a row to the others, and waits for theirs.
//
// One compiled instance a set of: IN, OUT, FUNCTION, SLOTS (vectors a thread keeps in registers, which may be none),
// VECTOR, APART (see window.cuh). Any number of threads up to kThreads, of blocks that share a row, and of vectors in
// shared memory. The code is short: where a kernel runs for ten microseconds, much of that may go to fetching it.
#define MESSENGERS 32  // threads of a block that take no part in a row
#include "grid.cuh"
#include "kept.cuh"
#include "merge.cuh"
#include "shelf.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr int kThreads = SLOTS ? 512 : 1024;  // the messengers among them
constexpr int kChunk = 4;  // vectors that are added to the state at a time

typedef Accumulator<OUT>::type A;
typedef Adder<OUT>::type L;
typedef Shelf<VECTOR, IN, true> Shared;

// A thread's elements of one chunk. Their exponentials are not kept: they are relative to what was the maximum then.
typedef Keep<FUNCTION, VECTOR, kChunk, IN, OUT, false>::type Chunk;

__device__ inline void absorb(Chunk& chunk, A* m, L* l) {
  const A before = *m;
  *m = max_(before, chunk.maximum());
  chunk.forget();
  *l = add(scaled(*l, exp_<A>(before - shift(*m))), Adder<OUT>::of(chunk.sum_below(*m)));
}

// Merges the pairs of the lanes of a warp.
__device__ inline void merge_lanes(A* m, L* l) {
  const A top = warp_merge<32>(*m, Max());
  *l = warp_merge<32>(scaled(*l, exp_<A>(*m - shift(top))), Sum());
  *m = top;
}

// Vectors on the shelf that are the row's in part or not at all: what is missing is nothing.
__device__ inline void complete(const IN* row, int64_t first, int64_t step, int64_t n, int shelf) {
#pragma unroll 1
  for (int c = 0; c < shelf; ++c) {
    const int64_t at = first + c * step;
    if (in_one<VECTOR>(at, n)) continue;
#pragma unroll 1
    for (int v = 0; v < VECTOR; ++v) Shared::slot(c)[v] = inside(at + v, n) ? row[at + v] : nothing<FUNCTION, IN>();
  }
}

constexpr int kAtOnce = 5;  // messages that a lane has on their way at a time

// By one warp: the state of a row from the messages of its `split` blocks.
__device__ inline State<A> whole_row(const Message* messages, int split, uint32_t turn) {
  A m = -INFINITY_;
  L l = Adder<OUT>::of(0);
  for (int first = threadIdx.x % 32; first < split; first += 32 * kAtOnce) {
    A part[kAtOnce];
    L sum[kAtOnce];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        part[i] = -INFINITY_, sum[i] = Adder<OUT>::of(0);
        if (first + 32 * i < split) there &= messages[first + 32 * i].read(&part[i], &sum[i], turn);
      }
    } while (!there);
    const A before = m;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) m = max_(m, part[i]);
    l = scaled(l, exp_<A>(before - shift(m)));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) l = add(l, scaled(sum[i], exp_<A>(part[i] - shift(m))));
  }
  __syncwarp();
  merge_lanes(&m, &l);
  return {m, value_of(l)};
}

// `split` blocks share a row, and `together` rows are taken at a time; a thread has `shelf` vectors in shared memory, and
// `extra` are read again.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride, int split,
                   int together, int shelf, int extra, Message* messages) {
  __shared__ A maxima[32];
  __shared__ L sums[32];
  __shared__ State<A> whole;
  const int workers = blockDim.x - MESSENGERS, warps = workers / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int mine = blockIdx.x / (unsigned)split, part = blockIdx.x - mine * split;
  const int64_t step = (int64_t)split * workers * VECTOR;
  const bool messenger = warp == warps;

  // A message is of a turn, counted from 1. What the memory of the call held before may look like any of them: every
  // block clears its own two, and no message is read before all have. (While the first row is on its way.)
  if (messenger && lane == 0) {
    messages[blockIdx.x].clear(), messages[gridDim.x + blockIdx.x].clear();
    grid_barrier();
  }

  uint32_t turn = 0;
  for (int64_t group = 0; group < rows; group += together) {
    ++turn;
    const int64_t row = group + mine;
    if (mine >= together || row >= rows) break;
    const IN* const x_row = x + row * x_stride;
    const int64_t n = n64;
    const int phase = APART ? 0 : (int)((uint64_t)x_row / sizeof(IN) % VECTOR);
    const int64_t shared = ((int64_t)part * workers + threadIdx.x) * VECTOR - phase;
    const int64_t kept = shared + shelf * step, again = kept + SLOTS * step;

    A m = -INFINITY_;
    L l = Adder<OUT>::of(0);
    Chunk chunk, chunks[SLOTS ? SLOTS / kChunk : 1];
    const auto come = [&](int c) {
      if (c < 0) {
        chunk.load<false>(x_row, again + (c + extra) * step, step, n);
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) chunk.put(i, *reinterpret_cast<const Chunk::Raw*>(Shared::slot(c + i)));
      }
    };
    if (!messenger) {
      bool all = true;
#pragma unroll 4
      for (int c = 0; c < shelf; ++c) {
        const bool one = in_one<VECTOR>(shared + c * step, n);
        if (one) Shared::fetch_whole(c, x_row + shared + c * step);
        all &= one;
        if (c % kChunk == kChunk - 1) commit_copies();
      }
#pragma unroll
      for (int c = 0; c < SLOTS / kChunk; ++c) chunks[c].load<true>(x_row, kept + c * kChunk * step, step, n);
      if (!all) complete(x_row, shared, step, n, shelf);

#pragma unroll 1
      for (int c = -extra; c < shelf; c += kChunk) {
        if (c >= 0) await_all_but((shelf - c) / kChunk - 1);
        come(c);
        absorb(chunk, &m, &l);
      }
#pragma unroll
      for (int c = 0; c < SLOTS / kChunk; ++c) absorb(chunks[c], &m, &l);
      merge_lanes(&m, &l);
      if (lane == 0) maxima[warp] = m, sums[warp] = l;
    }

    // One warp merges the parts of the block, and those of the row: the chip's two thousand warps would stand in line
    // for the same few lines of the L2 cache.
    __syncthreads();
    if (messenger) {
      m = lane < warps ? maxima[lane] : -INFINITY_;
      l = lane < warps ? sums[lane] : Adder<OUT>::of(0);
      merge_lanes(&m, &l);
      // Written over two turns on: by then all blocks of the row have sent theirs of the next, having read this one.
      Message* const of_row = messages + turn % 2 * gridDim.x + mine * split;
      if (lane == 0) of_row[part].write(m, l, turn);
      const State<A> state = whole_row(of_row, split, turn);
      if (lane == 0) whole = state;
    }
    __syncthreads();
    if (messenger) continue;
    const State<A> state = whole;
    if constexpr (kReduces) {
      if (part == 0 && threadIdx.x == 0) store_reduced<FUNCTION>(state, y + row * y_stride, rows);
      continue;
    }

    OUT* const y_row = y + row * y_stride;
    const auto write = [&](Chunk& chunk, int64_t first) {
      chunk.lower(state.m);
      chunk.finish(state);
      chunk.store(y_row, first, step, n);
    };
#pragma unroll 1
    for (int c = -extra; c < shelf; c += kChunk) {
      come(c);
      write(chunk, c < 0 ? again + (c + extra) * step : shared + c * step);
    }
#pragma unroll
    for (int c = 0; c < SLOTS / kChunk; ++c) write(chunks[c], kept + c * kChunk * step);
  }
}
