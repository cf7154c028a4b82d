// short.h: short rows of unit stride, in floats: as many together as a vector has lanes, so that what is done once a
// row (maximum and sum over the lanes, 1 / l or log(l)) is done for all of them at a time, one row a lane.
#pragma once

#include "fast.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kShort = 512;  // elements of the longest such row: 8 of them are 16 KB

// kWidth rows, of which there are `count` and the others may be read; of `whole` vectors each, and the first lanes of
// one more, whose other lanes may be read. `Few`: the vectors of a row, where that is 1 or 2; otherwise 0.
template <Function F, class X, class Y, int Few>
struct Short {
  typedef Row<F, X, Y> Element;
  typedef typename Exponential<Y>::type E;
  static constexpr bool kElements = F == Function::log_softmax;  // are kept, not exponentials
  static constexpr bool kSplit = Element::kSplit;
  const X* x;
  Y* y;
  int64_t n, x_stride, y_stride;
  int count;
  int64_t whole, vectors;
  Ints last_lanes;
  float* kept;
  alignas(64) float m[kWidth], high[kWidth], low[kWidth];

  ONEPASS_INLINE int64_t steps() const { return Few ? Few : vectors; }
  ONEPASS_INLINE float* at(int r) const { return kept + r * steps() * kWidth; }
  ONEPASS_INLINE Floats one(int r, int64_t v) const {
    return Element::value(load_vector(x + r * x_stride + v * kWidth));
  }
  ONEPASS_INLINE Floats masked(Floats v) const { return last_lanes ? v : all(-kInf<float>); }
  ONEPASS_INLINE void four(int r, int64_t v, Floats (&to)[4]) const {
    Element{x + r * x_stride, n}.four(v * kWidth, to);
  }

  Floats maxima() const {
    Floats top[kWidth];
#pragma GCC unroll 1
    for (int r = 0; r < kWidth; ++r) {
      Floats a = masked(one(r, steps() - 1)), b = a;
      int64_t v = 0;
      for (; !Few && v + 4 <= whole; v += 4) {
        Floats now[4];
        four(r, v, now);
        a = larger(larger(now[0], now[1]), a), b = larger(larger(now[2], now[3]), b);
      }
      for (; v + 1 < steps(); ++v) a = larger(one(r, v), a);
      top[r] = larger(a, b);
    }
    return each_across(top, larger);
  }

  // Exponentials, in the place of elements.
  ONEPASS_INLINE void exponentials(Floats (&e)[4], const Floats (&top)[4], float* const (&to)[4]) const {
    if constexpr (kElements) {
      for (int k = 0; k < 4; ++k) store_vector(to[k], e[k]);
    }
    for (int k = 0; k < 4; ++k) e[k] -= top[k];
    E::of(e);
    if constexpr (!kElements && !reduces(F)) {
      for (int k = 0; k < 4; ++k) store_vector(to[k], e[k]);
    }
  }

  // The sums of lifted exponentials relative to m, which are kept, or (log_softmax) the elements: of each row's vectors
  // by fours, then of what is left of four rows at a time.
  Sums sums() const {
    Floats l[kWidth], rests[kWidth];
    int64_t v = 0;
    if constexpr (Few) {
      constexpr int kRows = 4 / Few;
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += kRows) {
        Floats e[4], tops[4];
        float* to[4];
        for (int k = 0; k < 4; ++k) {
          const int row = r + k / Few, at_vector = k % Few;
          e[k] = one(row, at_vector), tops[k] = all(m[row]), to[k] = at(row) + at_vector * kWidth;
          if (at_vector == Few - 1) e[k] = masked(e[k]);
        }
        exponentials(e, tops, to);
        for (int k = 0; k < kRows; ++k) l[r + k] = Few == 2 ? e[2 * k] + e[2 * k + 1] : e[k], rests[r + k] = Floats{};
      }
      return together(l, rests);
    }
#pragma GCC unroll 1
    for (int r = 0; r < kWidth; ++r) {
      const Floats top = all(m[r]), tops[4] = {top, top, top, top};
      LiftedSums total;
      for (v = 0; v + 4 <= whole; v += 4) {
        float* const to = at(r) + v * kWidth;
        Floats e[4];
        four(r, v, e);
        exponentials(e, tops, {to, to + kWidth, to + 2 * kWidth, to + 3 * kWidth});
        total.add((e[0] + e[1]) + (e[2] + e[3]));
      }
      l[r] = total.sum, rests[r] = total.rest;
    }
    for (; v < vectors; ++v) {
      const bool last = v >= whole;
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += 4) {
        Floats e[4], tops[4];
        float* to[4];
        for (int k = 0; k < 4; ++k) {
          e[k] = one(r + k, v), tops[k] = all(m[r + k]), to[k] = at(r + k) + v * kWidth;
          if (last) e[k] = masked(e[k]);
        }
        exponentials(e, tops, to);
        for (int k = 0; k < 4; ++k) {
          LiftedSums total = {l[r + k], rests[r + k]};
          total.add(e[k]);
          l[r + k] = total.sum, rests[r + k] = total.rest;
        }
      }
    }
    for (Floats& each : l) each -= LiftedSums::kStart;
    return together(l, rests);
  }
  static ONEPASS_INLINE Sums together(Floats (&l)[kWidth], Floats (&rests)[kWidth]) {
    if constexpr (sizeof(Y) == 2) {
      for (int r = 0; r < kWidth; ++r) l[r] += rests[r];
      Sums plain;
      plain.sum = each_across(l, [](Floats a, Floats b) { return a + b; });
      return plain;
    } else {
      return totals_of(l, rests);
    }
  }

  // Results that lie one after another may be stored with what comes behind their row: that is stored later.
  template <bool Past>
  void finish() const {
    const auto result = [](const Last& last, auto& v) __attribute__((always_inline)) {
      if constexpr (kElements) {
        last.log(v);
      } else {
        last.template scale<Y>(v);
      }
    };
    for (int r = 0; r < count; ++r) {
      const Last last = {all(m[r]), all(high[r]), all(low[r])};
      Y* const to = y + r * y_stride;
      const float* const from = at(r);
      const bool over = y_stride == n && r * n + steps() * kWidth <= count * n;
      int64_t v = 0;
      for (; !Few && v + 4 <= whole; v += 4) {
        Floats e[4];
        Kept{from}.four(v * kWidth, e);
        result(last, e);
        for (int k = 0; k < 4; k += 2) {
          if constexpr (Past) {
            stream_two<kSplit, !kElements>(to + (v + k) * kWidth, e[k], e[k + 1]);
          } else {
            store_two<kSplit, !kElements>(to + (v + k) * kWidth, e[k], e[k + 1]);
          }
        }
      }
      for (; v < steps(); ++v) {
        Floats e[1] = {load_vector(from + v * kWidth)};
        result(last, e);
        if (Past) {
          stream_vector(to + v * kWidth, e[0]);
        } else if (over || v < whole) {
          store_vector(to + v * kWidth, e[0]);
        } else {
          store_part(to + v * kWidth, n - v * kWidth, e[0]);
        }
      }
    }
  }

  __attribute__((noinline)) void run(int64_t plane, bool past) {
    const Floats top = maxima();
    store_vector(m, top - top == Floats{} ? top : Floats{});
    Sums l = sums();
    const Floats finite = (l.sum - l.sum) + (top - top) * 0.0f, nan = finite == finite ? Floats{} : all(1);
    alignas(64) float odd[kWidth];
    store_vector(odd, nan);
    const bool any = maximum_of(nan) > 0;
    if constexpr (reduces(F) || kElements) {
      l.sum *= kDrop, l.rest *= kDrop;
      const Pair log = log_in_two(l);
      store_vector(high, log.high), store_vector(low, log.low);
    } else if constexpr (sizeof(Y) == 2) {
      store_vector(high, 1.0f / l.sum);
    } else {
      const Doubles inverse = 1.0 / (widened(l.sum) + widened(l.rest));
      const Floats nearest = narrowed(inverse);
      store_vector(high, nearest), store_vector(low, narrowed(inverse - widened(nearest)));
    }
    if constexpr (reduces(F)) {
      alignas(64) float sum[kWidth];
      store_vector(sum, l.sum + l.rest);
      for (int r = 0; r < count; ++r) {
        Y* const to = y + r * y_stride;
        if (any && odd[r] != 0) {
          row<F>(x + r * x_stride, to, Anywhere(1, 1), n, plane);
        } else if constexpr (F == Function::state) {
          to[0] = Narrow<Y>::from(m[r]), to[plane] = Narrow<Y>::from(sum[r]);
        } else {
          to[0] = Narrow<Y>::from(m[r] + high[r]);
        }
      }
    } else {
      if (past) {
        finish<true>();
      } else {
        finish<false>();
      }
      for (int r = 0; any && r < count; ++r) {
        if (odd[r] != 0) fill_nan(y + r * y_stride, n);  // torch: NaN, also where the maximum is infinite
      }
    }
  }
};

// Rows [first, first + count) of the `rows` of a call.
template <Function F, class X, class Y, int Few>
void some_short(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t first, int64_t count,
                int64_t rows, bool past) {
  constexpr int64_t kMost = kShort + kWidth;
  alignas(64) float kept[kWidth * kMost];
  Short<F, X, Y, Few> group;
  group.n = n, group.y_stride = y_stride, group.kept = kept;
  group.whole = n / kWidth, group.vectors = (n + kWidth - 1) / kWidth;
  group.last_lanes = first_lanes(n - (group.vectors - 1) * kWidth);
  const int64_t width = group.vectors * kWidth, end = (rows - 1) * x_stride + n, bytes = n * int64_t(sizeof(Y));
  const bool lines =
      kStreams && past && bytes % kLine == 0 && uintptr_t(y) % kLine == 0 && y_stride * int64_t(sizeof(Y)) % kLine == 0;
  for (int64_t done = 0; done < count; done += kWidth) {
    const int64_t at = first + done, many = count - done < kWidth ? count - done : kWidth;
    group.x = x + at * x_stride, group.x_stride = x_stride, group.y = y + at * y_stride, group.count = int(many);
    if (x_stride >= 0 && (at + kWidth - 1) * x_stride + width <= end) {
      group.run(rows, lines);
    } else {  // what lies behind these rows may not be read
      alignas(64) X copy[kWidth * kMost];
      std::memset(static_cast<void*>(copy), 0, sizeof(X) * size_t(kWidth * width));
      for (int64_t r = 0; r < many; ++r) std::memcpy(copy + r * width, group.x + r * x_stride, n * sizeof(X));
      group.x = copy, group.x_stride = width;
      group.run(rows, lines);
    }
  }
}

template <Function F, class X, class Y>
void short_rows(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t first, int64_t count,
                int64_t rows, bool past) {
  if (n <= kWidth) return some_short<F, X, Y, 1>(x, y, n, x_stride, y_stride, first, count, rows, past);
  if (n <= 2 * kWidth) return some_short<F, X, Y, 2>(x, y, n, x_stride, y_stride, first, count, rows, past);
  some_short<F, X, Y, 0>(x, y, n, x_stride, y_stride, first, count, rows, past);
}

}  // namespace onepass::ONEPASS_ISA
