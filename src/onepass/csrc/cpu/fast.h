// fast.h: rows of unit stride in floats (rows.h has all others, and doubles).
//
//   a row that fits a core's cache:  maximum -> exponentials, kept, and their sum -> scale -> store: one pass over
//   memory a longer one:                    in pieces of a fixed length, a state each, merged in order; then finish ->
//   store
//
// Exponentials are kept in the output itself, or in the thread's scratch: those of half types, and where the output is
// to go past the cache.
#pragma once

#include "elements.h"

namespace onepass::ONEPASS_ISA {

// Stores what `result(v)` makes of the vectors of a source, in the cache or past it.
// `Up`: ties may go up.
template <bool Split, bool Up, class Y, class Source, class Result>
inline void store_row(Y* y, int64_t n, bool past, const Source& source, Result result) {
  constexpr int64_t line = kLine / int64_t(sizeof(Y));
  int64_t i = 0;
  const auto fours = [&](auto store_two) __attribute__((always_inline)) {
    for (; i + kStep <= n; i += kStep) {
      Floats v[4];
      source.four(i, v);
      result(v);
      store_two(y + i, v[0], v[1]), store_two(y + i + 2 * kWidth, v[2], v[3]);
    }
  };
  const auto vectors = [&](int64_t end) __attribute__((always_inline)) {
    Floats v[1];
    for (; i + kWidth <= end; i += kWidth) {
      v[0] = source.one(i);
      result(v);
      store_vector(y + i, v[0]);
    }
    if (i < end) {
      v[0] = source.part(i, end - i);
      result(v);
      store_part(y + i, end - i, v[0]);
      i = end;
    }
  };
  // Past the cache go whole lines; what is split stays in its pairs, and has to begin and end with a line.
  const int64_t lead = int64_t(-uintptr_t(y) % kLine / sizeof(Y));
  if (kStreams && past && (Split ? lead == 0 && n % line == 0 : n >= lead + line)) {
    if (!Split) vectors(lead);
    fours([](Y* to, Floats a, Floats b) __attribute__((always_inline)) { stream_two<Split, Up>(to, a, b); });
  } else {
    fours([](Y* to, Floats a, Floats b) __attribute__((always_inline)) { store_two<Split, Up>(to, a, b); });
  }
  vectors(n);
}

// Exponentials that were kept.
struct Kept {
  const float* e;
  ONEPASS_INLINE void four(int64_t i, Floats (&v)[4]) const {
    for (int k = 0; k < 4; ++k) v[k] = load_vector(e + i + k * kWidth);
  }
  ONEPASS_INLINE Floats one(int64_t i) const { return load_vector(e + i); }
  Floats part(int64_t i, int64_t count) const { return load_part(e + i, count, 0); }
};

// What the last step takes, in two floats: 1 / l, or m + log(l), for log_softmax.
struct Last {
  Floats high, low;

  template <Function F>
  static Last of(float m, double l) {
    const double value = F == Function::log_softmax ? double(m) + std::log(l) : double(kDrop) / l;
    return {all(float(value)), all(float(value - double(float(value))))};
  }
  // Exponentials become results: of half types the product is rounded once, and once more.
  template <class Y, int K>
  ONEPASS_INLINE void scale(Floats (&e)[K]) const {
    for (Floats& each : e) each = sizeof(Y) == 2 ? each * high : each * high + each * low;
  }
  // x - high is exact where what is left is small beside x, and else rounded as the result is.
  template <int K>
  ONEPASS_INLINE void log(Floats (&x)[K]) const {
    for (Floats& each : x) each = (each - high) - low;
  }
};

template <class Y>
inline void fill_nan(Y* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = Narrow<Y>::from(std::numeric_limits<float>::quiet_NaN());
}

// Is a maximum infinite, NaN, or too far away for vectors?
inline bool far(float m) { return !(std::fabs(m) <= Origin::kFarthest); }

// The last step of elements that are read again, of a row whose sum relative to m is l.
template <Function F, class X, class Y>
void finish_again(const Row<X, Y>& row, Y* y, float m, double l, bool past) {
  typedef typename Exponential<Y>::type E;
  if (std::isnan(l)) return fill_nan(y, row.n);
  if (far(m)) {
    const Finish<F, float> finish(State<float>{m, {l, 0}});
    for (int64_t i = 0; i < row.n; ++i) y[i] = Narrow<Y>::from(finish(load<Y>(row.x[i])));
    return;
  }
  if constexpr (F == Function::log_softmax) {
    const Last last = Last::of<F>(m, l);
    store_row<Row<X, Y>::kSplit, false>(y, row.n, past, row,
                                        [&](auto& v) __attribute__((always_inline)) { last.log(v); });
  } else if constexpr (sizeof(Y) == 2) {
    const Origin from = Origin::of(m);
    const E scaled(float(kDrop / (l * excess<E>(m))));
    store_row<Row<X, Y>::kSplit, true>(y, row.n, past, row, [&](auto& v) __attribute__((always_inline)) {
      if constexpr (Origin::kSubtracts) {
        for (Floats& each : v) each -= from.top;
      }
      scaled.scaled(v, from);
    });
  } else {
    const Last last = Last::of<F>(m, l * excess<E>(m));
    const Origin from = Origin::of(m);
    store_row<Row<X, Y>::kSplit, true>(y, row.n, past, row, [&](auto& v) __attribute__((always_inline)) {
      exponentials<E>(v, from);
      last.template scale<Y>(v);
    });
  }
}

// A whole row of up to kLong elements. `past`: the output goes past the cache.
template <Function F, class X, class Y>
void fast_row(const X* x, Y* y, int64_t n, int64_t plane, bool past) {
  typedef typename Exponential<Y>::type E;
  const Row<X, Y> row = {x, n};
  const float m = row.maximum();
  if (far(m)) return onepass::ONEPASS_ISA::row<F>(x, y, Anywhere(1, 1), n, plane);
  if constexpr (reduces(F) || F == Function::log_softmax) {
    const double l = row.template sum<false>(m, nullptr) * kDrop / excess<E>(m);
    if constexpr (reduces(F)) {
      store_reduced<F>(State<float>{m, {l, 0}}, y, plane);
    } else {
      finish_again<F>(row, y, m, l, past);
    }
  } else {
    float* e = nullptr;
    if constexpr (sizeof(Y) == 4) e = past ? nullptr : y;
    if (!e) e = scratch();
    const double l = row.template sum<true>(m, e);
    if (std::isnan(l)) return fill_nan(y, n);
    const Last last = Last::of<F>(m, l * kDrop);
    store_row<Row<X, Y>::kSplit, true>(y, n, past, Kept{e},
                                       [&](auto& v) __attribute__((always_inline)) { last.template scale<Y>(v); });
  }
}

// Are the exponentials of long rows kept in the output, each piece's relative to its own maximum?
template <Function F, class Y>
constexpr bool kKeepsPieces = sizeof(Y) == 4 && !reduces(F) && F != Function::log_softmax;

// The state of a piece of a long row; with `kept` also its exponentials.
template <Function F, class X, class Y>
State<float> fast_state(const X* x, int64_t n, float* kept) {
  const Row<X, Y> piece = {x, n};
  State<float> state = {piece.maximum(), {}};
  if (far(state.m)) {
    for (int64_t i = 0; i < n; ++i) {
      const float e = exp_minus(load<Y>(x[i]), shift(state.m));
      state.l.add(double(e));
      if (kept) kept[i] = e * kLift;
    }
  } else {
    const double l = kept ? piece.template sum<true>(state.m, kept) : piece.template sum<false>(state.m, nullptr);
    state.l.sum = l * kDrop / excess<typename Exponential<Y>::type>(state.m);
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
      const double too_large = far(own) ? 1 : excess<typename Exponential<Y>::type>(own);
      const double scale = std::isfinite(own) ? std::exp(double(own) - double(row.m)) / (l * too_large) : 0;
      // A piece may be so far below the row's maximum that its scale is no normal float: then in two steps, of which
      // the second is a power of two.
      const bool tiny = scale < double(kDrop);
      const double lift = tiny ? 0x1p126 : 1;
      Last last = Last::of<F>(row.m, 1 / (scale * lift));
      if (scale == 0) last.high = last.low = all(0);
      const Floats second = all(float(1 / lift));
      return store_row<false, false>(y, n, past, Kept{y}, [&](auto& v) __attribute__((always_inline)) {
        last.template scale<Y>(v);
        for (Floats& each : v) each *= second;
      });
    }
  }
  finish_again<F>(Row<X, Y>{x, n}, y, row.m, l, past);
}

}  // namespace onepass::ONEPASS_ISA
