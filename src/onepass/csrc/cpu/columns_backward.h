// columns_backward.h: gradients of rows that lie side by side, or are shorter than a vector, in floats: a tile of them
// goes together, one row a lane.
//
//   sums over n -> dx, the operands read again -> store
//
// A tile is as wide as a page, however long: what is read again comes from a cache, and what its rows cost most by is
// pages, each of which has to be looked up.
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kTileBytes = 4096;  // of an element of all rows of a tile
template <class Y>
constexpr int64_t kTileRows = kTileBytes / int64_t(sizeof(Y));

// Operands of a tile of which element i of row j is at [i * stride + j]. g_mask 0: `g` is kBackwardStep of one number.
template <class Y, class D>
struct BackwardTile {
  const Y *y, *g;
  D* dx;
  int64_t n, y_stride, g_stride, dx_stride, g_mask;

  ONEPASS_INLINE const Y* y_of(int64_t i, int64_t j) const { return y + i * y_stride + j; }
  ONEPASS_INLINE const Y* g_of(int64_t i, int64_t j) const { return g + i * g_stride + (j & g_mask); }
};

// Rows [j, j + count) of a tile where that is less than a vector.
template <Kind K, class Y, class D>
__attribute__((noinline)) void backward_part(const BackwardTile<Y, D>& t, int64_t j, int64_t count, Floats sign) {
  count &= kWidth - 1;  // as it is; the compiler does not know
  Sums sums;
  for (int64_t i = 0; i < t.n; ++i) {
    sums.add(backward_term<K>(load_part(t.y_of(i, j), count, 0), load_part(t.g_of(i, j), count, 0)));
  }
  const Floats total = finite_rest(sums);
  const auto last = BackwardLast<K, D>::of_sum(total, sign);
  for (int64_t i = 0; i < t.n; ++i) {
    const Floats made = last.one(load_part(t.y_of(i, j), count, 0), load_part(t.g_of(i, j), count, 0));
    store_part<kAnyNan<Y, D>>(t.dx + i * t.dx_stride + j, count, made);
  }
}

// Elements of some vectors of rows become dx. `a`: minus the sums, signed, or of log_softmax the sums.
template <Kind K, class D, int M>
ONEPASS_INLINE void last_aside(Floats (&y)[M], const Floats (&g)[M], const Floats (&a)[M], Floats b) {
  if constexpr (K == Kind::soft) {
    for (int k = 0; k < M; ++k) y[k] *= g[k] * b + a[k];
  } else {
    const Factor one = Factor::of(all(1));
    powers<sizeof(D) == 2>(y, one.from);
    for (int k = 0; k < M; ++k) y[k] = g[k] - y[k] * one.number * a[k];
  }
}

// A tile of `width` rows; softmax, softmin and log_softmax.
template <Kind K, class Y, class D>
void backward_columns(const BackwardTile<Y, D>& t, int64_t width, Floats sign, bool past) {
  constexpr bool any = kAnyNan<Y, D>;
  constexpr bool split = kSplit<Y, D>;
  constexpr int64_t pair = kPair;
  const int64_t wide = width / pair * pair;
  for (int64_t j = wide; j < width; j += kWidth - 1) {
    backward_part<K>(t, j, width - j < kWidth - 1 ? width - j : kWidth - 1, sign);
  }
  if (!wide) return;
  struct Vector {
    Floats sum, rest, part, total;
  };
  alignas(64) Vector of[kTileRows<Y> / kWidth];  // no Sums: all of those would be made 0
  for (int64_t v = 0; v < wide / kWidth; ++v) of[v].sum = of[v].rest = Floats{};
  // One or two rows of the tile: what they add is `part`, is added to it, or goes with it into the sums.
  enum class To { part, more, sums };
  const auto rows = [&, t](int64_t i, auto two, auto to) __attribute__((always_inline)) {
    constexpr bool both = two.value, needs_y = K == Kind::soft;
    constexpr int64_t line = kLine / int64_t(sizeof(Y)), ahead = 4;
    const Y *const y = t.y_of(i, 0), *const y_two = y + t.y_stride;
    const Y *const g = t.g + i * t.g_stride, *const g_two = g + t.g_stride;
    for (int64_t v = 0; v < wide; v += pair) {
      const int64_t at_g = v & t.g_mask;
      if (v % line == 0) {
        const auto fetch = [](const Y* from) __attribute__((always_inline)) { __builtin_prefetch(from); };
        if (needs_y) fetch(y + ahead * t.y_stride + v);
        if (needs_y && both) fetch(y_two + ahead * t.y_stride + v);
        fetch(g + ahead * t.g_stride + at_g);
        if (both) fetch(g_two + ahead * t.g_stride + at_g);
      }
      Floats of_y[2] = {}, of_g[2], more[2];
      if constexpr (needs_y) load_some<split>(y + v, of_y);
      load_some<split>(g + at_g, of_g);
      for (int k = 0; k < 2; ++k) more[k] = backward_term<K>(of_y[k], of_g[k]);
      if constexpr (both) {
        if constexpr (needs_y) load_some<split>(y_two + v, of_y);
        load_some<split>(g_two + at_g, of_g);
        for (int k = 0; k < 2; ++k) more[k] += backward_term<K>(of_y[k], of_g[k]);
      }
      for (int k = 0; k < 2; ++k) {
        Vector& now = of[v / kWidth + k];
        if constexpr (to.value == To::part) now.part = more[k];
        if constexpr (to.value == To::more) now.part += more[k];
        if constexpr (to.value == To::sums) {
          Sums sums = {now.sum, now.rest};
          sums.add(now.part + more[k]);
          now.sum = sums.sum, now.rest = sums.rest;
        }
      }
    }
  };
  // Eight rows are added up in plain floats.
  using Two = std::true_type;
  using One = std::false_type;
  const std::integral_constant<To, To::part> part_of{};
  const std::integral_constant<To, To::more> more_of{};
  const std::integral_constant<To, To::sums> sums_of{};
  int64_t i = 0;
  for (; i + 8 <= t.n; i += 8) {
    rows(i, Two(), part_of);
    for (int k = 2; k < 6; k += 2) rows(i + k, Two(), more_of);
    rows(i + 6, Two(), sums_of);
  }
  for (int64_t v = 0; v < wide / kWidth; ++v) of[v].part = Floats{};
  for (; i + 1 < t.n; ++i) rows(i, One(), more_of);
  if (i < t.n) rows(i, One(), sums_of);
  for (int64_t v = 0; v < wide / kWidth; ++v) {
    const Floats total = finite_rest(Sums{of[v].sum, of[v].rest});
    of[v].total = K == Kind::soft ? total * -sign : total;
  }
  const auto store = [=, &of](D* to, int64_t i, auto is_past) __attribute__((always_inline)) {
    for (int64_t v = 0; v < wide; v += pair) {
      Floats y[2], g[2];
      load_some<split>(t.y_of(i, v), y), load_some<split>(t.g_of(i, v), g);
      last_aside<K, D>(y, g, {of[v / kWidth].total, of[v / kWidth + 1].total}, sign);
      store_some<split, any, is_past.value>(to + v, y);
    }
  };
  for (int64_t i = 0; i < t.n; ++i) {
    D* const to = t.dx + i * t.dx_stride;
    if (kStreams && past && uintptr_t(to) % kLine == 0) {
      store(to, i, std::true_type());
    } else {
      store(to, i, std::false_type());
    }
  }
}

// A tile of logsumexp.
template <class Y>
void backward_columns_lse(const Y* x, const float* each_g, const float* each_lse, Y* dx, int64_t n,
                          const int64_t* n_strides, int64_t width, bool past) {
  const Factor one = Factor::of(all(1));
  const int64_t wide = width / kPair * kPair;
  for (int64_t i = 0; i < n; ++i) {
    const Y* const from = x + i * n_strides[kSaved];
    Y* const to = dx + i * n_strides[kDx];
    const auto pairs = [&](auto is_past) __attribute__((always_inline)) {
      for (int64_t v = 0; v < wide; v += kPair) {
        Floats made[2], of_g[2];
        load_some<false>(from + v, made);
        for (int k = 0; k < 2; ++k) made[k] -= load_vector(each_lse + v + k * kWidth);
        powers<sizeof(Y) == 2>(made, one.from);
        load_some<false>(each_g + v, of_g);
        for (int k = 0; k < 2; ++k) made[k] = of_g[k] * (made[k] * one.number);
        store_some<false, false, is_past.value>(to + v, made);
      }
    };
    if (kStreams && past && uintptr_t(to) % kLine == 0) {
      pairs(std::true_type());
    } else {
      pairs(std::false_type());
    }
    for (int64_t v = wide; v < width; v += kWidth - 1) {
      const int64_t left = width - v < kWidth - 1 ? width - v : kWidth - 1;
      const auto last =
          BackwardLast<Kind::lse, Y>::of(load_part(each_g + v, left, 0), load_part(each_lse + v, left, 0));
      store_part(to + v, left, last.one(load_part(from + v, left, 0), Floats{}));
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
