// backward.cpp: gradients on the CPU, compiled once per instruction set (ONEPASS_ISA names it, and its namespace): the
// walk over the work items of a plan.
#include "backward_columns.h"
#include "backward_scalar.h"
#include "backward_small_rows.h"

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
  float load_per_row(const void* tensor, int64_t at) const {
    return call.type(kGrad) == DType::float32 ? static_cast<const float*>(tensor)[at]
                                              : to_acc(static_cast<const Y*>(tensor)[at]);
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
    OffsetCalculator at(outer, begin / inner.size, 1);
    for (int64_t first = begin % inner.size, rest = end - begin; rest > 0; at.next()) {
      const int64_t count = inner.size - first < rest ? inner.size - first : rest;
      grad_row_run<Op>(saved(at.offset) + first * inner.strides[kSaved], grad(at.offset) + first * inner.strides[kGrad],
                       dx(at.offset) + first * inner.strides[kDx], inner.strides, count, n.size, slope, streaming);
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

  // Groups of small rows. If rows are not whole lines, streaming stores go through a buffer: a few rows are whole
  // lines.
  void groups(int64_t begin, int64_t end) const {
    constexpr int64_t buffer_rows = kLine / int64_t(sizeof(D));
    alignas(64) D buffer[buffer_rows * kMaxSmallBackward];
    SmallGradRows<Op, Y, D> group;
    group.n = n.size, group.slope = slope;
    const Dim inner = outer.innermost();
    const bool one_dim = outer.count <= 1;
    const auto whole_lines = [&](int64_t count) { return count * int64_t(sizeof(D)) % kLine == 0; };
    const bool may_stream = streaming && one_dim && call.address(kDx) % kLine == 0;
    const bool direct = may_stream && whole_lines(inner.strides[kDx]) && whole_lines(n.size) &&
                        (n.size % kPair == 0 || n.size == kWidth);
    const bool through_buffer = may_stream && !direct && inner.strides[kDx] == n.size;
    const int64_t last = end * kRowsPerItem < call.layout.rows ? end * kRowsPerItem : call.layout.rows;
    OffsetCalculator at(outer, begin * kRowsPerItem);
    for (int64_t first = begin * kRowsPerItem; first < last; first += group.count) {
      if (n.size < kWidth) {
        group.count = int(last - first < kTinyRows ? last - first : kTinyRows);
        tiny_rows(at, group.count);
        continue;
      }
      group.count = int(last - first < kWidth ? last - first : kWidth);
      if (!one_dim || group.count < kWidth || (!kPointwise && grad_is_broadcast())) {
        gather_rows(group, at);
        continue;
      }
      const int64_t in_buffer = first % buffer_rows;
      const bool buffered = through_buffer && first - in_buffer + buffer_rows <= last;
      group.y = saved(at.offset), group.y_stride = inner.strides[kSaved];
      group.g = grad(at.offset), group.g_stride = inner.strides[kGrad];
      group.dx = buffered ? buffer + in_buffer * n.size : dx(at.offset), group.dx_stride = inner.strides[kDx];
      for (int r = 0; r < kWidth; ++r) {
        if constexpr (kPointwise) load_numbers(at.offset, &group.a[r], &group.b[r]);
        for (int t = 0; t < kBackwardTensors; ++t) at.offset[t] += inner.strides[t];
      }
      with_streaming(direct, [&](auto streams) {
        constexpr bool s = streams.value;
        if (n.size == kPair) return group.template run<2, s, true>();
        if (n.size < kPair) return group.template run<1, s, s>();  // n is kWidth, if they stream
        group.template run<2, s>();
      });
      if (buffered && in_buffer + kWidth == buffer_rows) {
        D* const to = call.data<D>(kDx) + (first - in_buffer) * n.size;
        stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(buffer),
                     buffer_rows * n.size * sizeof(D));
      }
    }
  }

  // Rows that are not at one stride, or are fewer than a vector has lanes, are copied to contiguous memory and back.
  __attribute__((noinline)) void gather_rows(SmallGradRows<Op, Y, D>& group, OffsetCalculator& at) const {
    alignas(64) Y y[kWidth * kMaxSmallBackward], g[kWidth * kMaxSmallBackward];
    alignas(64) D result[kWidth * kMaxSmallBackward];
    D* to[kWidth];
    for (int r = 0; r < group.count; ++r, at.next()) {
      std::memcpy(y + r * n.size, saved(at.offset), size_t(n.size) * sizeof(Y));
      if constexpr (kPointwise) {
        load_numbers(at.offset, &group.a[r], &group.b[r]);
      } else if (grad_is_broadcast()) {
        for (int64_t i = 0; i < n.size; ++i) g[r * n.size + i] = *grad(at.offset);
      } else {
        std::memcpy(g + r * n.size, grad(at.offset), size_t(n.size) * sizeof(Y));
      }
      to[r] = dx(at.offset);
    }
    const int64_t copied = group.count * n.size, missing = (kWidth - group.count) * n.size * int64_t(sizeof(Y));
    std::memset(static_cast<void*>(y + copied), 0, size_t(missing));
    std::memset(static_cast<void*>(g + copied), 0, size_t(missing));
    group.y = y, group.g = g, group.dx = result;
    group.y_stride = group.g_stride = group.dx_stride = n.size;
    n.size < kPair ? group.template run<1, false>() : group.template run<2, false>();
    for (int r = 0; r < group.count; ++r) std::memcpy(to[r], result + r * n.size, size_t(n.size) * sizeof(D));
  }

  // Rows shorter than a vector.
  __attribute__((noinline)) void tiny_rows(OffsetCalculator& at, int64_t count) const {
    alignas(64) float y[kWidth][kTinyRows] = {}, g[kWidth][kTinyRows] = {}, a[kTinyRows] = {}, b[kTinyRows] = {};
    const Y *y_at[kTinyRows], *g_at[kTinyRows];
    D* dx_at[kTinyRows];
    bool y_contiguous = true, g_contiguous = !grad_is_broadcast(), dx_contiguous = true;
    for (int64_t j = 0; j < count; ++j, at.next()) {
      y_at[j] = saved(at.offset), g_at[j] = grad(at.offset), dx_at[j] = dx(at.offset);
      y_contiguous &= y_at[j] == y_at[0] + j * n.size, g_contiguous &= g_at[j] == g_at[0] + j * n.size;
      dx_contiguous &= dx_at[j] == dx_at[0] + j * n.size;
      if constexpr (kPointwise) load_numbers(at.offset, &a[j], &b[j]);
    }
    transpose_in(y, n.size, count, y_contiguous, [&](int64_t j) { return y_at[j]; });
    if (!kPointwise && grad_is_broadcast()) {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t i = 0; i < n.size; ++i) g[i][j] = to_acc(*g_at[j]);
      }
    } else if (!kPointwise) {
      transpose_in(g, n.size, count, g_contiguous, [&](int64_t j) { return g_at[j]; });
    }
    for (int64_t j = 0; j < count; j += kWidth) {
      Vec sum{};
      for (int64_t i = 0; !kPointwise && i < n.size; ++i) {
        sum += grad_term<Op>(load_vector(y[i] + j), load_vector(g[i] + j));
      }
      const auto lanes = kPointwise ? GradEpilogue<Op, D>::of(load_vector(a + j), load_vector(b + j), broadcast(slope))
                                    : GradEpilogue<Op, D>::of_sum(sum, broadcast(slope));
      for (int64_t i = 0; i < n.size; ++i) {
        store_vector(y[i] + j, lanes.apply1(load_vector(y[i] + j), load_vector(g[i] + j)));
      }
    }
    transpose_out<kInputNan<Y, D>>(y, n.size, count, dx_contiguous, [&](int64_t j) { return dx_at[j]; });
  }

  void tiles(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kUnroll];
    const Dim inner = outer.innermost();
    for_each_tile(call.layout, plan.tile_cols, begin, end, [&](const int64_t* at, int64_t width) {
      if constexpr (kPointwise) {
        alignas(64) float g[kTileCols<Y>], lse[kTileCols<Y>];
        for (int64_t j = 0; j < width; ++j) {
          g[j] = load_per_row(call.tensors[kGrad].data, at[kGrad] + j * inner.strides[kGrad]) * slope;
          lse[j] = load_per_row(call.tensors[kLse].data, at[kLse] + j * inner.strides[kLse]);
        }
        grad_columns_logsumexp(saved(at), g, lse, dx(at), n.size, n.strides, width, broadcast(slope), streaming);
      } else {
        const bool same = inner.strides[kGrad] == 0;
        for (int i = 0; same && i < kUnroll; ++i) constant[i] = *grad(at);
        const GradTile<Y, D> tile = {saved(at),         same ? constant : grad(at), dx(at),         n.size,
                                     n.strides[kSaved], n.strides[kGrad],           n.strides[kDx], same ? 0 : -1};
        grad_columns<Op>(tile, width, broadcast(slope), streaming);
      }
    });
  }

  void run(CpuPhase phase, ChunkState* states, int64_t begin, int64_t end) const {
    switch (plan.route) {
      case CpuRoute::columns: tiles(begin, end); break;
      case CpuRoute::small_rows: groups(begin, end); break;
      case CpuRoute::row_chunks: chunks(phase, states, begin, end); break;
      case CpuRoute::row_runs:
        if constexpr (!kPointwise) runs(begin, end);
        break;
      default: rows(begin, end);
    }
    if (streaming) fence_streaming_stores();
  }
};

// Gradients of doubles.
template <GradOp Op>
void run_doubles(const Problem& call, const CpuPlan& plan, int64_t begin, int64_t end) {
  constexpr bool lse_op = Op == GradOp::logsumexp;
  const Dim n = call.layout.reduced.innermost(), inner = call.layout.outer.innermost();
  const auto *const y = call.data<const double>(kSaved), *const g = call.data<const double>(kGrad);
  const auto* const lse = call.data<const double>(kLse);
  auto* const dx = call.data<double>(kDx);
  const double slope = score_slope(call);
  if (plan.route == CpuRoute::columns) {
    for_each_tile(call.layout, plan.tile_cols, begin, end, [&](const int64_t* at, int64_t width) {
      grad_columns_double<Op>(y + at[kSaved], g + at[kGrad], lse + at[kLse], dx + at[kDx], n, inner.strides, width,
                              slope);
    });
    return;
  }
  for_each_row(call.layout, begin, end, [&](const int64_t* at, int64_t length) {
    const double a = lse_op ? g[at[kGrad]] * slope : 0, b = lse_op ? lse[at[kLse]] : 0;
    grad_row_double<Op>(y + at[kSaved], g + at[kGrad], n.strides[kGrad], dx + at[kDx], length, a, b, slope);
  });
}

}  // namespace

void run_backward(const Problem& call, const CpuPlan& plan, CpuPhase phase, ChunkState* states, int64_t begin,
                  int64_t end) {
  if (plan.route == CpuRoute::elements) return grad_elements(call, op_of(call.function), begin, end);
  if (phase == CpuPhase::merge) {
    ChunkState* const rows = states + plan.work_items;
    for (int64_t i = 0; i < plan.work_items; ++i) rows[i / plan.chunks].l += states[i].l;
    return;
  }
  dispatch(call.type(kGrad), call.type(kDx), call.function, [&](auto y, auto dx, auto function) {
    using Y = TypeOf<decltype(y)>;
    using D = TypeOf<decltype(dx)>;
    constexpr GradOp op = op_of(decltype(function)::value);
    if constexpr (std::is_same_v<Y, double>) {
      run_doubles<op>(call, plan, begin, end);
    } else if constexpr (op != GradOp::logsumexp) {
      Backward<op, Y, D>{call, plan}.run(phase, states, begin, end);
    } else if constexpr (std::is_same_v<Y, D> || (sizeof(Y) == 4 && sizeof(D) == 2)) {  // the input's type is D
      Backward<op, D, D>{call, plan}.run(phase, states, begin, end);
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
