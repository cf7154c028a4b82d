// fast.h: rows of unit stride in floats (rows.h has all others, and doubles).
//
//   a row that fits a core's cache, one pass over memory:  maximum -> exponentials, kept, and their sum -> scale ->
//   store a longer one, in pieces of a fixed length:             a state each, block by block, merged; then finish ->
//   store
//
// Exponentials are kept in the output itself, or in a buffer on the stack where the output is to go past the cache.
#pragma once

#include "rows.h"
#include "simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kKept = 16384;  // floats of the buffer: 64 KB, an eighth of a small L2 cache
constexpr int64_t kLong = 65536;  // elements of the longest row that is not cut into pieces
constexpr int64_t kPiece = 8192;  // elements of a piece
constexpr int64_t kLine = 64;     // bytes; a line of which a row has a part does not go past the cache
constexpr int64_t kStep = 4 * kWidth;

// Does `whole(i)` for every vector of n elements, by fours, and `part(i, count)` for what is left.
template <class Whole, class Part>
inline void for_vectors(int64_t n, Whole whole, Part part) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int64_t v = 0; v < kStep; v += kWidth) whole(i + v, int(v / kWidth));
  }
  for (; i + kWidth <= n; i += kWidth) whole(i, 0);
  if (i < n) part(i, n - i);
}

template <Function F, class X, class Y>
struct Row {
  const X* x;
  int64_t n;

  // What an element is to the function. (Where Y is narrower than X, torch rounds the input to Y first.)
  static ONEPASS_INLINE Floats value(Floats v) {
    if constexpr (!kWidens<X, Y>) {
      Y rounded[kWidth];
      store_vector<true>(rounded, v);
      v = load_vector(rounded);
    }
    return F == Function::softmin ? -v : v;
  }
  ONEPASS_INLINE Floats at(int64_t i) const { return value(load_vector(x + i)); }
  Floats part(int64_t i, int64_t count) const {
    return value(load_part(x + i, count, F == Function::softmin ? kInf<float> : -kInf<float>));
  }

  float maximum() const {
    Floats m[4] = {all(-kInf<float>), all(-kInf<float>), all(-kInf<float>), all(-kInf<float>)};
    for_vectors(
        n, [&](int64_t i, int lane) __attribute__((always_inline)) { m[lane] = larger(at(i), m[lane]); },
        [&](int64_t i, int64_t count) { m[0] = larger(part(i, count), m[0]); });
    return maximum_of(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  }

  // The sum of the exponentials relative to m, which `keep(i, e)` has, times 2^64. Four are added up in plain floats:
  // an eighth that is much smaller than the first would always be rounded the same way.
  template <class Keep, class KeepPart>
  double sum(float m, Keep keep, KeepPart keep_part) const {
    const typename Exponential<Y>::type exponential(m);
    Sums total;
    const auto next = [&](int64_t i) __attribute__((always_inline)) {
      const Floats e = exponential(at(i));
      keep(i, e);
      return e;
    };
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      // What comes behind the row is fetched meanwhile: no row's first pass should wait for memory.
      for (int64_t line = 0; line < kStep; line += 64 / int64_t(sizeof(X))) __builtin_prefetch(x + n + i + line);
      const Floats a = next(i), b = next(i + kWidth), c = next(i + 2 * kWidth), d = next(i + 3 * kWidth);
      total.add((a + b) + (c + d));
    }
    for (; i + kWidth <= n; i += kWidth) total.add(next(i));
    if (i < n) {
      const Floats e = exponential(part(i, n - i));
      keep_part(i, n - i, e);
      total.add(e);
    }
    return total.total();
  }
  double sum(float m) const {
    return sum(m, [](int64_t, Floats) {}, [](int64_t, int64_t, Floats) {});
  }
};

// Stores results that `result(i)` gives, in the cache or past it.
template <class Y, class Result, class Part>
inline void store_row(Y* y, int64_t n, bool past, Result result, Part part) {
  int64_t i = 0;
  if (kStreams && past && uintptr_t(y) % kLine == 0 && n * int64_t(sizeof(Y)) % kLine == 0) {
    for (; i + kWidth <= n; i += kWidth) stream_vector(y + i, result(i));
  } else {
    for (; i + kWidth <= n; i += kWidth) store_vector(y + i, result(i));
  }
  if (i < n) store_part(y + i, n - i, part(i, n - i));
}

// (x - m) - log(l), with what x - m was rounded by (Knuth's TwoSum), unless that is infinite.
ONEPASS_INLINE Floats log_of(Floats x, Floats m, Floats high, Floats low) {
  const Floats d = x - m, back = d - x, rest = (x - (d - back)) - (m + back);
  return (d - high) + ((rest == rest ? rest : Floats{}) - low);
}

// What the last step takes: m, and in two floats 1 / l or log(l).
struct Last {
  Floats m, high, low;

  template <Function F>
  static Last of(float m, double l) {
    const double value = F == Function::log_softmax ? std::log(l) : double(kDrop) / l;
    return {all(m), all(float(value)), all(float(value - double(float(value))))};
  }
  ONEPASS_INLINE Floats scale(Floats e) const { return e * high + e * low; }
  ONEPASS_INLINE Floats log(Floats x) const { return log_of(x, m, high, low); }
};
template <class Y>
ONEPASS_INLINE Floats scaled(const Last& last, Floats e) {
  return sizeof(Y) == 2 ? e * last.high : last.scale(e);
}

template <class Y>
inline void fill_nan(Y* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = Narrow<Y>::from(std::numeric_limits<float>::quiet_NaN());
}

// The last step of elements that are read again.
template <Function F, class X, class Y>
void finish_again(const Row<F, X, Y>& row, Y* y, float m, double l, bool past) {
  if (std::isnan(l)) return fill_nan(y, row.n);
  const Last last = Last::of<F>(m, l);
  const typename Exponential<Y>::type exponential(m);
  const auto result = [&](Floats v) __attribute__((always_inline)) {
    return F == Function::log_softmax ? last.log(v) : scaled<Y>(last, exponential(v));
  };
  store_row(
      y, row.n, past, [&](int64_t i) __attribute__((always_inline)) { return result(row.at(i)); },
      [&](int64_t i, int64_t count) { return result(row.part(i, count)); });
}

// A whole row of up to kLong elements. `past`: the output goes past the cache.
template <Function F, class X, class Y>
void fast_row(const X* x, Y* y, int64_t n, int64_t plane, bool past) {
  const Row<F, X, Y> row = {x, n};
  const float m = row.maximum();
  if (!std::isfinite(m)) return onepass::ONEPASS_ISA::row<F>(x, y, Unit(), n, plane);
  if constexpr (reduces(F)) {
    return store_reduced<F>(State<float>{m, {row.sum(m) * kDrop, 0}}, y, plane);
  } else if constexpr (F == Function::log_softmax) {
    finish_again(row, y, m, row.sum(m) * kDrop, past);
  } else {
    alignas(64) float kept[kKept];
    float* e = kept;
    if constexpr (sizeof(Y) == 4) {
      if (!past || n > kKept) e = y;
    }
    if (e == kept && n > kKept) return finish_again(row, y, m, row.sum(m) * kDrop, past);
    const double l = row.sum(
        m, [=](int64_t i, Floats v) __attribute__((always_inline)) { store_vector(e + i, v); },
        [=](int64_t i, int64_t count, Floats v) { store_part(e + i, count, v); });
    if (std::isnan(l)) return fill_nan(y, n);
    const Last last = Last::of<F>(m, l * kDrop);
    store_row(
        y, n, past, [&](int64_t i) __attribute__((always_inline)) { return scaled<Y>(last, load_vector(e + i)); },
        [&](int64_t i, int64_t count) { return scaled<Y>(last, load_part(e + i, count, 0)); });
  }
}

// Are the exponentials of long rows kept in the output, each piece's relative to its own maximum?
template <Function F, class Y>
constexpr bool kKeepsPieces = sizeof(Y) == 4 && !reduces(F) && F != Function::log_softmax;

// The state of a piece of a long row; with `kept` also its exponentials.
template <Function F, class X, class Y>
State<float> fast_state(const X* x, int64_t n, float* kept) {
  const Row<F, X, Y> piece = {x, n};
  State<float> state = {piece.maximum(), {}};
  if (!std::isfinite(state.m)) {
    for (int64_t i = 0; i < n; ++i) {
      const float e = exp_minus(load<F, Y>(x[i]), shift(state.m));
      state.l.add(double(e));
      if (kept) kept[i] = e;
    }
  } else if (kept) {
    state.l.sum = piece.sum(
        state.m, [=](int64_t i, Floats v) { store_vector(kept + i, v); },
        [=](int64_t i, int64_t count, Floats v) { store_part(kept + i, count, v); });
    state.l.sum *= kDrop;
  } else {
    state.l.sum = piece.sum(state.m) * kDrop;
  }
  return state;
}

// The last step of a piece, from the state of its row. `own`: the maximum that what was kept is relative to.
template <Function F, class X, class Y>
void fast_finish(const X* x, Y* y, int64_t n, const State<float>& row, bool kept, float own, bool past) {
  const double l = row.l.value();
  if (!std::isfinite(row.m) || std::isnan(l)) return fill_nan(y, n);
  if constexpr (kKeepsPieces<F, Y>) {
    if (kept) {
      const double scale = std::isfinite(own) ? std::exp(double(own) - double(row.m)) / l : 0;
      Last last = Last::of<F>(row.m, 1 / scale);
      if (scale == 0) last.high = last.low = all(0);
      return store_row(
          y, n, past, [&](int64_t i) __attribute__((always_inline)) { return last.scale(load_vector(y + i)); },
          [&](int64_t i, int64_t count) { return last.scale(load_part(y + i, count, 0)); });
    }
  }
  finish_again(Row<F, X, Y>{x, n}, y, row.m, l, past);
}

}  // namespace onepass::ONEPASS_ISA
