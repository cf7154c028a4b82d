// rows_simd.h: rows of unit stride in vectors of floats (scalar.h has all others, and doubles).
//
//   a row that fits a core's cache: maximum -> exponentials, which are stored, and their sum -> scale -> store. This is
//                                   one pass over memory.
//   a longer row:                   chunks of a fixed length, one state per chunk, merged in order. Then each element
//   is
//                                   read again and goes through the epilogue.
//
// The exponentials are stored in the output, or in the thread's scratch memory for 16-bit types and streaming stores.
#pragma once

#include "plan.h"
#include "scalar.h"

namespace onepass::ONEPASS_ISA {

static_assert(kMaxWholeRow <= kScratch);

template <class Score, class X, class Y>
struct RowReader {
  using Exp = ExpFor<Y>;
  static constexpr bool kDeinterleave = std::is_same_v<X, bfloat16> && std::is_same_v<Y, bfloat16>;
  const X* x;
  int64_t n;

  // The score of elements. Where Y is narrower than X, torch rounds the input to Y first.
  static ONEPASS_INLINE Vec score(Vec v) {
    if constexpr (!kIsLossless<X, Y>) {
      Y rounded[kWidth];
      store_vector<true>(rounded, v);
      v = load_vector(rounded);
    }
    return Score::apply(v);
  }
  ONEPASS_INLINE void load4(int64_t i, Vec (&v)[4]) const {
    load_pair<kDeinterleave>(x + i, v[0], v[1]), load_pair<kDeinterleave>(x + i + 2 * kWidth, v[2], v[3]);
    for (Vec& each : v) each = score(each);
  }
  ONEPASS_INLINE Vec load1(int64_t i) const { return score(load_vector(x + i)); }
  Vec tail(int64_t i, int64_t count) const { return score(load_tail(x + i, count, Score::kPadding)); }

  // The maximum of 16-bit numbers by their bits: as integers, positive numbers rise with their bits and negative ones
  // fall. If there is a NaN, it may be the result.
  float maximum_of_bits() const {
    constexpr int kLanes = 2 * kWidth;
    constexpr int16_t kLeast = -32768;
    constexpr uint16_t kMost = 65535;
    const auto* const from = reinterpret_cast<const uint16_t*>(x);
    WideInt16Vec high[2] = {WideInt16Vec{} + kLeast, WideInt16Vec{} + kLeast};
    WideUint16Vec low[2] = {WideUint16Vec{} + kMost, WideUint16Vec{} + kMost};
    const auto step = [&](int64_t i, int k) __attribute__((always_inline)) {
      WideUint16Vec v;
      std::memcpy(&v, from + i, sizeof v);
      if constexpr (Score::kSignFlip) v ^= Score::kSignFlip;
      high[k] = WideInt16Vec(v) > high[k] ? WideInt16Vec(v) : high[k];
      low[k] = v < low[k] ? v : low[k];
    };
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) step(i, 0), step(i + kLanes, 1);
    if (i + kLanes <= n) step(i, 0);
    if (i < n) step(n - kLanes, 1);  // some elements are read twice
    high[0] = high[0] > high[1] ? high[0] : high[1], low[0] = low[0] < low[1] ? low[0] : low[1];
    int16_t top = kLeast;
    uint16_t bottom = kMost;
    for (int k = 0; k < kLanes; ++k) {
      top = high[0][k] > top ? high[0][k] : top, bottom = low[0][k] < bottom ? low[0][k] : bottom;
    }
    const uint16_t bits = top >= 0 ? uint16_t(top) : bottom;
    X m;
    std::memcpy(static_cast<void*>(&m), &bits, sizeof m);
    return to_acc(m);
  }

  float maximum() const {
    if (sizeof(X) == 2 && n >= 2 * kWidth) {
      const float m = maximum_of_bits();
      if (m == m) return m;  // the maximum of a row with a NaN is the largest of the other elements
    }
    Vec m[4] = {broadcast(-kInf<float>), broadcast(-kInf<float>), broadcast(-kInf<float>), broadcast(-kInf<float>)};
    int64_t i = 0;
    for (; i + kUnroll <= n; i += kUnroll) {
      Vec v[4];
      load4(i, v);
      for (int k = 0; k < 4; ++k) m[k] = max(v[k], m[k]);
    }
    for (; i + kWidth <= n; i += kWidth) m[0] = max(load1(i), m[0]);
    if (i < n) m[1] = max(tail(i, n - i), m[1]);
    return reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
  }

  // The sum of the exponentials relative to ExpBase::of(m). The exponentials go to `exps`, if kStore. Four vectors are
  // added in plain floats: an eighth that is much smaller than the first would always be rounded the same way.
  template <bool kStore>
  double exp_sum(float m, float* exps) const {
    const ExpBase base = ExpBase::of(m);
    ExpSum<Y> total;
    Vec previous{};  // is added one step later: an addition that waits for exponentials would delay the next ones
    int64_t i = 0;
    for (; i + kUnroll <= n; i += kUnroll) {
      total.add(previous);
      // The elements behind the row are fetched meanwhile: no row's first pass should wait for memory.
      for (int64_t line = 0; line < kUnroll; line += 64 / int64_t(sizeof(X))) __builtin_prefetch(x + n + i + line);
      Vec v[4];
      load4(i, v);
      exp_relative_to<Exp>(base, v);
      if constexpr (kStore) {
        for (int k = 0; k < 4; ++k) store_vector(exps + i + k * kWidth, v[k]);
      }
      previous = (v[0] + v[1]) + (v[2] + v[3]);
    }
    total.add(previous);
    for (; i + kWidth <= n; i += kWidth) {
      Vec e[1] = {load1(i)};
      exp_relative_to<Exp>(base, e);
      if constexpr (kStore) store_vector(exps + i, e[0]);
      total.add(e[0]);
    }
    if (i < n) {
      Vec e[1] = {tail(i, n - i)};
      exp_relative_to<Exp>(base, e);
      if constexpr (kStore) store_tail(exps + i, n - i, e[0]);
      total.add(e[0]);
    }
    return total.total();
  }
};

// Reads exponentials that were stored.
struct ExpReader {
  const float* exps;
  ONEPASS_INLINE void load4(int64_t i, Vec (&v)[4]) const {
    for (int k = 0; k < 4; ++k) v[k] = load_vector(exps + i + k * kWidth);
  }
  ONEPASS_INLINE Vec load1(int64_t i) const { return load_vector(exps + i); }
  Vec tail(int64_t i, int64_t count) const { return load_tail(exps + i, count, 0); }
};

// Stores what `epilogue(v)` makes of the vectors of a reader. `TiesUp`: ties may be rounded up.
template <bool Deinterleave, bool TiesUp, class Y, class Reader, class Epilogue>
inline void store_row(Y* y, int64_t n, bool streaming, const Reader& reader, Epilogue epilogue) {
  constexpr int64_t line = kLine / int64_t(sizeof(Y));
  int64_t i = 0;
  const auto store_steps = [&](auto is_streaming) __attribute__((always_inline)) {
    for (; i + kUnroll <= n; i += kUnroll) {
      Vec v[4];
      reader.load4(i, v);
      epilogue(v);
      store_pair<Deinterleave, TiesUp, is_streaming.value>(y + i, v[0], v[1]);
      store_pair<Deinterleave, TiesUp, is_streaming.value>(y + i + 2 * kWidth, v[2], v[3]);
    }
  };
  const auto store_vectors = [&](int64_t end) __attribute__((always_inline)) {
    Vec v[1];
    for (; i + kWidth <= end; i += kWidth) {
      v[0] = reader.load1(i);
      epilogue(v);
      store_vector(y + i, v[0]);
    }
    if (i < end) {
      v[0] = reader.tail(i, end - i);
      epilogue(v);
      store_tail(y + i, end - i, v[0]);
      i = end;
    }
  };
  // Streaming stores write whole lines. Deinterleaved vectors stay in their pairs, so such a row has to begin and end
  // with a line.
  const int64_t head = int64_t(-uintptr_t(y) % kLine / sizeof(Y));
  if (kHasStreamingStores && streaming && (Deinterleave ? head == 0 && n % line == 0 : n >= head + line)) {
    if (!Deinterleave) store_vectors(head);
    store_steps(std::true_type());
  } else {
    store_steps(std::false_type());
  }
  store_vectors(n);
}

// Is a maximum infinite, NaN, or too large for an ExpBase?
inline bool exceeds_base(float m) { return !(std::fabs(m) <= ExpBase::kMaxMagnitude); }

// Reads the elements of a row, or of a part of it, and stores its results. l is the row's sum relative to m.
template <class Score, class Epilogue, class X, class Y>
void finish_from_input(const RowReader<Score, X, Y>& row, Y* y, float m, double l, bool streaming) {
  using Exp = ExpFor<Y>;
  constexpr bool deinterleave = RowReader<Score, X, Y>::kDeinterleave;
  if (std::isnan(l)) return fill_nan(y, row.n);
  if (exceeds_base(m)) {
    const ScalarEpilogue<Epilogue, float> epilogue(State<float>{m, {l, 0}});
    for (int64_t i = 0; i < row.n; ++i) y[i] = from_acc<Y>(epilogue(load_scalar<Score, Y>(row.x[i])));
    return;
  }
  if constexpr (!Epilogue::kFromExp) {
    const Epilogue epilogue = Epilogue::of(m, l);
    store_row<deinterleave, false>(y, row.n, streaming, row,
                                   [&](auto& v) __attribute__((always_inline)) { epilogue.template apply<Y>(v); });
  } else if constexpr (sizeof(Y) == 2) {  // the reciprocal goes into the exponential's coefficients
    const ExpBase base = ExpBase::of(m);
    const Exp exp(float(kExpUnscale / (l * relative_to_base<Exp>(m))));
    store_row<deinterleave, true>(y, row.n, streaming, row, [&](auto& v) __attribute__((always_inline)) {
      if constexpr (ExpBase::kSubtractsMax) {
        for (Vec& each : v) each -= base.max;
      }
      exp.multiply(v, base);
    });
  } else {
    const Epilogue epilogue = Epilogue::of(m, l * relative_to_base<Exp>(m));
    const ExpBase base = ExpBase::of(m);
    store_row<deinterleave, true>(y, row.n, streaming, row, [&](auto& v) __attribute__((always_inline)) {
      exp_relative_to<Exp>(base, v);
      epilogue.template apply<Y>(v);
    });
  }
}

// A whole row of up to kMaxWholeRow elements.
template <class Score, class Epilogue, class X, class Y>
void row_simd(const X* x, Y* y, int64_t n, int64_t sum_offset, bool streaming) {
  using Exp = ExpFor<Y>;
  const RowReader<Score, X, Y> row = {x, n};
  const float m = row.maximum();
  if (exceeds_base(m)) return row_scalar<Score, Epilogue>(x, y, AnyStride(), n, sum_offset);
  if constexpr (!Epilogue::kFromExp) {
    const double l = row.template exp_sum<false>(m, nullptr) * kExpUnscale / relative_to_base<Exp>(m);
    if constexpr (Epilogue::kOnePerRow) {
      Epilogue::store(State<float>{m, {l, 0}}, y, sum_offset);
    } else {
      finish_from_input<Score, Epilogue>(row, y, m, l, streaming);
    }
  } else {
    float* exps = nullptr;
    if constexpr (sizeof(Y) == 4) exps = streaming ? nullptr : y;
    if (!exps) exps = scratch();
    const double l = row.template exp_sum<true>(m, exps);
    if (std::isnan(l)) return fill_nan(y, n);
    const Epilogue epilogue = Epilogue::of(m, l * kExpUnscale);
    store_row<RowReader<Score, X, Y>::kDeinterleave, true>(
        y, n, streaming, ExpReader{exps},
        [&](auto& v) __attribute__((always_inline)) { epilogue.template apply<Y>(v); });
  }
}

// Are the exponentials of a chunk stored in the output, relative to the chunk's own maximum?
template <class Epilogue, class Y>
constexpr bool kStoresChunkExps = sizeof(Y) == 4 && Epilogue::kFromExp;

// The state of a chunk of a long row. If `exps` is not null, the chunk's exponentials go there.
template <class Score, class X, class Y>
State<float> chunk_state(const X* x, int64_t n, float* exps) {
  const RowReader<Score, X, Y> chunk = {x, n};
  State<float> state = {chunk.maximum(), {}};
  if (exceeds_base(state.m)) {
    for (int64_t i = 0; i < n; ++i) {
      const float e = exp_difference(load_scalar<Score, Y>(x[i]), finite_or_zero(state.m));
      state.l.add(double(e));
      if (exps) exps[i] = e * kExpScale;
    }
  } else {
    const double l =
        exps ? chunk.template exp_sum<true>(state.m, exps) : chunk.template exp_sum<false>(state.m, nullptr);
    state.l.sum = l * kExpUnscale / relative_to_base<ExpFor<Y>>(state.m);
  }
  return state;
}

// Stores the results of a chunk, given the state of its row. `stored`: y holds the chunk's exponentials, relative to
// `chunk_m`.
template <class Score, class Epilogue, class X, class Y>
void finish_chunk(const X* x, Y* y, int64_t n, const State<float>& row, bool stored, float chunk_m, bool streaming) {
  const double l = row.l.value();
  if (!std::isfinite(row.m) || std::isnan(l)) return fill_nan(y, n);
  if constexpr (kStoresChunkExps<Epilogue, Y>) {
    if (stored) {
      const double base = exceeds_base(chunk_m) ? 1 : relative_to_base<ExpFor<Y>>(chunk_m);
      const double scale = std::isfinite(chunk_m) ? std::exp(double(chunk_m) - double(row.m)) / (l * base) : 0;
      // A chunk may be so far below the row's maximum that its scale is no normal float. It then takes two steps, of
      // which the second is a power of two.
      const bool tiny = scale < double(kExpUnscale);
      const double raised = tiny ? 0x1p126 : 1;
      Epilogue epilogue = Epilogue::of(row.m, 1 / (scale * raised));
      if (scale == 0) epilogue.high = epilogue.low = broadcast(0);
      const Vec second = broadcast(float(1 / raised));
      return store_row<false, false>(y, n, streaming, ExpReader{y}, [&](auto& v) __attribute__((always_inline)) {
        epilogue.template apply<Y>(v);
        for (Vec& each : v) each *= second;
      });
    }
  }
  finish_from_input<Score, Epilogue>(RowReader<Score, X, Y>{x, n}, y, row.m, l, streaming);
}

}  // namespace onepass::ONEPASS_ISA
