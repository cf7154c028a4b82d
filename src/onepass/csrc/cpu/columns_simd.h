// columns_simd.h: rows whose elements are a stride apart and that lie side by side, in vectors of floats, one row per
// lane. They go in groups of 32, and neighbouring groups in a tile, so that long runs are read and written.
//
//   a tile that fits the scratch memory:  copied; per group maximum -> exponentials and their sum; scale -> store
//   a longer one:                         an online state over blocks; then epilogue -> store
//
// A tile is longer where one that fits would be a single group wide: blocks of whole lines, one after another, come
// from memory so much faster that the second exponential costs less.
//
// The copy matters: rows a power of two apart evict each other from the caches that they are read from.
#pragma once

#include "rows_simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kBlockFloats = kScratch / 16;  // of a block of a longer tile

template <class Epilogue, class In, class Y>
struct ColumnTile {
  using X = typename In::X;
  using Exp = ExpFor<Y>;
  static constexpr bool kReduces = Epilogue::kOnePerRow, kFromExp = Epilogue::kFromExp;
  static constexpr int V = kGroupCols / kWidth, kMaxGroups = int(kMaxTileCols / kGroupCols);
  static constexpr bool kDeinterleave = !kReduces && In::kDeinterleave;
  In x;
  Y* y;
  int64_t n, x_stride, y_stride, width;
  Vec m[kMaxGroups][V];
  CompensatedVec l[kMaxGroups][V];  // the epilogue's two numbers after prepare_epilogue
  Vec largest{};                    // of the magnitudes of the maxima that exponentials are relative to
  int64_t sum_offset;

  // Loads and stores one element of each row of a group, or of `count` rows of it.
  template <class... Count>
  ONEPASS_INLINE void load(int64_t from, Vec (&v)[V], Count... count) const {
    if constexpr (sizeof...(count)) {
      load_partial(from, v, count...);
    } else if constexpr (kDeinterleave == In::kDeinterleave) {
      x.load(from, v);
    } else {
      for (int k = 0; k < V; ++k) v[k] = x.load1(from + k * kWidth);
    }
  }
  __attribute__((noinline)) void load_partial(int64_t from, Vec (&v)[V], int64_t count) const {
    X whole[kGroupCols] = {};
    std::memcpy(whole, x.x + from, size_t(count) * sizeof(X));
    for (int k = 0; k < V; ++k) v[k] = In{whole, x.score}.load1(k * kWidth);
  }
  template <bool kStreaming, class... Count>
  static ONEPASS_INLINE void store(Y* to, const Vec (&v)[V], Count... count) {
    if constexpr (sizeof...(count)) {
      store_partial(to, v, count...);
    } else {
      store_vectors<kDeinterleave, kFromExp, kStreaming>(to, v);
    }
  }
  static __attribute__((noinline)) void store_partial(Y* to, const Vec (&v)[V], int64_t count) {
    Y whole[kGroupCols];
    for (int k = 0; k < V; ++k) store_vector(whole + k * kWidth, v[k]);
    std::memcpy(to, whole, size_t(count) * sizeof(Y));
  }
  // Calls work(group) for the whole groups in order, and work(group, count) for one of fewer columns.
  template <class Work>
  ONEPASS_INLINE void for_groups(Work work) const {
    int64_t g = 0;
    for (; (g + 1) * kGroupCols <= width; ++g) work(g);
    if (g * kGroupCols < width) work(g, width - g * kGroupCols);
  }

  static ONEPASS_INLINE Vec finite(Vec m) { return m - m == Vec{} ? m : Vec{}; }

  // Copies elements [first, first + count) of all rows, one group behind the other.
  __attribute__((noinline)) void copy(int64_t first, int64_t count, float* buffer) const {
    for (int64_t i = 0; i < count; ++i) {
      for_groups([&](int64_t g, auto... cols) __attribute__((always_inline)) {
        Vec v[V];
        load((first + i) * x_stride + g * kGroupCols, v, cols...);
        store_vectors<false, false>(buffer + (g * count + i) * kGroupCols, v);
      });
    }
  }

  // Exponentials that are stored are relative to the base that is cheapest.
  template <bool kStoreExp>
  static constexpr bool kUsesBase = kStoreExp && !ExpBase::kSubtractsMax;

  // The state of a group's copied elements. With kStoreExp their exponentials replace them. The elements behind a low
  // tile are fetched meanwhile.
  template <bool kStoreExp>
  void group_state(float* buffer, int64_t count, const X* next_tile, Vec (&m)[V], CompensatedVec (&l)[V]) {
    for (Vec& each : m) each = broadcast(-kInf<float>);
    for (int64_t i = 0; i < count; ++i) {
      for (int k = 0; k < V; ++k) m[k] = max(load_vector(buffer + i * kGroupCols + k * kWidth), m[k]);
    }
    const bool fetch = count <= 64;  // a taller tile would evict the data in use
    for (int k = 0; k < V; ++k) {
      const Vec top = finite(m[k]);
      const ExpBase base = kUsesBase<kStoreExp> ? ExpBase::of(top) : ExpBase();
      if (kUsesBase<kStoreExp>) largest = max(max(top, -top), largest);
      ExpSum<Y> sum;
      float* const column = buffer + k * kWidth;
      const auto exp_of = [&](int64_t i, auto& e) __attribute__((always_inline)) {
        constexpr int kMany = sizeof e / sizeof(Vec);
        for (int j = 0; j < kMany; ++j) {
          if (fetch && k * kWidth * int64_t(sizeof(X)) % kLine == 0) {
            __builtin_prefetch(next_tile + (i + j) * x_stride + k * kWidth);
          }
          e[j] = load_vector(column + (i + j) * kGroupCols);
          if (!kUsesBase<kStoreExp>) e[j] -= top;
        }
        Exp::apply(e, base);
        if constexpr (kStoreExp) {
          for (int j = 0; j < kMany; ++j) store_vector(column + (i + j) * kGroupCols, e[j]);
        }
      };
      int64_t i = 0;
      for (; i + 4 <= count; i += 4) {
        Vec e[4];
        exp_of(i, e);
        sum.add((e[0] + e[1]) + (e[2] + e[3]));
      }
      for (; i < count; ++i) {
        Vec e[1];
        exp_of(i, e);
        sum.add(e[0]);
      }
      l[k] = sum.compensated();
    }
  }

  // The states of all rows, over blocks that fit the buffer. Returns whether one block held all elements.
  bool reduce(float* buffer) {
    const int64_t groups = (width + kGroupCols - 1) / kGroupCols, padded = groups * kGroupCols;
    const int64_t most = n <= kScratch / padded ? n : kBlockFloats / padded;
    for (int64_t first = 0; first < n; first += most) {
      const int64_t count = n - first < most ? n - first : most;
      copy(first, count, buffer);
      for (int64_t g = 0; g < groups; ++g) {
        float* const group = buffer + g * count * kGroupCols;
        const X* const next = x.x + first * x_stride + width + g * kGroupCols;
        if (n <= most) {
          group_state<kFromExp>(group, count, next, m[g], l[g]);
        } else if (first == 0) {
          group_state<false>(group, count, next, m[g], l[g]);
        } else {
          Vec block_m[V];
          CompensatedVec block_l[V];
          group_state<false>(group, count, next, block_m, block_l);
          for (int k = 0; k < V; ++k) merge(m[g][k], l[g][k], block_m[k], block_l[k]);
        }
      }
    }
    return n <= most;
  }
  static void merge(Vec& m, CompensatedVec& l, Vec with_m, const CompensatedVec& with_l) {
    const Vec top = max(m, with_m), shared = finite(top);
    Vec scale[2] = {m - shared, with_m - shared};
    ExpFloat::apply(scale);
    const Vec before = scale[0] * kExpUnscale, now = scale[1] * kExpUnscale;
    l.sum *= before, l.error *= before;
    l.add(with_l.sum * now);
    l.error += with_l.error * now;
    m = top;
  }

  // Replaces the sums by the numbers of the epilogue: 1 / l, or m + log(l). Returns whether a row's results are NaN.
  bool prepare_epilogue() {
    Vec undefined{};
    for_groups([&](int64_t g, auto...) {
      for (int k = 0; k < V; ++k) {
        Vec& high = l[g][k].sum;
        Vec& low = l[g][k].error;
        HighLow numbers;
        if constexpr (kFromExp) {
          numbers = reciprocal(l[g][k]);
        } else {
          high *= kExpUnscale, low *= kExpUnscale;
          numbers = log_sum_exp(finite(m[g][k]), l[g][k]);
        }
        high = numbers.high, low = numbers.low;
        high += (m[g][k] - m[g][k]) * 0.0f;  // as in torch, a row whose maximum is infinite is NaN
        m[g][k] = finite(m[g][k]);
        undefined = high == high ? undefined : broadcast(1);
      }
    });
    return reduce_max(undefined) > 0;
  }

  // Stores the results, from the buffer or from the input. `kNan`: a row may be NaN, with any bits.
  template <bool kFromBuffer, bool kStreaming, bool kNan>
  void finish(const float* buffer) const {
    for (int64_t i = 0; i < n; ++i) {
      for_groups([&](int64_t g, auto... count) __attribute__((always_inline)) {
        Vec v[V];
        if constexpr (kFromBuffer) {
          load_vectors<false>(buffer + (g * n + i) * kGroupCols, v);
        } else {
          load(i * x_stride + g * kGroupCols, v, count...);
        }
        if constexpr (!kFromBuffer && kFromExp) {
          for (int k = 0; k < V; ++k) v[k] -= m[g][k];
          Exp::apply(v);
        }
        for (int k = 0; k < V; ++k) {
          Vec one[1] = {v[k]};
          Epilogue{l[g][k].sum, l[g][k].error}.template apply<Y>(one);
          v[k] = one[0];
          if constexpr (kNan) v[k] = v[k] == v[k] ? v[k] : broadcast(std::numeric_limits<float>::quiet_NaN());
        }
        store<kStreaming>(y + i * y_stride + g * kGroupCols, v, count...);
      });
    }
  }
  template <bool kFromBuffer>
  void finish(const float* buffer, bool streaming) {
    const bool nan = prepare_epilogue();
    const bool whole_lines = uintptr_t(y) % kLine == 0 && y_stride * int64_t(sizeof(Y)) % kLine == 0;
    if constexpr (std::is_same_v<Y, bfloat16>) {  // whose conversion takes only NaNs that arithmetic makes
      if (nan) return finish<kFromBuffer, false, true>(buffer);
    }
    with_streaming(streaming && whole_lines,
                   [&](auto is_streaming) { finish<kFromBuffer, is_streaming.value, false>(buffer); });
  }

  void columns_alone(int64_t first, int64_t count) const {
    columns_scalar<Epilogue>(x + first, y + first, n, x_stride, y_stride, count, sum_offset);
  }

  // Stores the results of a function that reduces. Rows whose state is not finite are done again in scalar code.
  void store_reduced() {
    for_groups([&](int64_t g, auto... count) {
      Vec first[V], second[V], undefined[V], any{};
      for (int k = 0; k < V; ++k) {
        CompensatedVec& sum = l[g][k];
        sum.sum *= kExpUnscale, sum.error *= kExpUnscale;
        undefined[k] = sum.sum - sum.sum + (m[g][k] - m[g][k]) == Vec{} ? Vec{} : broadcast(1);
        any += undefined[k];
        if (sum_offset) {
          first[k] = m[g][k], second[k] = sum.sum + sum.error;
        } else {
          first[k] = log_sum_exp(m[g][k], sum).high;
        }
      }
      store<false>(y + g * kGroupCols, first, count...);
      if (sum_offset) store<false>(y + g * kGroupCols + sum_offset, second, count...);
      if (reduce_max(any) == 0) return;
      for (int64_t j = g * kGroupCols; j < width && j < (g + 1) * kGroupCols; ++j) {
        if (undefined[j % kGroupCols / kWidth][j % kWidth] != 0) columns_alone(j, 1);
      }
    });
  }

  void run(bool streaming) {
    float* const buffer = scratch();
    const bool fits = reduce(buffer);
    if (exceeds_base(reduce_max(largest))) {
      for (int64_t at = 0; at < width; at += kScalarCols) {
        columns_alone(at, width - at < kScalarCols ? width - at : kScalarCols);
      }
    } else if constexpr (kReduces) {
      store_reduced();
    } else if (fits) {
      finish<true>(buffer, streaming);
    } else {
      finish<false>(nullptr, streaming);
    }
  }
};

}  // namespace onepass::ONEPASS_ISA
