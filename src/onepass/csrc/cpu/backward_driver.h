// backward_driver.h: a gradient with its types: how its rows are walked, and which of them go together.
#pragma once

#include "backward_generic.h"
#include "columns_backward.h"
#include "backward_rows.h"
#include "plan.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kRowsAGroup = 64;  // short rows of a unit

// Rows of a tile of rows that lie side by side: fewer, if no thread is to go without. (No row's bits depend on it.)
inline int64_t tile_rows(const BackwardProblem& call) {
  if (doubles(call)) return kDoubleTile;
  const int64_t line = kLine / size_of(call.type(kGrad)), inner = call.layout.outer.innermost().size;
  const auto tiles = [&](int64_t wide) { return call.layout.rows / inner * ((inner + wide - 1) / wide); };
  int64_t wide = kTileBytes / size_of(call.type(kGrad));
  while (wide > 16 * line && tiles(wide) < call.threads) wide /= 2;
  return wide;
}

// Calls work(offsets, width) for each of the tiles [begin, end): the innermost outer dim is cut into tiles, the others
// are walked in order.
template <class Work>
inline void each_tile(const BackwardProblem& call, int64_t begin, int64_t end, Work work) {
  BackwardBag slow = call.layout.outer;
  const BackwardDim inner = slow.innermost();
  --slow.count;
  const int64_t wide = tile_rows(call), across = (inner.size + wide - 1) / wide;
  for (int64_t t = begin; t < end; ++t) {
    BackwardOdometer at(slow, t / across);
    const int64_t first = t % across * wide;
    for (int i = 0; i < kBackwardTensors; ++i) at.offset[i] += first * inner.strides[i];
    work(at.offset, inner.size - first < wide ? inner.size - first : wide);
  }
}

// A call with its types: of what was saved, and of dx.
template <Kind K, class Y, class D>
struct Backward {
  const BackwardProblem& call;
  const BackwardBag& outer = call.layout.outer;
  const BackwardDim n = call.layout.reduced.innermost();
  const bool past = goes_past(call);
  const float sign = call.function == Function::softmin ? -1.0f : 1.0f;

  const Y* saved(const int64_t* offset) const { return call.data<const Y>(kSaved) + offset[kSaved]; }
  const Y* grad(const int64_t* offset) const { return call.data<const Y>(kGrad) + offset[kGrad]; }
  D* dx(const int64_t* offset) const { return call.data<D>(kDx) + offset[kDx]; }
  bool same_grad() const { return K == Kind::lse || n.strides[kGrad] == 0; }  // along a row

  // Of logsumexp, whose result may be wider than its input, an element of the result or of its gradient.
  float of_row(const void* tensor, int64_t at) const {
    return call.type(kGrad) == DType::float32 ? static_cast<const float*>(tensor)[at]
                                              : to_wide(static_cast<const Y*>(tensor)[at]);
  }
  // What makes the dx of a row but for its sum.
  template <class A>
  void last(const int64_t* offset, A* a, A* b) const {
    *a = A(0), *b = A(sign);
    if constexpr (K == Kind::lse) {
      *a = A(of_row(call.tensors[kGrad].data, offset[kGrad])), *b = A(of_row(call.tensors[kLse].data, offset[kLse]));
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
    if constexpr (K != Kind::lse) return BackwardLast<K, D>::of_sum(all(float(sum)), all(sign));
    float a, b;
    last(offset, &a, &b);
    return BackwardLast<K, D>::of(all(a), all(b));
  }

  // Runs of rows at one stride.
  void runs(int64_t begin, int64_t end) const {
    BackwardBag slow = outer;
    const BackwardDim inner = outer.innermost();
    slow.count -= slow.count > 0;
    BackwardOdometer at(slow, begin / inner.size);
    for (int64_t first = begin % inner.size, left = end - begin; left > 0; at.next()) {
      const int64_t count = inner.size - first < left ? inner.size - first : left;
      backward_rows<K>(saved(at.offset) + first * inner.strides[kSaved], grad(at.offset) + first * inner.strides[kGrad],
                       dx(at.offset) + first * inner.strides[kDx], inner.strides, count, n.size, sign, past);
      first = 0, left -= count;
    }
    if (past) end_streams();
  }

  // Rows of unit stride.
  void rows(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    BackwardOdometer at(outer, begin);
    for (int64_t r = begin; r < end; ++r, at.next()) {
      if (K == Kind::lse || n.size <= kLong) {
        const BackwardRow<Y> whole = row(at.offset, 0, n.size, constant);
        double sum = 0;
        if constexpr (K != Kind::lse) sum = backward_sum<K>(whole);
        backward_store(whole, dx(at.offset), finish(at.offset, sum), past);
        continue;
      }
      double sum = 0;
      const int64_t each = (n.size + kPiece - 1) / kPiece;
      for (int64_t p = 0; p < each; ++p) sum += piece_sum(at.offset, p, constant);
      for (int64_t p = 0; p < each; ++p) piece_store(at.offset, p, constant, sum);
    }
    if (past) end_streams();
  }

  // Pieces of long rows.
  BackwardRow<Y> piece(const int64_t* offset, int64_t p, Y* constant) const {
    const int64_t first = p * kPiece;
    return row(offset, first, n.size - first < kPiece ? n.size - first : kPiece, constant);
  }
  double piece_sum(const int64_t* offset, int64_t p, Y* constant) const {
    if constexpr (K == Kind::lse) return 0;
    return backward_sum<K>(piece(offset, p, constant));
  }
  void piece_store(const int64_t* offset, int64_t p, Y* constant, double sum) const {
    backward_store(piece(offset, p, constant), dx(offset) + p * kPiece, finish(offset, sum), past);
  }
  void pieces(BackwardStep step, double* sums, int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    const int64_t each = (n.size + kPiece - 1) / kPiece;
    for (int64_t p = begin; step == BackwardStep::sums && p < end; ++p) {
      sums[p] = piece_sum(BackwardOdometer(outer, p / each).offset, p % each, constant);
    }
    if (step == BackwardStep::sums) return;
    for (int64_t p = begin; p < end; ++p) {
      const double sum = K == Kind::lse ? 0 : sums[p / each];
      piece_store(BackwardOdometer(outer, p / each).offset, p % each, constant, sum);
    }
    if (past) end_streams();
  }

  // Groups of short rows. What goes past the cache does so by way of a buffer, if rows are no whole lines: a few are.
  void groups(int64_t begin, int64_t end) const {
    constexpr int64_t some = kLine / int64_t(sizeof(D));  // rows of a buffer
    alignas(64) D made[some * kShortMost];
    ShortRows<K, Y, D> group;
    group.n = n.size, group.sign = sign;
    const BackwardDim inner = outer.innermost();
    const bool flat = outer.count <= 1;
    const auto lined = [&](int64_t step) { return step * int64_t(sizeof(D)) % kLine == 0; };
    const bool past_too = past && flat && call.address(kDx) % kLine == 0;
    const bool straight =
        past_too && lined(inner.strides[kDx]) && lined(n.size) && (n.size % kPair == 0 || n.size == kWidth);
    const bool lines = past_too && !straight && inner.strides[kDx] == n.size;
    const int64_t last = end * kRowsAGroup < call.layout.rows ? end * kRowsAGroup : call.layout.rows;
    BackwardOdometer at(outer, begin * kRowsAGroup);
    for (int64_t first = begin * kRowsAGroup; first < last; first += group.count) {
      if (n.size < kWidth) {
        group.count = int(last - first < kTiny ? last - first : kTiny);
        tiny(at, group.count);
        continue;
      }
      group.count = int(last - first < kWidth ? last - first : kWidth);
      if (!flat || group.count < kWidth || (K != Kind::lse && same_grad())) {
        apart(group, at);
        continue;
      }
      const int64_t in_buffer = first % some;
      const bool buffered = lines && first - in_buffer + some <= last;
      group.y = saved(at.offset), group.y_stride = inner.strides[kSaved];
      group.g = grad(at.offset), group.g_stride = inner.strides[kGrad];
      group.dx = buffered ? made + in_buffer * n.size : dx(at.offset), group.dx_stride = inner.strides[kDx];
      for (int r = 0; r < kWidth; ++r) {
        if constexpr (K == Kind::lse) this->last(at.offset, &group.a[r], &group.b[r]);
        for (int t = 0; t < kBackwardTensors; ++t) at.offset[t] += inner.strides[t];
      }
      if (n.size == kPair) {
        straight ? group.template run<2, true, true>() : group.template run<2, false, true>();
      } else if (n.size < kPair) {
        straight ? group.template run<1, true, true>() : group.template run<1, false>();
      } else {
        straight ? group.template run<2, true>() : group.template run<2, false>();
      }
      if (buffered && in_buffer + kWidth == some) {
        D* const to = call.data<D>(kDx) + (first - in_buffer) * n.size;
        stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(made), some * n.size * sizeof(D));
      }
    }
    if (past_too) end_streams();
  }

  // Rows that do not lie at one stride, or are fewer than a vector has lanes: by way of copies.
  __attribute__((noinline)) void apart(ShortRows<K, Y, D>& group, BackwardOdometer& at) const {
    alignas(64) Y y[kWidth * kShortMost], g[kWidth * kShortMost];
    alignas(64) D made[kWidth * kShortMost];
    D* to[kWidth];
    for (int r = 0; r < group.count; ++r, at.next()) {
      std::memcpy(y + r * n.size, saved(at.offset), size_t(n.size) * sizeof(Y));
      if constexpr (K == Kind::lse) {
        last(at.offset, &group.a[r], &group.b[r]);
      } else if (same_grad()) {
        for (int64_t i = 0; i < n.size; ++i) g[r * n.size + i] = *grad(at.offset);
      } else {
        std::memcpy(g + r * n.size, grad(at.offset), size_t(n.size) * sizeof(Y));
      }
      to[r] = dx(at.offset);
    }
    const int64_t there = group.count * n.size, missing = (kWidth - group.count) * n.size * int64_t(sizeof(Y));
    std::memset(static_cast<void*>(y + there), 0, size_t(missing));
    std::memset(static_cast<void*>(g + there), 0, size_t(missing));
    group.y = y, group.g = g, group.dx = made;
    group.y_stride = group.g_stride = group.dx_stride = n.size;
    n.size < kPair ? group.template run<1, false>() : group.template run<2, false>();
    for (int r = 0; r < group.count; ++r) std::memcpy(to[r], made + r * n.size, size_t(n.size) * sizeof(D));
  }

  __attribute__((noinline)) void tiny(BackwardOdometer& at, int64_t count) const {
    alignas(64) float y[kWidth][kTiny] = {}, g[kWidth][kTiny] = {}, a[kTiny] = {}, b[kTiny] = {};
    const Y *y_at[kTiny], *g_at[kTiny];
    D* dx_at[kTiny];
    bool y_packed = true, g_packed = !same_grad(), dx_packed = true;
    for (int64_t j = 0; j < count; ++j, at.next()) {
      y_at[j] = saved(at.offset), g_at[j] = grad(at.offset), dx_at[j] = dx(at.offset);
      y_packed &= y_at[j] == y_at[0] + j * n.size, g_packed &= g_at[j] == g_at[0] + j * n.size;
      dx_packed &= dx_at[j] == dx_at[0] + j * n.size;
      if constexpr (K == Kind::lse) last(at.offset, &a[j], &b[j]);
    }
    turn_in<Y>(y, n.size, count, y_packed, [&](int64_t j) { return y_at[j]; });
    if (K != Kind::lse && same_grad()) {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t i = 0; i < n.size; ++i) g[i][j] = to_wide(*g_at[j]);
      }
    } else if (K != Kind::lse) {
      turn_in<Y>(g, n.size, count, g_packed, [&](int64_t j) { return g_at[j]; });
    }
    for (int64_t j = 0; j < count; j += kWidth) {
      Floats sum{};
      for (int64_t i = 0; K != Kind::lse && i < n.size; ++i) {
        sum += backward_term<K>(load_vector(y[i] + j), load_vector(g[i] + j));
      }
      const auto last = K == Kind::lse ? BackwardLast<K, D>::of(load_vector(a + j), load_vector(b + j))
                                       : BackwardLast<K, D>::of_sum(sum, all(sign));
      for (int64_t i = 0; i < n.size; ++i) {
        store_vector(y[i] + j, last.one(load_vector(y[i] + j), load_vector(g[i] + j)));
      }
    }
    turn_out<D, kAnyNan<Y, D>>(y, n.size, count, dx_packed, [&](int64_t j) { return dx_at[j]; });
  }

  // Tiles of rows side by side.
  void tiles(int64_t begin, int64_t end) const {
    alignas(64) Y constant[kBackwardStep];
    const BackwardDim inner = outer.innermost();
    each_tile(call, begin, end, [&](const int64_t* at, int64_t width) {
      if constexpr (K == Kind::lse) {
        alignas(64) float g[kTileRows<Y>], lse[kTileRows<Y>];
        for (int64_t j = 0; j < width; ++j) {
          g[j] = of_row(call.tensors[kGrad].data, at[kGrad] + j * inner.strides[kGrad]);
          lse[j] = of_row(call.tensors[kLse].data, at[kLse] + j * inner.strides[kLse]);
        }
        backward_columns_lse(saved(at), g, lse, dx(at), n.size, n.strides, width, past);
      } else {
        const bool same = inner.strides[kGrad] == 0;
        for (int i = 0; same && i < kBackwardStep; ++i) constant[i] = *grad(at);
        const BackwardTile<Y, D> tile = {saved(at),         same ? constant : grad(at), dx(at),         n.size,
                                         n.strides[kSaved], n.strides[kGrad],           n.strides[kDx], same ? 0 : -1};
        backward_columns<K>(tile, width, all(sign), past);
      }
    });
    if (past) end_streams();
  }

  void run(BackwardStep step, double* sums, int64_t begin, int64_t end) const {
    if (call.layout.view == View::columns) return tiles(begin, end);
    if (step != BackwardStep::rows) return pieces(step, sums, begin, end);
    if constexpr (K != Kind::lse) {
      if (one_by_one(call)) return runs(begin, end);
    }
    if (together(call)) return groups(begin, end);
    if (K == Kind::lse && n.size > kLong) return pieces(BackwardStep::finish, sums, begin, end);
    rows(begin, end);
  }
};

}  // namespace onepass::ONEPASS_ISA
