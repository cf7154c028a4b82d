// rows_grid_backward.cu: gradients of long rows over many blocks of the whole chip, launched cooperatively, in the
// shape of rows_grid.cu. Elements of both operands that fit stay in registers and in shared memory while the partial
// sums of a row are exchanged; others are read again.
//
//   a block's part of a row, chunk by chunk, one of them on its way -> each thread a sum -> block -> the row's other
//   blocks -> epilogue -> store
//
// One warp more than those that compute, the communication warp, sends the block's partial sum to the others and waits
// for theirs. It also takes the head and the tail elements of a row.
//
// A thread keeps kVecs vectors of each operand in registers. A launch has any number of threads up to kMaxThreads, of
// blocks that share a row, and of vectors in shared memory.
#include "async_copy.cuh"
#include "config.cuh"
#include "grid_sync.cuh"
#include "row_backward.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
typedef C::Sum L;
typedef GridSumType<L> GridSum;
typedef GridMessage<C> Message;

constexpr int kCommThreads = 32;                      // of a block; they have no whole vectors
constexpr int kMaxThreads = 512;                      // with those
constexpr int kChunkVecs = C::kVecSize == 2 ? 1 : 2;  // of each operand, that a thread takes at a time
constexpr int kRegisterChunks = C::kVecs / kChunkVecs;
constexpr int kOperands = C::kBroadcastGrad ? 1 : 2;

typedef BackwardFragment<C, kChunkVecs> Chunk;
typedef Chunk::Raw Raw;
constexpr int kRawBytes = sizeof(Raw);

// Converts a thread's sum to the type in which the parts of a row are added.
__device__ inline double to_grid_sum(Compensated<float> sum) { return (double)sum.hi + (double)sum.lo; }
__device__ inline Compensated<double> to_grid_sum(Compensated<double> sum) { return sum; }
__device__ inline float to_grid_sum(float sum) { return sum; }

template <bool EvictFirst>
__device__ inline Raw read_vector(const C::In* at) {
  if constexpr (C::kScalar) {
    Vector<C::In, C::kVecSize> vector;
#pragma unroll
    for (int v = 0; v < C::kVecSize; ++v) vector.at[v] = at[v];
    return __builtin_bit_cast(Raw, vector);
  } else {
    return __builtin_bit_cast(Raw, load_vector<uint32_t, kRawBytes / 4, EvictFirst>(at));
  }
}

// One warp reduces the messages of the blocks of a row to the sum of the row.
__device__ inline A reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch) {
  GridSum all = begin_sum<GridSum>(A(0));
  for (int at = threadIdx.x % 32; at < blocks_per_row; at += 32) {
    A unused;
    GridSum part;
    while (!messages[at].read(&unused, &part, epoch)) {
    }
    all = add(all, part);
  }
  __syncwarp();
  return value_of(warp_reduce<32>(all, Sum()));
}

// The blocks with one blockIdx.y share a row, and gridDim.y rows are computed at a time. Chunks of `chunk_vecs` vectors
// go to the blocks of a row in turn, up to `max_chunks` to each. A block keeps its first kRegisterChunks in registers
// and its last `smem_chunks` in shared memory; those between are read again.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    onepass_kernel(C::Out* dx, const C::In* y, const C::In* g, int64_t rows, int64_t n, int64_t dx_stride,
                   int64_t y_stride, int64_t g_stride, int smem_chunks, int chunk_vecs, int max_chunks,
                   Message* messages) {
  __shared__ GridSum sums[32];
  __shared__ A shared_row_sum;
  const int workers = blockDim.x - kCommThreads, warps = workers / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks_per_row = gridDim.x, rows_at_once = gridDim.y, part = blockIdx.x, row_slot = blockIdx.y;
  const int blocks = blocks_per_row * rows_at_once, block = row_slot * blocks_per_row + part;
  const bool is_comm_warp = warp == warps;
  const int other_chunks = max_chunks > kRegisterChunks ? max_chunks - kRegisterChunks : 0;
  const int reread_chunks = other_chunks > smem_chunks ? other_chunks - smem_chunks : 0;
  const int kept_chunks = other_chunks - reread_chunks;  // in shared memory
  const uint32_t smem_stride = workers * kRawBytes, smem = dynamic_smem_address() + threadIdx.x * kRawBytes;
  const int step = workers * C::kVecSize;

  // A message has an epoch, counted from 1. The memory of the messages may hold anything before, so every block clears
  // its own two, and no message is sent before all have, while the first row is loaded.
  GridBarrier messages_clear;
  if (is_comm_warp && lane == 0) {
    messages_clear.init();
    messages[block].clear(), messages[blocks + block].clear();
    messages_clear.arrive(block, blocks);
  }

  uint32_t epoch = 0;
  for (int64_t index = row_slot; index < rows; index += rows_at_once) {
    ++epoch;
    const C::In* const y_row = y + index * y_stride;
    const C::In* const g_row = g + index * g_stride;
    C::Out* const dx_row = dx + index * dx_stride;
    const AlignedRow<C> row(y_row, n);
    const int64_t first = (int64_t)part * chunk_vecs + threadIdx.x;
    const int64_t chunk_stride = (int64_t)blocks_per_row * chunk_vecs;
    const int64_t begin = row.head + first * C::kVecSize;
    // Vectors 0, workers, 2 workers, ... below this number are the thread's of chunk c.
    const auto count_of = [&](int c) {
      const int64_t rest = row.vectors - first - c * chunk_stride, all = chunk_vecs - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto smem_chunk = [&](int c) { return smem + c * (kOperands * kChunkVecs) * smem_stride; };

    L l = {};
    Chunk chunk, register_chunks[kRegisterChunks ? kRegisterChunks : 1];
    Raw next[kOperands * kChunkVecs];  // on its way
    const auto prefetch_chunk = [&](int c) {
      const int count = count_of(c);
      int64_t at = begin + c * chunk_stride * C::kVecSize;
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i, at += step) {
#pragma unroll
        for (int o = 0; o < kOperands; ++o) {
          next[i * kOperands + o] = Raw{};
          if (count > i * workers) next[i * kOperands + o] = read_vector<true>((o ? g_row : y_row) + at);
        }
      }
    };
    const A g_value = C::kBroadcastGrad ? to_acc(*g_row) : A(0);
    const auto set_chunk = [&](Chunk& chunk) {
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i)
        chunk.set(i, next[i * kOperands], next[i * kOperands + kOperands - 1], g_value);
    };

    if (!is_comm_warp) {
      prefetch_chunk(0);
#pragma unroll
      for (int c = 0; c < kRegisterChunks; ++c) {
        set_chunk(register_chunks[c]);
        prefetch_chunk(c + 1);
        l = add(l, register_chunks[c].partial_sum());
        register_chunks[c].opaque_registers();
      }
#pragma unroll 1
      for (int c = 0; c < other_chunks; ++c) {
        set_chunk(chunk);
        if (c >= reread_chunks) {
#pragma unroll
          for (int i = 0; i < kOperands * kChunkVecs; ++i)
            store_smem(smem_chunk(c - reread_chunks) + i * smem_stride, next[i]);
        }
        prefetch_chunk(kRegisterChunks + c + 1);
        l = add(l, chunk.partial_sum());
      }
      if (reread_chunks > 0) prefetch_chunk(kRegisterChunks + reread_chunks - 1);
      const GridSum warp_sum = warp_reduce<32>(to_grid_sum(l), Sum());
      if (lane == 0) sums[warp] = warp_sum;
    }
    const int64_t edge = is_comm_warp && part == 0 ? row.head_or_tail(lane, n) : -1;
    A edge_y = 0, edge_g = g_value;
    if (edge >= 0) {
      edge_y = to_acc(y_row[edge]);
      if (!C::kBroadcastGrad) edge_g = to_acc(g_row[edge]);
    }
    if (is_comm_warp && lane == 0 && epoch == 1) messages_clear.wait();

    // One warp reduces the sums of the block, and those of the row.
    __syncthreads();
    if (is_comm_warp) {
      GridSum block_sum = begin_sum<GridSum>(A(0));
      if (lane < warps) block_sum = sums[lane];
      if (edge >= 0) block_sum = add(block_sum, begin_sum<GridSum>(sum_term<C>(edge_y, edge_g)));
      block_sum = warp_reduce<32>(block_sum, Sum());
      // A message is overwritten two epochs later: all blocks of the row have sent theirs of the next epoch by then, so
      // they have read this one.
      Message* const row_messages = messages + epoch % 2 * blocks + row_slot * blocks_per_row;
      if (lane == 0) row_messages[part].write(A(0), block_sum, epoch);
      const A terms = reduce_messages(row_messages, blocks_per_row, epoch);
      if (lane == 0) shared_row_sum = C::kBroadcastGrad ? g_value * (C::kLog ? A(n) : terms) : terms;
    }
    __syncthreads();
    const A s = shared_row_sum;
    if (is_comm_warp) {
      if (edge >= 0) dx_row[edge] = from_acc<C::Out>(input_grad<C>(edge_y, edge_g, s));
      continue;
    }

    const auto write = [&](Chunk& chunk, int c) {
      C::Out* at = dx_row + begin + c * chunk_stride * C::kVecSize;
      const int count = count_of(c);
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i, at += step) {
        chunk.apply_epilogue(i, s);
        if (count > i * workers) chunk.store_full_vec(i, at);
      }
    };
#pragma unroll 1
    for (int c = kept_chunks - 1; c >= 0; --c) {
#pragma unroll
      for (int i = 0; i < kChunkVecs; ++i) {
        const uint32_t at = smem_chunk(c) + i * kOperands * smem_stride;
        chunk.set(i, load_smem<Raw>(at), load_smem<Raw>(at + (kOperands - 1) * smem_stride), g_value);
      }
      write(chunk, kRegisterChunks + reread_chunks + c);
    }
#pragma unroll 1
    for (int c = reread_chunks - 1; c >= 0; --c) {
      set_chunk(chunk);
      if (c > 0) prefetch_chunk(kRegisterChunks + c - 1);
      write(chunk, kRegisterChunks + c);
    }
#pragma unroll
    for (int c = 0; c < kRegisterChunks; ++c) write(register_chunks[c], c);
  }
}
