// backward.cpp: gradients on the CPU, compiled once per instruction set (ONEPASS_ISA names it, and its namespace): the
// walk over the work items of a plan.
#include "grad_tile.h"
#include "walk.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr GradOp op_of(Function function) {
  return function == Function::logsumexp     ? GradOp::logsumexp
         : function == Function::log_softmax ? GradOp::log_softmax
                                             : GradOp::softmax;
}

// A gradient in vectors of floats with its types: Y of what was saved, D of dx.
template <GradOp Op, class Y, class D>
struct Backward {
  static constexpr bool kPointwise = Op == GradOp::logsumexp;  // no sum
  static constexpr bool kSimd = std::is_same_v<Acc<Y>, float>;
  const Problem& call;
  const CpuPlan& plan;
  const DimGroup& outer = call.layout.outer;
  const Dim n = call.layout.reduced.innermost();
  const bool streaming = plan.streaming;
  const float slope = float(score_slope(call));

  const Y* saved(const int64_t* offset) const { return call.data<const Y>(kSaved) + offset[kSaved]; }
  const Y* grad(const int64_t* offset) const { return call.data<const Y>(kGrad) + offset[kGrad]; }
  D* dx(const int64_t* offset) const { return call.data<D>(kDx) + offset[kDx]; }
  bool grad_is_broadcast() const { return kPointwise || n.strides[kGrad] == 0; }  // along a row

  // An element of the result of logsumexp, or of its gradient. They may be wider than the input.
  Acc<Y> load_per_row(const void* tensor, int64_t at) const {
    if (call.type(kGrad) == DType::float32) return static_cast<const float*>(tensor)[at];
    return to_acc(static_cast<const Y*>(tensor)[at]);
  }
  // The numbers of a row's epilogue, of logsumexp.
  void load_numbers(const int64_t* offset, float* a, float* b) const {
    *a = load_per_row(call.tensors[kGrad].data, offset[kGrad]) * slope;
    *b = load_per_row(call.tensors[kLse].data, offset[kLse]);
  }

  // The operands of `length` elements of a row from `first` on. `constant` has room for kUnroll.
  GradRow<Y> row(const int64_t* offset, int64_t first, int64_t length, Y* constant) const {
    if (!grad_is_broadcast()) return {saved(offset) + first, grad(offset) + first, -1, length};
    if constexpr (!kPointwise) {
      for (int i = 0; i < kUnroll; ++i) constant[i] = *grad(offset);
    }
    return {saved(offset) + first, constant, 0, length};
  }
  GradRow<Y> chunk(const int64_t* offset, int64_t i, Y* constant) const {
    const int64_t first = i * kChunk;
    return row(offset, first, n.size - first < kChunk ? n.size - first : kChunk, constant);
  }
  GradEpilogue<Op, D> epilogue(const int64_t* offset, double sum) const {
    if constexpr (!kPointwise) return GradEpilogue<Op, D>::of_sum(broadcast(float(sum)), broadcast(slope));
    float a, b;
    load_numbers(offset, &a, &b);
    return GradEpilogue<Op, D>::of(broadcast(a), broadcast(b), broadcast(slope));
  }

  void runs(int64_t begin, int64_t end) const {
    const Dim inner = outer.innermost();
    const bool buffered = streaming && streams_by_buffer(call);
    OffsetCalculator at(outer, begin / inner.size, 1);
    for (int64_t first = begin % inner.size, rest = end - begin; rest > 0; at.next()) {
      const int64_t count = inner.size - first < rest ? inner.size - first : rest;
      int64_t from[kMaxTensors];
      for (int t = 0; t < kMaxTensors; ++t) from[t] = at.offset[t] + first * inner.strides[t];
      const auto load = [&](int64_t r, float* a, float* b) {
        int64_t row[kMaxTensors];
        for (int t = 0; t < kMaxTensors; ++t) row[t] = from[t] + r * inner.strides[t];
        load_numbers(row, a, b);
      };
      const int64_t bytes = n.size * int64_t(sizeof(D));
      const int64_t some = buffered ? ceil_div(kRowBufferBytes, bytes) : count;
      for (int64_t r = 0, now; r < count; r += now) {
        now = count - r < some ? count - r : some;
        D* const to = buffered ? reinterpret_cast<D*>(scratch()) : dx(from);
        grad_row_run<Op>(saved(from), grad(from), to, inner.strides, now, n.size, slope, streaming && !buffered, load);
        if (buffered) stream_bytes(dx(from), to, now * bytes);
        for (int t = 0; t < kMaxTensors; ++t) from[t] += now * inner.strides[t];
      }
      first = 0, rest -= count;
    }
  }

  // Rows of unit stride. Long ones are summed in chunks, as the row_chunks route does.
  void rows(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kUnroll];
    for_each_row(call.layout, begin, end, [&](const int64_t* at, int64_t length) {
      double sum = 0;
      if (kPointwise || length <= kMaxWholeRow) {
        const GradRow<Y> whole = row(at, 0, length, constant);
        if constexpr (!kPointwise) sum = grad_sum<Op>(whole);
        return grad_store(whole, dx(at), epilogue(at, sum), streaming);
      }
      const int64_t chunks = ceil_div(length, kChunk);
      for (int64_t i = 0; i < chunks; ++i) sum += chunk_sum(at, i, constant);
      for (int64_t i = 0; i < chunks; ++i) store_chunk(at, i, constant, sum);
    });
  }

  double chunk_sum(const int64_t* offset, int64_t i, Y* constant) const {
    if constexpr (kPointwise) return 0;
    return grad_sum<Op>(chunk(offset, i, constant));
  }
  void store_chunk(const int64_t* offset, int64_t i, Y* constant, double sum) const {
    grad_store(chunk(offset, i, constant), dx(offset) + i * kChunk, epilogue(offset, sum), streaming);
  }
  void chunks(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    alignas(64) Y constant[kUnroll];
    const ChunkState* const rows = states + plan.work_items;
    for (int64_t i = begin; i < end; ++i) {
      const OffsetCalculator at(outer, i / plan.chunks);
      if (phase == CpuPhase::states) {
        states[i].l = chunk_sum(at.offset, i % plan.chunks, constant);
      } else {
        store_chunk(at.offset, i % plan.chunks, constant, kPointwise ? 0 : rows[i / plan.chunks].l);
      }
    }
  }

  void tiles(int64_t begin, int64_t end) const {
    using A = Acc<Y>;
    const TileWalk<A> walk{call.layout, plan.tile};
    GradTile<Op, Y, D> tile;
    const int64_t origin[kMaxTensors] = {}, steps = walk.steps(), depth = plan.tile.depth;
    const bool direct = plan.tile.kind == TileKind::columns, fits = depth >= steps;
    const Input<Identity, Y, A> y = {saved(origin), {}}, g = {grad(origin), {}};
    tile.parts = plan.tile.parts, tile.columns = plan.tile.columns, tile.slope = A(score_slope(call));
    tile.grad_is_per_row = grad_is_broadcast();
    for (int i = 0; !kPointwise && i < call.layout.reduced.count; ++i) {
      tile.grad_is_per_row &= call.layout.reduced.dims[i].strides[kGrad] == 0;
    }
    A* const memory = reinterpret_cast<A*>(scratch());
    A *const a = reinterpret_cast<A*>(tile.a), *const b = reinterpret_cast<A*>(tile.b);
    walk.for_each(begin, end, [&](const TileItem& item) {
      const auto load = [&](int64_t first) {
        const int64_t count = steps - first < depth ? steps - first : depth;
        tile.shape = walk.shape(item, count);
        if (direct) {
          const int64_t y_step = n.strides[kSaved], g_step = n.strides[kGrad];
          // Of a low tile the next one is fetched, which may be in the next slice; of others the next steps.
          const bool low = count <= kFetchSteps, all = item.count == outer.innermost().size;
          const int64_t y_ahead = (low ? all ? steps : 0 : kSumSteps) * y_step + (low && !all ? item.count : 0);
          const int64_t g_ahead = (low ? all ? steps : 0 : kSumSteps) * g_step + (low && !all ? item.count : 0);
          const Y *const at_y = y.x + item.offset[kSaved], *const at_g = g.x + item.offset[kGrad];
          tile.fetches = sizeof(Y) == 2 || (low && all);
          tile.direct = {at_y, at_g, y_step, g_step, item.count, y_ahead, g_ahead};
          return count;
        }
        const int64_t room = tile.shape.vectors() * kLanes<A>;
        tile.t = memory, tile.t_grad = memory + room;
        walk.load(y, kSaved, item, first, count, A(0), tile.t, tile.t_grad + room);
        if (!tile.grad_is_per_row) {
          walk.load(g, kGrad, item, first, count, A(0), tile.t_grad, tile.t_grad + room);
        }
        return count;
      };
      load(0);
      if constexpr (!kPointwise && sizeof(Y) == 4 && sizeof(D) == 4) {
        const int64_t pitch = n.strides[kDx] * int64_t(sizeof(D));
        const bool streams = streaming && uintptr_t(dx(item.offset)) % kLine == 0 && pitch % kLine == 0;
        const bool low = steps <= kLowSteps && outer.innermost().size <= kLowColumns;
        if (direct && fits && low && !tile.grad_is_per_row && !streams) return low_columns(tile, dx(item.offset));
      }
      if (kPointwise || tile.grad_is_per_row) load_rows(walk, item, tile, a, b);
      if constexpr (!kPointwise) {
        tile.begin_sums();
        for (int64_t first = 0; tile.has_sums() && first < steps; first += depth) {
          if (first > 0) load(first);
          direct ? tile.add_direct() : tile.add_tile();
        }
      }
      tile.numbers(call.layout.n);
      for (int64_t first = 0; first < steps; first += depth) {
        const int64_t count = fits ? steps : load(first);
        A* const flat = memory + 2 * tile.shape.vectors() * kLanes<A>;
        if (direct) {
          walk.template store<std::true_type>(dx(origin), kDx, item, first, count, tile, flat, streaming);
        } else {
          walk.template store<std::false_type>(dx(origin), kDx, item, first, count, tile, flat, streaming);
        }
      }
    });
  }
  // dx of low tiles of columns.
  template <class Tile>
  __attribute__((noinline)) void low_columns(const Tile& tile, D* to) const {
    const int64_t step = n.strides[kDx], width = tile.direct.width;
    tile.columns_in_blocks([=](int64_t i, int64_t w, const Vec& v) __attribute__((always_inline)) {
      D* const at = to + i * step + w * kWidth;
      if (width - w * kWidth >= kWidth)
        store_vector<Tile::kInputNan>(at, v);
      else
        store_tail<Tile::kInputNan>(at, width - w * kWidth, v);
    });
  }
  // The numbers that a tile has per row: of logsumexp its result and the gradient of that, or the gradient of a result.
  template <class Walk, class Tile, class A>
  void load_rows(const Walk& walk, const TileItem& item, const Tile&, A* a, A* b) const {
    walk.for_each_lane(kGrad, item, [&](int64_t offset, int64_t lane) {
      (kPointwise ? a : b)[lane] = load_per_row(call.tensors[kGrad].data, offset);
    });
    if constexpr (kPointwise) {
      walk.for_each_lane(
          kLse, item, [&](int64_t offset, int64_t lane) { b[lane] = load_per_row(call.tensors[kLse].data, offset); });
    }
    for (int64_t lane = plan.tile.columns; plan.tile.parts > 1 && lane < plan.tile.parts * plan.tile.columns; ++lane) {
      a[lane] = a[lane - plan.tile.columns], b[lane] = b[lane - plan.tile.columns];
    }
  }

  void run(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    switch (plan.route) {
      case CpuRoute::tiles: tiles(begin, end); break;
      case CpuRoute::row_chunks:
        if constexpr (kSimd) chunks(phase, states, begin, end);
        break;
      case CpuRoute::row_runs:
        if constexpr (kSimd) runs(begin, end);
        break;
      default:
        if constexpr (kSimd) rows(begin, end);
    }
    if (streaming) fence_streaming_stores();
  }
};

}  // namespace

void run_backward(const Problem& call, const CpuPlan& plan, CpuPhase phase, ChunkState* states, int64_t begin,
                  int64_t end) {
  if (phase == CpuPhase::merge) {
    ChunkState* const rows = states + plan.work_items;
    for (int64_t i = 0; i < plan.work_items; ++i) rows[i / plan.chunks].l += states[i].l;
    return;
  }
  dispatch(call.type(kGrad), call.type(kDx), call.function, [&](auto y, auto dx, auto function) {
    using Y = TypeOf<decltype(y)>;
    using D = TypeOf<decltype(dx)>;
    constexpr GradOp op = op_of(decltype(function)::value);
    if constexpr (op != GradOp::logsumexp) {
      Backward<op, Y, D>{call, plan}.run(phase, states, begin, end);
    } else if constexpr (std::is_same_v<Y, D> || (sizeof(Y) == 4 && sizeof(D) == 2)) {  // the input's type is D
      Backward<op, D, D>{call, plan}.run(phase, states, begin, end);
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
