// backward.cpp: gradients on the CPU, compiled once per instruction set (ONEPASS_ISA is its name and namespace). It
// walks through the work items of a plan.
#include "grad_tile.h"
#include "walk.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr GradOp op_of(Function function) {
  return function == Function::logsumexp     ? GradOp::logsumexp
         : function == Function::log_softmax ? GradOp::log_softmax
                                             : GradOp::softmax;
}

constexpr int kScales = kLse;  // of rows (softmax, log_softmax), which have no logsumexp

// A gradient in tiles. S is the type of the operands, which are read in place (kDirect), or the type of their copies.
template <GradOp Op, class S, class D, bool kDirect>
struct GradTiles {
  using A = Acc<S>;
  using Tile = GradTile<Op, S, D>;
  static constexpr bool kPointwise = Op == GradOp::logsumexp;
  // Other gradients wait for arithmetic, not for memory.
  static constexpr bool kBuffers = kDirect && Op == GradOp::softmax && std::is_same_v<D, float>;
  static constexpr int64_t kMinSliceBytes = 1024, kMaxSliceBytes = 65536;  // of slices streamed through the buffer
  const Problem& call;
  const CpuPlan& plan;
  const TileWalk<A> walk{call.layout, plan.tile};
  const Dim n = call.layout.reduced.innermost(), inner = call.layout.outer.innermost();
  const int64_t steps = walk.steps(), depth = plan.tile.depth;
  D* const dx = call.data<D>(kDx);

  void run(int64_t begin, int64_t end) const {
    const bool fits = depth >= steps, streaming = plan.streaming;
    // If the lines of a slice are not whole cache lines, the slice is collected in a buffer and streamed from there.
    const int64_t line = inner.size * int64_t(sizeof(D)), slice = call.layout.n * line;
    const bool is_slice =
        call.layout.reduced.count == 1 && n.strides[kDx] == inner.size && plan.tile.rows >= inner.size;
    const bool buffered = kBuffers && fits && streaming && is_slice && line % kLine != 0 && slice >= kMinSliceBytes &&
                          slice <= kMaxSliceBytes;
    Tile tile;
    tile.parts = plan.tile.parts, tile.columns = plan.tile.columns, tile.slope = A(score_slope(call));
    tile.grad_is_per_row = true;
    for (int i = 0; !kPointwise && i < call.layout.reduced.count; ++i) {
      tile.grad_is_per_row &= call.layout.reduced.dims[i].strides[kGrad] == 0;
    }
    if constexpr (kHasFastPaths && kDirect && !kPointwise && !std::is_same_v<A, double>) {
      if (inner.size <= Tile::kNarrow * kWidth && !tile.grad_is_per_row) return narrow_slices(tile, begin, end);
    }
    walk.for_each(begin, end, [&](const TileItem& item) {
      load(item, 0, tile);
      if (tile.grad_is_per_row) load_rows(item, tile);
      if (kHasFastPaths && kDirect && !kPointwise && fits && steps <= kPlainSteps<A> && !tile.grad_is_per_row) {
        tile.numbers_of_few();
      } else {
        if constexpr (!kPointwise) {
          tile.begin_sums();
          for (int64_t first = 0; tile.has_sums() && first < steps; first += depth) {
            if (first > 0) load(item, first, tile);
            kDirect ? tile.add_direct() : tile.add_tile();
          }
        }
        tile.numbers(call.layout.n);
      }
      for (int64_t first = 0; first < steps; first += depth) {
        const int64_t count = fits ? steps : load(item, first, tile);
        if (buffered) {
          TileItem in_buffer = item;
          in_buffer.offset[kDx] = 0;
          D* const buffer = reinterpret_cast<D*>(scratch());
          walk.template store<std::bool_constant<kDirect>>(buffer, kDx, in_buffer, 0, count, tile, nullptr, false);
          stream_bytes(dx + item.offset[kDx], buffer, slice);
          return;
        }
        A* const flat = reinterpret_cast<A*>(scratch()) + 2 * tile.shape.vectors() * kLanes<A>;
        walk.template store<std::bool_constant<kDirect>>(dx, kDx, item, first, count, tile, flat, streaming);
      }
    });
  }
  // Loads the steps from `first` on, and returns how many there are.
  ONEPASS_INLINE int64_t load(const TileItem& item, int64_t first, Tile& tile) const {
    const int64_t count = steps - first < depth ? steps - first : depth;
    tile.shape = walk.shape(item, count);
    if constexpr (kDirect) {
      const int64_t y_step = n.strides[kSaved], g_step = n.strides[kGrad];
      // The hardware does not prefetch steps that are far apart. So the next tile is prefetched or, if there are many
      // steps, the next steps.
      const bool low = count <= kFetchSteps;
      const int64_t y_ahead = low ? item.count : kSumSteps * y_step, g_ahead = low ? item.count : kSumSteps * g_step;
      const S *const y = call.data<const S>(kSaved), *const g = call.data<const S>(kGrad);
      tile.fetches = sizeof(S) == 2 && item.count < inner.size;
      tile.direct = {y + item.offset[kSaved], g + item.offset[kGrad], y_step, g_step, item.count, y_ahead, g_ahead};
    } else {
      const int64_t room = tile.shape.vectors() * kLanes<A>;
      tile.t = reinterpret_cast<A*>(scratch()), tile.t_grad = tile.t + room;
      load_copy(kSaved, item, first, count, tile.t, tile.t_grad + room);
      if (!tile.grad_is_per_row) load_copy(kGrad, item, first, count, tile.t_grad, tile.t_grad + room);
    }
    return count;
  }
  __attribute__((noinline)) void load_copy(int tensor, const TileItem& item, int64_t first, int64_t count, A* t,
                                           A* flat) const {
    dispatch_type(call.type(tensor), [&](auto type) {
      using Y = TypeOf<decltype(type)>;
      if constexpr (std::is_same_v<Acc<Y>, A>) {
        walk.load(Input<Y, A>{call.data<const Y>(tensor)}, tensor, item, first, count, A(0), t, flat);
      }
    });
  }
  // Slices with few vectors of columns. Each slice is a tile.
  void narrow_slices(Tile& tile, int64_t begin, int64_t end) const {
    const int64_t step = n.strides[kDx], width = inner.size;
    const S *const y = call.data<const S>(kSaved), *const g = call.data<const S>(kGrad);
    const bool in_lines = plan.streaming && step * int64_t(sizeof(D)) % kLine == 0;
    tile.shape = {1, steps, ceil_div(width, kWidth)};
    tile.direct = {y, g, n.strides[kSaved], n.strides[kGrad], width, 0, 0};
    OffsetCalculator at(call.layout.outer, begin, 1);
    for (int64_t slice = begin; slice < end; ++slice, at.next()) {
      D* const to = dx + at.offset[kDx];
      const bool streams = in_lines && uintptr_t(to) % kLine == 0;
      tile.direct.y = y + at.offset[kSaved], tile.direct.g = g + at.offset[kGrad];
      tile.columns_in_registers([=](int64_t i, const auto& v) __attribute__((always_inline)) {
        walk.template store_results<Tile::kInputNan && sizeof(D) == 2>(to + i * step, width, v, streams);
      });
    }
  }
  // Loads the numbers of a tile's rows: for logsumexp its result and the gradient of the result; otherwise a gradient
  // per row.
  void load_rows(const TileItem& item, Tile& tile) const {
    A *const a = reinterpret_cast<A*>(tile.a), *const b = reinterpret_cast<A*>(tile.b);
    walk.template load_rows<kGrad>(call.tensors[kGrad], item, kPointwise ? a : b);
    if (kPointwise) walk.template load_rows<kLse>(call.tensors[kLse], item, b);
    for (int64_t lane = plan.tile.columns; plan.tile.parts > 1 && lane < plan.tile.parts * plan.tile.columns; ++lane) {
      a[lane] = a[lane - plan.tile.columns], b[lane] = b[lane - plan.tile.columns];
    }
  }
};

// A gradient as vectors of floats. Y is the type of the saved tensor, and D that of dx.
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
  const float* const scales = kPointwise ? nullptr : call.data<const float>(kScales);

  const Y* saved(const int64_t* offset) const { return call.data<const Y>(kSaved) + offset[kSaved]; }
  const Y* grad(const int64_t* offset) const { return call.data<const Y>(kGrad) + offset[kGrad]; }
  D* dx(const int64_t* offset) const { return call.data<D>(kDx) + offset[kDx]; }
  bool grad_is_broadcast() const { return kPointwise || n.strides[kGrad] == 0; }  // the same along a row

  // The slopes of the rows from `offset` on.
  RowSlopes slopes(const int64_t* offset, int64_t stride) const {
    return {slope, scales ? scales + offset[kScales] : nullptr, stride};
  }
  // The numbers for the epilogues of `count` rows of logsumexp. Its result and gradient may be wider than the input.
  void load_numbers(const int64_t* offset, const int64_t* strides, int64_t count, float* a, float* b) const {
    const auto load = [&](auto type) {
      using T = TypeOf<decltype(type)>;
      const T *const grad = call.data<const T>(kGrad) + offset[kGrad], *const lse =
                                                                           call.data<const T>(kLse) + offset[kLse];
#pragma omp simd
      for (int64_t r = 0; r < count; ++r) {
        a[r] = to_acc(grad[r * strides[kGrad]]) * slope, b[r] = to_acc(lse[r * strides[kLse]]);
      }
    };
    call.type(kGrad) == DType::float32 ? load(Type<float>()) : load(Type<Y>());
  }

  // The operands of up to `length` elements of a row, from `first` on. `constant` has room for kUnroll elements.
  GradRow<Y> row(const int64_t* offset, int64_t first, int64_t length, Y* constant) const {
    length = n.size - first < length ? n.size - first : length;
    if (!grad_is_broadcast()) return {saved(offset) + first, grad(offset) + first, -1, length};
    if constexpr (!kPointwise) {
      for (int i = 0; i < kUnroll; ++i) constant[i] = *grad(offset);
    }
    return {saved(offset) + first, constant, 0, length};
  }
  GradEpilogue<Op, D> epilogue(const int64_t* offset, double sum) const {
    if constexpr (!kPointwise) return GradEpilogue<Op, D>::of_sum(broadcast(float(sum)), slopes(offset, 0)[0]);
    float a, b;
    load_numbers(offset, offset, 1, &a, &b);
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
      const auto load = [&](int64_t r, int64_t rows, float* a, float* b) {
        int64_t row[kMaxTensors];
        for (int t = 0; t < kMaxTensors; ++t) row[t] = from[t] + r * inner.strides[t];
        if constexpr (kPointwise) load_numbers(row, inner.strides, rows, a, b);
      };
      const int64_t bytes = n.size * int64_t(sizeof(D));
      const int64_t some = buffered ? ceil_div(kRowBufferBytes, bytes) : count;
      for (int64_t r = 0, now; r < count; r += now) {
        now = count - r < some ? count - r : some;
        D* const to = buffered ? reinterpret_cast<D*>(scratch()) : dx(from);
        with_streaming(streaming && !buffered, [&](auto streams) {
          grad_row_run<Op, streams.value>(saved(from), grad(from), to, inner.strides, now, n.size,
                                          slopes(from, inner.strides[kScales]), load);
        });
        if (buffered) stream_bytes(dx(from), to, now * bytes);
        for (int t = 0; t < kMaxTensors; ++t) from[t] += now * inner.strides[t];
      }
      first = 0, rest -= count;
    }
  }

  // Rows of unit stride. Long rows are summed in chunks, as in the row_chunks route.
  void rows(int64_t begin, int64_t end) const {
    for_each_row(call.layout, begin, end, [&](const int64_t* at, int64_t length) {
      const int64_t part = kPointwise || length <= kMaxWholeRow ? length : kChunk;
      double sum = 0;
      for (int64_t first = 0; first < length; first += part) sum += sum_of(at, first, part);
      for (int64_t first = 0; first < length; first += part) store(at, first, part, sum);
    });
  }

  // Parts of a row: up to `length` elements, from `first` on.
  __attribute__((noinline)) double sum_of(const int64_t* offset, int64_t first, int64_t length) const {
    if constexpr (kPointwise) return 0;
    alignas(64) Y constant[kUnroll];
    return grad_sum<Op>(row(offset, first, length, constant));
  }
  __attribute__((noinline)) void store(const int64_t* offset, int64_t first, int64_t length, double sum) const {
    alignas(64) Y constant[kUnroll];
    grad_store(row(offset, first, length, constant), dx(offset) + first, epilogue(offset, sum), streaming);
  }
  void chunks(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    const ChunkState* const rows = states + plan.work_items;
    for (int64_t i = begin; i < end; ++i) {
      const OffsetCalculator at(outer, i / plan.chunks);
      const int64_t first = i % plan.chunks * kChunk;
      if (phase == CpuPhase::states) {
        states[i].l = sum_of(at.offset, first, kChunk);
      } else {
        store(at.offset, first, kChunk, kPointwise ? 0 : rows[i / plan.chunks].l);
      }
    }
  }

  // Columns are read in place. For all other tiles the operands are copied to the scratch memory, as floats or doubles.
  void tiles(int64_t begin, int64_t end) const {
    plan.tile.kind == TileKind::columns ? GradTiles<Op, Y, D, true>{call, plan}.run(begin, end)
                                        : GradTiles<Op, Acc<Y>, D, false>{call, plan}.run(begin, end);
  }

  void run(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    switch (plan.route) {
      case CpuRoute::tiles: tiles(begin, end); break;
      case CpuRoute::row_chunks:
        if constexpr (kSimd) chunks(phase, states, begin, end);
        break;
      case CpuRoute::row_runs:
        if constexpr (kSimd && kHasFastPaths) runs(begin, end);
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
