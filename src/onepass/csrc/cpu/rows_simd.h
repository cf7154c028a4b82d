// rows_simd.h: rows of unit stride as vectors of floats. (tiles.h handles all other rows, and doubles.)
//
//   a row that fits into a core's cache:   maximum -> exponentials, which are stored, and their sum -> scale -> store.
//                                          This is one pass over memory.
//   a longer row:                          chunks of a fixed length, one state per chunk, merged in order. Then each
//                                          element is read again, and the epilogue is applied.
//
// The exponentials are stored in the output or, for 16-bit types and streaming stores, in the scratch memory of the
// thread.
#pragma once

#include "plan.h"
#include "tile_ops.h"

namespace onepass::ONEPASS_ISA {

static_assert(kMaxWholeRow <= kScratch);

// Merges all lanes of a vector of 16-bit numbers into the last two.
template <int Distance = kWidth / 2, class Wide, class Merge>
ONEPASS_INLINE auto reduce_to_pair(Wide v, Merge merge) {
  if constexpr (Distance == 0) {
    return v;
  } else {
    return reduce_to_pair<Distance / 2>(merge(v, Wide(swap_lanes<Distance>(Vec(v), Lanes()))), merge);
  }
}

// The maximum of 16-bit numbers, found by their bits: as integers, positive numbers increase with their bits, and
// negative numbers decrease. If there is a NaN, it may be the result.
template <class In>
float maximum_of_bits(const In& row, int64_t n) {
  constexpr int kLanes = 2 * kWidth;
  constexpr int16_t kLeast = -32768;
  constexpr uint16_t kMost = 65535;
  const auto* const from = reinterpret_cast<const uint16_t*>(row.x);
  WideInt16Vec high[2] = {WideInt16Vec{} + kLeast, WideInt16Vec{} + kLeast};
  WideUint16Vec low[2] = {WideUint16Vec{} + kMost, WideUint16Vec{} + kMost};
  const auto step = [&](int64_t i, int k) __attribute__((always_inline)) {
    WideUint16Vec v;
    std::memcpy(&v, from + i, sizeof v);
    high[k] = WideInt16Vec(v) > high[k] ? WideInt16Vec(v) : high[k];
    low[k] = v < low[k] ? v : low[k];
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) step(i, 0), step(i + kLanes, 1);
  if (i + kLanes <= n) step(i, 0);
  if (i < n) step(n - kLanes, 1);  // some elements are read twice
  const auto most = [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; };
  const auto least = [](auto a, auto b) __attribute__((always_inline)) { return a < b ? a : b; };
  const auto tops = reduce_to_pair(most(high[0], high[1]), most);
  const auto bottoms = reduce_to_pair(least(low[0], low[1]), least);
  const int16_t top = most(tops[0], tops[1]);
  const uint16_t bits = top >= 0 ? uint16_t(top) : least(bottoms[0], bottoms[1]);
  typename In::X element;
  std::memcpy(static_cast<void*>(&element), &bits, sizeof element);
  return to_acc(element);
}

template <class In>
float row_maximum(const In& row, int64_t n) {
  if constexpr (sizeof(typename In::X) == 2) {
    const float m = n >= 2 * kWidth ? maximum_of_bits(row, n) : std::numeric_limits<float>::quiet_NaN();
    if (m == m) return m;  // the maximum of a row that has a NaN is the largest of its other elements
  }
  Vec m[4] = {broadcast(-kInf<float>), broadcast(-kInf<float>), broadcast(-kInf<float>), broadcast(-kInf<float>)};
  int64_t i = 0;
  for (; i + kUnroll <= n; i += kUnroll) {
    Vec v[4];
    row.load(i, v);
    for (int k = 0; k < 4; ++k) m[k] = max(v[k], m[k]);
  }
  for (; i + kWidth <= n; i += kWidth) m[0] = max(row.load1(i), m[0]);
  if (i < n) {
    Vec v[1];
    row.load(i, v, n - i);
    m[1] = max(v[0], m[1]);
  }
  return reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
}

// The sum of the exponentials relative to ExpBase::of(m), for results of type Y. With kStore, the exponentials are
// stored to `exps`. At most four vectors are added as plain floats: with eight, a last one that is much smaller than
// the first would always be rounded the same way.
template <bool kStore, class Y, class In>
double row_exp_sum(const In& row, int64_t n, float m, float* exps) {
  const ExpBase base = ExpBase::of(m);
  ExpSum<Y> total;
  const auto exp_of = [&](int64_t i, auto& e, auto... count) __attribute__((always_inline)) {
    row.load(i, e, count...);
    exp_relative_to<ExpFor<Y>>(base, e);
    if constexpr (kStore) store_vectors<false, false>(exps + i, e, count...);
  };
  Vec previous{};  // added one step later: an addition that waits for exponentials would delay the next ones
  int64_t i = 0;
  for (; i + kUnroll <= n; i += kUnroll) {
    total.add(previous);
    // Prefetches the elements behind the row, so that the first pass over the next row need not wait for memory.
    row.fetch(n + i, kUnroll);
    Vec e[4];
    exp_of(i, e);
    previous = (e[0] + e[1]) + (e[2] + e[3]);
  }
  total.add(previous);
  Vec e[1];
  for (; i + kWidth <= n; i += kWidth) {
    exp_of(i, e);
    total.add(e[0]);
  }
  if (i < n) {
    exp_of(i, e, n - i);
    total.add(e[0]);
  }
  return total.total();
}

// Stores a row. `compute(i, v)` computes the results of the vectors from element i on, and `compute(i, v, count)` those
// of the first `count` elements of one vector. `Paired`: what it reads is already deinterleaved, so vectors stay in
// pairs. For TiesUp and InputNan see store_vectors.
template <bool Deinterleave, bool Paired, bool TiesUp, bool InputNan, class Y, class Compute>
ONEPASS_INLINE void store_row(Y* y, int64_t n, bool streaming, Compute compute) {
  // Streaming stores write whole lines. If vectors stay in pairs, the row must begin and end with a line.
  constexpr int64_t line = kLine / int64_t(sizeof(Y));
  const int64_t head = int64_t(-uintptr_t(y) % kLine / sizeof(Y));
  const bool streams = streaming && (Paired ? head == 0 && n % line == 0 : n >= head + line);
  // The first round goes up to a line, the second one does whole steps and the rest. So each has its code only once.
  int64_t i = 0, end = streams ? head : n;
  do {
    for (const int64_t steps = end == n ? n : 0; i + kUnroll <= steps; i += kUnroll) {
      Vec v[4];
      compute(i, v);
      with_streaming(streams, [&](auto is_streaming) __attribute__((always_inline)) {
        store_vectors<Deinterleave, TiesUp, is_streaming.value, InputNan>(y + i, v);
      });
    }
    Vec v[1];
    for (; i + kWidth <= end; i += kWidth) {
      compute(i, v);
      store_vector<InputNan>(y + i, v[0]);
    }
    if (i < end) {
      compute(i, v, end - i);
      store_tail<InputNan>(y + i, end - i, v[0]);
      i = end;
    }
    end = n;
  } while (i < n);
}
template <bool Paired, bool TiesUp, class Y, class Reader, class Epilogue>
inline void store_row_of(const Reader& reader, Y* y, int64_t n, bool streaming, Epilogue epilogue) {
  store_row<Paired, Paired, TiesUp, false>(y, n, streaming,
                                           [&](int64_t i, auto& v, auto... count) __attribute__((always_inline)) {
                                             reader.load(i, v, count...);
                                             epilogue(v);
                                           });
}

// Reads stored exponentials.
struct ExpReader {
  const float* exps;
  template <int K, class... Count>
  ONEPASS_INLINE void load(int64_t i, Vec (&v)[K], Count... count) const {
    load_vectors<false>(exps + i, v, count...);
  }
};

// Whether a maximum is infinite, NaN, or too large for an ExpBase.
inline bool exceeds_base(float m) { return !(std::fabs(m) <= ExpBase::kMaxMagnitude); }

// Reads the elements of a row, or of a part of it, and stores their results. l is the sum of the row relative to m.
template <class Epilogue, class In, class Y>
void finish_from_input(const In& row, Y* y, int64_t n, float m, double l, bool streaming) {
  using Exp = ExpFor<Y>;
  constexpr bool paired = In::kDeinterleave;
  if (std::isnan(l)) return fill_nan(y, n);
  if (exceeds_base(m)) return RowTile<Epilogue, Y>(row, n).store({m, {l, 0}}, y, 0);
  const ExpBase base = ExpBase::of(m);
  if constexpr (Epilogue::kFromExp && sizeof(Y) == 2) {  // the reciprocal goes into the exponential's coefficients
    const Exp exp(float(kExpUnscale / (l * relative_to_base<Exp>(m))));
    store_row_of<paired, true>(row, y, n, streaming, [&](auto& v) __attribute__((always_inline)) {
      if constexpr (ExpBase::kSubtractsMax) {
        for (Vec& each : v) each -= base.max;
      }
      exp.multiply(v, base);
    });
  } else {
    const Epilogue epilogue = Epilogue::of(m, Epilogue::kFromExp ? l * relative_to_base<Exp>(m) : l);
    store_row_of<paired, Epilogue::kFromExp>(row, y, n, streaming, [&](auto& v) __attribute__((always_inline)) {
      if constexpr (Epilogue::kFromExp) exp_relative_to<Exp>(base, v);
      epilogue.template apply<Y>(v);
    });
  }
}

// A row with any values. The sink is one more element, without a result; for `nothing` see RowTile.
template <class Epilogue, class In, class Y>
__attribute__((noinline)) void row_by_tile(const In& row, Y* y, int64_t n, int64_t sum_offset,
                                           float sink = -kInf<float>, float nothing = kNan<float>) {
  RowTile<Epilogue, Y> tile(row, n);
  tile.nothing = nothing;
  tile.store(merge(tile.state(nullptr), State<float>{sink, {1, 0}}), y, sum_offset);
}

// A whole row of up to kMaxWholeRow elements.
template <class Epilogue, class In, class Y>
void row_simd(const In& row, Y* y, int64_t n, int64_t sum_offset, bool streaming) {
  const float m = row_maximum(row, n);
  if (exceeds_base(m)) return row_by_tile<Epilogue>(row, y, n, sum_offset);
  if constexpr (!Epilogue::kFromExp) {
    const double l = row_exp_sum<false, Y>(row, n, m, nullptr) * kExpUnscale / relative_to_base<ExpFor<Y>>(m);
    if constexpr (Epilogue::kOnePerRow) {
      Epilogue::store(State<float>{m, {l, 0}}, y, sum_offset);
    } else {
      finish_from_input<Epilogue>(row, y, n, m, l, streaming);
    }
  } else {
    float* exps = nullptr;
    if constexpr (sizeof(Y) == 4) exps = streaming ? nullptr : y;
    if (!exps) exps = scratch();
    const double l = row_exp_sum<true, Y>(row, n, m, exps);
    if (std::isnan(l)) return fill_nan(y, n);
    const Epilogue epilogue = Epilogue::of(m, l * kExpUnscale);
    store_row_of<In::kDeinterleave, true>(ExpReader{exps}, y, n, streaming,
                                          [&](auto& v)
                                              __attribute__((always_inline)) { epilogue.template apply<Y>(v); });
  }
}

// Whether the exponentials of a chunk are stored in the output, relative to the chunk's own maximum.
template <class Epilogue, class Y>
constexpr bool kStoresChunkExps = sizeof(Y) == 4 && Epilogue::kFromExp;

// The state of a chunk of a long row, for results of type Y. If `exps` is not null, the exponentials are stored there.
template <class Y, class In>
State<float> chunk_state(const In& chunk, int64_t n, float* exps) {
  State<float> state = {row_maximum(chunk, n), {}};
  if (exceeds_base(state.m)) return RowTile<ReduceEpilogue, float>(chunk, n).state(exps);
  const double l =
      exps ? row_exp_sum<true, Y>(chunk, n, state.m, exps) : row_exp_sum<false, Y>(chunk, n, state.m, nullptr);
  state.l.sum = l * kExpUnscale / relative_to_base<ExpFor<Y>>(state.m);
  return state;
}

// Stores the results of a chunk, given the state of its row. `stored`: y has the exponentials of the chunk, relative to
// `chunk_m`.
template <class Epilogue, class In, class Y>
void finish_chunk(const In& chunk, Y* y, int64_t n, const State<float>& row, bool stored, float chunk_m,
                  bool streaming) {
  const double l = row.l.value();
  if (!std::isfinite(row.m) || std::isnan(l)) return fill_nan(y, n);
  if constexpr (kStoresChunkExps<Epilogue, Y>) {
    if (stored) {
      const double base = exceeds_base(chunk_m) ? 1 : relative_to_base<ExpFor<Y>>(chunk_m);
      const double scale = std::isfinite(chunk_m) ? std::exp(double(chunk_m) - double(row.m)) / (l * base) : 0;
      // A chunk may be so far below the row's maximum that its scale is not a normal float. Then it is applied in two
      // steps, the second of which is a power of two.
      const bool tiny = scale < double(kExpUnscale);
      const double raised = tiny ? 0x1p126 : 1;
      Epilogue epilogue = Epilogue::of(row.m, 1 / (scale * raised));
      if (scale == 0) epilogue.high = epilogue.low = broadcast(0);
      const Vec second = broadcast(float(1 / raised));
      return store_row_of<false, false>(ExpReader{y}, y, n, streaming, [&](auto& v) __attribute__((always_inline)) {
        epilogue.template apply<Y>(v);
        for (Vec& each : v) each *= second;
      });
    }
  }
  finish_from_input<Epilogue>(chunk, y, n, row.m, l, streaming);
}

}  // namespace onepass::ONEPASS_ISA
