// rows_grid.cu: long rows, each shared by many blocks of the whole GPU, launched cooperatively (the tier `grid`). As
// many elements as fit stay in registers and in shared memory while the partial states of a row are exchanged. The
// remaining elements are read again, most of them from the L2 cache.
//
//   the block's chunks of a row, the next one prefetched -> partial state of each thread -> of the block ->
//   to the row's other blocks -> epilogue; elements that were not kept are read again -> store
//
// A thread keeps kVecs vectors of each operand in registers, or none if rows are much longer than the chip holds. A
// launch may have any number of threads up to kMaxThreads, of blocks per row, and of vectors in shared memory.
#include "async_copy.cuh"
#include "config.cuh"
#include "grid_row.cuh"

// Forward and backward. The second argument is how many vectors of each operand a thread processes at a time, while as
// many more are prefetched. Doubles have fewer, because their exponentials take registers.
template <class C>
using Forward = GridForward<C, C::kVecSize == 2 ? 2
                               : C::kVecs       ? 4
                                                : 8>;
template <class C>
using Backward = GridBackward<C, C::kVecSize == 2 ? 1 : 2>;

// A barrier of the threads of a block that compute.
__device__ inline void sync_workers(int workers) { asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory"); }

// Blocks with the same blockIdx.y share a row, and gridDim.y rows are computed at a time. A row is cut into chunks of
// `chunk_vecs` vectors. They go to the blocks of the row in turn, up to `max_chunks` to each, so that all blocks read
// from one region of memory at a time. A block keeps its first kRegisterChunks chunks in registers and its last
// `smem_chunks` in shared memory. It reads the chunks between them again.
template <class Op>
__device__ inline void compute(const typename Op::Rows& rows, int smem_chunks, int chunk_vecs, int max_chunks,
                               typename Op::Message* messages) {
  typedef typename Op::C C;
  typedef typename Op::Chunk Chunk;
  typedef typename Op::Raw Raw;
  constexpr int kChunkVecs = Op::kChunkVecs, kOperands = Op::kOperands, kRawBytes = sizeof(Raw);
  constexpr int kRegisterChunks = C::kVecs / kChunkVecs;
  __shared__ typename Op::Shared shared;
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

  // A message has an epoch, counted from 1. The memory for the messages may hold anything at first. Every block
  // therefore clears its own two messages while it loads the first row, and no message is sent before all blocks have
  // done this. After the messages there is one word for each row at a time: how many of the chunks to be read again
  // have been taken.
  GridBarrier messages_clear;
  if (is_comm_warp && lane == 0) {
    messages_clear.init();
    messages[block].clear(), messages[blocks + block].clear();
    if (Op::kDrawsTickets && part == 0) messages[2 * blocks + row_slot].clear();
    messages_clear.arrive(block, blocks);
  }

  uint32_t epoch = 0;
  for (int64_t index = row_slot; index < rows.count; index += rows_at_once) {
    ++epoch;
    const auto operand = rows.row(index);
    const auto result = rows.result(index);
    const int64_t n = operand.n;
    const AlignedRow<C> row(operand.aligned(), n);
    const int64_t first = (int64_t)part * chunk_vecs + threadIdx.x;
    const int64_t chunk_stride = (int64_t)blocks_per_row * chunk_vecs;
    const int64_t begin = row.head + first * C::kVecSize;
    // Of the chunk that `before` vectors precede, the thread has the vectors 0, workers, 2 workers, ... below this
    // number.
    const auto count_of = [&](int64_t before) {
      const int64_t rest = row.vectors - first - before, all = chunk_vecs - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto smem_chunk = [&](int c) { return smem + c * (kOperands * kChunkVecs * smem_stride); };

    Op op(operand);
    Chunk chunk, register_chunks[kRegisterChunks ? kRegisterChunks : 1];
    Raw next[kOperands * kChunkVecs];  // prefetched
    const auto prefetch_chunk = [&](int c) {
      const int64_t before = c * chunk_stride, at = begin + before * C::kVecSize;
      op.template prefetch<Op::kEvictFirst>(next, at, count_of(before), workers);
    };
    const auto prefetch_again = [&](int64_t before) {
      const int64_t at = begin + before * C::kVecSize;
      op.template prefetch<Op::kEvictFirstAgain>(next, at, count_of(before), workers);
    };
    const auto set_chunk = [&](Chunk& chunk) {
      unroll<kChunkVecs>([&](int i) { op.set(chunk, i, next + i * kOperands); });
    };

    if (!is_comm_warp) {
      prefetch_chunk(0);
      unroll<kRegisterChunks>([&](int c) {
        set_chunk(register_chunks[c]);
        prefetch_chunk(c + 1);
        op.absorb(register_chunks[c]);
      });
#pragma unroll 1
      for (int c = 0; c < other_chunks; ++c) {
        set_chunk(chunk);
        if (!Op::kOnePerRow && c >= reread_chunks) {
          unroll<kOperands * kChunkVecs>(
              [&](int i) { store_smem(smem_chunk(c - reread_chunks) + i * smem_stride, next[i]); });
        }
        prefetch_chunk(kRegisterChunks + c + 1);
        op.absorb(chunk);
      }
      if (!Op::kOnePerRow && reread_chunks > 0) prefetch_again((kRegisterChunks + reread_chunks - 1) * chunk_stride);
      op.publish(shared, warp, lane);
    }
    const int64_t edge = is_comm_warp && part == 0 ? row.head_or_tail(lane, n) : -1;
    op.load_edge(edge);
    if (is_comm_warp && lane == 0 && epoch == 1) messages_clear.wait();

    // One warp reduces the states of the block, and then those of the row. If all two thousand warps of the chip read
    // the messages, they would queue for the same few lines of the L2 cache.
    __syncthreads();
    if (is_comm_warp) {
      op.reduce_block(shared, warps, lane, edge >= 0);
      // A message is overwritten two epochs later. By then all blocks of the row have sent their message of the epoch
      // between, so they have read this one.
      typename Op::Message* const row_messages = messages + epoch % 2 * blocks + row_slot * blocks_per_row;
      if (lane == 0) op.send(row_messages[part], epoch);
      const auto state = op.reduce_messages(row_messages, blocks_per_row, epoch);
      if (lane == 0) shared.row = state;
    }
    __syncthreads();
    const auto state = shared.row;
    if constexpr (Op::kOnePerRow) {
      if (part == 0 && threadIdx.x == 0) C::Epilogue::store(state, result, rows.count);
    } else if (is_comm_warp) {
      if (edge >= 0) result[edge] = op.edge_result(state);
    } else {
      const auto to = result + begin;
      const auto write_at = [&](Chunk& chunk, int64_t before) {
        Op::apply_epilogue(chunk, state);
        auto at = to + before * C::kVecSize;
        const int count = count_of(before);
#pragma unroll
        for (int i = 0; i < kChunkVecs; ++i, at += step) {
          Op::apply_epilogue(chunk, i, state);
          if (count > i * workers) store_predicated<C>(at, 0, C::kVecSize, chunk.vec(i));
        }
      };
      const auto write = [&](Chunk& chunk, int c) { write_at(chunk, c * chunk_stride); };
#pragma unroll 1
      for (int c = kept_chunks - 1; c >= 0; --c) {
        unroll<kChunkVecs>([&](int i) {
          Raw raw[kOperands];
          unroll<kOperands>([&](int o) { raw[o] = load_smem<Raw>(smem_chunk(c) + (i * kOperands + o) * smem_stride); });
          op.set(chunk, i, raw);
        });
        write(chunk, kRegisterChunks + reread_chunks + c);
      }
      if constexpr (!Op::kDrawsTickets) {
#pragma unroll 1
        for (int c = reread_chunks - 1; c >= 0; --c) {
          set_chunk(chunk);
          if (c > 0) prefetch_again((kRegisterChunks + c - 1) * chunk_stride);
          write(chunk, kRegisterChunks + c);
        }
      } else {
        // Tickets number the chunks to be read again, from the last one, which is still in the L2 cache. Each block
        // begins with two chunks of its own, and draws one more ticket for each chunk that it finishes. So `all`
        // tickets are drawn per row, and the last two of each block are beyond the chunks.
        uint32_t* const drawn = reinterpret_cast<uint32_t*>(messages + 2 * blocks + row_slot);
        const uint32_t all = reread_chunks * blocks_per_row, before = (epoch - 1) * all - 2 * blocks_per_row;
        const auto begin_of = [&](uint32_t ticket) { return ((int64_t)(all - 1 - ticket) - part) * chunk_vecs; };
        uint32_t now = blocks_per_row - 1 - part, after = blocks_per_row + now;
#pragma unroll 1
        for (uint32_t side = 0; now < all; side ^= 1) {
          uint32_t ticket;
          if (threadIdx.x == 0) ticket = atomicAdd(drawn, 1) - before;
          set_chunk(chunk);
          if (after < all) prefetch_again(begin_of(after));
          write_at(chunk, begin_of(now));
          if (threadIdx.x == 0) next_tickets[side] = ticket;
          sync_workers(workers);
          now = after, after = next_tickets[side];
        }
      }
      unroll<kRegisterChunks>([&](int c) { write(register_chunks[c], c); });
    }
  }
}

typedef KernelOp<Forward, Backward> Op;
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    onepass_kernel(const Op::Rows rows, int smem_chunks, int chunk_vecs, int max_chunks, Op::Message* messages) {
  compute<Op>(rows, smem_chunks, chunk_vecs, max_chunks, messages);
}
