// backward_call.h: a gradient with its types: how its rows are walked, and which of them go together.
#pragma once

#include "backward_aside.h"
#include "backward_scalar.h"
#include "engine.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kShortRow = 128;     // elements of a row that is taken with three others
constexpr int64_t kRowsAGroup = 64;    // short rows of a unit
constexpr int64_t kAhead = 128 << 10;  // bytes of a row and a half that are fetched beforehand

inline Kind kind_of(Function function) {
  return function == Function::logsumexp ? Kind::lse : function == Function::log_softmax ? Kind::log : Kind::soft;
}
// Computed in vectors of floats?
constexpr bool vectors(DType y, DType dx) {
  return y != DType::float64 && dx != DType::float64 && (y == dx || y == DType::float32 || dx == DType::float32);
}
template <class Y, class D>
constexpr bool kVectors = sizeof(Y) < 8 && sizeof(D) < 8 && (std::is_same_v<Y, D> || sizeof(Y) == 4 || sizeof(D) == 4);

inline bool past_cache(const BackwardCall& call) {
  return kStreams && call.dx != call.saved && call.dx != call.grad &&
         call.layout.rows * call.layout.n * size_of(call.dx_type) >= kPast;
}

inline int64_t tile_rows(const BackwardCall& call) {
  if (!vectors(call.type, call.dx_type)) return kScalarTile;
  if (call.function == Function::logsumexp) return kTileRows;  // which keeps nothing
  const int64_t n = call.layout.n;
  return size_of(call.type) == 4 ? backward_tile_width<float>(n) : backward_tile_width<float16>(n);
}

// A call with its types.
template <Kind K, class Y, class D>
struct Backward {
  const BackwardCall& call;
  const BackwardBag outer = call.layout.outer;
  const BackwardDim n = call.layout.reduced.innermost();
  const bool past = past_cache(call);
  const float sign = call.function == Function::softmin ? -1.0f : 1.0f;

  const Y* saved(const int64_t* offset) const { return static_cast<const Y*>(call.saved) + offset[kSaved]; }
  const Y* grad(const int64_t* offset) const { return static_cast<const Y*>(call.grad) + offset[kGrad]; }
  D* dx(const int64_t* offset) const { return static_cast<D*>(call.dx) + offset[kDx]; }
  bool same_grad() const { return K == Kind::lse || n.strides[kGrad] == 0; }  // along a row

  // What makes the dx of a row but for its sum.
  template <class A>
  void last(const int64_t* offset, A* a, A* b) const {
    *a = A(0), *b = A(sign);
    if constexpr (K == Kind::lse) {
      *a = A(to_wide(*grad(offset))), *b = A(to_wide(static_cast<const Y*>(call.lse)[offset[kLse]]));
    }
  }

  // The operands of elements of a row from `first` on; `constant` has room for a step.
  BackwardRow<Y> row(const int64_t* offset, int64_t first, int64_t length, Y* constant) const {
    if (!same_grad()) return {saved(offset) + first, grad(offset) + first, -1, length};
    if constexpr (K != Kind::lse) {
      for (int i = 0; i < kBackwardStep; ++i) constant[i] = *grad(offset);
    }
    return {saved(offset) + first, constant, 0, length};
  }
  BackwardLast<K, D> finish(const int64_t* offset, double sum) const {
    float a, b;
    last(offset, &a, &b);
    return {all(K == Kind::lse ? a : float(sum)), all(b)};
  }

  // Rows of unit stride.
  void rows(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    const BackwardDim inner = outer.innermost();
    const bool ahead = n.size * 2 * int64_t(sizeof(Y)) <= kAhead;
    const int64_t next_y = K == Kind::soft && ahead ? inner.strides[kSaved] : 0;
    const int64_t next_g = same_grad() || !ahead ? 0 : inner.strides[kGrad];
    BackwardOdometer at(outer, begin);
    for (int64_t r = begin; r < end; ++r, at.next()) {
      double sum = 0;
      const BackwardRow<Y> whole = row(at.offset, 0, n.size, constant);
      if (K == Kind::lse || n.size <= kLong) {
        if constexpr (K != Kind::lse) sum = backward_sum<K>(whole, next_y, next_g);
      } else {
        for (int64_t first = 0; first < n.size; first += kPiece) sum += piece_sum(at.offset, first, constant);
      }
      backward_store(whole, dx(at.offset), finish(at.offset, sum), past);
    }
    if (past) end_streams();
  }

  // Pieces of long rows.
  double piece_sum(const int64_t* offset, int64_t first, Y* constant) const {
    const int64_t length = n.size - first < kPiece ? n.size - first : kPiece;
    return backward_sum<K>(row(offset, first, length, constant), 0, 0);
  }
  void pieces(BackwardStep step, double* sums, int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    const int64_t each = (n.size + kPiece - 1) / kPiece;
    for (int64_t p = begin; p < end; ++p) {
      const BackwardOdometer at(outer, p / each);
      const int64_t first = p % each * kPiece, length = n.size - first < kPiece ? n.size - first : kPiece;
      if (step == BackwardStep::sums) {
        if constexpr (K != Kind::lse) sums[p] = piece_sum(at.offset, first, constant);
      } else {
        const double sum = K == Kind::lse ? 0 : sums[p / each];
        backward_store(row(at.offset, first, length, constant), dx(at.offset) + first, finish(at.offset, sum), past);
      }
    }
    if (past && step != BackwardStep::sums) end_streams();
  }

  // Groups of short rows.
  void groups(int64_t begin, int64_t end) const {
    alignas(64) Y constants[4][kBackwardStep];
    const bool flat = outer.count <= 1;
    const BackwardDim inner = outer.innermost();
    const int64_t none[kBackwardTensors] = {};
    const Y *const y_first = saved(none), *const g_first = grad(none);
    D* const dx_first = dx(none);
    // Whole lines, all of them?
    const bool lines = past && flat && n.size * int64_t(sizeof(D)) % kLine == 0 && n.size % (2 * kWidth) == 0 &&
                       uintptr_t(call.dx) % kLine == 0 && inner.strides[kDx] * int64_t(sizeof(D)) % kLine == 0;
    BackwardOdometer at(outer, begin * kRowsAGroup);
    for (int64_t g = begin; g < end; ++g) {
      const int64_t left = call.layout.rows - g * kRowsAGroup, count = left < kRowsAGroup ? left : kRowsAGroup;
      if (n.size < kWidth) {
        tiny(at, count);
        continue;
      }
      for (int64_t first = 0; first < count; first += 4) {
        const int some = count - first < 4 ? int(count - first) : 4;
        const Y *y[4], *g_at[4];
        D* to[4];
        for (int r = 0; r < 4; ++r) {
          const int64_t index = g * kRowsAGroup + first + (r < some ? r : some - 1);
          if (flat) {
            y[r] = y_first + index * inner.strides[kSaved], g_at[r] = g_first + index * inner.strides[kGrad];
            to[r] = dx_first + index * inner.strides[kDx];
          } else {
            y[r] = saved(at.offset), g_at[r] = grad(at.offset), to[r] = dx(at.offset);
            if (r + 1 < some || some == 4) at.next();
          }
          if (same_grad()) {
            for (int i = 0; i < kBackwardStep; ++i) constants[r][i] = *g_at[r];
            g_at[r] = constants[r];
          }
        }
        four_rows<K, Y, D>(y, g_at, same_grad() ? 0 : -1, to, n.size, some, all(sign), lines);
      }
    }
    if (lines) end_streams();
  }

  __attribute__((noinline)) void tiny(BackwardOdometer& at, int64_t count) const {
    alignas(64) float y[kWidth][kTiny], g[kWidth][kTiny];
    const Y *y_at[kTiny] = {}, *g_at[kTiny] = {};
    D* dx_at[kTiny] = {};
    bool y_packed = true, g_packed = !same_grad(), dx_packed = true;
    for (int64_t j = 0; j < count; ++j, at.next()) {
      y_at[j] = saved(at.offset), g_at[j] = grad(at.offset), dx_at[j] = dx(at.offset);
      y_packed &= y_at[j] == y_at[0] + j * n.size, g_packed &= g_at[j] == g_at[0] + j * n.size;
      dx_packed &= dx_at[j] == dx_at[0] + j * n.size;
    }
    std::memset(y, 0, sizeof y), std::memset(g, 0, sizeof g);
    turn_in<Y>(y, n.size, count, y_packed, [&](int64_t j) { return y_at[j]; });
    if (same_grad()) {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t i = 0; i < n.size; ++i) g[i][j] = to_wide(*g_at[j]);
      }
    } else {
      turn_in<Y>(g, n.size, count, g_packed, [&](int64_t j) { return g_at[j]; });
    }
    for (int64_t j = 0; j < count; j += kWidth) {
      Floats sum{};
      for (int64_t i = 0; i < n.size; ++i) sum += backward_term<K>(load_vector(y[i] + j), load_vector(g[i] + j));
      const BackwardLast<K, D> last = {sum, all(sign)};
      for (int64_t i = 0; i < n.size; ++i) {
        store_vector(y[i] + j, last(load_vector(y[i] + j), load_vector(g[i] + j)));
      }
    }
    turn_out<D, kAnyNan<Y, D>>(y, n.size, count, dx_packed, [&](int64_t j) { return dx_at[j]; });
  }

  // Tiles of rows side by side: the innermost outer dim is cut into tiles, the others are walked in order.
  void tiles(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    BackwardBag slow = outer;
    const BackwardDim inner = slow.dims[--slow.count];
    const int64_t wide = tile_rows(call), across = (inner.size + wide - 1) / wide;
    for (int64_t t = begin; t < end; ++t) {
      BackwardOdometer at(slow, t / across);
      const int64_t first = t % across * wide, width = inner.size - first < wide ? inner.size - first : wide;
      for (int i = 0; i < kBackwardTensors; ++i) at.offset[i] += first * inner.strides[i];
      tile(at.offset, inner, width, constant);
    }
    if (past) end_streams();
  }
  void tile(const int64_t* offset, const BackwardDim& inner, int64_t width, Y* constant) const {
    const Y *const y = saved(offset), *const g = grad(offset);
    D* const to = dx(offset);
    if constexpr (!kVectors<Y, D>) {
      if constexpr (K == Kind::lse) {
        const BackwardBag one = {1, {n}};
        for (int64_t j = 0; j < width; ++j) {
          int64_t here[kBackwardTensors];
          for (int i = 0; i < kBackwardTensors; ++i) here[i] = offset[i] + j * inner.strides[i];
          Common<Y, D> a, b;
          last(here, &a, &b);
          any_row<K>(y + j, g, to + j, one, n.size, a, b);
        }
      } else {
        unit_columns<K, Y, D>(y, g, to, n, inner.strides[kGrad], width, Common<Y, D>(sign));
      }
    } else if constexpr (K == Kind::lse) {
      backward_columns_lse(y, g, static_cast<const Y*>(call.lse) + offset[kLse], to, n.size, n.strides, inner.strides,
                           width, past);
    } else {
      const bool same = inner.strides[kGrad] == 0;
      for (int i = 0; same && i < kBackwardStep; ++i) constant[i] = *g;
      const BackwardTile<Y, D> t = {
          y, same ? constant : g, to, n.size, n.strides[kSaved], n.strides[kGrad], n.strides[kDx], same ? 0 : -1};
      backward_columns<K>(t, width, all(sign), past);
    }
  }

  // Rows of any strides, and of doubles.
  void scalar_rows(int64_t begin, int64_t end) const {
    using A = Common<Y, D>;
    BackwardOdometer at(outer, begin);
    for (int64_t r = begin; r < end; ++r, at.next()) {
      A a, b;
      last(at.offset, &a, &b);
      if (call.layout.view == View::rows) {
        const int64_t g_stride = n.strides[kGrad];
        if (g_stride == 0)
          unit_row<K>(saved(at.offset), grad(at.offset), 0, dx(at.offset), n.size, a, b);
        else
          unit_row<K>(saved(at.offset), grad(at.offset), 1, dx(at.offset), n.size, a, b);
      } else {
        any_row<K>(saved(at.offset), grad(at.offset), dx(at.offset), call.layout.reduced, call.layout.n, a, b);
      }
    }
  }

  void run(BackwardStep step, double* sums, int64_t begin, int64_t end) const {
    if (call.layout.view == View::columns) return tiles(begin, end);
    if constexpr (kVectors<Y, D>) {
      if (call.layout.view == View::rows) {
        if (step == BackwardStep::sums || step == BackwardStep::finish) return pieces(step, sums, begin, end);
        if (K != Kind::lse && n.size <= kShortRow) {
          if constexpr (K != Kind::lse) groups(begin, end);
          return;
        }
        if (K == Kind::lse && n.size > kLong) return pieces(BackwardStep::finish, sums, begin, end);
        return rows(begin, end);
      }
    }
    scalar_rows(begin, end);
  }
};

}  // namespace onepass::ONEPASS_ISA
