// backward_aside.h: gradients of rows that lie side by side, or are shorter than a vector, in floats: a tile of them
// goes together, one row a lane.
//
//   a tile that fits:  sums over n, the operands kept in a buffer -> dx from the buffer -> store
//   a longer one:      sums over n -> dx, the operands read again
#pragma once

#include "backward.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kTileRows = 512;        // rows of a tile, at most
constexpr int64_t kTileBytes = 64 << 10;  // of each operand, that a tile keeps: rows far apart evict each other

// Rows of a tile of rows of n elements: as many as fit, in whole lines, or, where not even
// four do, 16, which are read again.
template <class Y>
int64_t backward_tile_width(int64_t n) {
  constexpr int64_t line = kLine / int64_t(sizeof(Y));
  const int64_t fit = kTileBytes / int64_t(sizeof(Y)) / n / line * line;
  return fit < 4 * line ? 16 * line : fit < kTileRows ? fit : kTileRows;
}

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
ONEPASS_INLINE void last_aside(Floats (&y)[M], const Floats (&g)[M], const Floats* a, Floats b) {
  if constexpr (K == Kind::soft) {
    for (int k = 0; k < M; ++k) y[k] *= g[k] * b + a[k];
  } else {
    const Factor one = Factor::of(all(1));
    powers<sizeof(D) == 2>(y, one.from);
    for (int k = 0; k < M; ++k) y[k] = g[k] - y[k] * one.number * a[k];
  }
}

// A pair of vectors, of which the elements are kept.
template <bool Split, bool Keeps, class T>
ONEPASS_INLINE void load_kept(const T* from, T* kept, Floats (&v)[2]) {
  load_some<Split>(from, v);
  if constexpr (Keeps && sizeof(T) == 4) {
    store_vector(kept, v[0]), store_vector(kept + kWidth, v[1]);
  } else if constexpr (Keeps) {
    Words all;  // moved as one: of a memcpy between pointers the compiler makes two
    std::memcpy(&all, from, sizeof all);
    std::memcpy(static_cast<void*>(kept), &all, sizeof all);
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
  alignas(64) Sums sums[kTileRows / kWidth];
  alignas(64) Floats part[kTileRows / kWidth];
  for (int64_t v = 0; v < wide / kWidth; ++v) sums[v] = {};
  alignas(64) Y kept_y[kTileBytes / sizeof(Y)], kept_g[kTileBytes / sizeof(Y)];
  BackwardTile<Y, D> again = t;
  const bool keep = t.n * wide <= kTileBytes / int64_t(sizeof(Y)), keep_g = keep && t.g_mask && t.g_stride;
  if (keep) again.y = kept_y, again.y_stride = wide;
  if (keep_g) again.g = kept_g, again.g_stride = wide;
  // One or two rows of the tile: what they add is `part`, is added to it, or goes with it into the sums.
  enum class To { part, more, sums };
  const auto rows = [&, t](int64_t i, auto two, auto to, auto keeps, auto keeps_g) __attribute__((always_inline)) {
    constexpr bool both = two.value, needs_y = K == Kind::soft || keeps.value;
    constexpr int64_t line = kLine / int64_t(sizeof(Y)), ahead = 4;
    const Y *const y = t.y_of(i, 0), *const y_two = y + t.y_stride;
    const Y *const g = t.g + i * t.g_stride, *const g_two = g + t.g_stride;
    Y *const to_y = kept_y + i * wide, *const to_g = kept_g + i * wide;
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
      if constexpr (needs_y) load_kept<split, keeps.value>(y + v, to_y + v, of_y);
      load_kept<split, keeps_g.value>(g + at_g, to_g + v, of_g);
      for (int k = 0; k < 2; ++k) more[k] = backward_term<K>(of_y[k], of_g[k]);
      if constexpr (both) {
        if constexpr (needs_y) load_kept<split, keeps.value>(y_two + v, to_y + wide + v, of_y);
        load_kept<split, keeps_g.value>(g_two + at_g, to_g + wide + v, of_g);
        for (int k = 0; k < 2; ++k) more[k] += backward_term<K>(of_y[k], of_g[k]);
      }
      for (int k = 0; k < 2; ++k) {
        Floats& other = part[v / kWidth + k];
        if constexpr (to.value == To::part) other = more[k];
        if constexpr (to.value == To::more) other += more[k];
        if constexpr (to.value == To::sums) sums[v / kWidth + k].add(other + more[k]);
      }
    }
  };
  // Eight rows are added up in plain floats.
  const auto run = [&](auto keeps, auto keeps_g) __attribute__((always_inline)) {
    using Two = std::true_type;
    using One = std::false_type;
    const std::integral_constant<To, To::part> part_of{};
    const std::integral_constant<To, To::more> more_of{};
    const std::integral_constant<To, To::sums> sums_of{};
    int64_t i = 0;
    for (; i + 8 <= t.n; i += 8) {
      rows(i, Two(), part_of, keeps, keeps_g);
      for (int k = 2; k < 6; k += 2) rows(i + k, Two(), more_of, keeps, keeps_g);
      rows(i + 6, Two(), sums_of, keeps, keeps_g);
    }
    for (int64_t k = 0; k < wide / kWidth; ++k) part[k] = Floats{};
    for (; i + 1 < t.n; ++i) rows(i, One(), more_of, keeps, keeps_g);
    if (i < t.n) rows(i, One(), sums_of, keeps, keeps_g);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  keep_g ? run(Yes(), Yes()) : keep ? run(Yes(), No()) : run(No(), No());
  alignas(64) Floats totals[kTileRows / kWidth];
  for (int64_t v = 0; v < wide / kWidth; ++v) {
    const Floats total = finite_rest(sums[v]);
    totals[v] = K == Kind::soft ? total * -sign : total;
  }
  const auto store = [=, &totals](D* to, int64_t i, auto is_past) __attribute__((always_inline)) {
    for (int64_t v = 0; v < wide; v += pair) {
      Floats y[2], g[2];
      load_some<split>(again.y_of(i, v), y), load_some<split>(again.g_of(i, v), g);
      last_aside<K, D>(y, g, totals + v / kWidth, sign);
      store_some<split, any, is_past.value>(to + v, y);
    }
  };
  for (int64_t i = 0; i < t.n; ++i) {
    D* const to = t.dx + i * t.dx_stride;
    if (kStreams && past && uintptr_t(to) % kLine == 0) {
      store(to, i, Yes());
    } else {
      store(to, i, No());
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
