// engine.cpp: the CPU engine, compiled once per instruction set (ONEPASS_ISA names it, and its namespace): the plans,
// and the forward functions. backward.cpp has the gradients.
#include "engine.h"

#include "columns_simd.h"
#include "dispatch.h"
#include "small_rows.h"

namespace onepass::ONEPASS_ISA {

namespace {

// softmin is softmax of the negated elements; a state is logsumexp with another result.
template <Function F>
using ScoreOf = std::conditional_t<F == Function::softmin, Negate, Identity>;
template <Function F>
using EpilogueOf =
    std::conditional_t<is_reduction(F), ReduceEpilogue,
                       std::conditional_t<F == Function::log_softmax, LogSoftmaxEpilogue, SoftmaxEpilogue>>;

// Which functions are there for a pair of types? (Callers have checked it.)
template <Function F, class X, class Y>
constexpr bool kIsServed = F == Function::softmin     ? std::is_same_v<X, Y>
                           : F == Function::logsumexp ? sizeof(X) <= sizeof(Y)
                           : F == Function::state     ? std::is_same_v<Y, Acc<X>>
                                                      : true;

// A call with its types and policies.
template <class Score, class Epilogue, class X, class Y>
struct Forward {
  static constexpr bool kSimd = std::is_same_v<Acc<Y>, float>;
  const Problem& call;
  const CpuPlan& plan;
  const Layout& layout = call.layout;
  // The sums of a state lie one plane behind its maxima.
  const int64_t sum_offset = call.function == Function::state ? layout.rows : 0;

  const X* x(const int64_t* offset) const { return call.data<const X>(kX) + offset[kX]; }
  Y* y(const int64_t* offset) const { return call.data<Y>(kY) + offset[kY]; }

  void rows(int64_t begin, int64_t end) const {
    OffsetCalculator at(layout.outer, begin);
    for (int64_t r = begin; r < end; ++r, at.next()) {
      const X* const from = x(at.offset);
      Y* const to = y(at.offset);
      if (plan.route == CpuRoute::elements) {
        row_scalar<Score, Epilogue>(from, to, AnyStride(layout.reduced), layout.n, sum_offset);
      } else if constexpr (kSimd) {
        row_simd<Score, Epilogue>(from, to, layout.n, sum_offset, plan.streaming);
      } else {
        row_scalar<Score, Epilogue>(from, to, UnitStride(), layout.n, sum_offset);
      }
    }
  }

  void groups(int64_t begin, int64_t end) const {
    const int64_t origin[kMaxTensors] = {};
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = g * kRowsPerItem, rest = layout.rows - first;
      small_rows<Score, Epilogue>(x(origin), y(origin), layout.n, layout.row_stride(kX), layout.row_stride(kY), first,
                                  rest < kRowsPerItem ? rest : kRowsPerItem, layout.rows, sum_offset, plan.streaming);
    }
  }

  void tiles(int64_t begin, int64_t end) const {
    const Dim n = layout.reduced.count ? layout.reduced.dims[0] : Dim{1, {}};
    for_each_tile(layout, plan.tile_cols, begin, end, [&](const int64_t* offset, int64_t width) {
      const X* const from = x(offset);
      Y* const to = y(offset);
      if constexpr (kSimd) {
        ColumnTile<Score, Epilogue, X, Y> tile;
        tile.x = from, tile.y = to, tile.n = n.size, tile.x_stride = n.strides[kX], tile.y_stride = n.strides[kY];
        tile.width = width, tile.sum_offset = sum_offset;
        tile.run(plan.streaming);
      } else {
        for (int64_t j = 0; j < width; j += kScalarCols) {
          columns_scalar<Score, Epilogue>(from + j, to + j, n.size, n.strides[kX], n.strides[kY],
                                          width - j < kScalarCols ? width - j : kScalarCols, sum_offset);
        }
      }
    });
  }

  // Chunks of long rows. The exponentials of a chunk wait in the output, unless that is streamed.
  void chunks(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    const bool stored = kStoresChunkExps<Epilogue, Y> && !plan.streaming;
    const ChunkState* const rows = states + plan.work_items;
    for (int64_t i = begin; i < end; ++i) {
      const OffsetCalculator at(layout.outer, i / plan.chunks);
      const int64_t first = i % plan.chunks * kChunk, count = layout.n - first < kChunk ? layout.n - first : kChunk;
      const X* const from = x(at.offset) + first;
      if (phase == CpuPhase::states) {
        float* exps = nullptr;
        if constexpr (kStoresChunkExps<Epilogue, Y>) exps = stored ? y(at.offset) + first : nullptr;
        const State<float> state = chunk_state<Score, X, Y>(from, count, exps);
        states[i] = {state.m, state.l.sum, state.l.error};
      } else if constexpr (!Epilogue::kOnePerRow) {
        const ChunkState& row = rows[i / plan.chunks];
        finish_chunk<Score, Epilogue>(from, y(at.offset) + first, count, State<float>{row.m, {row.l, row.error}},
                                      stored, states[i].m, plan.streaming);
      }
    }
  }

  // Merges the chunks of each row. A function that reduces is done then.
  void merge_chunks(ChunkState* states) const {
    ChunkState* const rows = states + plan.work_items;
    OffsetCalculator at(layout.outer, 0);
    for (int64_t r = 0; r < layout.rows; ++r, at.next()) {
      State<float> state;
      for (int64_t i = r * plan.chunks; i < (r + 1) * plan.chunks; ++i)
        state = merge(state, State<float>{states[i].m, {states[i].l, states[i].error}});
      rows[r] = {state.m, state.l.sum, state.l.error};
      if constexpr (Epilogue::kOnePerRow) Epilogue::store(state, y(at.offset), sum_offset);
    }
  }

  void run(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    if (plan.route == CpuRoute::columns) {
      tiles(begin, end);
    } else if (plan.route == CpuRoute::small_rows) {
      if constexpr (kSimd && std::is_same_v<X, Y>) groups(begin, end);
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
    if constexpr (kIsServed<F, X, Y>) {
      Forward<ScoreOf<F>, EpilogueOf<F>, X, Y>{call, plan}.run(phase, states, begin, end);
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
