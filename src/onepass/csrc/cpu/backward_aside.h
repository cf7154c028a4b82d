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

template <class D, bool Any>
ONEPASS_INLINE void store_past(D* to, Floats v, bool past) {
  if (past) {
    stream_vector<Any>(to, v);
  } else {
    store_vector<Any>(to, v);
  }
}

// Rows [j, j + count) of a tile where that is less than a vector.
template <Kind K, class Y, class D>
__attribute__((noinline)) void backward_part(const BackwardTile<Y, D>& t, int64_t j, int64_t count, Floats sign) {
  count &= kWidth - 1;  // as it is; the compiler does not know
  Sums sums;
  for (int64_t i = 0; i < t.n; ++i) {
    sums.add(backward_term<K>(load_part(t.y_of(i, j), count, 0), load_part(t.g_of(i, j), count, 0)));
  }
  BackwardLast<K, D> last = {Floats{}, sign};
  last.a = finite_rest(sums);
  for (int64_t i = 0; i < t.n; ++i) {
    const Floats made = last(load_part(t.y_of(i, j), count, 0), load_part(t.g_of(i, j), count, 0));
    store_part<kAnyNan<Y, D>>(t.dx + i * t.dx_stride + j, count, made);
  }
}

// A tile of `width` rows; softmax, softmin and log_softmax.
template <Kind K, class Y, class D>
void backward_columns(const BackwardTile<Y, D>& t, int64_t width, Floats sign, bool past) {
  constexpr bool any = kAnyNan<Y, D>;
  constexpr bool split = kSplit<Y, D>;
  constexpr int64_t pair = 2 * kWidth;
  const int64_t wide = width / pair * pair;
  for (int64_t j = wide; j < width; j += kWidth - 1) {
    backward_part<K>(t, j, width - j < kWidth - 1 ? width - j : kWidth - 1, sign);
  }
  if (!wide) return;
  alignas(64) Sums sums[kTileRows / kWidth];
  for (int64_t v = 0; v < wide / kWidth; ++v) sums[v] = {};
  alignas(64) Y kept_y[kTileBytes / sizeof(Y)], kept_g[kTileBytes / sizeof(Y)];
  BackwardTile<Y, D> again = t;
  const bool keep = t.n * wide <= kTileBytes / int64_t(sizeof(Y)), keep_g = keep && t.g_mask && t.g_stride;
  if (keep) again.y = kept_y, again.y_stride = wide;
  if (keep_g) again.g = kept_g, again.g_stride = wide;
  const auto run = [&, t](auto keeps, auto keeps_g) __attribute__((always_inline)) {
    const auto term = [&](int64_t i, int64_t v) __attribute__((always_inline)) {
      const Y *const y = t.y_of(i, v), *const g = t.g_of(i, v);
      if constexpr (keeps.value) std::memcpy(kept_y + i * wide + v, y, pair * sizeof(Y));
      if constexpr (keeps_g.value) std::memcpy(kept_g + i * wide + v, g, pair * sizeof(Y));
      const Two of_y = K == Kind::soft ? load_two<split>(y) : Two{}, of_g = load_two<split>(g);
      return Two{backward_term<K>(of_y.a, of_g.a), backward_term<K>(of_y.b, of_g.b)};
    };
    int64_t i = 0;
    for (; i + 4 <= t.n; i += 4) {
      for (int64_t v = 0; v < wide; v += pair) {
        for (int k = 4; k < 8; ++k) {
          __builtin_prefetch(t.y_of(i + k, v)), __builtin_prefetch(t.g_of(i + k, v));
        }
        const Two a = term(i, v), b = term(i + 1, v), c = term(i + 2, v), d = term(i + 3, v);
        sums[v / kWidth].add((a.a + b.a) + (c.a + d.a)), sums[v / kWidth + 1].add((a.b + b.b) + (c.b + d.b));
      }
    }
    for (; i < t.n; ++i) {
      for (int64_t v = 0; v < wide; v += pair) {
        const Two a = term(i, v);
        sums[v / kWidth].add(a.a), sums[v / kWidth + 1].add(a.b);
      }
    }
  };
  using Yes = std::true_type;
  using No = std::false_type;
  keep_g ? run(Yes(), Yes()) : keep ? run(Yes(), No()) : run(No(), No());
  alignas(64) Floats totals[kTileRows / kWidth];
  for (int64_t v = 0; v < wide / kWidth; ++v) totals[v] = finite_rest(sums[v]);
  const auto store = [=, &totals](D* to, int64_t i, auto is_past) __attribute__((always_inline)) {
    for (int64_t v = 0; v < wide; v += pair) {
      const BackwardLast<K, D> one = {totals[v / kWidth], sign}, two = {totals[v / kWidth + 1], sign};
      const Two of_y = load_two<split>(again.y_of(i, v)), of_g = load_two<split>(again.g_of(i, v));
      store_two<split, any, is_past.value>(to + v, {one(of_y.a, of_g.a), two(of_y.b, of_g.b)});
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

// A tile of logsumexp: of each row the result's gradient and the result lie at strides of their own.
template <class Y>
void backward_columns_lse(const Y* x, const Y* g, const Y* lse, Y* dx, int64_t n, const int64_t* n_strides,
                          const int64_t* strides, int64_t width, bool past) {
  alignas(64) float each_g[kTileRows], each_lse[kTileRows];
  for (int64_t j = 0; j < width; ++j) {
    each_g[j] = to_wide(g[j * strides[kGrad]]), each_lse[j] = to_wide(lse[j * strides[kLse]]);
  }
  const int64_t wide = width / kWidth * kWidth, left = width - wide;
  for (int64_t i = 0; i < n; ++i) {
    const Y* const from = x + i * n_strides[kSaved];
    Y* const to = dx + i * n_strides[kDx];
    const bool stream = past && uintptr_t(to) % kLine == 0;
    for (int64_t v = 0; v < wide; v += kWidth) {
      const BackwardLast<Kind::lse, Y> last = {load_vector(each_g + v), load_vector(each_lse + v)};
      store_past<Y, false>(to + v, last(load_vector(from + v), Floats{}), stream);
    }
    if (left) {
      const BackwardLast<Kind::lse, Y> last = {load_part(each_g + wide, left, 0), load_part(each_lse + wide, left, 0)};
      store_part(to + wide, left, last(load_part(from + wide, left, 0), Floats{}));
    }
  }
}

// Rows shorter than a vector: 64 of them, turned so that they lie side by side.
constexpr int64_t kTiny = 64;

// Converted, one row a lane; `at(j)` is where row j begins.
template <class Y, class At>
void turn_in(float (*turned)[kTiny], int64_t n, int64_t count, bool packed, At at) {
  alignas(64) float flat[kTiny * kWidth];
  for (int64_t j = 0; j < (packed ? 1 : count); ++j) {
    const Y* const from = at(j);
    const int64_t length = packed ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector(flat + j * n + i, load_vector(from + i));
    if (i < length) store_part(flat + j * n + i, length - i, load_part(from + i, length - i, 0));
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) turned[i][j] = flat[j * n + i];
  }
}

template <class D, bool Any, class At>
void turn_out(const float (*turned)[kTiny], int64_t n, int64_t count, bool packed, At at) {
  alignas(64) float flat[kTiny * kWidth];
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) flat[j * n + i] = turned[i][j];
  }
  for (int64_t j = 0; j < (packed ? 1 : count); ++j) {
    D* const to = at(j);
    const int64_t length = packed ? n * count : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector<Any>(to + i, load_vector(flat + j * n + i));
    if (i < length) store_part<Any>(to + i, length - i, load_part(flat + j * n + i, length - i, 0));
  }
}

}  // namespace onepass::ONEPASS_ISA
