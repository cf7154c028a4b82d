// rows_grid_backward.cu: gradients of long rows over many blocks of the whole chip, launched cooperatively, as
// rows_grid.cu makes the rows themselves. What fits of both operands is kept in registers and in shared memory while
// the parts of a row meet; what does not is read again.
//
//   a block's part of a row, chunk by chunk, one of them on its way -> each thread a sum -> block -> the row's other
//   blocks -> finish -> store
//
// One warp more than those that compute, the messenger, sends the block's part of the sum to the others and waits for
// theirs. It also takes the few elements before the first and after the last whole vector.
//
// One compiled instance a set of: IN, OUT, FUNCTION, EVEN (see row_backward.cuh), SLOTS (vectors of each operand that a
// thread keeps in registers), VECTOR, EDGES (see vector_access.cuh). Any number of threads up to kThreads, of blocks
// that share a row, and of vectors in shared memory.
#include "grid_sync.cuh"  // before the reductions: they would add its doubles as floats
#include "row_backward.cuh"
#include "async_copy.cuh"

constexpr int kMessengers = 32;              // threads of a block that take no part in whole vectors
constexpr int kThreads = 512;                // the messengers among them
constexpr int kChunk = VECTOR == 2 ? 1 : 2;  // vectors of each operand that a thread takes at a time
constexpr int kKept = SLOTS / kChunk;        // chunks in registers
constexpr int kOperands = EVEN ? 1 : 2;

typedef Terms<kChunk> Chunk;
typedef Chunk::Raw Raw;
constexpr int kRaw = sizeof(Raw);
typedef Merged<Summed>::type Sums;  // of a row's parts: doubles where results are floats

// A thread's sum as parts of a row are added up.
__device__ inline double wide_of(Total<float> part) { return (double)part.sum + (double)part.rest; }
__device__ inline Total<double> wide_of(Total<double> part) { return part; }
__device__ inline float wide_of(float part) { return part; }

template <bool Once>
__device__ inline Raw read_vector(const IN* at) {
  if constexpr (kApart) {
    Vector<IN, VECTOR> one;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) one.at[v] = at[v];
    return __builtin_bit_cast(Raw, one);
  } else {
    return __builtin_bit_cast(Raw, load<uint32_t, kRaw / 4, Once>(at));
  }
}

// By one warp: the sum of a row from the messages of its `split` blocks.
__device__ inline A whole_row(const Message* messages, int split, uint32_t turn) {
  Sums all = Merged<Summed>::of(0);
  for (int at = threadIdx.x % 32; at < split; at += 32) {
    A none;
    Sums part;
    while (!messages[at].read(&none, &part, turn)) {
    }
    all = add(all, part);
  }
  __syncwarp();
  return value_of(warp_merge<32>(all, Sum()));
}

// The blocks of one y share a row, and as many rows are taken at a time as there are. Chunks of `wide` vectors go to
// the blocks of a row in turn: `most` to each. A block keeps the first kKept of its own in registers and the last
// `places` in shared memory; those between are read again.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    onepass_kernel(OUT* dx, const IN* y, const IN* g, int64_t rows, int64_t n, int64_t dx_stride, int64_t y_stride,
                   int64_t g_stride, int places, int wide, int most, Message* messages) {
  __shared__ Sums sums[32];
  __shared__ A whole;
  const int workers = blockDim.x - kMessengers, warps = workers / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = gridDim.x, together = gridDim.y, part = blockIdx.x, mine = blockIdx.y;
  const int blocks = split * together, block = mine * split + part;
  const bool messenger = warp == warps;
  const int shared = most > kKept ? most - kKept : 0;       // chunks that registers do not hold
  const int again = shared > places ? shared - places : 0;  // of them those that are read twice
  const int held = shared - again;                          // and those that wait in shared memory
  const uint32_t stride = workers * kRaw, shelf = shelf_address() + threadIdx.x * kRaw;
  const int step = workers * VECTOR;

  // A message is of a turn, counted from 1. What the memory of the call held before may look like any of them: every
  // block clears its own two, and no message is sent before all have. (While the first row is on its way.)
  Rendezvous all_clear;
  if (messenger && lane == 0) {
    all_clear.open();
    messages[block].clear(), messages[blocks + block].clear();
    all_clear.arrive(block, blocks);
  }

  uint32_t turn = 0;
  for (int64_t index = mine; index < rows; index += together) {
    ++turn;
    const IN* const y_row = y + index * y_stride;
    const IN* const g_row = g + index * g_stride;
    OUT* const dx_row = dx + index * dx_stride;
    const Row row(y_row, n);
    const int64_t first = (int64_t)part * wide + threadIdx.x, jump = (int64_t)split * wide;  // from a chunk to the next
    const int64_t begin = row.head + first * VECTOR;
    // Vectors 0, workers, 2 workers, ... below this are the thread's of a chunk.
    const auto rest_of = [&](int c) {
      const int64_t rest = row.vectors - first - c * jump, all = wide - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto place = [&](int c) { return shelf + c * (kOperands * kChunk) * stride; };

    L l = {};
    Chunk chunk, chunks[kKept ? kKept : 1];
    Raw ahead[kOperands * kChunk];  // on its way
    const auto ask = [&](int c) {
      const int here = rest_of(c);
      int64_t at = begin + c * jump * VECTOR;
#pragma unroll
      for (int i = 0; i < kChunk; ++i, at += step) {
#pragma unroll
        for (int o = 0; o < kOperands; ++o) {
          ahead[i * kOperands + o] = Raw{};
          if (here > i * workers) ahead[i * kOperands + o] = read_vector<true>((o ? g_row : y_row) + at);
        }
      }
    };
    const A even = EVEN ? to_wide(*g_row) : A(0);
    const auto take = [&](Chunk& chunk) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk.put(i, ahead[i * kOperands], ahead[i * kOperands + kOperands - 1], even);
    };

    if (!messenger) {
      ask(0);
#pragma unroll
      for (int c = 0; c < kKept; ++c) {
        take(chunks[c]);
        ask(c + 1);
        l = add(l, chunks[c].part());
        chunks[c].forget();
      }
#pragma unroll 1
      for (int c = 0; c < shared; ++c) {
        take(chunk);
        if (c >= again) {
#pragma unroll
          for (int i = 0; i < kOperands * kChunk; ++i) store_shared(place(c - again) + i * stride, ahead[i]);
        }
        ask(kKept + c + 1);
        l = add(l, chunk.part());
      }
      if (again > 0) ask(kKept + again - 1);
      const Sums of_warp = warp_merge<32>(wide_of(l), Sum());
      if (lane == 0) sums[warp] = of_warp;
    }
    const int64_t loose = messenger && part == 0 ? row.loose(lane, n) : -1;
    A own_y = 0, own_g = even;
    if (loose >= 0) {
      own_y = to_wide(y_row[loose]);
      if (!EVEN) own_g = to_wide(g_row[loose]);
    }
    if (messenger && lane == 0 && turn == 1) all_clear.wait();

    // One warp merges the parts of the block, and those of the row.
    __syncthreads();
    if (messenger) {
      Sums mine_sum = Merged<Summed>::of(0);
      if (lane < warps) mine_sum = sums[lane];
      if (loose >= 0) mine_sum = add(mine_sum, Merged<Summed>::of(term(own_y, own_g)));
      mine_sum = warp_merge<32>(mine_sum, Sum());
      // Written over two turns on: by then all blocks of the row have sent theirs of the next, having read this one.
      Message* const of_row = messages + turn % 2 * blocks + mine * split;
      if (lane == 0) of_row[part].write(A(0), mine_sum, turn);
      const A total = whole_row(of_row, split, turn);
      if (lane == 0) whole = EVEN ? even * (kLog ? A(n) : total) : total;
    }
    __syncthreads();
    const A s = whole;
    if (messenger) {
      if (loose >= 0) dx_row[loose] = narrow<OUT>(gradient(own_y, own_g, s));
      continue;
    }

    const auto write = [&](Chunk& chunk, int c) {
      OUT* at = dx_row + begin + c * jump * VECTOR;
      const int here = rest_of(c);
#pragma unroll
      for (int i = 0; i < kChunk; ++i, at += step) {
        chunk.finish(i, s);
        if (here > i * workers) chunk.store_vector(i, at);
      }
    };
#pragma unroll 1
    for (int c = held - 1; c >= 0; --c) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const uint32_t at = place(c) + i * kOperands * stride;
        chunk.put(i, load_shared<Raw>(at), load_shared<Raw>(at + (kOperands - 1) * stride), even);
      }
      write(chunk, kKept + again + c);
    }
#pragma unroll 1
    for (int c = again - 1; c >= 0; --c) {
      take(chunk);
      if (c > 0) ask(kKept + c - 1);
      write(chunk, kKept + c);
    }
#pragma unroll
    for (int c = 0; c < kKept; ++c) write(chunks[c], c);
  }
}
