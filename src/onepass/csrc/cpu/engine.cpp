// engine.cpp: the plans of the CPU engine and its forward functions, compiled once per instruction set (ONEPASS_ISA is
// its name and namespace). backward.cpp has the gradients.
#include "engine.h"

#include "small_rows.h"
#include "tile_ops.h"
#include "walk.h"

namespace onepass::ONEPASS_ISA {

namespace {

// Whether a function is compiled for a pair of types. (Callers have checked it.)
template <Function F, class X, class Y>
constexpr bool kIsServed = F == Function::logsumexp ? sizeof(X) <= sizeof(Y)
                           : F == Function::state   ? std::is_same_v<Y, Acc<X>>
                                                    : true;

// A call with its types and policies. softmin is softmax of a copy of the row with the other sign.
template <class Epilogue, class X, class Y>
struct Forward {
  using In = Input<X, Y>;
  static constexpr bool kSimd = std::is_same_v<Acc<Y>, float>;
  const Problem& call;
  const CpuPlan& plan;
  const Layout& layout = call.layout;
  // In a state, the sums are one plane behind the maxima.
  const int64_t sum_offset = call.function == Function::state ? layout.rows : 0;

  In x(const int64_t* offset) const { return {call.data<const X>(kX) + offset[kX]}; }
  // `count` elements of a row as scores: for softmin, a copy with the other sign.
  In scored(const In& x, int64_t count) const {
    if (!Epilogue::kFromExp || !negates(call)) return x;
    X* const copy = reinterpret_cast<X*>(scratch() + kMaxWholeRow);
    copy_negated(x.x, copy, count);
    return {copy};
  }
  Y* y(const int64_t* offset) const { return call.data<Y>(kY) + offset[kY]; }

  void rows(int64_t begin, int64_t end) const {
    for_each_row(layout, begin, end, [&](const int64_t* at, int64_t n) {
      if constexpr (kSimd) row_simd<Epilogue>(scored(x(at), n), y(at), n, sum_offset, plan.streaming);
    });
  }

  void groups(int64_t begin, int64_t end) const {
    const int64_t origin[kMaxTensors] = {};
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = g * kRowsPerItem, rest = layout.rows - first;
      small_rows<Epilogue>(x(origin), y(origin), layout.n, layout.row_stride(kX), layout.row_stride(kY), first,
                           rest < kRowsPerItem ? rest : kRowsPerItem, layout.rows, sum_offset, negates(call),
                           plan.streaming);
    }
  }

  void tiles(int64_t begin, int64_t end) const {
    using A = Acc<Y>;
    const int64_t origin[kMaxTensors] = {};
    const TileWalk<A> walk{layout, plan.tile};
    const Input<X, std::conditional_t<kIsLossless<X, Y>, A, Y>> from = {x(origin).x};
    Y* const to = y(origin);
    const bool negative = Epilogue::kFromExp && negates(call);
    ForwardTile<Epilogue, Y> tile;
    tile.parts = plan.tile.parts, tile.columns = plan.tile.columns;
    A* const t = tile.t = reinterpret_cast<A*>(scratch());
    tile.in_registers =
        !Epilogue::kOnePerRow && plan.tile.kind == TileKind::slices && plan.tile.depth <= kMaxShortDepth;
    walk.for_each(begin, end, [&](const TileItem& item) {
      const int64_t steps = walk.steps(), depth = plan.tile.depth;
      const auto load = [&](int64_t first) {
        const int64_t count = steps - first < depth ? steps - first : depth;
        tile.shape = walk.shape(item, count);
        const int64_t room = tile.shape.vectors() * kLanes<A>;
        walk.load(from, kX, item, first, count, negative ? kInf<A> : -kInf<A>, t, t + room);
        if (negative) copy_negated(t, t, room);
        return count;
      };
      const bool fits = depth >= steps;
      const int64_t size = sizeof(X), stride = layout.reduced.innermost().strides[kX];
      const bool fetch = plan.tile.kind == TileKind::columns && depth * item.count * size <= kFetchBytes;
      tile.next_step = stride * size, tile.next_vector = kLanes<A> * size;
      for (int64_t first = 0; first < steps; first += depth) {
        load(first);
        const X* const next = from.x + item.offset[kX] + (fits ? item.count : (first + depth) * stride);
        tile.next = fetch ? reinterpret_cast<const char*>(next) : nullptr;
        if (tile.in_registers) {
          // store() does everything
        } else if (first > 0) {
          tile.reduce_more();
        } else {
          fits ? tile.template reduce<Epilogue::kFromExp>() : tile.template reduce<false>();
        }
      }
      tile.fold();
      if constexpr (Epilogue::kOnePerRow) {
        tile.results(sum_offset != 0);
        walk.for_each_lane(kY, item, [&](int64_t offset, int64_t lane) {
          to[offset] = from_acc<Y>(reinterpret_cast<const A*>(tile.m)[lane]);
          if (sum_offset) to[offset + sum_offset] = from_acc<Y>(reinterpret_cast<const A*>(tile.sum)[lane]);
        });
      } else {
        if (!tile.in_registers) tile.numbers();
        for (int64_t first = 0; first < steps; first += depth) {
          const int64_t count = fits ? steps : load(first);
          A* const flat = t + tile.shape.vectors() * kLanes<A>;
          if (fits && Epilogue::kFromExp) {
            using FromExps = std::bool_constant<Epilogue::kFromExp>;
            walk.template store<FromExps>(to, kY, item, first, count, tile, flat, plan.streaming);
          } else {
            walk.template store<std::false_type>(to, kY, item, first, count, tile, flat, plan.streaming);
          }
        }
      }
    });
  }

  // Chunks of long rows. The exponentials of a chunk are kept in the output, unless it is written by streaming stores.
  void chunks(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    const bool stored = kStoresChunkExps<Epilogue, Y> && !plan.streaming;
    const ChunkState* const rows = states + plan.work_items;
    for (int64_t i = begin; i < end; ++i) {
      const OffsetCalculator at(layout.outer, i / plan.chunks);
      const int64_t first = i % plan.chunks * kChunk, count = layout.n - first < kChunk ? layout.n - first : kChunk;
      const In from = x(at.offset) + first;
      if (phase == CpuPhase::states) {
        float* exps = nullptr;
        if constexpr (kStoresChunkExps<Epilogue, Y>) exps = stored ? y(at.offset) + first : nullptr;
        const State<float> state = chunk_state<Y>(scored(from, count), count, exps);
        states[i] = {state.m, state.l.sum, state.l.error};
      } else if constexpr (!Epilogue::kOnePerRow) {
        const ChunkState& row = rows[i / plan.chunks];
        finish_chunk<Epilogue>(stored ? from : scored(from, count), y(at.offset) + first, count,
                               State<float>{row.m, {row.l, row.error}}, stored, states[i].m, plan.streaming);
      }
    }
  }

  // Merges the chunks of each row. For a reduction this is the last phase.
  void merge_chunks(ChunkState* states) const {
    ChunkState* row = states + plan.work_items;
    for_each_row(layout, 0, layout.rows, [&](const int64_t* at, int64_t) {
      State<float> state;
      for (int64_t i = 0; i < plan.chunks; ++i, ++states) {
        state = merge(state, State<float>{states->m, {states->l, states->error}});
      }
      *row++ = {state.m, state.l.sum, state.l.error};
      if constexpr (Epilogue::kOnePerRow) Epilogue::store(state, y(at), sum_offset);
    });
  }

  void run(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    if (plan.route == CpuRoute::tiles) {
      tiles(begin, end);
    } else if (plan.route == CpuRoute::small_rows) {
      if constexpr (kHasFastPaths && kSimd && std::is_same_v<X, Y>) groups(begin, end);
    } else if (plan.route == CpuRoute::row_chunks) {
      if constexpr (kSimd) phase == CpuPhase::merge ? merge_chunks(states) : chunks(phase, states, begin, end);
    } else {
      rows(begin, end);
    }
    if (plan.streaming) fence_streaming_stores();
  }
};

}  // namespace

CpuPlan plan(const Problem& call) { return call.is_backward() ? make_backward_plan(call) : make_forward_plan(call); }

void run(const Problem& call, const CpuPlan& plan, CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) {
  if (call.is_backward()) return run_backward(call, plan, phase, states, begin, end);
  dispatch(call.type(kX), call.type(kY), call.function, [&](auto x, auto y, auto function) {
    using X = TypeOf<decltype(x)>;
    using Y = TypeOf<decltype(y)>;
    constexpr Function F = decltype(function)::value;
    if constexpr (kIsServed<F, X, Y>) Forward<EpilogueOf<F>, X, Y>{call, plan}.run(phase, states, begin, end);
  });
}

}  // namespace onepass::ONEPASS_ISA
