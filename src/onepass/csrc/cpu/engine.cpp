// engine.cpp: the CPU engine, compiled once for each instruction set (ONEPASS_ISA names it, and its namespace).
//
// Work is cut into units that no two threads share: rows, or tiles of columns. A unit is computed the same way whatever
// thread takes it, so the bits do not depend on the number of threads.
#include "engine.h"

#include "columns.h"
#include "rows.h"

namespace onepass::ONEPASS_ISA {

namespace {

// Rows [begin, end) of a call, the outer dims walked in order.
template <Function F, class X, class Y>
void some_rows(const Call& call, int64_t begin, int64_t end) {
  const Bag& reduced = call.layout.reduced;
  const Dim dim = reduced.count ? reduced.dims[0] : Dim{1, 1, 1};
  Odometer outer(call.layout.outer, begin);
  for (int64_t r = begin; r < end; ++r, outer.next()) {
    const X* x = static_cast<const X*>(call.x) + outer.x;
    Y* y = static_cast<Y*>(call.y) + outer.y;
    if (reduced.count > 1) {
      row<F>(x, y, Many{reduced}, call.layout.n, call.layout.rows);
    } else if (dim.x_stride == 1 && dim.y_stride == 1) {
      row<F>(x, y, Unit(), call.layout.n, call.layout.rows);
    } else {
      row<F>(x, y, Strided{dim.x_stride, dim.y_stride}, call.layout.n, call.layout.rows);
    }
  }
}

// Tiles [begin, end): the innermost outer dim is cut into tiles, the others are walked in order.
template <Function F, class X, class Y>
void some_tiles(const Call& call, int64_t begin, int64_t end) {
  Bag outer = call.layout.outer;
  const int64_t inner = outer.dims[--outer.count].size, tiles = (inner + kTile - 1) / kTile;
  const Bag& reduced = call.layout.reduced;
  const Dim n = reduced.count ? reduced.dims[0] : Dim{1, 0, 0};
  for (int64_t t = begin; t < end; ++t) {
    int64_t x_offset, y_offset;
    outer.offsets(t / tiles, &x_offset, &y_offset);
    const int64_t first = t % tiles * kTile, width = inner - first < kTile ? inner - first : kTile;
    columns<F>(static_cast<const X*>(call.x) + x_offset + first, static_cast<Y*>(call.y) + y_offset + first, n.size,
               n.x_stride, n.y_stride, width, call.layout.rows);
  }
}

template <Function F, class X, class Y>
void some(const Call& call, int64_t begin, int64_t end) {
  if (call.layout.view == View::columns) return some_tiles<F, X, Y>(call, begin, end);
  some_rows<F, X, Y>(call, begin, end);
}

template <class X, class Y>
void typed(const Call& call, int64_t begin, int64_t end) {
  switch (call.function) {
    case Function::softmax: return some<Function::softmax, X, Y>(call, begin, end);
    case Function::log_softmax: return some<Function::log_softmax, X, Y>(call, begin, end);
    case Function::softmin: return some<Function::softmin, X, Y>(call, begin, end);
    case Function::logsumexp:
      if constexpr (sizeof(X) == sizeof(Y)) some<Function::logsumexp, X, Y>(call, begin, end);
      return;
    case Function::state:
      if constexpr (sizeof(Y) == sizeof(typename Wide<X>::type)) some<Function::state, X, Y>(call, begin, end);
  }
}

template <class X, class Same>
void from_half(const Call& call, int64_t begin, int64_t end) {
  if (call.y_type == DType::float32) return typed<X, float>(call, begin, end);
  typed<X, Same>(call, begin, end);
}

}  // namespace

Units units(const Layout& layout) {
  if (layout.view != View::columns) return {layout.rows, layout.n};
  const int64_t inner = layout.outer.dims[layout.outer.count - 1].size;
  return {layout.rows / inner * ((inner + kTile - 1) / kTile), layout.n * kTile};
}

void run(const Call& call, int64_t begin, int64_t end) {
  switch (call.x_type) {
    case DType::float64: return typed<double, double>(call, begin, end);
    case DType::float16: return from_half<float16, float16>(call, begin, end);
    case DType::bfloat16: return from_half<bfloat16, bfloat16>(call, begin, end);
    case DType::float32:
      if (call.y_type == DType::float16) return typed<float, float16>(call, begin, end);
      if (call.y_type == DType::bfloat16) return typed<float, bfloat16>(call, begin, end);
      return typed<float, float>(call, begin, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
