// rows_simd.h: rows of unit stride, as vectors of floats (rows_scalar.h has all others, and doubles).
//
//   a row that fits a core's cache: maximum -> exponentials, which are stored, and their sum -> scale -> store. This is
//                                   one pass over memory.
//   a longer row:                   in chunks of a fixed length, one state per chunk, merged in order. Then each
//   element
//                                   is read again, finished and stored.
//
// The exponentials are stored in the output, or in the thread's scratch for half types and non-temporal outputs.
#pragma once

#include "exp_simd.h"
#include "rows_scalar.h"
#include "scratch.h"
#include "thresholds.h"

namespace onepass::ONEPASS_ISA {

static_assert(kLong <= kScratch);
constexpr int64_t kStep = 4 * kWidth;

template <class X, class Y>
struct Row {
  typedef typename Exponential<Y>::type E;
  static constexpr bool kSplit = std::is_same_v<X, bfloat16> && std::is_same_v<Y, bfloat16>;
  const X* x;
  int64_t n;

  // What an element is to the function. (Where Y is narrower than X, torch rounds the input to Y first.)
  static ONEPASS_INLINE Floats value(Floats v) {
    if constexpr (!kWidens<X, Y>) {
      Y rounded[kWidth];
      store_vector<true>(rounded, v);
      v = load_vector(rounded);
    }
    return v;
  }
  ONEPASS_INLINE void four(int64_t i, Floats (&v)[4]) const {
    load_two<kSplit>(x + i, v[0], v[1]), load_two<kSplit>(x + i + 2 * kWidth, v[2], v[3]);
    for (Floats& each : v) each = value(each);
  }
  ONEPASS_INLINE Floats one(int64_t i) const { return value(load_vector(x + i)); }
  Floats part(int64_t i, int64_t count) const { return value(load_part(x + i, count, -kInf<float>)); }

  // Of half types by their bits: those of positive numbers grow with them, those of negative ones fall. (A NaN may be
  // the largest: then it is NaN.)
  float maximum_of_bits() const {
    constexpr int kMany = 2 * kWidth;
    constexpr int16_t kLeast = -32768;
    constexpr uint16_t kMost = 65535;
    const auto* const from = reinterpret_cast<const uint16_t*>(x);
    Shorts high[2] = {Shorts{} + kLeast, Shorts{} + kLeast};
    Codes low[2] = {Codes{} + kMost, Codes{} + kMost};
    const auto step = [&](int64_t i, int k) __attribute__((always_inline)) {
      Codes v;
      std::memcpy(&v, from + i, sizeof v);
      high[k] = Shorts(v) > high[k] ? Shorts(v) : high[k];
      low[k] = v < low[k] ? v : low[k];
    };
    int64_t i = 0;
    for (; i + 2 * kMany <= n; i += 2 * kMany) step(i, 0), step(i + kMany, 1);
    if (i + kMany <= n) step(i, 0);
    if (i < n) step(n - kMany, 1);  // some of them again
    high[0] = high[0] > high[1] ? high[0] : high[1], low[0] = low[0] < low[1] ? low[0] : low[1];
    int16_t top = kLeast;
    uint16_t bottom = kMost;
    for (int k = 0; k < kMany; ++k) {
      top = high[0][k] > top ? high[0][k] : top, bottom = low[0][k] < bottom ? low[0][k] : bottom;
    }
    const uint16_t bits = top >= 0 ? uint16_t(top) : bottom;
    X m;
    std::memcpy(static_cast<void*>(&m), &bits, sizeof m);
    return to_wide(m);
  }

  float maximum() const {
    if (sizeof(X) == 2 && n >= 2 * kWidth) {
      const float m = maximum_of_bits();
      if (m == m) return m;  // that of a row with a NaN is the largest of the others
    }
    Floats m[4] = {all(-kInf<float>), all(-kInf<float>), all(-kInf<float>), all(-kInf<float>)};
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      Floats v[4];
      four(i, v);
      for (int k = 0; k < 4; ++k) m[k] = larger(v[k], m[k]);
    }
    for (; i + kWidth <= n; i += kWidth) m[0] = larger(one(i), m[0]);
    if (i < n) m[1] = larger(part(i, n - i), m[1]);
    return maximum_of(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  }

  // The sum of the exponentials, which go to `kept`, if there is one, counted from Origin::of(m). Four are added up in
  // plain floats: an eighth that is much smaller than the first would always be rounded the same way.
  template <bool Keeps>
  double sum(float m, float* kept) const {
    const Origin from = Origin::of(m);
    SumsFor<Y> total;
    Floats late{};  // is added a step later: what waits for exponentials keeps others from beginning
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      total.add(late);
      // What comes behind the row is fetched meanwhile: no row's first pass should wait for memory.
      for (int64_t line = 0; line < kStep; line += 64 / int64_t(sizeof(X))) __builtin_prefetch(x + n + i + line);
      Floats v[4];
      four(i, v);
      exponentials<E>(v, from);
      if constexpr (Keeps) {
        for (int k = 0; k < 4; ++k) store_vector(kept + i + k * kWidth, v[k]);
      }
      late = (v[0] + v[1]) + (v[2] + v[3]);
    }
    total.add(late);
    for (; i + kWidth <= n; i += kWidth) {
      Floats e[1] = {one(i)};
      exponentials<E>(e, from);
      if constexpr (Keeps) store_vector(kept + i, e[0]);
      total.add(e[0]);
    }
    if (i < n) {
      Floats e[1] = {part(i, n - i)};
      exponentials<E>(e, from);
      if constexpr (Keeps) store_part(kept + i, n - i, e[0]);
      total.add(e[0]);
    }
    return total.total();
  }
};

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
