// grid.cu: long rows over many blocks of the whole chip, launched cooperatively. What fits is kept in registers and in
// shared memory while the parts of a row meet; what does not is read again, most of it from the L2 cache.
//
//   load all that fits -> each thread an online state, chunk by chunk as they arrive -> block -> grid barrier
//   -> finish: what has to be read again, then what was kept -> store
//
// One compiled instance a set of: IN, OUT, FUNCTION, SLOTS (vectors a thread keeps in registers), VECTOR, APART (see
// window.cuh). Any number of threads up to kThreads, of blocks that share a row, and of vectors in shared memory.
#include "grid.cuh"
#include "kept.cuh"
#include "merge.cuh"
#include "shelf.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr int kThreads = 512;
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

constexpr int kParts = 5;  // that a lane has on their way at a time

// By one warp: the state of a row from its `split` parts.
__device__ inline State<A> whole_row(const Part<A>* parts, int split) {
  A m = -INFINITY_;
  L l = Adder<OUT>::of(0);
  for (int first = threadIdx.x % 32; first < split; first += 32 * kParts) {
    Part<A> read[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      read[i].m = -INFINITY_, read[i].sum = read[i].rest = 0;
      if (first + 32 * i < split) read[i] = read_part(parts + first + 32 * i);
    }
    const A before = m;
#pragma unroll
    for (int i = 0; i < kParts; ++i) m = max_(m, read[i].m);
    l = scaled(l, exp_<A>(before - shift(m)));
#pragma unroll
    for (int i = 0; i < kParts; ++i) l = add(l, scaled(sum_of<OUT>(read[i]), exp_<A>(read[i].m - shift(m))));
  }
  merge_lanes(&m, &l);
  return {m, value_of(l)};
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n64, int64_t x_stride, int64_t y_stride, int split,
                   int shelf, Part<A>* parts) {
  __shared__ A maxima[32];
  __shared__ L sums[32];
  __shared__ State<A> whole;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int together = gridDim.x / split, mine = blockIdx.x / split, part = blockIdx.x % split;
  const int64_t step = (int64_t)split * blockDim.x * VECTOR;

  for (int64_t group = 0; group < rows; group += together) {
    const int64_t row = group + mine;
    const bool present = mine < together && row < rows;  // others come to the barrier all the same
    const int64_t n = present ? n64 : 0;
    const Source<IN, int64_t> from = {x + (present ? row : 0) * x_stride, n,
                                      row > 0 && row + 1 < rows && x_stride >= VECTOR};
    const int phase = APART ? 0 : (int)((uint64_t)from.row / sizeof(IN) % VECTOR);
    const int64_t shared = ((int64_t)part * blockDim.x + threadIdx.x) * VECTOR - phase;
    const int64_t kept = shared + shelf * step, again = kept + SLOTS * step;

    for (int c = 0; c < shelf; c += kChunk) {
      for_slots<VECTOR, kChunk>(
          shared + c * step, step, n, [&](int i, int64_t at) { Shared::fetch_whole(c + i, from.row + at); },
          [&](int i, int64_t at) { Shared::fetch(c + i, from, at); });
      commit_copies();
    }
    Chunk chunks[SLOTS / kChunk];
#pragma unroll
    for (int c = 0; c < SLOTS / kChunk; ++c) chunks[c].load<true>(from.row, kept + c * kChunk * step, step, n);

    A m = -INFINITY_;
    L l = Adder<OUT>::of(0);
    Chunk chunk;
    for (int64_t at = again; at < n; at += kChunk * step) {
      chunk.load<false>(from.row, at, step, n);
      absorb(chunk, &m, &l);
    }
    for (int c = 0; c < shelf; c += kChunk) {
      await_all_but((shelf - c) / kChunk - 1);
      chunk.take(c, shared + c * step, step, n);
      absorb(chunk, &m, &l);
    }
#pragma unroll
    for (int c = 0; c < SLOTS / kChunk; ++c) absorb(chunks[c], &m, &l);

    // One warp merges the parts of the block, meets the other blocks, and merges theirs: the chip's two thousand warps
    // would stand in line for the same few lines of the L2 cache.
    merge_lanes(&m, &l);
    if (lane == 0) maxima[warp] = m, sums[warp] = l;
    __syncthreads();
    if (warp == 0) {
      m = lane < warps ? maxima[lane] : -INFINITY_;
      l = lane < warps ? sums[lane] : Adder<OUT>::of(0);
      merge_lanes(&m, &l);
      Part<A>* const row_parts =
          parts + (group / together % 2) * gridDim.x + mine * split;  // of the last group but one
      if (lane == 0) {
        row_parts[part] = part_of(m, l);
        grid_barrier();
      }
      __syncwarp();
      const State<A> state = whole_row(row_parts, split);
      if (lane == 0) whole = state;
    }
    __syncthreads();
    if (!present) continue;
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
    for (int64_t at = again; at < n; at += kChunk * step) {
      chunk.load<false>(from.row, at, step, n);
      write(chunk, at);
    }
#pragma unroll
    for (int c = 0; c < SLOTS / kChunk; ++c) write(chunks[c], kept + c * kChunk * step);
    for (int c = 0; c < shelf; c += kChunk) {
      chunk.take(c, shared + c * step, step, n);
      write(chunk, shared + c * step);
    }
  }
}
