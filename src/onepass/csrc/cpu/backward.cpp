// backward.cpp: gradients on the CPU, compiled once for each instruction set (ONEPASS_ISA names it, and its namespace).
//
// Work is cut into units that no two threads share: rows, groups of short rows, tiles of columns, pieces of long rows.
// A unit is computed the same way whatever thread takes it, so the bits do not depend on the number of threads.
#include "backward_driver.h"

namespace onepass::ONEPASS_ISA {

namespace {

template <class Y, class D>
void typed(const BackwardProblem& call, BackwardStep step, double* sums, int64_t begin, int64_t end) {
  switch (kind_of(call.function)) {
    case Kind::soft: return Backward<Kind::soft, Y, D>{call}.run(step, sums, begin, end);
    case Kind::log: return Backward<Kind::log, Y, D>{call}.run(step, sums, begin, end);
    case Kind::lse:
      if constexpr (std::is_same_v<Y, D> || (sizeof(Y) == 4 && sizeof(D) == 2)) {
        Backward<Kind::lse, D, D>{call}.run(step, sums, begin, end);
      }
  }
}

// Of half types: to themselves, or to the float32 that the forward was given.
template <class Half>
void from_half(const BackwardProblem& call, BackwardStep step, double* sums, int64_t begin, int64_t end) {
  if (call.type(kDx) == DType::float32) return typed<Half, float>(call, step, sums, begin, end);
  typed<Half, Half>(call, step, sums, begin, end);
}

// Calls of doubles.
template <Kind K>
void run_doubles(const BackwardProblem& call, int64_t begin, int64_t end) {
  const BackwardDim n = call.layout.reduced.innermost(), inner = call.layout.outer.innermost();
  const auto *const y = call.data<const double>(kSaved), *const g = call.data<const double>(kGrad);
  const auto* const lse = call.data<const double>(kLse);
  auto* const dx = call.data<double>(kDx);
  const double sign = call.function == Function::softmin ? -1 : 1;
  if (call.layout.view == View::columns) {
    each_tile(call, begin, end, [&](const int64_t* at, int64_t width) {
      double_columns<K>(y + at[kSaved], g + at[kGrad], lse + at[kLse], dx + at[kDx], n, inner.strides, width, sign);
    });
    return;
  }
  BackwardOdometer at(call.layout.outer, begin);
  for (int64_t r = begin; r < end; ++r, at.next()) {
    const double a = K == Kind::lse ? g[at.offset[kGrad]] : 0, b = K == Kind::lse ? lse[at.offset[kLse]] : sign;
    double_row<K>(y + at.offset[kSaved], g + at.offset[kGrad], n.strides[kGrad], dx + at.offset[kDx], n.size, a, b);
  }
}

}  // namespace

Units backward_units(const BackwardProblem& call) {
  const BackwardLayout& layout = call.layout;
  const int64_t n = layout.n, rows = layout.rows;
  const bool fast = vectors(call), lse = call.function == Function::logsumexp;
  if (layout.view == View::columns && (fast || doubles(call))) {
    const int64_t inner = layout.outer.innermost().size, wide = tile_rows(call);
    return {rows / inner * ((inner + wide - 1) / wide), n * (inner < wide ? inner : wide), 0};
  }
  if (fast) {
    const int64_t each = (n + kPiece - 1) / kPiece;
    if (one_by_one(call)) return {rows, n, 0};
    if (together(call)) return {(rows + kRowsAGroup - 1) / kRowsAGroup, n * kRowsAGroup, 0};
    if (n > kLong) return {rows * each, kPiece, lse ? 0 : each};
  }
  return {rows, n, 0};
}

void backward(const BackwardProblem& call, BackwardStep step, double* sums, int64_t begin, int64_t end) {
  const Kind kind = kind_of(call.function);
  if (doubles(call)) {
    return kind == Kind::soft  ? run_doubles<Kind::soft>(call, begin, end)
           : kind == Kind::log ? run_doubles<Kind::log>(call, begin, end)
                               : run_doubles<Kind::lse>(call, begin, end);
  }
  if (!vectors(call)) return any_rows(call, kind, begin, end);
  switch (call.type(kGrad)) {
    case DType::float16: return from_half<float16>(call, step, sums, begin, end);
    case DType::bfloat16: return from_half<bfloat16>(call, step, sums, begin, end);
    default: break;
  }
  switch (call.type(kDx)) {
    case DType::float16: return typed<float, float16>(call, step, sums, begin, end);
    case DType::bfloat16: return typed<float, bfloat16>(call, step, sums, begin, end);
    default: return typed<float, float>(call, step, sums, begin, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
