// aside.h: rows that lie side by side, or are short, in floats: a tile of them goes together, one row a lane.
//
//   a tile that fits:  maximum over n -> exponentials, kept, and their sum -> scale -> store
//   a longer one:      an online state a row, block by block; then finish -> store
#pragma once

#include "columns.h"
#include "fast.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kWidest = 256;  // rows of a tile
constexpr int64_t kShort = 64;    // elements of a row that is taken in a tile of neighbours

// Rows of a tile of rows of n elements: as many as fit the buffer, where that is worth a cache line or more.
inline int64_t tile_width(int64_t n) {
  const int64_t fit = kKept / (n > 0 ? n : 1) / 64 * 64;
  return fit < 64 || fit > kWidest ? kWidest : fit;
}

// A tile of `width` rows of n elements; element i of row j is load(i, j), as a vector of neighbours. `keep` and `kept`
// hold exponentials where all fit. What is left of the last vector beyond `width` is computed like the rest.
template <Function F, class Y>
struct Tile {
  typedef typename Exponential<Y>::type E;
  int64_t n, width;
  alignas(64) Floats m[kWidest / kWidth];
  alignas(64) Sums l[kWidest / kWidth];
  bool odd = false;  // has it a row whose maximum is infinite?

  int64_t vectors() const { return (width + kWidth - 1) / kWidth; }
  static ONEPASS_INLINE Floats finite(Floats m) { return m - m == Floats{} ? m : Floats{}; }

  template <class Load, class Keep>
  void state(int64_t block, Load load, Keep keep) {
    const int64_t count = vectors();
    for (int64_t v = 0; v < count; ++v) m[v] = all(-kInf<float>), l[v] = {};
    for (int64_t first = 0; first < n; first += block) {
      const int64_t end = first + block < n ? first + block : n;
      Floats before[kWidest / kWidth];
      for (int64_t v = 0; v < count; ++v) before[v] = m[v];
      for (int64_t i = first; i < end; ++i) {
        for (int64_t v = 0; v < count; ++v) m[v] = larger(load(i, v), m[v]);
      }
      E minus[kWidest / kWidth];
      for (int64_t v = 0; v < count; ++v) {
        minus[v] = E(finite(m[v]));
        if (first > 0) {
          const Floats scale = Precise(finite(m[v]))(before[v]) * kDrop;
          l[v].sum *= scale, l[v].rest *= scale;
        }
      }
      const auto next = [&](int64_t i, int64_t v) __attribute__((always_inline)) {
        const Floats e = minus[v](load(i, v));
        keep(i, v, e);
        return e;
      };
      int64_t i = first;
      for (; i + 4 <= end; i += 4) {
        for (int64_t v = 0; v < count; ++v) {
          const Floats a = next(i, v), b = next(i + 1, v), c = next(i + 2, v), d = next(i + 3, v);
          l[v].add((a + b) + (c + d));
        }
      }
      for (; i < end; ++i) {
        for (int64_t v = 0; v < count; ++v) l[v].add(next(i, v));
      }
    }
    Ints infinite{};
    for (int64_t v = 0; v < count; ++v) {
      const Ints here = width - v * kWidth < kWidth ? first_lanes(width - v * kWidth) : ~Ints{};
      infinite |= here & ~(m[v] - m[v] == Floats{});
    }
    for (int k = 0; k < kWidth; ++k) odd |= infinite[k] != 0;
  }
  // Of row j. The sums are lifted, as exponentials are.
  double sum(int64_t j) const {
    const Sums& of = l[j / kWidth];
    return (double(of.sum[j % kWidth]) + double(of.rest[j % kWidth])) * double(kDrop);
  }
  // What the last step takes, in the place of the sums: 1 / l, or log(l).
  void last() {
    for (int64_t v = 0; v < vectors(); ++v) {
      Floats& high = l[v].sum;
      Floats& low = l[v].rest;
      if constexpr (F == Function::log_softmax) {
        for (int k = 0; k < kWidth; ++k) {
          const double value = std::log(sum(v * kWidth + k));
          high[k] = float(value), low[k] = float(value - double(float(value)));
        }
      } else {
        const Floats inverse = 1.0f / (high + low);
        low = ((1.0f - high * inverse) - low * inverse) * inverse;
        high = inverse;
      }
      high += (m[v] - m[v]) * 0.0f;  // torch: NaN for a row whose maximum is infinite
    }
  }
  ONEPASS_INLINE Floats from_exp(int64_t v, Floats e) const {
    return sizeof(Y) == 2 ? e * l[v].sum : e * l[v].sum + e * l[v].rest;
  }
  ONEPASS_INLINE Floats result(int64_t v, Floats x) const {
    return F == Function::log_softmax ? log_of(x, m[v], l[v].sum, l[v].rest) : from_exp(v, E(finite(m[v]))(x));
  }
};

// Rows side by side: x and y at the first element of the first row of the tile.
template <Function F, class X, class Y>
void fast_columns(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t width, int64_t plane,
                  bool past) {
  const int64_t whole = width / kWidth;
  const float fill = F == Function::softmin ? kInf<float> : -kInf<float>;
  const auto load = [&](int64_t i, int64_t v) __attribute__((always_inline)) {
    const X* const at = x + i * x_stride + v * kWidth;
    return Row<F, X, Y>::value(v < whole ? load_vector(at) : load_part(at, width - v * kWidth, fill));
  };
  Tile<F, Y> tile;
  tile.n = n, tile.width = width;
  const int64_t count = tile.vectors();
  const bool fits = n * count * kWidth <= kKept && F != Function::log_softmax && !reduces(F);
  alignas(64) Floats kept[kKept / kWidth];
  const int64_t block = n * count * kWidth <= kKept ? n : kKept / (count * kWidth);
  if (fits) {
    tile.state(block, load, [&](int64_t i, int64_t v, Floats e) { kept[i * count + v] = e; });
  } else {
    tile.state(block, load, [](int64_t, int64_t, Floats) {});
  }
  if constexpr (reduces(F)) {
    for (int64_t j = 0; j < width; ++j) {
      const float m = tile.m[j / kWidth][j % kWidth];
      if (std::isfinite(m))
        store_reduced<F>(State<float>{m, {tile.sum(j), 0}}, y + j, plane);
      else
        columns<F>(x + j, y + j, n, x_stride, y_stride, 1, plane);
    }
    return;
  }
  tile.last();
  for (int64_t i = 0; i < n; ++i) {
    Y* const to = y + i * y_stride;
    const bool aligned = past && uintptr_t(to) % sizeof(typename Packed<Y>::type) == 0;
    for (int64_t v = 0; v < whole; ++v) {
      const Floats made = fits ? tile.from_exp(v, kept[i * count + v]) : tile.result(v, load(i, v));
      if (aligned)
        stream_vector<true>(to + v * kWidth, made);
      else
        store_vector<true>(to + v * kWidth, made);
    }
    if (whole < count) {
      const Floats made = fits ? tile.from_exp(whole, kept[i * count + whole]) : tile.result(whole, load(i, whole));
      store_part(to + whole * kWidth, width - whole * kWidth, made);
    }
  }
}

// Short rows, one after another at a stride: `count` of them, 64 at most.
template <Function F, class X, class Y>
void short_rows(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t count, int64_t plane) {
  constexpr int64_t kRows = 64, kAcross = kRows / kWidth;
  alignas(64) float values[kShort * kRows];
  alignas(64) float row_by_row[kShort * kRows];  // as they lie in the tensors: types are converted here
  const bool one = x_stride == n;
  for (int64_t j = 0; j < (one ? 1 : count); ++j) {
    const Row<F, X, Y> from = {x + j * x_stride, one ? count * n : n};
    float* const to = row_by_row + j * n;
    int64_t i = 0;
    for (; i + kWidth <= from.n; i += kWidth) store_vector(to + i, from.at(i));
    if (i < from.n) store_part(to + i, from.n - i, from.part(i, from.n - i));
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) values[i * kRows + j] = row_by_row[j * n + i];
  }
  for (int64_t j = count; j < kRows; ++j) {
    for (int64_t i = 0; i < n; ++i) values[i * kRows + j] = 0;
  }
  const auto at = [&](int64_t i, int64_t v) { return values + i * kRows + v * kWidth; };
  Tile<F, Y> tile;
  tile.n = n, tile.width = count;
  const auto load_kept = [&](int64_t i, int64_t v) __attribute__((always_inline)) { return load_vector(at(i, v)); };
  if constexpr (F == Function::log_softmax || reduces(F)) {
    tile.state(n, load_kept, [](int64_t, int64_t, Floats) {});
  } else {
    tile.state(n, load_kept, [&](int64_t i, int64_t v, Floats e) { store_vector(at(i, v), e); });
  }
  const auto generic = [&](int64_t j) {
    return tile.odd && !std::isfinite(tile.m[j / kWidth][j % kWidth]) &&
           (row<F>(x + j * x_stride, y + j * y_stride, Unit(), n, plane), true);
  };
  if constexpr (reduces(F)) {
    for (int64_t j = 0; j < count; ++j) {
      if (!generic(j)) {
        store_reduced<F>(State<float>{tile.m[j / kWidth][j % kWidth], {tile.sum(j), 0}}, y + j * y_stride, plane);
      }
    }
    return;
  }
  tile.last();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t v = 0; v < kAcross && v < tile.vectors(); ++v) {
      const Floats now = load_kept(i, v);
      store_vector(at(i, v), F == Function::log_softmax ? tile.result(v, now) : tile.from_exp(v, now));
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) row_by_row[j * n + i] = values[i * kRows + j];
  }
  const bool packed = y_stride == n;
  for (int64_t j = 0; j < (packed ? 1 : count); ++j) {
    const float* const from = row_by_row + j * n;
    Y* const to = y + j * y_stride;
    const int64_t length = packed ? count * n : n;
    int64_t i = 0;
    for (; i + kWidth <= length; i += kWidth) store_vector<true>(to + i, load_vector(from + i));
    if (i < length) store_part<true>(to + i, length - i, load_part(from + i, length - i, 0));
  }
}

}  // namespace onepass::ONEPASS_ISA
