// column_reduce.cuh: the threads that share columns reduce the partial states of each column: through shared memory,
// then over the blocks of a cluster, or over many blocks by messages through global memory.
#pragma once

#include "async_copy.cuh"
#include "column_tile.cuh"
#include "grid_sync.cuh"
#include "warp_reduce.cuh"

template <class A>
struct alignas(2 * sizeof(A)) StatePair {
  A m, l;
};

// The partial states of softmaxes and how they are reduced. L is the type of sums.
template <class A, class L>
struct StatePartials {
  typedef StatePair<A> Partial;
  typedef A Scalar;
  typedef L Sum;
  static constexpr bool kHasMax = true;
  static __device__ Partial make(A max, A sum) { return {max, sum}; }
  static __device__ Partial identity() { return {-infinity(), 0}; }
  template <int Count>
  static __device__ Partial merge(Partial before, const Partial (&partials)[Count]) {
    A max = before.m;
    unroll<Count>([&](int i) { max = max_(max, partials[i].m); });
    L sum = rescale(before, max);
    unroll<Count>([&](int i) { sum = add(sum, rescale(partials[i], max)); });
    return {max, value_of(sum)};
  }
  static __device__ Partial reduce_lanes(Partial partial, int stride) {
    const A max = warp_reduce_strided(partial.m, stride, [](A a, A b) { return max_(a, b); });
    return {max, value_of(warp_reduce_strided(rescale(partial, max), stride, [](L a, L b) { return add(a, b); }))};
  }

 private:
  // The minimum with 0, because the difference of two infinities is NaN.
  static __device__ L rescale(Partial partial, A max) {
    return scale(begin_sum<L>(partial.l), exp_for_sum(at_most_zero(partial.m - finite_or_zero(max))));
  }
  static __device__ float at_most_zero(float v) { return fminf(v, 0.0f); }
  static __device__ double at_most_zero(double v) { return fmin(v, 0.0); }
};
// The same for gradients, whose state is a sum.
template <class A, class L>
struct SumPartials {
  typedef A Partial;
  typedef A Scalar;
  typedef L Sum;
  static constexpr bool kHasMax = false;
  static __device__ Partial make(A, A sum) { return sum; }
  static __device__ Partial identity() { return 0; }
  template <int Count>
  static __device__ Partial merge(Partial before, const Partial (&partials)[Count]) {
    return value_of(
        add(begin_sum<L>(before), begin_sum<L>(pairwise_sum<Count, 0>([&](int i) { return partials[i]; }))));
  }
  static __device__ Partial reduce_lanes(Partial partial, int stride) {
    return value_of(warp_reduce_strided(begin_sum<L>(partial), stride, [](L a, L b) { return add(a, b); }));
  }
};

// What a block sends the blocks that share a column with it.
template <class C, class A>
struct ColumnMessage {
  GridMessage<C> message;
  __device__ void write(StatePair<A> partial, uint32_t epoch) {
    if constexpr (sizeof(A) == 8)
      message.write(partial.m, Compensated<double>{partial.l, 0}, epoch);
    else
      message.write(partial.m, (double)partial.l, epoch);
  }
  __device__ void write(A partial, uint32_t epoch) { write(StatePair<A>{A(0), partial}, epoch); }
  __device__ bool read(StatePair<A>* partial, uint32_t epoch) const {
    if constexpr (sizeof(A) == 8) {
      Compensated<double> l;
      const bool arrived = message.read(&partial->m, &l, epoch);
      return partial->l = l.hi, arrived;
    } else {
      return message.read(&partial->m, &partial->l, epoch);
    }
  }
  __device__ bool read(A* partial, uint32_t epoch) const {
    StatePair<A> pair;
    const bool arrived = read(&pair, epoch);
    return *partial = pair.l, arrived;
  }
};

constexpr int kColumnMessagesInFlight = 6;  // of a lane
constexpr int kPartialsAtOnce = 4;          // of a column, that a lane takes at a time

// A thread's values of its columns, to and from shared memory, 16 bytes at a time where they lie together.
template <class T, int V>
__device__ inline void store_together(T* at, const T (&values)[V]) {
  constexpr int kCount = V * sizeof(T) < 16 ? V : 16 / sizeof(T);
#pragma unroll
  for (int v = 0; v < V; v += kCount) {
    Vector<T, kCount> vector;
    unroll<kCount>([&](int i) { vector.at[i] = values[v + i]; });
    *reinterpret_cast<Vector<T, kCount>*>(at + v) = vector;
  }
}
template <class T, int V>
__device__ inline void load_together(const T* at, T (&values)[V]) {
  if constexpr (V * sizeof(T) % 16 == 0) {
    typedef Vector<uint32_t, 4> Word;
    Word words[V * sizeof(T) / 16];
    unroll<V * sizeof(T) / 16>([&](int p) { words[p] = reinterpret_cast<const Word*>(at)[p]; });
    memcpy(values, words, sizeof(words));
  } else {
    unroll<V>([&](int v) { values[v] = at[v]; });
  }
}

// The reduction over the threads that share columns. Dynamic shared memory has, in this order: the vectors of the
// threads; the epilogues of whole columns; the partial sums of the block's threads with their maxima, or the block's
// maxima; and the messages of a cluster, in two buffers in turn. ThreadMaxima: a thread's sum of a column is relative
// to the thread's own maximum and not to the block's. That saves one round trip through shared memory and makes another
// longer.
template <class C, class Partials, class Epilogue, bool ThreadMaxima>
struct ColumnReduce {
  static constexpr int V = C::kVecSize;
  typedef typename Partials::Partial Partial;
  typedef typename Partials::Scalar A;
  typedef typename Partials::Sum L;
  typedef ColumnMessage<C, A> Message;
  TxBarrier barriers[2];

  // All threads call this before the first reduction.
  __device__ void init(const Tiles& tiles, GridBarrier* messages_clear) {
    if constexpr (C::kClusterSize > 1) {
      if (threadIdx.x == 0) barriers[0].init(), barriers[1].init();
      cluster_arrive();
    } else if constexpr (C::kGrid) {
      // The memory of the messages may hold anything before: every block clears its own, and none is read before all
      // have. The last warp does it, because the others have their loads to begin.
      const int last = blockDim.x - 32;
      if ((int)threadIdx.x >= last) {
        for (int parity = 0; parity < 2; ++parity) {
          for (int c = threadIdx.x - last; c < tiles.tile_cols; c += 32)
            message_of(tiles, parity, c, blockIdx.x)->message.clear();
        }
        __syncwarp();
        if ((int)threadIdx.x == last) {
          const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
          messages_clear->init(), messages_clear->arrive(block, blocks);
        }
      }
    }
  }
  // All threads call this once, before the first reduction and well after init, because none has to wait then.
  __device__ void wait_for_clear(GridBarrier* messages_clear) const {
    if (C::kGrid && threadIdx.x == blockDim.x - 32) messages_clear->wait();
  }

  // Replaces a thread's maximum of each of its columns by the block's.
  template <class Tile>
  __device__ void block_max(A (&max)[V], const Tile& tile) {
    const SmemLayout smem(tile.tiles);
    smem.put(smem.sums, max, tile);
    __syncthreads();
    const MergeLanes lanes(tile.tiles);
    for (int c = lanes.column; c - lanes.slot < tile.tiles.tile_cols; c += lanes.column_stride) {
      A col_max = -infinity();
      smem.for_each_partial(c, lanes, tile, A(-infinity()), [&](const A(&partials)[kPartialsAtOnce]) {
        unroll<kPartialsAtOnce>([&](int i) { col_max = max_(col_max, partials[i]); });
      });
      col_max = warp_reduce_strided(col_max, lanes.lane_stride, [](A a, A b) { return max_(a, b); });
      if (lanes.rank == 0 && c < tile.tiles.tile_cols) smem.maxima[c] = col_max;
    }
    __syncthreads();
    smem.get(smem.maxima, max, tile);
  }

  // Publishes a thread's sum of each of its columns. Returns whether `condition` holds for any thread of the block.
  template <class Tile>
  __device__ bool publish(const A (&sums)[V], const Tile& tile, bool condition) {
    const SmemLayout smem(tile.tiles);
    smem.put(smem.sums, sums, tile);
    return __syncthreads_or(condition);
  }
  // Reduces a thread's sums of its columns (unless they are published already), which with ThreadMaxima are relative to
  // `maxima`. One thread of the block computes `make(column, partial, the block's maximum)` for each whole column; the
  // block's maximum is there if sums are relative to it. Every thread gets those of its columns in `out`.
  template <bool IsPublished, class Tile, class Make>
  __device__ void reduce(const A (&maxima)[V], const A (&sums)[V], Epilogue (&out)[V], const Tile& tile,
                         uint32_t iteration, Make make) {
    const Tiles& tiles = tile.tiles;
    const int tile_cols = tiles.tile_cols;
    const SmemLayout smem(tiles);
    const MergeLanes lanes(tiles);
    Partial* const sent = smem.sent + iteration % 2 * C::kClusterSize * tile_cols;
    if constexpr (!IsPublished) smem.put(smem.sums, sums, tile);
    if constexpr (ThreadMaxima) smem.put(smem.maxima, maxima, tile);
    if (C::kClusterSize > 1 && iteration == 0) cluster_wait();  // a peer's shared memory exists once it has started
    if (C::kClusterSize > 1 && threadIdx.x == 0)
      barriers[iteration % 2].expect_tx(C::kClusterSize * tile_cols * sizeof(Partial));
    if constexpr (!IsPublished) __syncthreads();
    for (int c = lanes.column; c - lanes.slot < tile_cols; c += lanes.column_stride) {
      const Partial partial = smem.merge_block(c, lanes, tile);
      if (c >= tile_cols) continue;
      if constexpr (C::kClusterSize > 1) {
        for (int peer = lanes.rank; peer < C::kClusterSize; peer += tiles.merge_threads)
          store_async(&sent[cluster_rank() * tile_cols + c], peer, partial, &barriers[iteration % 2]);
      } else if constexpr (C::kGrid) {
        if (lanes.rank == 0) message_of(tiles, iteration % 2, c, blockIdx.x)->write(partial, iteration + 1);
      } else if (lanes.rank == 0) {
        smem.epilogues[c] = make(c, partial, smem.block_max_of(c));
      }
    }
    if constexpr (C::kClusterSize > 1) {
      barriers[iteration % 2].wait(iteration / 2 % 2);
      for (int c = lanes.column; c - lanes.slot < tile_cols; c += lanes.column_stride) {
        Partial partial = Partials::identity();
        for (int first = lanes.rank; first < C::kClusterSize && c < tile_cols;
             first += kPartialsAtOnce * tiles.merge_threads) {
          Partial here[kPartialsAtOnce];
          unroll<kPartialsAtOnce>([&](int i) {
            const int k = first + i * tiles.merge_threads;
            here[i] = k < C::kClusterSize ? sent[k * tile_cols + c] : Partials::identity();
          });
          partial = Partials::merge(partial, here);
        }
        __syncwarp();
        partial = Partials::reduce_lanes(partial, lanes.lane_stride);
        if (lanes.rank == 0 && c < tile_cols) smem.epilogues[c] = make(c, partial, smem.block_max_of(c));
      }
    } else if constexpr (C::kGrid) {
      const int blocks = gridDim.x;
      for (int c = lanes.column; c - lanes.slot < tile_cols; c += lanes.column_stride) {
        Partial partial = Partials::identity();
        const Message* const messages = message_of(tiles, iteration % 2, c, 0);
        for (int first = lanes.rank; first < blocks && c < tile_cols;
             first += kColumnMessagesInFlight * tiles.merge_threads) {
          Partial here[kColumnMessagesInFlight];
          bool arrived;
          do {
            arrived = true;
            unroll<kColumnMessagesInFlight>([&](int i) {
              const int k = first + i * tiles.merge_threads;
              here[i] = Partials::identity();
              if (k < blocks) arrived &= messages[k].read(&here[i], iteration + 1);
            });
          } while (!arrived);
          partial = Partials::merge(partial, here);
        }
        __syncwarp();
        partial = Partials::reduce_lanes(partial, lanes.lane_stride);
        if (lanes.rank == 0 && c < tile_cols) smem.epilogues[c] = make(c, partial, smem.block_max_of(c));
      }
    }
    __syncthreads();
    smem.get(smem.epilogues, out, tile);
  }

 private:
  // The message of one of the blocks that share this block's columns. There are two in turn. The messages of a column
  // lie together because they are read together.
  static __device__ Message* message_of(const Tiles& tiles, uint32_t parity, int column, int block) {
    const int64_t columns = ((int64_t)parity * gridDim.y + blockIdx.y) * tiles.tile_cols + column;
    return reinterpret_cast<Message*>(tiles.messages) + columns * gridDim.x + block;
  }
  // Which columns a lane merges: `column`, and every `column_stride`th from there. It takes the partial states number
  // `rank`, rank + merge_threads, ... of each.
  struct MergeLanes {
    int lane_stride, slot, column, rank, column_stride;
    __device__ MergeLanes(const Tiles& tiles) {
      const int lane = threadIdx.x % 32, bits = 5 - tiles.merge_threads_log2;
      lane_stride = 1 << bits;
      rank = lane >> bits;
      slot = lane & (lane_stride - 1);
      column = (threadIdx.x / 32 << bits) + slot;
      column_stride = blockDim.x / 32 << bits;
    }
  };
  struct SmemLayout {
    const Tiles& tiles;
    Epilogue* epilogues;
    A *sums, *maxima;
    Partial* sent;
    __device__ SmemLayout(const Tiles& tiles) : tiles(tiles) {
      const auto round_up = [](int bytes) { return (bytes + 15) / 16 * 16; };
      unsigned char* at = dynamic_smem + tiles.smem_vecs_bytes;
      epilogues = reinterpret_cast<Epilogue*>(at), at += round_up(tiles.tile_cols * sizeof(Epilogue));
      sums = reinterpret_cast<A*>(at), at += round_up(tiles.partials * tiles.partial_stride * sizeof(A));
      maxima = reinterpret_cast<A*>(at);
      at += !Partials::kHasMax
                ? 0
                : round_up((ThreadMaxima ? tiles.partials * tiles.partial_stride : tiles.tile_cols) * sizeof(A));
      sent = reinterpret_cast<Partial*>(at);
    }
    template <class Tile>
    __device__ void put(A* to, const A (&values)[V], const Tile& tile) const {
      if (threadIdx.x >= tiles.threads_x * tiles.threads_y) return;
      if constexpr (C::kShifted)
        unroll<V>([&](int v) {
          if (tile.in_tile >> v & 1) to[tile.line * tiles.partial_stride + tile.col + v] = values[v];
        });
      else
        store_together(to + (C::kSlab ? threadIdx.x * V : tile.line * tiles.partial_stride + tile.col), values);
    }
    template <class T, class Tile>
    __device__ void get(const T* from, T (&out)[V], const Tile& tile) const {
      if constexpr (C::kShifted) {
        unroll<V>([&](int v) { out[v] = from[tile.in_tile >> v & 1 ? tile.col + v : 0]; });
      } else if constexpr (!C::kSlab) {
        load_together(from + tile.col, out);
      } else {
        int c = tile.col;
        unroll<V>([&](int v) {
          out[v] = from[c];
          c = tile.next_col(c);
        });
      }
    }
    // Merges the partial states of a column that the threads of the block have.
    template <class Tile>
    __device__ Partial merge_block(int column, const MergeLanes& lanes, const Tile& tile) const {
      if constexpr (ThreadMaxima) {
        Partial partial = Partials::identity();
        if (column < tiles.tile_cols) {
          const A *sum = sums + first_partial(column, lanes, tile), *max = maxima + (sum - sums);
          for (int left = tiles.partials - lanes.rank; left > 0; left -= kPartialsAtOnce << tiles.merge_threads_log2) {
            Partial here[kPartialsAtOnce];
            unroll<kPartialsAtOnce>([&](int i) {
              const int at = i * tiles.partial_stride << tiles.merge_threads_log2;
              here[i] = Partials::identity();
              if (i << tiles.merge_threads_log2 < left) here[i] = Partials::make(max[at], sum[at]);
            });
            partial = Partials::merge(partial, here);
            sum += kPartialsAtOnce * tiles.partial_stride << tiles.merge_threads_log2;
            max += kPartialsAtOnce * tiles.partial_stride << tiles.merge_threads_log2;
          }
        }
        __syncwarp();
        return Partials::reduce_lanes(partial, lanes.lane_stride);
      } else {
        L sum = {};
        for_each_partial(column, lanes, tile, A(0), [&](const A(&partials)[kPartialsAtOnce]) {
          sum = add(sum, begin_sum<L>(pairwise_sum<kPartialsAtOnce, 0>([&](int i) { return partials[i]; })));
        });
        sum = warp_reduce_strided(sum, lanes.lane_stride, [](L a, L b) { return add(a, b); });
        return Partials::make(column < tiles.tile_cols ? block_max_of(column) : A(0), value_of(sum));
      }
    }
    __device__ A block_max_of(int column) const {
      if constexpr (Partials::kHasMax && !ThreadMaxima)
        return maxima[column];
      else
        return 0;
    }
    // Where a lane's first partial state of a column is.
    template <class Tile>
    __device__ int first_partial(int column, const MergeLanes& lanes, const Tile& tile) const {
      int first = C::kSlab ? column + tile.before : column;
      if (C::kSlab && first >= tiles.tile_cols) first %= tiles.tile_cols;
      return first + lanes.rank * tiles.partial_stride;
    }
    // Calls f for a lane's partial values of a column, kPartialsAtOnce at a time.
    template <class Tile, class F>
    __device__ void for_each_partial(int column, const MergeLanes& lanes, const Tile& tile, A neutral, F f) const {
      if (column >= tiles.tile_cols) return;
      const A* from = sums + first_partial(column, lanes, tile);
      for (int left = tiles.partials - lanes.rank; left > 0; left -= kPartialsAtOnce << tiles.merge_threads_log2) {
        A here[kPartialsAtOnce];
        unroll<kPartialsAtOnce>([&](int i) {
          here[i] = neutral;
          if (i << tiles.merge_threads_log2 < left)
            here[i] = from[i * tiles.partial_stride << tiles.merge_threads_log2];
        });
        f(here);
        from += kPartialsAtOnce * tiles.partial_stride << tiles.merge_threads_log2;
      }
    }
  };
};
