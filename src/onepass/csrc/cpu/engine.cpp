// engine.cpp: the CPU engine, compiled once for each instruction set (ONEPASS_ISA names it, and its namespace).
//
// Work is cut into units that no two threads share: rows, or tiles of columns. A unit is computed the same way whatever
// thread takes it, so the bits do not depend on the number of threads.
#include "engine.h"

#include "columns_simd.h"
#include "small_rows.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kGroup = 64;  // short rows of a unit

bool goes_past(const ForwardProblem& call) {
  return kStreams && !call.is_reduction() && call.tensors[kX].data != call.tensors[kY].data &&
         call.layout.rows * call.layout.n * size_of(call.type(kY)) >= kPast;
}

template <class Y>
constexpr bool kFast = sizeof(typename Wide<Y>::type) == 4;

// Short rows go many at a time where input and output have one type (others row by row: less to compile).
bool short_rows_of(const ForwardProblem& call) {
  return call.layout.view == View::rows && call.type(kX) == call.type(kY) && call.type(kY) != DType::float64 &&
         call.layout.n <= longest_short(call.type(kY));
}

// Rows [begin, end) of a call, the outer dims walked in order.
template <Function F, class X, class Y>
void some_rows(const ForwardProblem& call, int64_t begin, int64_t end) {
  const Bag& reduced = call.layout.reduced;
  const bool past = goes_past(call);
  Odometer outer(call.layout.outer, begin);
  for (int64_t r = begin; r < end; ++r, outer.next()) {
    const X* x = call.data<const X>(kX) + outer.x;
    Y* y = call.data<Y>(kY) + outer.y;
    if (!call.layout.unit_rows()) {
      row<F>(x, y, Anywhere(reduced), call.layout.n, call.layout.rows);
    } else if constexpr (kFast<Y>) {
      fast_row<F>(x, y, call.layout.n, call.layout.rows, past);
    } else {
      row<F>(x, y, Unit(), call.layout.n, call.layout.rows);
    }
  }
  if (past) end_streams();
}

// Units [begin, end) of short rows.
template <Function F, class X, class Y>
void some_groups(const ForwardProblem& call, int64_t begin, int64_t end) {
  const Layout& layout = call.layout;
  const bool past = goes_past(call);
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = g * kGroup, left = layout.rows - first;
    short_rows<F>(call.data<const X>(kX), call.data<Y>(kY), layout.n, layout.row_x_stride(), layout.row_y_stride(),
                  first, left < kGroup ? left : kGroup, layout.rows, past);
  }
  if (past) end_streams();
}

// Tiles [begin, end): the innermost outer dim is cut into tiles, the others are walked in order. Does
// `work(x, y, n, width)` for each, `n` being the rows' own dim.
template <class X, class Y, class Each>
void each_tile(const ForwardProblem& call, int64_t begin, int64_t end, Each work) {
  Bag outer = call.layout.outer;
  const int64_t wide = tile_width(call.layout.n, call.is_reduction());
  const int64_t inner = outer.dims[--outer.count].size, tiles = (inner + wide - 1) / wide;
  const Bag& reduced = call.layout.reduced;
  const Dim n = reduced.count ? reduced.dims[0] : Dim{1, 0, 0};
  for (int64_t t = begin; t < end; ++t) {
    int64_t x_offset, y_offset;
    outer.offsets(t / tiles, &x_offset, &y_offset);
    const int64_t first = t % tiles * wide, width = inner - first < wide ? inner - first : wide;
    work(call.data<const X>(kX) + x_offset + first, call.data<Y>(kY) + y_offset + first, n, width);
  }
}

template <Function F, class X, class Y>
void some_tiles(const ForwardProblem& call, int64_t begin, int64_t end) {
  const bool past = goes_past(call);
  each_tile<X, Y>(call, begin, end, [&](const X* x, Y* y, const Dim& n, int64_t width) {
    if constexpr (kFast<Y>) {
      fast_columns<F>(x, y, n.size, n.x_stride, n.y_stride, width, call.layout.rows, past);
    } else {
      for (int64_t at = 0; at < width; at += kTile) {
        columns<F>(x + at, y + at, n.size, n.x_stride, n.y_stride, width - at < kTile ? width - at : kTile,
                   call.layout.rows);
      }
    }
  });
  if (past) end_streams();
}

// One unit of a call of given types: begin to end of whole rows, or the states or the last steps of pieces.
enum class Step { rows, states, merge, finish };
struct Work {
  Step step;
  int64_t begin, end;
  Piece* pieces;
};

int64_t pieces_of(const Layout& layout) { return (layout.n + kPiece - 1) / kPiece; }

template <Function F, class X, class Y>
void some_pieces(const ForwardProblem& call, const Work& work) {
  const int64_t n = call.layout.n, each = pieces_of(call.layout);
  const bool past = goes_past(call), kept = kKeepsPieces<F, Y> && !past;
  const Piece* const rows = work.pieces + call.layout.rows * each;
  for (int64_t at = work.begin; at < work.end; ++at) {
    Odometer outer(call.layout.outer, at / each);
    const int64_t first = at % each * kPiece, count = n - first < kPiece ? n - first : kPiece;
    const X* const x = call.data<const X>(kX) + outer.x + first;
    Y* const y = reduces(F) ? nullptr : call.data<Y>(kY) + outer.y + first;
    Piece& piece = work.pieces[at];
    if (work.step == Step::states) {
      float* keep = nullptr;
      if constexpr (kKeepsPieces<F, Y>) keep = kept ? y : nullptr;
      const State<float> state = fast_state<F, X, Y>(x, count, keep);
      piece = {state.m, state.l.sum, state.l.rest};
    } else if constexpr (!reduces(F)) {
      const Piece& row = rows[at / each];
      fast_finish<F>(x, y, count, State<float>{row.m, {row.l, row.rest}}, kept, piece.m, past);
    }
  }
  if (past) end_streams();
}

// The states of rows go behind those of the pieces; a function that reduces is done then.
template <Function F, class Y>
void merge_pieces(const ForwardProblem& call, Piece* pieces) {
  const int64_t each = pieces_of(call.layout);
  Piece* const rows = pieces + call.layout.rows * each;
  Odometer outer(call.layout.outer, 0);
  for (int64_t r = 0; r < call.layout.rows; ++r, outer.next()) {
    State<float> state;
    for (int64_t i = r * each; i < (r + 1) * each; ++i)
      state = onepass::ONEPASS_ISA::merge(state, State<float>{pieces[i].m, {pieces[i].l, pieces[i].rest}});
    rows[r] = {state.m, state.l.sum, state.l.rest};
    if constexpr (reduces(F)) store_reduced<F>(state, call.data<Y>(kY) + outer.y, call.layout.rows);
  }
}

template <Function F, class X, class Y>
void some(const ForwardProblem& call, const Work& work) {
  if constexpr (kFast<Y>) {
    if (work.step == Step::merge) return merge_pieces<F, Y>(call, work.pieces);
    if (work.step != Step::rows) return some_pieces<F, X, Y>(call, work);
  }
  if (call.layout.view == View::columns) return some_tiles<F, X, Y>(call, work.begin, work.end);
  if constexpr (kFast<Y> && std::is_same_v<X, Y>) {
    if (short_rows_of(call)) return some_groups<F, X, Y>(call, work.begin, work.end);
  }
  some_rows<F, X, Y>(call, work.begin, work.end);
}

template <class X, class Y>
void typed(const ForwardProblem& call, const Work& work) {
  switch (call.function) {
    case Function::softmax: return some<Function::softmax, X, Y>(call, work);
    case Function::log_softmax: return some<Function::log_softmax, X, Y>(call, work);
    case Function::softmin: return;  // is softmax by now
    case Function::logsumexp:
      if constexpr (sizeof(X) <= sizeof(Y)) some<Function::logsumexp, X, Y>(call, work);
      return;
    case Function::state:
      if constexpr (sizeof(Y) == sizeof(typename Wide<X>::type)) some<Function::state, X, Y>(call, work);
  }
}

template <class X, class Same>
void from_half(const ForwardProblem& call, const Work& work) {
  if (call.type(kY) == DType::float32) return typed<X, float>(call, work);
  typed<X, Same>(call, work);
}

void any(const ForwardProblem& call, const Work& work) {
  switch (call.type(kX)) {
    case DType::float64: return typed<double, double>(call, work);
    case DType::float16: return from_half<float16, float16>(call, work);
    case DType::bfloat16: return from_half<bfloat16, bfloat16>(call, work);
    case DType::float32:
      if (call.type(kY) == DType::float16) return typed<float, float16>(call, work);
      if (call.type(kY) == DType::bfloat16) return typed<float, bfloat16>(call, work);
      return typed<float, float>(call, work);
  }
}

// softmin is the softmax, in place, of what it is given with the other sign.
ForwardProblem in_place(const ForwardProblem& softmin) {
  ForwardProblem call = softmin;
  call.function = Function::softmax, call.tensors[kX].data = call.tensors[kY].data;
  for (Bag* const bag : {&call.layout.outer, &call.layout.reduced}) {
    for (int i = 0; i < bag->count; ++i) bag->dims[i].x_stride = bag->dims[i].y_stride;
  }
  return call;
}

// Units [begin, end) of the input with the other sign, in the output. `Bits`: as large as an element.
template <class Bits>
void negate(const ForwardProblem& softmin, int64_t begin, int64_t end) {
  constexpr Bits sign = Bits(Bits(1) << (8 * sizeof(Bits) - 1));
  const Layout& layout = softmin.layout;
  const auto side_by_side = [](const Bits* x, Bits* y, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] ^ sign;
  };
  if (layout.view == View::columns) {
    return each_tile<Bits, Bits>(softmin, begin, end, [&](const Bits* x, Bits* y, const Dim& n, int64_t width) {
      for (int64_t i = 0; i < n.size; ++i) side_by_side(x + i * n.x_stride, y + i * n.y_stride, width);
    });
  }
  const int64_t pieces = units(softmin).pieces, rows_each = short_rows_of(softmin) ? kGroup : 1;
  if (!pieces) begin *= rows_each, end = end * rows_each < layout.rows ? end * rows_each : layout.rows;
  Odometer outer(layout.outer, pieces ? begin / pieces : begin);
  const Anywhere at(layout.reduced);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = pieces ? i % pieces * kPiece : 0, left = layout.n - first;
    const int64_t count = pieces && left > kPiece ? kPiece : left;
    const Bits* const x = softmin.data<const Bits>(kX) + outer.x;
    Bits* const y = softmin.data<Bits>(kY) + outer.y;
    if (layout.unit_rows()) {
      side_by_side(x + first, y + first, count);
    } else {
      for (int64_t k = first; k < first + count; ++k) y[at.y(k)] = x[at.x(k)] ^ sign;
    }
    if (!pieces || (i + 1) % pieces == 0) outer.next();
  }
}

// Of units [begin, end) of rows or pieces, or of what comes after them.
void take(const ForwardProblem& call, const Work& work) {
  if (call.function != Function::softmin) return any(call, work);
  if (work.step == Step::rows || work.step == Step::states) {
    switch (size_of(call.type(kX))) {
      case 2: negate<uint16_t>(call, work.begin, work.end); break;
      case 4: negate<uint32_t>(call, work.begin, work.end); break;
      default: negate<uint64_t>(call, work.begin, work.end);
    }
  }
  any(in_place(call), work);
}

}  // namespace

Units units(const ForwardProblem& call) {
  if (call.function == Function::softmin) return units(in_place(call));
  const Layout& layout = call.layout;
  const bool fast = call.type(kY) != DType::float64;
  if (layout.view == View::columns) {
    const int64_t inner = layout.outer.dims[layout.outer.count - 1].size,
                  wide = tile_width(layout.n, call.is_reduction());
    return {layout.rows / inner * ((inner + wide - 1) / wide), layout.n * (inner < wide ? inner : wide), 0};
  }
  if (short_rows_of(call)) return {(layout.rows + kGroup - 1) / kGroup, layout.n * kGroup, 0};
  if (fast && layout.unit_rows() && layout.n > kLong)
    return {layout.rows * pieces_of(layout), kPiece, pieces_of(layout)};
  return {layout.rows, layout.n, 0};
}

void run(const ForwardProblem& call, int64_t begin, int64_t end) { take(call, {Step::rows, begin, end, nullptr}); }
void states(const ForwardProblem& call, Piece* pieces, int64_t begin, int64_t end) {
  take(call, {Step::states, begin, end, pieces});
}
void merge(const ForwardProblem& call, Piece* pieces) { take(call, {Step::merge, 0, 0, pieces}); }
void finish(const ForwardProblem& call, const Piece* pieces, int64_t begin, int64_t end) {
  take(call, {Step::finish, begin, end, const_cast<Piece*>(pieces)});
}

}  // namespace onepass::ONEPASS_ISA
