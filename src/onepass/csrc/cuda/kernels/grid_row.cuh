// grid_row.cuh: a row that several blocks share, which exchange their partial states through global memory. The kernels
// rows_grid.cu and rows_pipelined.cu use it. GridForward and GridBackward have the steps: a thread absorbs its part of
// the row chunk by chunk, a block merges the parts of its threads, the blocks merge each other's messages, and the
// epilogue is applied to each chunk.
//
// A block has one warp more than those that compute, the communication warp. It sends the block's partial state to the
// other blocks and waits for theirs. It also handles the head and tail elements of a row.
#pragma once

#include "block_reduce.cuh"
#include "grid_sync.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

constexpr int kCommThreads = 32;  // of a block; they read no whole vectors
constexpr int kMaxThreads = 512;  // including kCommThreads

// Reads a vector of a chunk that is prefetched.
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

// The state of a row in the forward, and one thread's part of it.
template <class Config, int ChunkVecs>
struct GridForward : ThreadState<Config, GridSumType<typename Config::Sum>> {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef GridSumType<typename C::Sum> L;
  typedef ForwardRows<C> Rows;
  typedef GridMessage<C> Message;
  static constexpr int kChunkVecs = ChunkVecs, kOperands = 1;
  // Exponentials are not kept: each is relative to the maximum at the time, which later chunks may raise.
  typedef RowFragment<C, kChunkVecs, false> Chunk;
  typedef typename Chunk::Raw Raw;
  static constexpr bool kOnePerRow = C::Epilogue::kOnePerRow;
  // Elements that are read only once may leave the L2 cache first. If most are read again, that costs 3%, as in other
  // tiers.
  static constexpr bool kEvictFirst = C::kVecs > 0, kEvictFirstAgain = false;
  // If nearly all chunks are read again, the second read is scheduled dynamically: a block takes the next chunk when it
  // has finished one, so that no block ends long after the others.
  static constexpr bool kDrawsTickets = C::kVecs == 0;
  static constexpr int kMessagesInFlight = 5;  // per lane
  struct Shared {
    A maxima[32];
    L sums[32];
    State<A> row;
  };
  using ThreadState<C, L>::m;
  using ThreadState<C, L>::l;
  A edge_value = -infinity();

  ForwardRow<C> row;
  __device__ explicit GridForward(const ForwardRow<C>& row) : row(row) {}

  __device__ const In* operand(int) const { return row.x; }
  // A vector that changes no state.
  static __device__ Raw neutral_vector() {
    Vector<In, C::kVecSize> vector;
    unroll<C::kVecSize>([&](int v) { vector.at[v] = C::Operand::template neutral<In>(); });
    return __builtin_bit_cast(Raw, vector);
  }
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
  // Called by each warp: gives its state to the block.
  __device__ void publish(Shared& shared, int warp, int lane) {
    reduce_lanes();
    if (lane == 0) shared.maxima[warp] = m, shared.sums[warp] = l;
  }
  __device__ void load_edge(int64_t at) {
    if (at >= 0) edge_value = row.operand(row.x[at]);
  }
  // Called by one warp: reduces the states of the block's warps, and the head and tail elements.
  __device__ void reduce_block(const Shared& shared, int warps, int lane, bool has_edge) {
    A warp_m = -infinity();
    if (lane < warps) warp_m = shared.maxima[lane], l = shared.sums[lane];
    m = max_(warp_m, edge_value);
    l = scale(l, exp_for_sum(warp_m - finite_for_sum(m)));
    if (has_edge) l = add(l, begin_sum<L>(exp_for_sum(edge_value - finite_for_sum(m))));
    reduce_lanes();
  }
  __device__ void send(Message& message, uint32_t epoch) const { message.write(m, l, epoch); }
  // Called by one warp: reduces the messages of all blocks of the row to the state of the row.
  template <class Patience = Endless>
  __device__ State<A> reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch,
                                      Patience&& patience = {}) {
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
      } while (!arrived && !patience.is_over());
      const A old_m = m;
      unroll<kMessagesInFlight>([&](int i) { m = max_(m, max[i]); });
      l = scale(l, exp_for_sum(old_m - finite_for_sum(m)));
      unroll<kMessagesInFlight>([&](int i) { l = add(l, scale(sum[i], exp_for_sum(max[i] - finite_for_sum(m)))); });
    }
    __syncwarp();
    reduce_lanes();
    return {m, value_of(l)};
  }
  // Makes all results of the row NaN.
  static __device__ void spoil(State<A>& state) { state.m = A(nan_()); }
  __device__ Out edge_result(State<A> state) const { return from_acc<Out>(typename C::Epilogue(state)(edge_value)); }
  static __device__ void apply_epilogue(Chunk& chunk, State<A> state) {
    chunk.subtract_max(state.m);
    chunk.apply_epilogue(state);
  }
  static __device__ void apply_epilogue(Chunk&, int, State<A>) {}

 private:
  __device__ void reduce_lanes() {
    const A max = warp_max(m);
    l = warp_reduce<32>(scale(l, exp_for_sum(m - finite_for_sum(max))), Sum());
    m = max;
  }
};

// The sum of a row in the backward, and one thread's part of it.
template <class Config, int ChunkVecs>
struct GridBackward {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef GridSumType<L> GridSum;
  typedef BackwardRows<C> Rows;
  typedef GridMessage<C> Message;
  static constexpr int kChunkVecs = ChunkVecs, kOperands = C::kBroadcastGrad ? 1 : 2;
  typedef BackwardFragment<C, kChunkVecs> Chunk;
  typedef typename Chunk::Raw Raw;
  static constexpr bool kOnePerRow = false, kEvictFirst = true, kEvictFirstAgain = true, kDrawsTickets = false;
  struct Shared {
    GridSum sums[32];
    InputGrad<C> row;
  };
  BackwardRow<C> row;
  L l = {};
  GridSum sum;
  A g_value;  // if g is broadcast
  A edge_y = 0, edge_g = g_value;

  __device__ explicit GridBackward(const BackwardRow<C>& row)
      : row(row), g_value(C::kBroadcastGrad ? to_acc(*row.g) : A(0)) {}

  __device__ const In* operand(int o) const { return o ? row.g : row.y; }
  static __device__ Raw neutral_vector() { return {}; }
  template <bool EvictFirst>
  __device__ void prefetch(Raw* next, int64_t element, int count, int workers) const {
#pragma unroll
    for (int i = 0; i < kChunkVecs; ++i, element += workers * C::kVecSize) {
      unroll<kOperands>([&](int o) {
        next[i * kOperands + o] = neutral_vector();
        if (count > i * workers) next[i * kOperands + o] = read_vector<Chunk, C, EvictFirst>(operand(o) + element);
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
  template <class Patience = Endless>
  __device__ InputGrad<C> reduce_messages(const Message* messages, int blocks_per_row, uint32_t epoch,
                                          Patience&& patience = {}) {
    GridSum all = begin_sum<GridSum>(A(0));
    for (int at = threadIdx.x % 32; at < blocks_per_row; at += 32) {
      A unused;
      GridSum part;
      while (!messages[at].read(&unused, &part, epoch) && !patience.is_over()) {
      }
      all = add(all, part);
    }
    __syncwarp();
    const A terms = value_of(warp_reduce<32>(all, Sum()));
    return {C::kBroadcastGrad ? g_value * (C::Grad::kSumsGrad ? A(row.n) : terms) : terms, row.score};
  }
  static __device__ void spoil(InputGrad<C>& grad) { grad.sum = A(nan_()); }
  __device__ Out edge_result(const InputGrad<C>& grad) const { return from_acc<Out>(grad(edge_y, edge_g)); }
  static __device__ void apply_epilogue(Chunk&, const InputGrad<C>&) {}
  static __device__ void apply_epilogue(Chunk& chunk, int i, const InputGrad<C>& grad) {
    chunk.apply_epilogue(i, grad);
  }

 private:
  // Converts a thread's sum to the type in which the sums of blocks are added.
  static __device__ double to_grid_sum(Compensated<float> sum) { return (double)sum.hi + (double)sum.lo; }
  static __device__ Compensated<double> to_grid_sum(Compensated<double> sum) { return sum; }
  static __device__ float to_grid_sum(float sum) { return sum; }
};
