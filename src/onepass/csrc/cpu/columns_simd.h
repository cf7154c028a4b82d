// columns_simd.h: rows that lie side by side, in floats, one row a lane. They go in groups of 32, and neighbouring
// groups in a tile, so that what is read and written in one go is long.
//
//   a tile that fits the second cache:  copied, group by group maximum -> exponentials and their sum; scale -> store
//   a longer one:                       an online state, block by block; then finish -> store
//
// A tile is longer where one that fits would be a single group wide: blocks of whole lines, one after another, come
// from memory so much faster that the second exponential costs less.
//
// The copy matters: rows a power of two apart push each other out of the caches that they are read from.
#pragma once

#include "columns_scalar.h"
#include "rows_simd.h"
#include "scratch.h"

namespace onepass::ONEPASS_ISA {

constexpr int kAside = 32;  // rows of a group: a cache line of half types, two of floats
constexpr int64_t kTileWidest = 256;
constexpr int64_t kBlockOf = kScratch / 16;  // floats of a block of a longer tile

// Rows of a tile of rows of n elements. What is only read need not stay.
inline int64_t tile_width(int64_t n, bool reduces) {
  const int64_t fit = kScratch / (n > 0 ? n : 1) / kAside * kAside;
  return reduces || fit < 2 * kAside || fit > kTileWidest ? kTileWidest : fit;
}

template <Function F, class X, class Y>
struct Tile {
  typedef Row<X, Y> Element;
  typedef typename Exponential<Y>::type E;
  static constexpr int V = kAside / kWidth, kGroups = int(kTileWidest / kAside);
  static constexpr bool kSplit = !reduces(F) && Element::kSplit;
  const X* x;
  Y* y;
  int64_t n, x_stride, y_stride, width;
  Floats m[kGroups][V];
  Sums l[kGroups][V];
  Floats furthest{};  // maximum, of those that exponentials are counted from

  // The elements of a group at x, and its results. `count`: rows of it that there are; as a constant, kAside.
  template <class Count>
  static ONEPASS_INLINE void load(const X* from, Count count, Floats (&v)[V]) {
    if constexpr (std::is_same_v<Count, int64_t>) {
      load_some(from, count, v);
    } else {
      for (int k = 0; k < V; k += 2) load_two<kSplit>(from + k * kWidth, v[k], v[k + 1]);
    }
    for (Floats& each : v) each = Element::value(each);
  }
  static __attribute__((noinline)) void load_some(const X* from, int64_t count, Floats (&v)[V]) {
    X whole[kAside] = {};
    std::memcpy(whole, from, size_t(count) * sizeof(X));
    for (int k = 0; k < V; ++k) v[k] = load_vector(whole + k * kWidth);
  }
  template <bool Past, class Count>
  static ONEPASS_INLINE void store(Y* to, Count count, const Floats (&v)[V]) {
    if constexpr (std::is_same_v<Count, int64_t>) {
      store_some(to, count, v);
    } else {
      for (int k = 0; k < V; k += 2) {
        if constexpr (Past) {
          stream_two<kSplit, F != Function::log_softmax>(to + k * kWidth, v[k], v[k + 1]);
        } else {
          store_two<kSplit, F != Function::log_softmax>(to + k * kWidth, v[k], v[k + 1]);
        }
      }
    }
  }
  static __attribute__((noinline)) void store_some(Y* to, int64_t count, const Floats (&v)[V]) {
    Y whole[kAside];
    for (int k = 0; k < V; ++k) store_vector(whole + k * kWidth, v[k]);
    std::memcpy(to, whole, size_t(count) * sizeof(Y));
  }
  // Does `work(group, count)` for the groups in order.
  template <class Work>
  ONEPASS_INLINE void for_groups(Work work) const {
    int64_t g = 0;
    for (; (g + 1) * kAside <= width; ++g) work(g, std::integral_constant<int, kAside>());
    if (g * kAside < width) work(g, int64_t(width - g * kAside));
  }

  static ONEPASS_INLINE Floats finite(Floats m) { return m - m == Floats{} ? m : Floats{}; }

  // Elements [first, first + count) of all rows, group behind group.
  __attribute__((noinline)) void copy(int64_t first, int64_t count, float* kept) const {
    for (int64_t i = 0; i < count; ++i) {
      for_groups([&](int64_t g, auto rows) __attribute__((always_inline)) {
        Floats v[V];
        load(x + (first + i) * x_stride + g * kAside, rows, v);
        for (int k = 0; k < V; ++k) store_vector(kept + (g * count + i) * kAside + k * kWidth, v[k]);
      });
    }
  }

  // Exponentials that are kept are counted from where that is cheapest.
  template <bool Exponentials>
  static constexpr bool kCounts = Exponentials && !Origin::kSubtracts;

  // The state of a group's copied elements, which their exponentials may take the places of. What comes behind a low
  // tile is fetched meanwhile.
  template <bool Exponentials>
  void state(float* kept, int64_t count, const X* next_tile, Floats (&m)[V], Sums (&l)[V]) {
    for (Floats& each : m) each = all(-kInf<float>);
    for (int64_t i = 0; i < count; ++i) {
      for (int k = 0; k < V; ++k) m[k] = larger(load_vector(kept + i * kAside + k * kWidth), m[k]);
    }
    const bool fetch = count <= 64;  // a taller tile would push out what is at work
    for (int k = 0; k < V; ++k) {
      const Floats top = finite(m[k]);
      const Origin from = kCounts<Exponentials> ? Origin::of(top) : Origin();
      if (kCounts<Exponentials>) furthest = larger(larger(top, -top), furthest);
      SumsFor<Y> sum;
      float* const at = kept + k * kWidth;
      const auto next = [&](int64_t i, auto& e) __attribute__((always_inline)) {
        constexpr int kMany = sizeof e / sizeof(Floats);
        for (int j = 0; j < kMany; ++j) {
          if (fetch && k * kWidth * int64_t(sizeof(X)) % kLine == 0) {
            __builtin_prefetch(next_tile + (i + j) * x_stride + k * kWidth);
          }
          e[j] = load_vector(at + (i + j) * kAside);
          if (!kCounts<Exponentials>) e[j] -= top;
        }
        E::of(e, from);
        if constexpr (Exponentials) {
          for (int j = 0; j < kMany; ++j) store_vector(at + (i + j) * kAside, e[j]);
        }
      };
      int64_t i = 0;
      for (; i + 4 <= count; i += 4) {
        Floats e[4];
        next(i, e);
        sum.add((e[0] + e[1]) + (e[2] + e[3]));
      }
      for (; i < count; ++i) {
        Floats e[1];
        next(i, e);
        sum.add(e[0]);
      }
      l[k] = sum.sums();
    }
  }

  // The states of all rows, of blocks that fit. True: that was one, and is in `kept`.
  bool states(float* kept) {
    const int64_t groups = (width + kAside - 1) / kAside, wide = groups * kAside;
    const int64_t most = n <= kScratch / wide ? n : kBlockOf / wide;
    for (int64_t first = 0; first < n; first += most) {
      const int64_t count = n - first < most ? n - first : most;
      copy(first, count, kept);
      for (int64_t g = 0; g < groups; ++g) {
        float* const at = kept + g * count * kAside;
        const X* const next = x + first * x_stride + width + g * kAside;
        if (n <= most) {
          state<!reduces(F) && F != Function::log_softmax>(at, count, next, m[g], l[g]);
        } else if (first == 0) {
          state<false>(at, count, next, m[g], l[g]);
        } else {
          Floats block_m[V];
          Sums block_l[V];
          state<false>(at, count, next, block_m, block_l);
          for (int k = 0; k < V; ++k) merge(m[g][k], l[g][k], block_m[k], block_l[k]);
        }
      }
    }
    return n <= most;
  }
  static void merge(Floats& m, Sums& l, Floats with_m, const Sums& with_l) {
    const Floats top = larger(m, with_m), shared = finite(top);
    Floats scale[2] = {m - shared, with_m - shared};
    Precise::of(scale);
    const Floats old = scale[0] * kDrop, now = scale[1] * kDrop;
    l.sum *= old, l.rest *= old;
    l.add(with_l.sum * now);
    l.rest += with_l.rest * now;
    m = top;
  }

  // What the last step takes, in the place of the sums: 1 / l, or log(l). True: a row is to be NaN.
  bool last() {
    Floats undefined{};
    for_groups([&](int64_t g, auto) {
      for (int k = 0; k < V; ++k) {
        Floats& high = l[g][k].sum;
        Floats& low = l[g][k].rest;
        if constexpr (F == Function::log_softmax) {
          high *= kDrop, low *= kDrop;
          const Pair log = log_beside(finite(m[g][k]), l[g][k]);
          high = log.high, low = log.low;
        } else {
          const Pair inverse = inverse_in_two(l[g][k]);
          high = inverse.high, low = inverse.low;
        }
        high += (m[g][k] - m[g][k]) * 0.0f;  // torch: NaN for a row whose maximum is infinite
        m[g][k] = finite(m[g][k]);
        undefined = high == high ? undefined : all(1);
      }
    });
    return maximum_of(undefined) > 0;
  }

  // The last step; of what was kept, if `Keeps`. `Nan`: there may be some, with any 32 bits.
  template <bool Keeps, bool Past, bool Nan>
  void finish(const float* kept) const {
    for (int64_t i = 0; i < n; ++i) {
      for_groups([&](int64_t g, auto rows) __attribute__((always_inline)) {
        Floats v[V];
        if constexpr (Keeps) {
          for (int k = 0; k < V; ++k) v[k] = load_vector(kept + (g * n + i) * kAside + k * kWidth);
        } else {
          load(x + i * x_stride + g * kAside, rows, v);
        }
        if constexpr (!Keeps && F != Function::log_softmax) {
          for (int k = 0; k < V; ++k) v[k] -= m[g][k];
          E::of(v);
        }
        for (int k = 0; k < V; ++k) {
          const Sums& of = l[g][k];
          if constexpr (F == Function::log_softmax) {
            v[k] = (v[k] - of.sum) - of.rest;
          } else {
            v[k] = sizeof(Y) == 2 ? v[k] * of.sum : v[k] * of.sum + v[k] * of.rest;
          }
          if constexpr (Nan) v[k] = v[k] == v[k] ? v[k] : all(std::numeric_limits<float>::quiet_NaN());
        }
        store<Past>(y + i * y_stride + g * kAside, rows, v);
      });
    }
  }
  template <bool Keeps>
  void finish(const float* kept, bool past) {
    const bool nan = last();
    const bool lines = uintptr_t(y) % kLine == 0 && y_stride * int64_t(sizeof(Y)) % kLine == 0;
    if (nan) return finish<Keeps, false, true>(kept);
    if (past && lines) return finish<Keeps, true, false>(kept);
    finish<Keeps, false, false>(kept);
  }

  // What a function that reduces gives of the states.
  void reduced(int64_t plane) {
    for_groups([&](int64_t g, auto rows) {
      Floats first[V], second[V], undefined[V], any{};
      for (int k = 0; k < V; ++k) {
        Sums& of = l[g][k];
        of.sum *= kDrop, of.rest *= kDrop;
        undefined[k] = of.sum - of.sum + (m[g][k] - m[g][k]) == Floats{} ? Floats{} : all(1);
        any += undefined[k];
        if constexpr (F == Function::state) {
          first[k] = m[g][k], second[k] = of.sum + of.rest;
        } else {
          first[k] = log_beside(m[g][k], of).high;
        }
      }
      store<false>(y + g * kAside, rows, first);
      if constexpr (F == Function::state) store<false>(y + g * kAside + plane, rows, second);
      if (maximum_of(any) == 0) return;
      for (int64_t j = g * kAside; j < width && j < (g + 1) * kAside; ++j) {
        if (undefined[j % kAside / kWidth][j % kWidth] == 0) continue;
        columns<F>(x + j, y + j, n, x_stride, y_stride, 1, plane);
      }
    });
  }

  void run(int64_t plane, bool past) {
    float* const kept = scratch();
    const bool whole = states(kept);
    if (maximum_of(furthest) > Origin::kFarthest) {
      for (int64_t at = 0; at < width; at += kTile) {
        columns<F>(x + at, y + at, n, x_stride, y_stride, width - at < kTile ? width - at : kTile, plane);
      }
      return;
    }
    if constexpr (reduces(F)) {
      reduced(plane);
    } else if (whole) {
      finish<true>(kept, past);
    } else {
      finish<false>(nullptr, past);
    }
  }
};

// Rows side by side, kTileWidest at most: x and y at the first element of the first of them.
template <Function F, class X, class Y>
void fast_columns(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t width, int64_t plane,
                  bool past) {
  Tile<F, X, Y> tile;
  tile.x = x, tile.y = y, tile.n = n, tile.x_stride = x_stride, tile.y_stride = y_stride, tile.width = width;
  tile.run(plane, past);
}

}  // namespace onepass::ONEPASS_ISA
