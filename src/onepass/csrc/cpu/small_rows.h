// small_rows.h: short rows of unit stride, as vectors of floats. As many rows go together as a vector has lanes. What
// is done once per row (the maximum and the sum over the lanes, 1 / l or log(l)) is then done for all of them at a
// time, one row per lane.
#pragma once

#include "rows_simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kShort = 384;  // elements of the longest such row
inline int64_t longest_short(DType type) { return size_of(type) == 2 ? kShort : 256; }
constexpr int kGroups = 4;  // of rows that go together, where they are short enough for kKept
constexpr int64_t kKept = kWidth * (kShort + kWidth);  // floats; as many lie on the stack

// Groups of kWidth rows, of which there are `count` and the others may be read; of `whole` vectors each, and the first
// lanes of one more, whose other lanes may be read. `Few`: the vectors of a row, where that is 1 or 2; otherwise 0.
// Each step is taken for all groups before the next: it would wait for the one before, of a group alone.
template <Function F, class X, class Y, int Few>
struct Short {
  typedef Row<X, Y> Element;
  typedef typename Exponential<Y>::type E;
  static constexpr bool kElements = F == Function::log_softmax;  // are kept, not exponentials
  static constexpr bool kSplit = Element::kSplit;
  // Exponentials whose sum goes into nothing but their own factor are counted from where that is cheapest.
  static constexpr bool kCounts = !kElements && !reduces(F) && !Origin::kSubtracts;
  const X* x;
  Y* y;
  int64_t n, x_stride, y_stride;
  int count;
  int64_t whole, vectors;
  Ints last_lanes;
  float* kept;
  alignas(64) float m[kGroups * kWidth], high[kGroups * kWidth], low[kGroups * kWidth];

  ONEPASS_INLINE int64_t steps() const { return Few ? Few : vectors; }
  ONEPASS_INLINE float* at(int r) const { return kept + r * steps() * kWidth; }
  ONEPASS_INLINE Floats one(int r, int64_t v) const {
    return Element::value(load_vector(x + r * x_stride + v * kWidth));
  }
  ONEPASS_INLINE Floats masked(Floats v) const { return last_lanes ? v : all(-kInf<float>); }
  ONEPASS_INLINE void four(int r, int64_t v, Floats (&to)[4]) const {
    Element{x + r * x_stride, n}.four(v * kWidth, to);
  }

  Floats maxima(int first) const {
    Floats top[kWidth];
#pragma GCC unroll 1
    for (int of = 0; of < kWidth; ++of) {
      const int r = first + of;
      Floats a = masked(one(r, steps() - 1)), b = a;
      int64_t v = 0;
      for (; !Few && v + 4 <= whole; v += 4) {
        Floats now[4];
        four(r, v, now);
        a = larger(larger(now[0], now[1]), a), b = larger(larger(now[2], now[3]), b);
      }
      for (; v + 1 < steps(); ++v) a = larger(one(r, v), a);
      top[of] = larger(a, b);
    }
    return each_across(top, larger);
  }

  // Exponentials, in the place of elements.
  ONEPASS_INLINE Origin origin(int r) const {
    if constexpr (kCounts) return {all(0), all(low[r]), all(high[r])};
    return {all(m[r])};
  }
  template <class From>
  ONEPASS_INLINE void exponentials(Floats (&e)[4], const From& from, float* const (&to)[4]) const {
    if constexpr (kElements) {
      for (int k = 0; k < 4; ++k) store_vector(to[k], e[k]);
    }
    if constexpr (kCounts) {
      E::of(e, from);
    } else {
      for (int k = 0; k < 4; ++k) e[k] -= of_each(from, k).top;
      E::of(e);
    }
    if constexpr (!kElements && !reduces(F)) {
      for (int k = 0; k < 4; ++k) store_vector(to[k], e[k]);
    }
  }

  // The sums of lifted exponentials relative to m, which are kept, or (log_softmax) the elements: of each row's vectors
  // by fours, then of what is left of four rows at a time.
  Sums sums(int first) const {
    Floats l[kWidth], rests[kWidth];
    int64_t v = 0;
    if constexpr (Few) {
      constexpr int kRows = 4 / Few;
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += kRows) {
        Floats e[4];
        Origin from[4];
        float* to[4];
        for (int k = 0; k < 4; ++k) {
          const int row = first + r + k / Few, at_vector = k % Few;
          e[k] = one(row, at_vector), from[k] = origin(row), to[k] = at(row) + at_vector * kWidth;
          if (at_vector == Few - 1) e[k] = masked(e[k]);
        }
        exponentials(e, from, to);
        for (int k = 0; k < kRows; ++k) l[r + k] = Few == 2 ? e[2 * k] + e[2 * k + 1] : e[k], rests[r + k] = Floats{};
      }
      return together(l, rests);
    }
#pragma GCC unroll 1
    for (int r = 0; r < kWidth; ++r) {
      const Origin from = origin(first + r);
      SumsFor<Y> total;
      for (v = 0; v + 4 <= whole; v += 4) {
        float* const to = at(first + r) + v * kWidth;
        Floats e[4];
        four(first + r, v, e);
        exponentials(e, from, {to, to + kWidth, to + 2 * kWidth, to + 3 * kWidth});
        total.add((e[0] + e[1]) + (e[2] + e[3]));
      }
      l[r] = total.sum;
      if constexpr (sizeof(Y) != 2) rests[r] = total.rest;
    }
    for (; v < vectors; ++v) {
      const bool last = v >= whole;
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += 4) {
        Floats e[4];
        Origin from[4];
        float* to[4];
        for (int k = 0; k < 4; ++k) {
          const int row = first + r + k;
          e[k] = one(row, v), from[k] = origin(row), to[k] = at(row) + v * kWidth;
          if (last) e[k] = masked(e[k]);
        }
        exponentials(e, from, to);
        for (int k = 0; k < 4; ++k) {
          if constexpr (sizeof(Y) == 2) {
            l[r + k] += e[k];
          } else {
            LiftedSums total = {l[r + k], rests[r + k]};
            total.add(e[k]);
            l[r + k] = total.sum, rests[r + k] = total.rest;
          }
        }
      }
    }
    for (Floats& each : l) each -= sizeof(Y) == 2 ? 0 : LiftedSums::kStart;
    return together(l, rests);
  }
  static ONEPASS_INLINE Sums together(Floats (&l)[kWidth], Floats (&rests)[kWidth]) {
    if constexpr (sizeof(Y) == 2) {
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
    const int64_t beyond = count * n - steps() * kWidth;  // the last row that may be begins there at most
    const int64_t over = whole == steps() ? count : y_stride == n && beyond >= 0 ? beyond / n + 1 : 0;
    int r = 0;
    for (; r < over; ++r) finish_row<Past, true>(r);
    for (; r < count; ++r) finish_row<Past, false>(r);
  }
  template <bool Past, bool Over>
  ONEPASS_INLINE void finish_row(int r) const {
    const auto result = [](const Last& last, auto& v) __attribute__((always_inline)) {
      if constexpr (kElements) {
        last.log(v);
      } else {
        last.template scale<Y>(v);
      }
    };
    const Last last = {all(high[r]), all(low[r])};
    Y* const to = y + r * y_stride;
    const float* const from = at(r);
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
      } else if (Over || v < whole) {
        store_vector(to + v * kWidth, e[0]);
      } else {
        store_part(to + v * kWidth, n - v * kWidth, e[0]);
      }
    }
  }

  // What the last step takes of a group, whose sums of lifted exponentials are l. True: a row is to be NaN.
  ONEPASS_INLINE bool last(int first, Floats top, Sums l, float* odd) {
    const Floats finite = (l.sum - l.sum) + (top - top) * 0.0f, nan = finite == finite ? Floats{} : all(1);
    store_vector(odd + first, nan);
    if constexpr (reduces(F) || kElements) {
      l.sum *= kDrop, l.rest *= kDrop;
      if constexpr (F == Function::state) {
        store_vector(high + first, l.sum + l.rest);
      } else {
        const Pair log = log_beside(load_vector(m + first), l);
        store_vector(high + first, log.high), store_vector(low + first, log.low);
      }
    } else if constexpr (sizeof(Y) == 2) {
      store_vector(high + first, 1.0f / l.sum);
    } else {
      const Pair inverse = inverse_in_two(l);
      store_vector(high + first, inverse.high), store_vector(low + first, inverse.low);
    }
    return maximum_of(nan) > 0;
  }

  __attribute__((noinline)) void run(int64_t plane, bool past) {
    Floats top[kGroups], furthest{};
    Sums l[kGroups];
    alignas(64) float odd[kGroups * kWidth];
    const int groups = (count + kWidth - 1) / kWidth;
    for (int g = 0; g < groups; ++g) {
      top[g] = maxima(g * kWidth);
      const Floats finite = top[g] - top[g] == Floats{} ? top[g] : Floats{};
      if constexpr (kCounts) {
        const Origin from = Origin::of(finite);
        store_vector(low + g * kWidth, from.low), store_vector(high + g * kWidth, from.magic);
        furthest = larger(larger(finite, -finite), furthest);
      } else {
        store_vector(m + g * kWidth, finite);
      }
    }
    if (kCounts && maximum_of(furthest) > Origin::kFarthest) {
      for (int r = 0; r < count; ++r) row<F>(x + r * x_stride, y + r * y_stride, Anywhere(1, 1), n, plane);
      return;
    }
    for (int g = 0; g < groups; ++g) l[g] = sums(g * kWidth);
    bool any = false;
    for (int g = 0; g < groups; ++g) any |= last(g * kWidth, top[g], l[g], odd);
    if constexpr (reduces(F)) {
      for (int r = 0; r < count; ++r) {
        Y* const to = y + r * y_stride;
        if (any && odd[r] != 0) {
          row<F>(x + r * x_stride, to, Anywhere(1, 1), n, plane);
        } else if constexpr (F == Function::state) {
          to[0] = Narrow<Y>::from(m[r]), to[plane] = Narrow<Y>::from(high[r]);
        } else {
          to[0] = Narrow<Y>::from(high[r]);
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
  alignas(64) float kept[kKept];
  Short<F, X, Y, Few> group;
  group.n = n, group.y_stride = y_stride, group.kept = kept;
  group.whole = n / kWidth, group.vectors = (n + kWidth - 1) / kWidth;
  group.last_lanes = first_lanes(n - (group.vectors - 1) * kWidth);
  const int64_t width = group.vectors * kWidth, end = (rows - 1) * x_stride + n, bytes = n * int64_t(sizeof(Y));
  const int64_t fit = kKept / (kWidth * width), most = kWidth * (fit < kGroups ? fit : kGroups);
  const bool lines =
      kStreams && past && bytes % kLine == 0 && uintptr_t(y) % kLine == 0 && y_stride * int64_t(sizeof(Y)) % kLine == 0;
  for (int64_t done = 0; done < count; done += group.count) {
    const int64_t at = first + done, left = count - done;
    const auto readable = [&](int64_t rows_read) {
      return x_stride >= 0 && (at + rows_read - 1) * x_stride + width <= end;
    };
    group.x = x + at * x_stride, group.x_stride = x_stride, group.y = y + at * y_stride;
    group.count = int(left < most ? left : most);
    if (!readable((group.count + kWidth - 1) / kWidth * kWidth)) group.count = int(left < kWidth ? left : kWidth);
    if (readable(kWidth)) {
      group.run(rows, lines);
    } else {  // what lies behind these rows may not be read
      alignas(64) X copy[kKept];
      std::memset(static_cast<void*>(copy), 0, sizeof(X) * size_t(kWidth * width));
      for (int64_t r = 0; r < group.count; ++r) std::memcpy(copy + r * width, group.x + r * x_stride, n * sizeof(X));
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
