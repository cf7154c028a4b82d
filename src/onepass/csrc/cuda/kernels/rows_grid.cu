// rows_grid.cu: long rows over many blocks of the whole chip, launched cooperatively. What fits is kept in registers
// and in shared memory while the parts of a row meet; what does not is read again, most of it from the L2 cache.
//
//   a block's part of a row, chunk by chunk, one of them on its way -> each thread an online state -> block -> the
//   row's other blocks -> finish, what was not kept being read again -> store
//
// One warp more than those that compute, the messenger, sends the block's part of a row to the others and waits for
// theirs. It also takes the few elements before the first and after the last whole vector.
//
// One compiled instance a set of: IN, OUT, FUNCTION, SLOTS (vectors a thread keeps in registers, none of rows that are
// much longer than the chip holds), VECTOR, EDGES (see vector_access.cuh). Any number of threads up to kThreads, of
// blocks that share a row, and of vectors in shared memory.
#include "grid_sync.cuh"
#include "row_fragment.cuh"
#include "block_reduce.cuh"
#include "async_copy.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE;
constexpr int kMessengers = 32;  // threads of a block that take no part in whole vectors
constexpr int kThreads = 512;    // the messengers among them
// Vectors a thread takes at a time, while it waits for as many: fewer of doubles, whose exponentials take registers.
constexpr int kChunk = VECTOR == 2 ? 2 : SLOTS ? 4 : 8;
constexpr int kKept = SLOTS / kChunk;  // chunks in registers

typedef Accumulator<OUT>::type A;
typedef Merged<OUT>::type L;

// A thread's elements of one chunk. Their exponentials are not kept: they are relative to what was the maximum then.
typedef Keep<FUNCTION, VECTOR, kChunk, IN, OUT, false>::type Chunk;
typedef Chunk::Raw Raw;
constexpr int kRaw = sizeof(Raw);

__device__ inline void absorb(Chunk& chunk, A* m, L* l) {
  const A before = *m;
  *m = max_(before, chunk.maximum());
  chunk.forget();
  *l = add(scaled(*l, exp_<A>(before - shift(*m))), Merged<OUT>::of(chunk.sum_below(*m)));
}

// A warp's pair from those of its lanes.
__device__ inline void merge_lanes(A* m, L* l) {
  const A top = warp_max(*m);
  *l = warp_merge<32>(scaled(*l, exp_to_add(*m - shift_to_add(top))), Sum());
  *m = top;
}

// A vector that changes no state.
__device__ inline Raw no_vector() {
  Vector<IN, VECTOR> none;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) none.at[v] = nothing<FUNCTION, IN>();
  return __builtin_bit_cast(Raw, none);
}

// What is read once may be the first to leave the L2 cache. Where most is read again that costs 3%, as in other tiers.
constexpr bool kOnce = SLOTS > 0;

template <bool Once>
__device__ inline Raw read_vector(const IN* at) {
  if constexpr (kApart) {
    Vector<IN, VECTOR> one;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) one.at[v] = at[v];
    return __builtin_bit_cast(Raw, one);
  } else {
    return Chunk::read<Once>(at);
  }
}

// Asks for a thread's vectors of a chunk, of which there are those at 0, workers, 2 workers, ... below `here`.
template <bool Once>
__device__ inline void ask_for(Raw* ahead, const IN* at, int here, int workers) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i, at += workers * VECTOR) {
    ahead[i] = no_vector();
    if (here > i * workers) ahead[i] = read_vector<Once>(at);
  }
}

// Of the threads of a block that compute.
__device__ inline void workers_meet(int workers) { asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory"); }

constexpr int kAtOnce = 5;  // messages that a lane has on their way at a time

// By one warp: the state of a row from the messages of its `split` blocks.
__device__ inline State<A> whole_row(const Message* messages, int split, uint32_t turn) {
  A m = -INFINITY_;
  L l = Merged<OUT>::of(0);
  for (int first = threadIdx.x % 32; first < split; first += 32 * kAtOnce) {
    A part[kAtOnce];
    L sum[kAtOnce];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        part[i] = -INFINITY_, sum[i] = Merged<OUT>::of(0);
        if (first + 32 * i < split) there &= messages[first + 32 * i].read(&part[i], &sum[i], turn);
      }
    } while (!there);
    const A before = m;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) m = max_(m, part[i]);
    l = scaled(l, exp_to_add(before - shift_to_add(m)));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) l = add(l, scaled(sum[i], exp_to_add(part[i] - shift_to_add(m))));
  }
  __syncwarp();
  merge_lanes(&m, &l);
  return {m, value_of(l)};
}

// The blocks of one y share a row, and as many rows are taken at a time as there are. Chunks of `wide` vectors go to
// the blocks of a row in turn, so that all read in one region of memory at a time: `most` to each. A block keeps the
// first kKept of its own in registers and the last `places` in shared memory; those between are read again. Where they
// are nearly all (SLOTS is 0) they are then anybody's: each block takes the next, so that none ends after the others.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    onepass_kernel(const IN* x, OUT* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride, int places,
                   int wide, int most, Message* messages) {
  __shared__ A maxima[32];
  __shared__ L sums[32];
  __shared__ State<A> whole;
  __shared__ uint32_t turns[2];
  const int workers = blockDim.x - kMessengers, warps = workers / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = gridDim.x, together = gridDim.y, part = blockIdx.x, mine = blockIdx.y;
  const int blocks = split * together, block = mine * split + part;
  const bool messenger = warp == warps;
  const int shared = most > kKept ? most - kKept : 0;       // chunks that registers do not hold
  const int again = shared > places ? shared - places : 0;  // of them those that are read twice
  const int held = shared - again;                          // and those that wait in shared memory
  const uint32_t shelf = shelf_address() + threadIdx.x * kRaw, stride = workers * kRaw;
  const int step = workers * VECTOR;

  // A message is of a turn, counted from 1. What the memory of the call held before may look like any of them: every
  // block clears its own two, and no message is sent before all have. (While the first row is on its way.) After the
  // messages there is a word for each row at a time: how many chunks of those that are read again have been taken.
  Rendezvous all_clear;
  if (messenger && lane == 0) {
    all_clear.open();
    messages[block].clear(), messages[blocks + block].clear();
    if (SLOTS == 0 && part == 0) messages[2 * blocks + mine].clear();
    all_clear.arrive(block, blocks);
  }

  uint32_t turn = 0;
  for (int64_t index = mine; index < rows; index += together) {
    ++turn;
    const Row row(x + index * x_stride, n);
    OUT* const y_row = y + index * y_stride;
    const int64_t first = (int64_t)part * wide + threadIdx.x, jump = (int64_t)split * wide;  // from a chunk to the next
    const IN* const from = row.at + row.head + first * VECTOR;
    // Vectors 0, workers, 2 workers, ... below this are the thread's of a chunk, of which `before` come before.
    const auto rest_of = [&](int64_t before) {
      const int64_t rest = row.vectors - first - before, all = wide - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto place = [&](int c) { return shelf + c * (kChunk * stride); };

    A m = -INFINITY_;
    L l = Merged<OUT>::of(0);
    Chunk chunk, chunks[kKept ? kKept : 1];
    Raw ahead[kChunk];  // on its way
    const auto ask = [&](int c) { ask_for<kOnce>(ahead, from + c * jump * VECTOR, rest_of(c * jump), workers); };
    const auto ask_again = [&](int64_t before) {
      ask_for<false>(ahead, from + before * VECTOR, rest_of(before), workers);
    };
    const auto take = [&](Chunk& chunk) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk.put(i, ahead[i]);
    };

    if (!messenger) {
      ask(0);
#pragma unroll
      for (int c = 0; c < kKept; ++c) {
        take(chunks[c]);
        ask(c + 1);
        absorb(chunks[c], &m, &l);
      }
#pragma unroll 1
      for (int c = 0; c < shared; ++c) {
        take(chunk);
        if (!kReduces && c >= again) {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) store_shared(place(c - again) + i * stride, ahead[i]);
        }
        ask(kKept + c + 1);
        absorb(chunk, &m, &l);
      }
      if (!kReduces && again > 0) ask_again((kKept + again - 1) * jump);
      merge_lanes(&m, &l);
      if (lane == 0) maxima[warp] = m, sums[warp] = l;
    }
    const int64_t loose = messenger && part == 0 ? row.loose(lane, n) : -1;
    A own = -INFINITY_;
    if (loose >= 0) own = (FUNCTION == SOFTMIN ? A(-1) : A(1)) * load_value<IN, OUT>(row.at[loose]);
    if (messenger && lane == 0 && turn == 1) all_clear.wait();

    // One warp merges the parts of the block, and those of the row: the chip's two thousand warps would stand in line
    // for the same few lines of the L2 cache.
    __syncthreads();
    if (messenger) {
      A of_warp = -INFINITY_;
      if (lane < warps) of_warp = maxima[lane], l = sums[lane];
      m = max_(of_warp, own);
      l = scaled(l, exp_to_add(of_warp - shift_to_add(m)));
      if (loose >= 0) l = add(l, Merged<OUT>::of(exp_to_add(own - shift_to_add(m))));
      merge_lanes(&m, &l);
      // Written over two turns on: by then all blocks of the row have sent theirs of the next, having read this one.
      Message* const of_row = messages + turn % 2 * blocks + mine * split;
      if (lane == 0) of_row[part].write(m, l, turn);
      const State<A> state = whole_row(of_row, split, turn);
      if (lane == 0) whole = state;
    }
    __syncthreads();
    const State<A> state = whole;
    if constexpr (kReduces) {
      if (part == 0 && threadIdx.x == 0) store_reduced<FUNCTION>(state, y_row, rows);
      continue;
    }
    if (messenger) {
      if (loose >= 0) y_row[loose] = narrow<OUT>(Finish<FUNCTION, OUT, A>(state)(own));
      continue;
    }

    OUT* const to = y_row + row.head + first * VECTOR;
    const auto write_at = [&](Chunk& chunk, int64_t before) {
      chunk.lower(state.m);
      chunk.finish(state);
      OUT* at = to + before * VECTOR;
      const int here = rest_of(before);
#pragma unroll
      for (int i = 0; i < kChunk; ++i, at += step) {
        if (here > i * workers) chunk.store_vector(i, at);
      }
    };
    const auto write = [&](Chunk& chunk, int c) { write_at(chunk, c * jump); };
#pragma unroll 1
    for (int c = held - 1; c >= 0; --c) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk.put(i, load_shared<Raw>(place(c) + i * stride));
      write(chunk, kKept + again + c);
    }
    if constexpr (SLOTS > 0) {
#pragma unroll 1
      for (int c = again - 1; c >= 0; --c) {
        take(chunk);
        if (c > 0) ask_again((kKept + c - 1) * jump);
        write(chunk, kKept + c);
      }
    } else {
      // Counted from the last, which is in the L2 cache still. Two are each block's, as its chunks were before; each
      // that is done takes another, so that `all` are taken in a turn, the last two of each block being none.
      uint32_t* const taken = reinterpret_cast<uint32_t*>(messages + 2 * blocks + mine);
      const uint32_t all = again * split, before = (turn - 1) * all - 2 * split;
      const auto begin = [&](uint32_t i) { return ((int64_t)(all - 1 - i) - part) * wide; };
      uint32_t now = split - 1 - part, next = split + now;
#pragma unroll 1
      for (uint32_t side = 0; now < all; side ^= 1) {
        uint32_t mine_next;
        if (threadIdx.x == 0) mine_next = atomicAdd(taken, 1) - before;
        take(chunk);
        if (next < all) ask_again(begin(next));
        write_at(chunk, begin(now));
        if (threadIdx.x == 0) turns[side] = mine_next;
        workers_meet(workers);
        now = next, next = turns[side];
      }
    }
#pragma unroll
    for (int c = 0; c < kKept; ++c) write(chunks[c], c);
  }
}
