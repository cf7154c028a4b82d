// columns.cu: columns whose tiles are kept in the registers of a block, or of the blocks of a cluster or the grid. Each
// element is read once and written once.
//
//   load -> each thread reduces its columns -> block -> cluster or grid -> epilogue -> store
//
// A thread keeps kVecs vectors. The ways to load are described in column_tile.cuh and pipeline.cuh. With kTwoPass
// nothing is kept, and the columns, of any length, are read twice.
#include "column_state.cuh"
#include "config.cuh"

typedef ColumnConfig<ForwardConfig> C;
typedef C::Acc A;
typedef C::Sum L;
typedef C::In In;
constexpr int V = C::kVecSize;

constexpr int kElementRegisters = C::kVecs * V * sizeof(In) / 4;
constexpr int kStateRegisters = 2 * V * sizeof(A) / 4;
constexpr int kMinBlocks = (C::kGrid || C::kPipelined) && !C::kTwoPass
                               ? pipelined_blocks<C>
                               : min_blocks<C>(kElementRegisters + kStateRegisters);

typedef ThreadTile<C, 2> Tile;
typedef ColumnFragment<C, In, kStageVecs> Stage;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads, kMinBlocks)
    onepass_kernel(const In* x, C::Out* y, const __grid_constant__ Tiles tiles) {
  __shared__ ColumnReduce<C, StatePartials<A, L>, ColumnEpilogue<C>, C::kThreadMaxima> column_reduce;
  GridBarrier messages_clear;
  column_reduce.init(tiles, &messages_clear);
  const int rank = sharing_rank<C>();
  const uint64_t x_misalignment = (uint64_t)x / sizeof(In) % V;
  const int64_t all = tiles.tiles_per_slice * tiles.slices,
                tile_stride = C::kGrid ? gridDim.y : gridDim.x / C::kClusterSize;
  uint32_t iteration = 0;
  const int64_t first_tile = C::kGrid ? blockIdx.y : blockIdx.x / C::kClusterSize;
  int64_t tile_index = first_tile;
  const auto prefetch_tile = [&](int64_t next) {
    if constexpr (C::kPrefetchesTile) {
      if (next < all) copy_vecs(0, x, Tile(tiles, next, rank, x_misalignment), 0, C::kVecs);
      AsyncCopy::commit();
    }
  };
  prefetch_tile(tile_index);
  ColumnPipeline<C> pipeline(tiles, smem_vec_address<C>(0, 0));

  for (; tile_index < all; tile_index += tile_stride) {
    const Tile tile(tiles, tile_index, rank, x_misalignment);
    ColumnFragment<C, In, C::kVecs> fragment;
    Stage stage;
    const auto load = [&](int from) {
      load_vecs<C::kPrefetchesTile>(fragment, x, tile, 0, from, neutral_element<C>(), 0, 0);
    };
    // Loads the stage that waits from vector c of shared memory on, or the first stage with kProvisionalMax.
    const auto load_smem_stage = [&](int c) {
      load_vecs<C::kUsesSmemVecs>(stage, x, tile, 0, C::kVecs + c, neutral_element<C>(), 0, c);
    };
    const auto load_first_stage = [&] {
      load_vecs<C::kUsesSmemVecs>(stage, x, tile, 0, 0, neutral_element<C>(), 0, 0);
    };
    const bool is_shared = C::kClusterSize > 1 || C::kGrid || C::kSlab || tiles.partials > 1;
    A m[V], sums[V];
    if constexpr (C::kPipelined) {
      if (tile_index == first_tile) {
        pipeline.begin_tile(tile, true, 0, x, x), pipeline.fill();
      }
    }
    const bool has_next = C::kPipelined && tile_index + tile_stride < all;
    const Tile next_tile(tiles, has_next ? tile_index + tile_stride : tile_index, rank, x_misalignment);
    const auto prefetch_stage = [&] {
      if (pipeline.rest <= 0) pipeline.begin_tile(next_tile, has_next, 0, x, x);
      pipeline.prefetch();
    };
    if constexpr (C::kPipelined) {
      typedef ColumnOnlineState<C> Online;
      Online state;
      state.init();
      const auto receive = [&](int q, int kept) {
        load_stage(stage, x, tile, 0, q, neutral_element<C>(), 0, pipeline.wait_next(kept));
        typename Online::Maxima stage_max;
        Online::max_of(stage, stage_max);
        stage.opaque_registers();
        state.update_max(stage_max);
      };
      const auto add_stage = [&] {
#pragma unroll
        for (int v = 0; v < V; ++v)
          state.add_elements(v, stage, [&](int i) { return element_value<true>(stage, i, v); });
      };
#pragma unroll
      for (int q = 0; q < (C::kIsReduction ? 0 : C::kVecs); q += kStageVecs) {
        if (q < tiles.vecs_per_thread_max) receive(q, 0), prefetch_stage(), set_stage(fragment, q, stage), add_stage();
      }
      if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
#pragma unroll 1
      for (int q = C::kIsReduction ? 0 : C::kVecs; q < tiles.vecs_per_thread_max; q += kStageVecs) {
        receive(q, C::kIsReduction ? 0 : (q - C::kVecs) / kStageVecs);
        if constexpr (C::kIsReduction) prefetch_stage();
        add_stage();
      }
      fragment.opaque_registers();
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = state.max(v);
      if (!C::kThreadMaxima && is_shared) column_reduce.block_max(m, tile);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = state.sum_relative_to(v, m[v]);
    } else if constexpr (C::kTwoPass) {
      L l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) m[v] = -infinity(), l[v] = L{};
      for (int from = 0; from < tiles.vecs_per_thread_max; from += C::kVecs) load(from), absorb(fragment, m, l);
      if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
      A max[V];
#pragma unroll
      for (int v = 0; v < V; ++v) max[v] = m[v];
      if (is_shared) column_reduce.block_max(max, tile);
#pragma unroll
      for (int v = 0; v < V; ++v)
        sums[v] = value_of(scale(l[v], exp_for_sum(m[v] - finite_for_sum(max[v])))), m[v] = max[v];
    } else if constexpr (C::kProvisionalMax) {
      for (bool is_retry = false;; is_retry = true) {
        copy_stages<C>(x, x, tile, 0, 0, 0, C::kFirstVecs);
        load(C::kFirstVecs);
        copy_stages<C>(x, x, tile, 0, C::kVecs + C::kFirstVecs, C::kFirstVecs, tiles.smem_vecs);
        AsyncCopy::wait_all_but(is_retry ? 0 : tiles.smem_vecs / kStageVecs - 1);
        load_first_stage(), max_of(stage, m), stage.opaque_registers();
        if (__builtin_expect(is_retry, false)) {
          update_max(fragment, m);
#pragma unroll 1
          for (int c = C::kFirstVecs; c < tiles.smem_vecs; c += kStageVecs) load_smem_stage(c), update_max(stage, m);
        } else if (iteration == 0) {
          column_reduce.wait_for_clear(&messages_clear);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) m[v] = max_(m[v], A(-3.40282347e38f));  // any element is far above -inf
        if (is_shared) column_reduce.block_max(m, tile);
        load_first_stage();
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] = sum_exp(stage, v, m[v]);
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] += sum_exp(fragment, v, m[v]);
        fragment.opaque_registers();
#pragma unroll 1
        for (int c = C::kFirstVecs; c < tiles.smem_vecs; c += kStageVecs) {
          AsyncCopy::wait_all_but((tiles.smem_vecs - c) / kStageVecs - 1);
          load_smem_stage(c);
#pragma unroll
          for (int v = 0; v < V; ++v) sums[v] += sum_exp(stage, v, m[v]);
        }
        // If an element is so far above the provisional maximum that sums overflow, all starts again, relative to the
        // block's maximum.
        bool overflows = false;
#pragma unroll
        for (int v = 0; v < V; ++v) overflows |= sums[v] > 1e30f;
        overflows &= !is_retry;
        if (is_shared) overflows = column_reduce.publish(sums, tile, overflows);
        if (__builtin_expect(!overflows, true)) break;
      }
    } else {
      uint32_t lowest = 0xff800000;  // -inf
      if constexpr (C::kUsesSmemVecs && !C::kRescaleOnArrival)
        copy_stages<C>(x, x, tile, 0, C::kVecs, 0, tiles.smem_vecs, lowest);
      if constexpr (C::kPrefetchesTile) AsyncCopy::wait<0>();
      load(0);
      if constexpr (C::kRescaleOnArrival) lowest = copy_stages<C>(x, x, tile, 0, C::kVecs, 0, tiles.smem_vecs, lowest);
      max_of(fragment, m, C::kRescaleOnArrival ? A(__uint_as_float(lowest)) : A(-infinity()));
      fragment.opaque_registers();
      if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
      prefetch_tile(tile_index + tile_stride);
      if constexpr (C::kUsesSmemVecs && !C::kRescaleOnArrival) {
        AsyncCopy::wait<0>();
#pragma unroll 1
        for (int c = 0; c < tiles.smem_vecs; c += kStageVecs) {
          A here[V];
          load_smem_stage(c), max_of(stage, here);
#pragma unroll
          for (int v = 0; v < V; ++v) m[v] = max_(here[v], m[v]);
        }
      }
      if (!C::kThreadMaxima && is_shared) column_reduce.block_max(m, tile);
      ThreadSum<C> l[V];
#pragma unroll
      for (int v = 0; v < V; ++v) l[v] = begin_sum<ThreadSum<C>>(sum_exp(fragment, v, m[v]));
      fragment.opaque_registers();
      bool was_rescaled = false;
      // Makes all that was computed so far relative to larger maxima.
      const auto rescale_to = [&](const A(&max)[V], int count) {
        A difference[V];
#pragma unroll
        for (int v = 0; v < V; ++v) difference[v] = m[v] - max[v], m[v] = max[v];
        rescale_sums<C>(l, difference), rescale(fragment, difference);
        if constexpr (C::kRescaleOnArrival) {
#pragma unroll 1
          for (int c = 0; c < count; c += kStageVecs)
            load_smem_stage(c), rescale(stage, difference), write_back(stage, c);
        }
      };
      if constexpr (C::kUsesSmemVecs) {
#pragma unroll 1
        for (int c = 0; c < tiles.smem_vecs; c += kStageVecs) {
          if constexpr (C::kRescaleOnArrival) AsyncCopy::wait_all_but((tiles.smem_vecs - c) / kStageVecs - 1);
          load_smem_stage(c);
          if constexpr (C::kRescaleOnArrival) {
            A here[V];
            bool is_higher = false;
            max_of(stage, here);
#pragma unroll
            for (int v = 0; v < V; ++v) is_higher |= here[v] - m[v] > C::kSlack;
            if (__builtin_expect(is_higher, false)) {
#pragma unroll
              for (int v = 0; v < V; ++v) here[v] = max_(here[v], m[v]);
              rescale_to(here, c), load_smem_stage(c), was_rescaled = true;
            }
          }
#pragma unroll
          for (int v = 0; v < V; ++v) l[v] = add(l[v], begin_sum<ThreadSum<C>>(sum_exp(stage, v, m[v])));
          if constexpr (C::kKeepsExp) write_back(stage, c);
        }
      }
      if constexpr (C::kRescaleOnArrival) {
        if (is_shared && __syncthreads_or(was_rescaled)) {
          A max[V];
#pragma unroll
          for (int v = 0; v < V; ++v) max[v] = m[v];
          column_reduce.block_max(max, tile);
          rescale_to(max, tiles.smem_vecs);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = value_of(l[v]);
    }

    const auto store_column = [&](int column, State<A> state) {
      if (rank > 0 || tile.first_col + column >= tiles.inner) return;
      int64_t at[2] = {0, tile.origin + (tile.first_col + column) * tiles.steps[1]};
      if constexpr (C::kStrided) at[1] = 0, add_offsets<2>(tiles.outer, tile.first_col + column, at);
      store_reduction<C>(state, y + at[1], tiles.plane_stride);
    };
    ColumnEpilogue<C> epilogues[V];
    if (is_shared) {
      column_reduce.reduce<C::kProvisionalMax>(m, sums, epilogues, tile, iteration++,
                                               [&](int column, StatePair<A> state, A block_max) {
                                                 if constexpr (C::kIsReduction)
                                                   store_column(column, {state.m, state.l});
                                                 return ColumnEpilogue<C>::make({state.m, state.l}, block_max);
                                               });
    } else {  // the thread has whole columns
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (C::kIsReduction) {
          if (threadIdx.x < tiles.threads_x) store_column(threadIdx.x * V + v, {m[v], sums[v]});
        } else {
          epilogues[v] = ColumnEpilogue<C>::make({m[v], sums[v]}, m[v]);
        }
      }
    }
    if constexpr (!C::kIsReduction) {
      const auto fragment_result = [&](int i, int v) { return epilogues[v](epilogue_input(fragment, i, v)); };
      const auto stage_result = [&](int i, int v) { return epilogues[v](epilogue_input(stage, i, v)); };
      if constexpr (C::kPipelined) {
        pipeline.rewind(resident_stages<C>(tiles));
        C::Out* to = y + tile.offset(1, 0);
        const auto write_stage = [&](int q) { to = store_vecs_at<kStageVecs>(to, y, tile, 1, q, stage_result); };
#pragma unroll
        for (int q = 0; q < C::kVecs; q += kStageVecs) {
          if (q < tiles.vecs_per_thread_max) get_stage(fragment, q, stage), write_stage(q);
        }
#pragma unroll 1
        for (int q = C::kVecs; q < tiles.vecs_per_thread_max; q += kStageVecs) {
          load_stage(stage, x, tile, 0, q, neutral_element<C>(), 0, pipeline.next());
          write_stage(q);
          prefetch_stage();
        }
      } else if constexpr (C::kTwoPass) {  // backwards: what was read last may still be in the L2 cache
        for (int from = (tiles.vecs_per_thread_max - 1) / C::kVecs * C::kVecs; from >= 0; from -= C::kVecs)
          load(from), store_vecs<C::kVecs>(y, tile, 1, from, fragment_result);
      } else {
        store_vecs<C::kVecs>(y, tile, 1, C::kFirstVecs, fragment_result);
        if constexpr (C::kUsesSmemVecs) {
#pragma unroll 1
          for (int c = 0; c < tiles.smem_vecs; c += kStageVecs) {
            const int q = C::kFirstVecs && !c ? 0 : C::kVecs + c;
            load_vecs<true>(stage, x, tile, 0, q, neutral_element<C>(), 0, c);
            store_vecs<kStageVecs>(y, tile, 1, q, stage_result);
          }
        }
      }
    }
  }
}
