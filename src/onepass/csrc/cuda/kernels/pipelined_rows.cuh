// pipelined_rows.cuh: many long rows, each shared by several blocks, which all run at the same time. While the blocks
// of a row exchange their partial states, the next row is already being copied and reduced. The first row waits in
// shared memory for the exchange.
//
//   chunks of a row -> shared memory -> partial state of each thread -> of the block -> to the row's other blocks
//   one row later, chunk by chunk: shared memory -> epilogue -> store; a chunk of a later row takes the free place
//
// Each thread reads only the vectors in shared memory that it has copied itself (async_copy.cuh). A thread takes kVecs
// vectors of a chunk. A launch may have any number of blocks, and of threads up to kMaxThreads.
//
// An Exchange says which blocks exchange states: those of a launch (rows_pipelined.cu), or of a launch on each of
// several GPUs (rows_over_ranks.cu). Its members:
//
//   blocks()          the number of blocks on this GPU
//   rows_at_once      how many rows these blocks compute in a turn. The last turn may have fewer rows, with more blocks
//                     each
//   ahead(spare)      how many chunks to prefetch, if shared memory has room for `spare` chunks beyond a row
//   open(sends)       called by both communication warps before anything is sent or received
//   send(op, at)      sends the state of the block to the blocks of its row
//   receive(op, at)   waits for the states of these blocks, and merges them
#pragma once

#include "async_copy.cuh"
#include "grid_row.cuh"

template <class C>
using Forward = GridForward<C, C::kVecs>;
template <class C>
using Backward = GridBackward<C, C::kVecs>;

// Two named barriers serve a row: at the first, all threads of the block have reduced the row; at the second, its
// blocks have merged it. Some threads only arrive at a barrier, the others wait at it. Rows take turns at kSets pairs
// of barriers, so that a thread may be up to kSets rows ahead.
constexpr int kSets = 4;
enum class Done { reduced, merged };
__device__ inline int barrier_of(Done done, uint32_t row) { return 1 + kSets * int(done) + int(row % kSets); }
// Each barrier is used by only one of the two communication warps.
__device__ inline int threads_at_barrier() { return blockDim.x - 32; }
__device__ inline void arrive(Done done, uint32_t row) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier_of(done, row)), "r"(threads_at_barrier()) : "memory");
}
__device__ inline void wait(Done done, uint32_t row) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier_of(done, row)), "r"(threads_at_barrier()) : "memory");
}
// A barrier of the two communication warps.
__device__ inline void sync_communication() {
  asm volatile("bar.sync %0, %1;" ::"n"(1 + 2 * kSets), "n"(2 * kCommThreads) : "memory");
}
// How many messages a block may have sent before the first of them is read. A block sends one message for each row that
// it has reduced, and is at most kSets rows ahead of the last merged row. The blocks that merged this row are in turn
// at most kSets rows ahead of what they have read.
constexpr int kMessages = 2 * kSets;

// The rows that a block takes part in: one in each turn.
template <class Op, class Exchange>
struct BlockRows {
  const typename Op::Rows& rows;
  const Exchange& exchange;
  uint32_t turn = 1;
  int64_t index;       // of the block's row in this turn; rows.count or more if it has none
  int blocks_per_row;  // in this turn
  int part;            // the block's number among those of its row

  __device__ BlockRows(const typename Op::Rows& rows, const Exchange& exchange) : rows(rows), exchange(exchange) {
    share(0, exchange.rows_at_once);
  }
  __device__ bool exists() const { return index < rows.count; }
  // Moves to the next turn. Returns whether it has more blocks per row than the turn before.
  __device__ bool advance() {
    const int at_once = exchange.rows_at_once;
    const int64_t first = (int64_t)turn++ * at_once, rest = rows.count - first;
    index += at_once;
    if (rest >= at_once || rest <= 0) return false;
    share(first, (int)rest);
    return true;
  }

 private:
  __device__ void share(int64_t first, int count) {
    blocks_per_row = exchange.blocks() / count;
    const int slot = blockIdx.x / blocks_per_row;
    index = slot < count ? first + slot : rows.count, part = blockIdx.x - slot * blocks_per_row;
  }
};

// A thread's part of the chunks of a block, one chunk after another. The chunks of a row go to its blocks in turn.
// Within a chunk, the vectors of a thread are `workers` vectors apart.
template <class Op, class Exchange>
struct Chunks : BlockRows<Op, Exchange> {
  typedef typename Op::C C;
  typedef BlockRows<Op, Exchange> Base;
  const int workers;
  const uint32_t begin, end;   // in shared memory: a ring of places, each for one chunk
  const int bytes;             // size of a place
  uint32_t place;              // where the thread's first vector is in the current place
  Op op;                       // the row of the current chunk
  int row_chunks, chunk_vecs;  // chunks that the block takes of the row, and vectors in each
  int chunk = 0;               // the number of the current chunk, of these
  int64_t element;             // of the row: where the thread's first vector in the chunk begins,
  int rest;                    // vectors of the row from that one on

  __device__ Chunks(const typename Op::Rows& rows, const Exchange& exchange, int workers, uint32_t begin, int bytes,
                    int places)
      : Base(rows, exchange),
        workers(workers),
        begin(begin),
        end(begin + bytes * places),
        bytes(bytes),
        place(begin),
        op(rows.row(0)) {
    share();
    begin_row();
  }
  __device__ bool begins_row() const { return chunk == 0; }
  __device__ bool ends_row() const { return chunk + 1 == row_chunks; }
  // A vector of the thread exists if its distance from the thread's first vector is below this limit.
  __device__ int limit() const {
    const int in_chunk = chunk_vecs - (int)threadIdx.x;
    return rest < in_chunk ? rest : in_chunk;
  }
  __device__ void advance() {
    place = place + bytes == end ? begin : place + bytes;
    if (!ends_row()) {
      const int step = this->blocks_per_row * chunk_vecs;
      ++chunk, rest -= step, element += (int64_t)step * C::kVecSize;
    } else {
      chunk = 0;
      if (Base::advance()) share();
      begin_row();
    }
  }

 private:
  __device__ void share() {
    const int vecs = (int)((uint64_t)op.row.n / C::kVecSize), all = this->blocks_per_row;
    const auto divide = [](int a, int b) { return (a + b - 1) / b; };
    row_chunks = divide(divide(vecs, all), C::kVecs * workers);
    row_chunks = row_chunks ? row_chunks : 1;
    chunk_vecs = (divide(vecs, all * row_chunks) + 3) / 4 * 4;
  }
  __device__ void begin_row() {
    if (!this->exists()) return;
    op = Op(this->rows.row(this->index));
    const AlignedRow<C> row(op.row.aligned(), op.row.n);
    const int first = this->part * chunk_vecs + threadIdx.x;
    rest = (int)row.vectors - first, element = row.head + (int64_t)first * C::kVecSize;
  }
};

// Shared memory has `places` places for chunks. That is more than the chunks that a block takes of a row.
template <class Op, class Exchange>
__device__ inline void compute(const typename Op::Rows& rows, int places, Exchange exchange) {
  typedef typename Op::C C;
  typedef typename Op::Chunk Chunk;
  typedef typename Op::Raw Raw;
  constexpr int kOperands = Op::kOperands, kSlots = kOperands * C::kVecs, kRawBytes = sizeof(Raw);
  __shared__ typename Op::Shared shared[kSets];
  const int workers = blockDim.x - 2 * kCommThreads, warps = workers / 32, warp = threadIdx.x / 32,
            lane = threadIdx.x % 32;

  if (warp >= warps) {  // one warp sends the partial states of the block, the other one receives those of its rows
    const bool sends = warp == warps;
    exchange.open(sends);
    for (BlockRows<Op, Exchange> at(rows, exchange); at.exists(); at.advance()) {
      auto& here = shared[at.turn % kSets];
      Op op(rows.row(at.index));
      const AlignedRow<C> row(op.row.aligned(), op.row.n);
      const int64_t edge = at.part == 0 ? row.head_or_tail(lane, op.row.n) : -1;
      op.load_edge(edge);
      if (sends) {
        wait(Done::reduced, at.turn);
        op.reduce_block(here, warps, lane, edge >= 0);
        exchange.send(op, at);
      } else {
        const auto state = exchange.receive(op, at);
        if (lane == 0) here.row = state;
        if (edge >= 0) rows.result(at.index)[edge] = op.edge_result(state);
        arrive(Done::merged, at.turn);
      }
    }
    return;
  }

  const int stride = workers * kRawBytes;  // from a thread's vector in shared memory to its next
  typedef Chunks<Op, Exchange> BlockChunks;
  BlockChunks coming(rows, exchange, workers, dynamic_smem_address() + threadIdx.x * kRawBytes, kSlots * stride,
                     places);
  BlockChunks reduced = coming, written = coming;
  const auto place_of = [&](const BlockChunks& chunks, int slot) { return chunks.place + slot * stride; };
  // Vectors that do not exist are filled with neutral elements in shared memory.
  const auto copy_next = [&] {
    if (coming.exists()) {
      const int limit = coming.limit();
      unroll<kSlots>([&](int s) {
        const int i = s / kOperands * workers;
        if (i < limit) {
          const auto from = coming.op.operand(s % kOperands) + coming.element + i * C::kVecSize;
          AsyncCopy::start<kRawBytes>(place_of(coming, s), from);
        } else {
          store_smem(place_of(coming, s), Op::neutral_vector());
        }
      });
    }
    AsyncCopy::commit();
    coming.advance();
  };
  const auto read = [&](const BlockChunks& from, Chunk& chunk) {
    unroll<C::kVecs>([&](int i) {
      Raw raw[kOperands];
      unroll<kOperands>([&](int o) { raw[o] = load_smem<Raw>(place_of(from, i * kOperands + o)); });
      from.op.set(chunk, i, raw);
    });
  };
  // The places beyond a row are for chunks that are being copied, and for chunks of later rows, up to kSets rows, that
  // are reduced while a row is being merged. In the last turn a block has no more chunks of its row than in other
  // turns, and may have only one.
  const int row_chunks = coming.row_chunks, spare = places - row_chunks, wanted = exchange.ahead(spare);
  const int least_ahead = places - (kSets * row_chunks - 1);
  const int ahead = wanted > spare ? spare : wanted > least_ahead ? wanted : least_ahead, lag = places - ahead;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) copy_next();

  decltype(Op::Shared::row) state = {};
#pragma unroll 1
  for (int waits = lag; written.exists(); waits -= waits > 0) {  // `waits`: the steps before the first chunk is written

    Chunk elements;
    if (reduced.exists()) {
      AsyncCopy::wait_all_but(ahead - 1);
      read(reduced, elements);
      reduced.op.absorb(elements);
      if (reduced.ends_row()) {
        reduced.op.publish(shared[reduced.turn % kSets], warp, lane);
        arrive(Done::reduced, reduced.turn);
      }
      reduced.advance();
    }
    if (waits == 0) {
      if (written.begins_row()) {
        wait(Done::merged, written.turn);
        state = shared[written.turn % kSets].row;
      }
      read(written, elements);
      Op::apply_epilogue(elements, state);
      typename C::Out* const result = rows.result(written.index) + written.element;
      const int limit = written.limit();
      unroll<C::kVecs>([&](int i) {
        Op::apply_epilogue(elements, i, state);
        if (i * workers < limit) store_vector(result + i * workers * C::kVecSize, elements.vec(i));
      });
      written.advance();
    }
    copy_next();
  }
}
