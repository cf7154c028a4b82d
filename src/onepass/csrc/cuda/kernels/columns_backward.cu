// columns_backward.cu: gradients of columns, in the shape of columns.cu with one number per column as the state. Each
// element of the forward's saved tensor and of the result's gradient is read once, and dx is written once.
//
//   load -> each thread sums its columns -> block -> cluster or grid -> epilogue -> store
//
// The gradient of logsumexp, g exp(x - lse), reduces nothing. There In is the type of g and lse, and Out that of x and
// dx.
#include "column_online.cuh"
#include "column_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"

constexpr bool kLogsumexp = BackwardConfig::kFunction == Function::logsumexp;
constexpr bool kVectorGrad = !kLogsumexp && !BackwardConfig::kBroadcastGrad;  // g has vectors as y has

struct C : BackwardConfig {
  static constexpr int kOperands = kVectorGrad ? 2 : 1;
};
typedef C::Acc A;
typedef C::Sum L;
constexpr int V = C::kVecSize;

enum { DX, SAVED, GRAD, LSE };  // tensors

// The type of the saved tensor: the forward's result, or the input of logsumexp.
typedef Conditional<kLogsumexp, C::Out, C::In>::type Saved;

constexpr int kElementRegisters = C::kVecs * V * sizeof(Saved) / 4 * (kVectorGrad ? 2 : 1) + (kLogsumexp ? V : 0);
constexpr int kMinBlocks = (C::kGrid || is_pipelined<C>) && !C::kTwoPass
                               ? pipelined_blocks<C>
                               : min_blocks<C>(kElementRegisters + (sizeof(A) == 8 ? 2 : 1) * V);

typedef ThreadTile<C, kVectorGrad ? 3 : 2> Tile;

template <bool Again, class T, int Vecs>
__device__ inline A element_value(const ColumnFragment<C, T, Vecs>& fragment, int i, int v) {
  if constexpr (Again && is_half2<C, T>)
    return reconvert<T>(fragment.at[i].at[v / 2], v % 2);
  else
    return to_acc(fragment.get(i, v));
}

// A thread's vectors of both operands. Where the gradient is broadcast its value is passed as `broadcast_g`.
template <int Vecs>
struct OperandFragments {
  ColumnFragment<C, Saved, Vecs> y;
  ColumnFragment<C, C::In, kVectorGrad ? Vecs : 1> g;

  // Loads vectors q, q + 1, ..., which with FromSmem are in shared memory from the slot `slot` on.
  template <bool FromSmem>
  __device__ void load(const Saved* saved, const C::In* grad, const Tile& tile, int q, int slot) {
    load_vecs<FromSmem>(y, saved, tile, SAVED, q, from_acc<Saved>(0.0f), 0, slot);
    if constexpr (kVectorGrad) load_vecs<FromSmem>(g, grad, tile, GRAD, q, from_acc<C::In>(0.0f), 1, slot);
  }
  // Loads the first vectors, of the operands in turn, so that products of those that have arrived can be computed.
  __device__ void load_first(const Saved* saved, const C::In* grad, const Tile& tile) {
    if constexpr (!kVectorGrad || C::kStrided) return load<false>(saved, grad, tile, 0, 0);
    if (!tile.are_full(0, Vecs)) return load<false>(saved, grad, tile, 0, 0);
    if (can_prefetch_l2<C> && tile.tiles.is_narrow)
      load_interleaved<true>(saved, grad, tile);
    else
      load_interleaved<false>(saved, grad, tile);
  }
  // Loads a stage at the address `smem` of the pipeline.
  __device__ void load_from_pipeline(const Saved* saved, const C::In* grad, const Tile& tile, int q, uint32_t smem) {
    load_stage(y, saved, tile, SAVED, q, from_acc<Saved>(0.0f), 0, smem);
    if constexpr (kVectorGrad) load_stage(g, grad, tile, GRAD, q, from_acc<C::In>(0.0f), 1, smem);
  }
  template <int Count = Vecs, int First = 0>
  __device__ A partial_sum(A broadcast_g, int v) const {
    return pairwise_sum<Count, First>(
        [&](int i) { return sum_term<C>(element_value<false>(y, i, v), grad_value<false>(broadcast_g, i, v)); });
  }
  // Adds the vectors to sums, a stage at a time.
  template <int First = 0>
  __device__ void absorb(A broadcast_g, L (&sums)[V]) const {
    constexpr int kCount = Vecs - First < kStageVecs ? Vecs - First : kStageVecs;
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = add(sums[v], begin_sum<L>(partial_sum<kCount, First>(broadcast_g, v)));
    if constexpr (First + kCount < Vecs) absorb<First + kCount>(broadcast_g, sums);
  }
  __device__ A result(A broadcast_g, A s, int i, int v) const {
    return input_grad<C>(element_value<true>(y, i, v), grad_value<true>(broadcast_g, i, v), s);
  }
  __device__ void opaque_registers() { y.opaque_registers(), g.opaque_registers(); }
  // Copies a stage to the vectors q, q + 1, ..., and from there.
  __device__ void set_stage(int q, const OperandFragments<kStageVecs>& stage) {
    ::set_stage(y, q, stage.y);
    if constexpr (kVectorGrad) ::set_stage(g, q, stage.g);
  }
  __device__ void get_stage(int q, OperandFragments<kStageVecs>& stage) const {
    ::get_stage(y, q, stage.y);
    if constexpr (kVectorGrad) ::get_stage(g, q, stage.g);
  }

 private:
  template <bool Again>
  __device__ A grad_value(A broadcast_g, int i, int v) const {
    if constexpr (kVectorGrad)
      return element_value<Again>(g, i, v);
    else
      return broadcast_g;
  }
  template <bool PrefetchL2>
  __device__ void load_interleaved(const Saved* saved, const C::In* grad, const Tile& tile) {
    if constexpr (kVectorGrad) {
      saved += tile.offset(SAVED, 0), grad += tile.offset(GRAD, 0);
#pragma unroll
      for (int i = 0; i < Vecs; ++i) {
        y.set(i, load_global<typename decltype(y)::Raw, PrefetchL2>(saved));
        g.set(i, load_global<typename decltype(g)::Raw, PrefetchL2>(grad));
        saved = advance(saved, tile.tiles.vec_strides[SAVED]), grad = advance(grad, tile.tiles.vec_strides[GRAD]);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(C::kBlockThreads, kMinBlocks)
    onepass_kernel(C::Out* dx, const Saved* saved, const C::In* grad, const C::In* lse,
                   const __grid_constant__ Tiles tiles) {
  __shared__ ColumnReduce<C, SumPartials<A, L>, A, false> column_reduce;
  constexpr bool kPipelined = is_pipelined<C>;
  GridBarrier messages_clear;
  if (!kLogsumexp) column_reduce.init(tiles, &messages_clear);
  const int rank = sharing_rank<C>();
  const uint64_t misalignment = (uint64_t)saved / sizeof(Saved) % V;
  const int64_t all = tiles.tiles_per_slice * tiles.slices,
                tile_stride = C::kGrid ? gridDim.y : gridDim.x / C::kClusterSize;
  uint32_t iteration = 0;
  const int64_t first_tile = C::kGrid ? blockIdx.y : blockIdx.x / C::kClusterSize;
  int64_t tile_index = first_tile;
  const auto prefetch_tile = [&](int64_t next) {
    if constexpr (C::kPrefetchesTile) {
      if (next >= all) return;
      const Tile tile(tiles, next, rank, misalignment);
      copy_vecs(0, saved, tile, SAVED, C::kVecs);
      if constexpr (kVectorGrad) copy_vecs(1, grad, tile, GRAD, C::kVecs);
      AsyncCopy::commit();
    }
  };
  if (!kLogsumexp) prefetch_tile(tile_index);
  ColumnPipeline<C> pipeline(tiles, smem_vec_address<C>(0, 0));

  for (; tile_index < all; tile_index += tile_stride) {
    const Tile tile(tiles, tile_index, rank, misalignment);
    OperandFragments<C::kVecs> fragment;
    if constexpr (kLogsumexp) {
      A col_g[V], col_lse[V];
      int64_t at[4] = {};
      if constexpr (!C::kStrided) add_offsets<4>(tiles.outer, tile.slice, at);
      int c = tile.col;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = tile.first_col + c;
        col_g[v] = col_lse[v] = 0;
        if (column < tiles.inner) {
          if constexpr (C::kStrided) {
            for (int t = 0; t < 4; ++t) at[t] = 0;
            add_offsets<4>(tiles.outer, column, at);
          }
          col_g[v] = to_acc(grad[at[GRAD] + (C::kStrided ? 0 : column * tiles.steps[GRAD])]);
          col_lse[v] = to_acc(lse[at[LSE] + (C::kStrided ? 0 : column * tiles.steps[LSE])]);
        }
        c = tile.next_col(c);
      }
      for (int from = 0; from < tiles.vecs_per_thread_max; from += C::kVecs) {
        fragment.load<false>(saved, grad, tile, from, 0);
        store_vecs<C::kVecs>(dx, tile, DX, from, [&](int i, int v) {
          return col_g[v] * exp_<C::Out>(element_value<false>(fragment.y, i, v) - col_lse[v]);
        });
      }
      continue;
    }

    A broadcast_g = 0, sums[V], s[V];
    if constexpr (C::kBroadcastGrad) {
      int64_t at[3] = {};
      add_offsets<3>(
          tiles.outer,
          C::kStrided ? (tile.first_col + tile.col < tiles.inner ? tile.first_col + tile.col : 0) : tile.slice, at);
      broadcast_g = to_acc(grad[at[GRAD]]);
    }
    OperandFragments<kStageVecs> stage;
    if constexpr (kPipelined) {
      if (tile_index == first_tile) {
        pipeline.begin_tile(tile, true, SAVED, saved, grad), pipeline.fill();
      }
    }
    const bool has_next = kPipelined && tile_index + tile_stride < all;
    const Tile next_tile(tiles, has_next ? tile_index + tile_stride : tile_index, rank, misalignment);
    const auto prefetch_stage = [&] {
      if (pipeline.rest <= 0) pipeline.begin_tile(next_tile, has_next, SAVED, saved, grad);
      pipeline.prefetch();
    };
    if constexpr (C::kTwoPass || C::kUsesSmemVecs) {
      if constexpr (C::kUsesSmemVecs && !kPipelined)
        copy_stages<C>((const C::In*)saved, grad, tile, SAVED, C::kVecs, 0, tiles.smem_vecs);
      L l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) l[v] = L{};
      if constexpr (C::kTwoPass) {
        for (int from = 0; from < tiles.vecs_per_thread_max; from += C::kVecs) {
          fragment.load<false>(saved, grad, tile, from, 0);
          fragment.absorb(broadcast_g, l);
        }
      } else if constexpr (kPipelined) {
        const auto receive = [&](int q, int kept) {
          stage.load_from_pipeline(saved, grad, tile, q, pipeline.wait_next(kept));
          stage.absorb(broadcast_g, l);
        };
#pragma unroll
        for (int q = 0; q < C::kVecs; q += kStageVecs) {
          if (q < tiles.vecs_per_thread_max) receive(q, 0), fragment.set_stage(q, stage), prefetch_stage();
        }
        if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
#pragma unroll 1
        for (int q = C::kVecs; q < tiles.vecs_per_thread_max; q += kStageVecs) receive(q, (q - C::kVecs) / kStageVecs);
      } else {
        fragment.load_first(saved, grad, tile);
        fragment.absorb(broadcast_g, l);
        fragment.opaque_registers();
#pragma unroll 1
        for (int c = 0; c < tiles.smem_vecs; c += kStageVecs) {
          AsyncCopy::wait_all_but((tiles.smem_vecs - c) / kStageVecs - 1);
          stage.load<C::kUsesSmemVecs>(saved, grad, tile, C::kVecs + c, c);
          stage.absorb(broadcast_g, l);
        }
      }
      if (!kPipelined && iteration == 0) column_reduce.wait_for_clear(&messages_clear);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = value_of(l[v]);
    } else {
      if constexpr (C::kPrefetchesTile)
        AsyncCopy::wait<0>(), fragment.load<true>(saved, grad, tile, 0, 0);
      else
        fragment.load_first(saved, grad, tile);
      if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = fragment.partial_sum(broadcast_g, v);
      fragment.opaque_registers();
      prefetch_tile(tile_index + tile_stride);
    }
    if (C::kClusterSize > 1 || C::kGrid || C::kSlab || tiles.partials > 1) {
      column_reduce.reduce<false>(sums, sums, s, tile, iteration++, [](int, A sum, A) { return sum; });
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) s[v] = sums[v];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) s[v] = C::kBroadcastGrad ? broadcast_g * (C::kLog ? A(tiles.n) : s[v]) : s[v];
    const auto fragment_result = [&](int i, int v) { return fragment.result(broadcast_g, s[v], i, v); };
    const auto stage_result = [&](int i, int v) { return stage.result(broadcast_g, s[v], i, v); };
    if constexpr (kPipelined) {
      pipeline.rewind(resident_stages<C>(tiles));
      C::Out* to = dx + tile.offset(DX, 0);
      const auto write_stage = [&](int q) { to = store_vecs_at<kStageVecs>(to, dx, tile, DX, q, stage_result); };
#pragma unroll
      for (int q = 0; q < C::kVecs; q += kStageVecs) {
        if (q < tiles.vecs_per_thread_max) fragment.get_stage(q, stage), write_stage(q);
      }
#pragma unroll 1
      for (int q = C::kVecs; q < tiles.vecs_per_thread_max; q += kStageVecs) {
        stage.load_from_pipeline(saved, grad, tile, q, pipeline.next());
        write_stage(q);
        prefetch_stage();
      }
    } else if constexpr (C::kTwoPass) {  // backwards: what was read last may still be in the L2 cache
      for (int from = (tiles.vecs_per_thread_max - 1) / C::kVecs * C::kVecs; from >= 0; from -= C::kVecs) {
        fragment.load<false>(saved, grad, tile, from, 0);
        store_vecs<C::kVecs>(dx, tile, DX, from, fragment_result);
      }
    } else {
      store_vecs<C::kVecs>(dx, tile, DX, 0, fragment_result);
      if constexpr (C::kUsesSmemVecs) {
#pragma unroll 1
        for (int c = 0; c < tiles.smem_vecs; c += kStageVecs) {
          stage.load<C::kUsesSmemVecs>(saved, grad, tile, C::kVecs + c, c);
          store_vecs<kStageVecs>(dx, tile, DX, C::kVecs + c, stage_result);
        }
      }
    }
  }
}
