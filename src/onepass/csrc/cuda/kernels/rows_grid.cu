// rows_grid.cu: long rows over many blocks of the whole chip, launched cooperatively. Elements that fit stay in
// registers and in shared memory while the partial states of a row are exchanged; others are read again, most of them
// from the L2 cache.
//
//   a block's part of a row, chunk by chunk, one of them on its way -> each thread a partial state -> block -> the
//   row's other blocks -> epilogue, for which the other elements are read again -> store
//
// One warp more than those that compute, the communication warp, sends the block's partial state to the others and
// waits for theirs. It also takes the head and the tail elements of a row.
//
// A thread keeps kVecs vectors of each operand in registers, none where rows are much longer than the chip holds. A
// launch has any number of threads up to kMaxThreads, of blocks that share a row, and of vectors in shared memory.
#include "async_copy.cuh"
#include "block_reduce.cuh"
#include "config.cuh"
#include "grid_sync.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

constexpr int kCommThreads = 32;  // of a block; they have no whole vectors
constexpr int kMaxThreads = 512;  // with those

// Reads a vector, for a chunk on its way.
template <class Chunk, class C, bool EvictFirst>
__device__ inline typename Chunk::Raw read_vector(const typename C::In* at) {
  typedef typename Chunk::Raw Raw;
  if constexpr (C::kScalar) {
    Vector<typename C::In, C::kVecSize> vector;
    unroll<C::kVecSize>([&](int v) { vector.at[v] = at[v]; });
    return __builtin_bit_cast(Raw, vector);
  } else {
    return Chunk::template read<EvictFirst>(at);
  }
}

// The state of a row in the forward, and what one thread has of it.
template <class Config>
struct Forward : ThreadState<Config, GridSumType<typename Config::Sum>> {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef GridSumType<typename C::Sum> L;
  typedef ForwardRows<C> Rows;
  typedef GridMessage<C> Message;
  // Vectors that a thread takes at a time, while as many are on their way. Exponentials of doubles take registers, so
  // they have fewer.
  static constexpr int kChunkVecs = C::kVecSize == 2 ? 2 : C::kVecs ? 4 : 8, kOperands = 1;
  // Exponentials are not kept, because they are relative to an older maximum.
  typedef RowFragment<C, kChunkVecs, false> Chunk;
  typedef typename Chunk::Raw Raw;
  static constexpr bool kOnePerRow = C::Epilogue::kOnePerRow;
  // Elements that are read once may leave the L2 cache first. Where most are read again that costs 3%, as in other
  // tiers.
  static constexpr bool kEvictFirst = C::kVecs > 0, kEvictFirstAgain = false;
  // Where nearly all chunks are read again, the second read is scheduled dynamically: each block takes the next chunk
  // when it is done with one, so that none ends after the others.
  static constexpr bool kDrawsTickets = C::kVecs == 0;
  static constexpr int kMessagesInFlight = 5;  // of a lane
  struct Shared {
    A maxima[32];
    L sums[32];
    State<A> row;
  };
  using ThreadState<C, L>::m;
  using ThreadState<C, L>::l;
  A edge_value = -infinity();

  const ForwardRow<C>& row;
  __device__ explicit Forward(const ForwardRow<C>& row) : row(row) {}

  template <bool EvictFirst>
  __device__ void prefetch(Raw* next, int64_t element, int count, int workers) const {
    const In* at = row.x + element;
#pragma unroll
    for (int i = 0; i < kChunkVecs; ++i, at += workers * C::kVecSize) {
      next[i] = neutral_vector();
      if (count > i * workers) next[i] = read_vector<Chunk, C, EvictFirst>(at);
    }
  }
  __device__ void set(Chunk& chunk, int i, const Raw* raw) const { chunk.set(i, raw[0], row.operand); }
  // One warp gives its state to the block.
  __device__ void publish(Shared& shared, int warp, int lane) {
    reduce_lanes();
    if (lane == 0) shared.maxima[warp] = m, shared.sums[warp] = l;
  }
  __device__ void load_edge(int64_t at) {
    if (at >= 0) edge_value = row.operand(row.x[at]);
  }
  // One warp reduces the states of a block's warps, and the head and tail elements.
  __device__ void reduce_block(const Shared& shared, int warps, int lane, bool has_edge) {
    A warp_m = -infinity();
    if (lane < warps) warp_m = shared.maxima[lane], l = shared.sums[lane];
    m = max_(warp_m, edge_value);
    l = scale(l, exp_for_sum(warp_m - finite_for_sum(m)));
    if (has_edge) l = add(l, begin_sum<L>(exp_for_sum(edge_value - finite_for_sum(m))));
    reduce_lanes();
  }
  __device__ void send(Message& message, uint32_t epoch) const { message.write(m, l, epoch); }
  // One warp reduces the messages of the blocks of a row to the state of the row.
  __device__ State<A> reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch) {
    m = -infinity(), l = begin_sum<L>(A(0));
    for (int first = threadIdx.x % 32; first < blocks_per_row; first += 32 * kMessagesInFlight) {
      A max[kMessagesInFlight];
      L sum[kMessagesInFlight];
      bool arrived;
      do {
        arrived = true;
        unroll<kMessagesInFlight>([&](int i) {
          max[i] = -infinity(), sum[i] = begin_sum<L>(A(0));
          if (first + 32 * i < blocks_per_row) arrived &= messages[first + 32 * i].read(&max[i], &sum[i], epoch);
        });
      } while (!arrived);
      const A old_m = m;
      unroll<kMessagesInFlight>([&](int i) { m = max_(m, max[i]); });
      l = scale(l, exp_for_sum(old_m - finite_for_sum(m)));
      unroll<kMessagesInFlight>([&](int i) { l = add(l, scale(sum[i], exp_for_sum(max[i] - finite_for_sum(m)))); });
    }
    __syncwarp();
    reduce_lanes();
    return {m, value_of(l)};
  }
  __device__ Out edge_result(State<A> state) const { return from_acc<Out>(typename C::Epilogue(state)(edge_value)); }
  static __device__ void apply_epilogue(Chunk& chunk, State<A> state) {
    chunk.subtract_max(state.m);
    chunk.apply_epilogue(state);
  }
  static __device__ void apply_epilogue(Chunk&, int, State<A>) {}

 private:
  // A vector that changes no state.
  static __device__ Raw neutral_vector() {
    Vector<In, C::kVecSize> vector;
    unroll<C::kVecSize>([&](int v) { vector.at[v] = C::Operand::template neutral<In>(); });
    return __builtin_bit_cast(Raw, vector);
  }
  __device__ void reduce_lanes() {
    const A max = warp_max(m);
    l = warp_reduce<32>(scale(l, exp_for_sum(m - finite_for_sum(max))), Sum());
    m = max;
  }
};

// The sum of a row in the backward, and what one thread has of it.
template <class Config>
struct Backward {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef GridSumType<L> GridSum;
  typedef BackwardRows<C> Rows;
  typedef GridMessage<C> Message;
  static constexpr int kChunkVecs = C::kVecSize == 2 ? 1 : 2;  // of each operand, that a thread takes at a time
  static constexpr int kOperands = C::kBroadcastGrad ? 1 : 2;
  typedef BackwardFragment<C, kChunkVecs> Chunk;
  typedef typename Chunk::Raw Raw;
  static constexpr bool kOnePerRow = false, kEvictFirst = true, kEvictFirstAgain = true, kDrawsTickets = false;
  struct Shared {
    GridSum sums[32];
    InputGrad<C> row;
  };
  const BackwardRow<C>& row;
  L l = {};
  GridSum sum;
  const A g_value;  // where it is broadcast
  A edge_y = 0, edge_g = g_value;

  __device__ explicit Backward(const BackwardRow<C>& row)
      : row(row), g_value(C::kBroadcastGrad ? to_acc(*row.g) : A(0)) {}

  template <bool EvictFirst>
  __device__ void prefetch(Raw* next, int64_t element, int count, int workers) const {
#pragma unroll
    for (int i = 0; i < kChunkVecs; ++i, element += workers * C::kVecSize) {
      unroll<kOperands>([&](int o) {
        next[i * kOperands + o] = Raw{};
        if (count > i * workers)
          next[i * kOperands + o] = read_vector<Chunk, C, EvictFirst>((o ? row.g : row.y) + element);
      });
    }
  }
  __device__ void set(Chunk& chunk, int i, const Raw* raw) const { chunk.set(i, raw[0], raw[kOperands - 1], g_value); }
  __device__ void absorb(Chunk& chunk) {
    l = add(l, chunk.partial_sum());
    chunk.opaque_registers();
  }
  __device__ void publish(Shared& shared, int warp, int lane) {
    const GridSum warp_sum = warp_reduce<32>(to_grid_sum(l), Sum());
    if (lane == 0) shared.sums[warp] = warp_sum;
  }
  __device__ void load_edge(int64_t at) {
    if (at < 0) return;
    edge_y = to_acc(row.y[at]);
    if (!C::kBroadcastGrad) edge_g = to_acc(row.g[at]);
  }
  __device__ void reduce_block(const Shared& shared, int warps, int lane, bool has_edge) {
    sum = begin_sum<GridSum>(A(0));
    if (lane < warps) sum = shared.sums[lane];
    if (has_edge) sum = add(sum, begin_sum<GridSum>(sum_term<C>(edge_y, edge_g)));
    sum = warp_reduce<32>(sum, Sum());
  }
  __device__ void send(Message& message, uint32_t epoch) const { message.write(A(0), sum, epoch); }
  __device__ InputGrad<C> reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch) {
    GridSum all = begin_sum<GridSum>(A(0));
    for (int at = threadIdx.x % 32; at < blocks_per_row; at += 32) {
      A unused;
      GridSum part;
      while (!messages[at].read(&unused, &part, epoch)) {
      }
      all = add(all, part);
    }
    __syncwarp();
    const A terms = value_of(warp_reduce<32>(all, Sum()));
    return {C::kBroadcastGrad ? g_value * (C::Grad::kSumsGrad ? A(row.n) : terms) : terms, row.score};
  }
  __device__ Out edge_result(const InputGrad<C>& grad) const { return from_acc<Out>(grad(edge_y, edge_g)); }
  static __device__ void apply_epilogue(Chunk&, const InputGrad<C>&) {}
  static __device__ void apply_epilogue(Chunk& chunk, int i, const InputGrad<C>& grad) {
    chunk.apply_epilogue(i, grad);
  }

 private:
  // Converts a thread's sum to the type in which the parts of a row are added.
  static __device__ double to_grid_sum(Compensated<float> sum) { return (double)sum.hi + (double)sum.lo; }
  static __device__ Compensated<double> to_grid_sum(Compensated<double> sum) { return sum; }
  static __device__ float to_grid_sum(float sum) { return sum; }
};

// A barrier of the threads of a block that compute.
__device__ inline void sync_workers(int workers) { asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory"); }

// The blocks with one blockIdx.y share a row, and gridDim.y rows are computed at a time. Chunks of `chunk_vecs` vectors
// go to the blocks of a row in turn, up to `max_chunks` to each, so that all read in one region of memory at a time. A
// block keeps its first kRegisterChunks in registers and its last `smem_chunks` in shared memory; those between are
// read again.
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

  // A message has an epoch, counted from 1. The memory of the messages may hold anything before, so every block clears
  // its own two, and no message is sent before all have, while the first row is loaded. After the messages there is a
  // word for each row at a time: how many of the chunks that are read again have been taken.
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
    // Vectors 0, workers, 2 workers, ... below this number are the thread's of the chunk that `before` vectors precede.
    const auto count_of = [&](int64_t before) {
      const int64_t rest = row.vectors - first - before, all = chunk_vecs - (int)threadIdx.x;
      return (int)(rest < all ? rest < 0 ? 0 : rest : all);
    };
    const auto smem_chunk = [&](int c) { return smem + c * (kOperands * kChunkVecs * smem_stride); };

    Op op(operand);
    Chunk chunk, register_chunks[kRegisterChunks ? kRegisterChunks : 1];
    Raw next[kOperands * kChunkVecs];  // on its way
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

    // One warp reduces the states of the block, and those of the row: the two thousand warps of the chip would queue
    // for the same few lines of the L2 cache.
    __syncthreads();
    if (is_comm_warp) {
      op.reduce_block(shared, warps, lane, edge >= 0);
      // A message is overwritten two epochs later: all blocks of the row have sent theirs of the next epoch by then, so
      // they have read this one.
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
          if (count > i * workers) chunk.store_full_vec(i, at);
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
        // Tickets count from the last chunk, which is still in the L2 cache. Each block has two of its own chunks
        // first, and draws another ticket for each that it has done. So `all` tickets are drawn per row, the last two
        // of each block for nothing.
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
