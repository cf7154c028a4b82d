// rows_grid.cu: long rows over many blocks of the whole chip, launched cooperatively. Elements that fit stay in
// registers and in shared memory while the partial states of a row are exchanged; others are read again, most of them
// from the L2 cache.
//
//   a block's part of a row, chunk by chunk, one of them on its way -> each thread an online state -> block -> the
//   row's other blocks -> epilogue, for which the other elements are read again -> store
//
// One warp more than those that compute, the communication warp, sends the block's partial state to the others and
// waits for theirs. It also takes the head and the tail elements of a row.
//
// A thread keeps kVecs vectors in registers, none where rows are much longer than the chip holds. A launch has any
// number of threads up to kMaxThreads, of blocks that share a row, and of vectors in shared memory.
#include "async_copy.cuh"
#include "block_reduce.cuh"
#include "config.cuh"
#include "grid_sync.cuh"
#include "row_fragment.cuh"

typedef ForwardConfig C;
typedef C::Acc A;
typedef GridSumType<C::Sum> L;
typedef GridMessage<C> Message;

constexpr int kCommThreads = 32;  // of a block; they have no whole vectors
constexpr int kMaxThreads = 512;  // with those
// Vectors that a thread takes at a time, while as many are on their way. Exponentials of doubles take registers, so
// they have fewer.
constexpr int kChunkVecs = C::kVecSize == 2 ? 2 : C::kVecs ? 4 : 8;
constexpr int kRegisterChunks = C::kVecs / kChunkVecs;

// A thread's elements of one chunk. Their exponentials are not kept, because they are relative to an older maximum.
typedef RowFragment<C, kChunkVecs, false> Chunk;
typedef Chunk::Raw Raw;
constexpr int kRawBytes = sizeof(Raw);

// Adds the elements of a chunk to a thread's state.
__device__ inline void absorb(Chunk& chunk, A* m, L* l) {
  const A old_m = *m;
  *m = max_(old_m, chunk.max());
  chunk.opaque_registers();
  *l = add(scale(*l, exp_<A>(old_m - finite_or_zero(*m))), begin_sum<L>(chunk.sum_exp_relative_to(*m)));
}

// Reduces the states of the lanes of a warp.
__device__ inline void reduce_lanes(A* m, L* l) {
  const A max = warp_max(*m);
  *l = warp_reduce<32>(scale(*l, exp_for_sum(*m - finite_for_sum(max))), Sum());
  *m = max;
}

// A vector that changes no state.
__device__ inline Raw neutral_vector() {
  Vector<C::In, C::kVecSize> vector;
#pragma unroll
  for (int v = 0; v < C::kVecSize; ++v) vector.at[v] = neutral_element<C>();
  return __builtin_bit_cast(Raw, vector);
}

// Elements that are read once may leave the L2 cache first. Where most are read again that costs 3%, as in other tiers.
constexpr bool kEvictFirst = C::kVecs > 0;

template <bool EvictFirst>
__device__ inline Raw read_vector(const C::In* at) {
  if constexpr (C::kScalar) {
    Vector<C::In, C::kVecSize> vector;
#pragma unroll
    for (int v = 0; v < C::kVecSize; ++v) vector.at[v] = at[v];
    return __builtin_bit_cast(Raw, vector);
  } else {
    return Chunk::read<EvictFirst>(at);
  }
}

// Begins to load a thread's vectors of a chunk: the vectors 0, workers, 2 workers, ... that are below `count`.
template <bool EvictFirst>
__device__ inline void prefetch(Raw* next, const C::In* at, int count, int workers) {
#pragma unroll
  for (int i = 0; i < kChunkVecs; ++i, at += workers * C::kVecSize) {
    next[i] = neutral_vector();
    if (count > i * workers) next[i] = read_vector<EvictFirst>(at);
  }
}

// A barrier of the threads of a block that compute.
__device__ inline void sync_workers(int workers) { asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory"); }

constexpr int kMessagesInFlight = 5;  // of a lane

// One warp reduces the messages of the blocks of a row to the state of the row.
__device__ inline State<A> reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch) {
  A m = -infinity();
  L l = begin_sum<L>(A(0));
  for (int first = threadIdx.x % 32; first < blocks_per_row; first += 32 * kMessagesInFlight) {
    A max[kMessagesInFlight];
    L sum[kMessagesInFlight];
    bool arrived;
    do {
      arrived = true;
#pragma unroll
      for (int i = 0; i < kMessagesInFlight; ++i) {
        max[i] = -infinity(), sum[i] = begin_sum<L>(A(0));
        if (first + 32 * i < blocks_per_row) arrived &= messages[first + 32 * i].read(&max[i], &sum[i], epoch);
      }
    } while (!arrived);
    const A old_m = m;
#pragma unroll
    for (int i = 0; i < kMessagesInFlight; ++i) m = max_(m, max[i]);
    l = scale(l, exp_for_sum(old_m - finite_for_sum(m)));
#pragma unroll
    for (int i = 0; i < kMessagesInFlight; ++i) l = add(l, scale(sum[i], exp_for_sum(max[i] - finite_for_sum(m))));
  }
  __syncwarp();
  reduce_lanes(&m, &l);
  return {m, value_of(l)};
}

// The blocks with one blockIdx.y share a row, and gridDim.y rows are computed at a time. Chunks of `chunk_vecs` vectors
// go to the blocks of a row in turn, up to `max_chunks` to each, so that all read in one region of memory at a time. A
// block keeps its first kRegisterChunks in registers and its last `smem_chunks` in shared memory; those between are
// read again. Where they are nearly all (kVecs is 0) the second read is scheduled dynamically: each block takes the
// next chunk when it is done with one, so that none ends after the others.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    onepass_kernel(const C::In* x, C::Out* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride,
                   int smem_chunks, int chunk_vecs, int max_chunks, Message* messages) {
  __shared__ A maxima[32];
  __shared__ L sums[32];
  __shared__ State<A> row_state;
  __shared__ uint32_t next_tickets[2];
  const int workers = blockDim.x - kCommThreads, warps = workers / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks_per_row = gridDim.x, rows_at_once = gridDim.y, part = blockIdx.x, row_slot = blockIdx.y;
  const int blocks = blocks_per_row * rows_at_once, block = row_slot * blocks_per_row + part;
  const bool is_comm_warp = warp == warps;
  const int other_chunks = max_chunks > kRegisterChunks ? max_chunks - kRegisterChunks : 0;
  const int reread_chunks = other_chunks > smem_chunks ? other_chunks - smem_chunks : 0;
  const int kept_chunks = other_chunks - reread_chunks;  // in shared memory
  const uint32_t smem = dynamic_smem_address() + threadIdx.x * kRawBytes, smem_stride = workers * kRawBytes;
  const int step = workers * C::kVecSize;

  // A message has an epoch, counted from 1. The memory of the messages may hold anything before, so every block clears
  // its own two, and no message is sent before all have, while the first row is loaded. After the messages there is a
  // word for each row at a time: how many of the chunks that are read again have been taken.
  GridBarrier messages_clear;
  if (is_comm_warp && lane == 0) {
    messages_clear.init();
    messages[block].clear(), messages[blocks + block].clear();
    if (C::kVecs == 0 && part == 0) messages[2 * blocks + row_slot].clear();
    messages_clear.arrive(block, blocks);
  }

  uint32_t epoch = 0;
  for (int64_t index = row_slot; index < rows; index += rows_at_once) {
    ++epoch;
    const AlignedRow<C> row(x + index * x_stride, n);
    C::Out* const y_row = y + index * y_stride;
    const int64_t first = (int64_t)part * chunk_vecs + threadIdx.x;
    const int64_t chunk_stride = (int64_t)blocks_per_row * chunk_vecs;
    const C::In* const from = row.data + row.head + first * C::kVecSize;
    // Vectors 0, workers, 2 workers, ... below this number are the thread's of the chunk that `before` vectors precede.
    const auto count_of = [&](int64_t before) {
      const int64_t rest = row.vectors - first - before, all = chunk_vecs - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto smem_chunk = [&](int c) { return smem + c * (kChunkVecs * smem_stride); };

    A m = -infinity();
    L l = begin_sum<L>(A(0));
    Chunk chunk, register_chunks[kRegisterChunks ? kRegisterChunks : 1];
    Raw next[kChunkVecs];  // on its way
    const auto prefetch_chunk = [&](int c) {
      prefetch<kEvictFirst>(next, from + c * chunk_stride * C::kVecSize, count_of(c * chunk_stride), workers);
    };
    const auto prefetch_again = [&](int64_t before) {
      prefetch<false>(next, from + before * C::kVecSize, count_of(before), workers);
    };
    const auto set_chunk = [&](Chunk& chunk) {
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i) chunk.set(i, next[i]);
    };

    if (!is_comm_warp) {
      prefetch_chunk(0);
#pragma unroll
      for (int c = 0; c < kRegisterChunks; ++c) {
        set_chunk(register_chunks[c]);
        prefetch_chunk(c + 1);
        absorb(register_chunks[c], &m, &l);
      }
#pragma unroll 1
      for (int c = 0; c < other_chunks; ++c) {
        set_chunk(chunk);
        if (!C::kIsReduction && c >= reread_chunks) {
#pragma unroll
          for (int i = 0; i < kChunkVecs; ++i) store_smem(smem_chunk(c - reread_chunks) + i * smem_stride, next[i]);
        }
        prefetch_chunk(kRegisterChunks + c + 1);
        absorb(chunk, &m, &l);
      }
      if (!C::kIsReduction && reread_chunks > 0) prefetch_again((kRegisterChunks + reread_chunks - 1) * chunk_stride);
      reduce_lanes(&m, &l);
      if (lane == 0) maxima[warp] = m, sums[warp] = l;
    }
    const int64_t edge = is_comm_warp && part == 0 ? row.head_or_tail(lane, n) : -1;
    A edge_value = -infinity();
    if (edge >= 0)
      edge_value = (C::kFunction == Function::softmin ? A(-1) : A(1)) * round_through<C::Out>(row.data[edge]);
    if (is_comm_warp && lane == 0 && epoch == 1) messages_clear.wait();

    // One warp reduces the states of the block, and those of the row: the two thousand warps of the chip would queue
    // for the same few lines of the L2 cache.
    __syncthreads();
    if (is_comm_warp) {
      A warp_m = -infinity();
      if (lane < warps) warp_m = maxima[lane], l = sums[lane];
      m = max_(warp_m, edge_value);
      l = scale(l, exp_for_sum(warp_m - finite_for_sum(m)));
      if (edge >= 0) l = add(l, begin_sum<L>(exp_for_sum(edge_value - finite_for_sum(m))));
      reduce_lanes(&m, &l);
      // A message is overwritten two epochs later: all blocks of the row have sent theirs of the next epoch by then, so
      // they have read this one.
      Message* const row_messages = messages + epoch % 2 * blocks + row_slot * blocks_per_row;
      if (lane == 0) row_messages[part].write(m, l, epoch);
      const State<A> state = reduce_messages(row_messages, blocks_per_row, epoch);
      if (lane == 0) row_state = state;
    }
    __syncthreads();
    const State<A> state = row_state;
    if constexpr (C::kIsReduction) {
      if (part == 0 && threadIdx.x == 0) store_reduction<C>(state, y_row, rows);
      continue;
    }
    if (is_comm_warp) {
      if (edge >= 0) y_row[edge] = from_acc<C::Out>(Epilogue<C>(state)(edge_value));
      continue;
    }

    C::Out* const to = y_row + row.head + first * C::kVecSize;
    const auto write_at = [&](Chunk& chunk, int64_t before) {
      chunk.subtract_max(state.m);
      chunk.apply_epilogue(state);
      C::Out* at = to + before * C::kVecSize;
      const int count = count_of(before);
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i, at += step) {
        if (count > i * workers) chunk.store_full_vec(i, at);
      }
    };
    const auto write = [&](Chunk& chunk, int c) { write_at(chunk, c * chunk_stride); };
#pragma unroll 1
    for (int c = kept_chunks - 1; c >= 0; --c) {
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i) chunk.set(i, load_smem<Raw>(smem_chunk(c) + i * smem_stride));
      write(chunk, kRegisterChunks + reread_chunks + c);
    }
    if constexpr (C::kVecs > 0) {
#pragma unroll 1
      for (int c = reread_chunks - 1; c >= 0; --c) {
        set_chunk(chunk);
        if (c > 0) prefetch_again((kRegisterChunks + c - 1) * chunk_stride);
        write(chunk, kRegisterChunks + c);
      }
    } else {
      // Tickets count from the last chunk, which is still in the L2 cache. Each block has two of its own chunks first,
      // and draws another ticket for each that it has done. So `all` tickets are drawn per row, the last two of each
      // block for nothing.
      uint32_t* const drawn = reinterpret_cast<uint32_t*>(messages + 2 * blocks + row_slot);
      const uint32_t all = reread_chunks * blocks_per_row, before = (epoch - 1) * all - 2 * blocks_per_row;
      const auto begin = [&](uint32_t ticket) { return ((int64_t)(all - 1 - ticket) - part) * chunk_vecs; };
      uint32_t now = blocks_per_row - 1 - part, after = blocks_per_row + now;
#pragma unroll 1
      for (uint32_t side = 0; now < all; side ^= 1) {
        uint32_t ticket;
        if (threadIdx.x == 0) ticket = atomicAdd(drawn, 1) - before;
        set_chunk(chunk);
        if (after < all) prefetch_again(begin(after));
        write_at(chunk, begin(now));
        if (threadIdx.x == 0) next_tickets[side] = ticket;
        sync_workers(workers);
        now = after, after = next_tickets[side];
      }
    }
#pragma unroll
    for (int c = 0; c < kRegisterChunks; ++c) write(register_chunks[c], c);
  }
}
