// tile_ops.h: computes functions of a tile (tiles.h), in these steps. (grad_tile.h has gradients.)
//
//   reduce    the state of each row: maximum -> exponentials and their sum
//   fold      merges the states of the lanes of a row
//   numbers   what the epilogue needs of a state
//   results   replace the elements, or the exponentials
#pragma once

#include "epilogue.h"
#include "tiles.h"

namespace onepass::ONEPASS_ISA {

// A sum of scaled exponentials with its rounding error, for vectors of floats or doubles (see CompensatedExpSum).
template <class A>
constexpr A kTileUnscale = std::is_same_v<A, float> ? A(kExpUnscale) : A(1);
template <class A>
struct CompensatedLanes {
  static constexpr A kStart = 8 / kTileUnscale<A>;
  V<A> sum = broadcast_as(kStart), error{};
  ONEPASS_INLINE void add(V<A> e) {
    const V<A> next = sum + e;
    error += e - (next - sum);
    sum = next;
  }
};

constexpr int kMaxShortDepth = kHasFastPaths ? 8 : 0;  // elements of the longest slice that stays in registers

// In rows of more elements, four at a time are first added as plain floats.
constexpr int64_t kMaxExactSum = 32;

template <class A>
ONEPASS_INLINE V<A> finite_or(V<A> v, V<A> other) {
  return v - v == V<A>{} ? v : other;
}
// The states of a tile with results of type Y. The maximum is always subtracted from each element first.
template <class Y>
struct TileStates {
  using A = Acc<Y>;
  using Vector = V<A>;
  using Exp = ExpFor<Y>;
  static constexpr int L = kLanes<A>;
  static constexpr bool kHalf = sizeof(Y) == 2;
  TileShape shape;
  int64_t parts = 1, columns = 0;  // parts of a row, one per lane; rows that are cut into parts
  A* t;
  // The states of the lanes of each sequence. numbers() replaces them by what is subtracted, and the epilogue's two
  // numbers.
  Vector m[kMaxSequences], sum[kMaxSequences], error[kMaxSequences];
  bool has_infinity;
  // For columns: the address of the next tile's elements, which are prefetched, and the bytes between its steps.
  const char* next = nullptr;
  int64_t next_step = 0, next_vector = 0;

  static ONEPASS_INLINE Vector nan() { return broadcast_as(kNan<A>); }
  A* sequence(int64_t s) const { return t + (s / shape.across * shape.depth * shape.across + s % shape.across) * L; }

  // Computes the states of the elements in the tile. With kStoreExp their exponentials replace them.
  template <bool kStoreExp>
  __attribute__((noinline)) void reduce() {
    maxima(m);
    for (int64_t s = 0; s < shape.sequences(); ++s) {
      reduce_one<kStoreExp>(sequence(s), m[s], sum[s], error[s], next ? next + s * next_vector : nullptr);
    }
  }
  // The maxima of the elements of each row. Lane p * columns + j has part p of row j.
  void maxima(Vector* m) {
    const int64_t step = shape.across * L, depth = shape.depth;
    for (int64_t s = 0; s < shape.sequences(); ++s) {
      const A* p = sequence(s);
      Vector a = broadcast_as(-kInf<A>), b = a;
      int64_t i = 0;
      for (; i + 4 <= depth; i += 4, p += 4 * step) {
        a = max_as(load_as<A>(p), a), b = max_as(load_as<A>(p + step), b);
        a = max_as(load_as<A>(p + 2 * step), a), b = max_as(load_as<A>(p + 3 * step), b);
      }
      for (; i < depth; ++i, p += step) a = max_as(load_as<A>(p), a);
      m[s] = max_as(a, b);
    }
    Vector most = m[0];
    for (int64_t s = 1; s < shape.sequences(); ++s) most = max_as(most, m[s]);
    has_infinity = any_lane<A>(most == kInf<A> ? Vector{} + 1 : Vector{});
    A* const tops = reinterpret_cast<A*>(m);
    for (int64_t lane = columns; lane < parts * columns; ++lane) {
      A& top = tops[lane - (lane / columns) * columns];
      top = tops[lane] > top ? tops[lane] : top;
    }
    repeat(tops);
  }
  // Copies the number of a row's first lane to the row's other lanes.
  void repeat(A* lanes) const {
    for (int64_t lane = columns; lane < parts * columns; ++lane) lanes[lane] = lanes[lane - columns];
  }
  template <bool kStoreExp>
  ONEPASS_INLINE void reduce_one(A* const at, Vector m, Vector& sum, Vector& error, const char* next) const {
    const int64_t step = shape.across * L, depth = shape.depth;
    const Vector top = finite_or<A>(m, Vector{});
    int64_t i;
    CompensatedLanes<A> total;
    Vector plain{};
    const auto add = [&](A* p, auto count) __attribute__((always_inline)) {
      constexpr int K = count.value;
      if (next) {
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) __builtin_prefetch(next + k * next_step);
        next += K * next_step;
      }
      Vector e[K];
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) e[k] = load_as<A>(p + k * step) - top;
      Exp::apply(e);
#pragma GCC unroll 4
      for (int k = 0; kStoreExp && k < K; ++k) store_as(p + k * step, e[k]);
      if (kHalf && K == 4) {
        plain += (e[0] + e[K / 2 - K / 4]) + (e[K / 2] + e[K - 1]);
      } else if (K == 4 && depth > kMaxExactSum) {
        total.add((e[0] + e[K / 2 - K / 4]) + (e[K / 2] + e[K - 1]));
      } else {
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) kHalf ? void(plain += e[k]) : total.add(e[k]);
      }
    };
    for (i = 0; i + 4 <= depth; i += 4) add(at + i * step, std::integral_constant<int, 4>());
    A* const rest = at + i * step;
    if (depth - i == 1) add(rest, std::integral_constant<int, 1>());
    if (depth - i == 2) add(rest, std::integral_constant<int, 2>());
    if (depth - i == 3) add(rest, std::integral_constant<int, 3>());
    sum = kHalf ? plain : total.sum - total.kStart, error = kHalf ? Vector{} : total.error;
    // The sum of a row with +inf is +inf, or NaN if there is a NaN.
    if (!has_infinity) return;
    Vector with_nan{};
    for (i = 0; i < depth; ++i) with_nan += load_as<A>(at + i * step) == load_as<A>(at + i * step) ? Vector{} : nan();
    sum = m == kInf<A> ? with_nan + kInf<A> : sum, error = m == kInf<A> ? Vector{} : error;
  }

  // Adds the states of the elements of another block of the same rows.
  __attribute__((noinline)) void reduce_more() {
    Vector tops[kMaxSequences];
    maxima(tops);
    for (int64_t s = 0; s < shape.sequences(); ++s) {
      Vector with = tops[s], more, more_error;
      reduce_one<false>(sequence(s), with, more, more_error, next ? next + s * next_vector : nullptr);
      const Vector top = max_as(m[s], with), shared = finite_or<A>(top, Vector{});
      Vector scale[2] = {m[s] - shared, with - shared};
      exp_exactly(scale);
      Vector total = sum[s] * scale[0], errors = error[s] * scale[0] + more_error * scale[1];
      add_compensated(total, errors, Vector(more * scale[1]));
      const auto infinite = top == kInf<A>;
      sum[s] = infinite ? sum[s] + more : total, error[s] = infinite ? Vector{} : errors;
      m[s] = top;
    }
  }
  // The exponentials of differences of maxima, without the scale.
  template <int K>
  static ONEPASS_INLINE void exp_exactly(Vector (&v)[K]) {
    std::conditional_t<std::is_same_v<A, double>, ExpDouble, ExpFloat>::apply(v);
    for (Vector& each : v) each *= kTileUnscale<A>;
  }

  // Adds the sums of the lanes of each row, whose maxima are the same.
  __attribute__((noinline)) void fold() {
    if (parts == 1) return;
    A *const sums = reinterpret_cast<A*>(sum), *const errors = reinterpret_cast<A*>(error);
    for (int64_t j = 0; j < columns; ++j) {
      Compensated total;
      for (int64_t lane = j; lane < parts * columns; lane += columns) {
        total.add(double(sums[lane])), total.error += double(errors[lane]);
      }
      const A high = sums[j] = A(total.value());
      errors[j] = std::isfinite(high) ? A((total.sum - double(high)) + total.error) : 0;
    }
    repeat(sums), repeat(errors);
  }

  // The results of a reduction, in `m`; in a state, the sums are in `sum`.
  __attribute__((noinline)) void results(bool is_state) {
    for (int64_t s = 0; s < shape.sequences(); ++s) {
      if (is_state) {
        sum[s] = sum[s] * kTileUnscale<A> + error[s] * kTileUnscale<A>;
      } else {
        m[s] = log_sum_of(s);
      }
    }
  }
  // m + log(l) of the rows of a sequence.
  Vector log_sum_of(int64_t s) const {
    const Vector high = sum[s] * kTileUnscale<A>, low = error[s] * kTileUnscale<A>, total = high + low;
    const Vector special = m[s] + total;  // l is 0, infinite or NaN
    const auto regular = total - total == Vector{} && total > Vector{};
    return regular ? log_sum(finite_or<A>(m[s], Vector{}), high, low) : special;
  }
  static ONEPASS_INLINE Vec log_sum(Vec m, Vec sum, Vec error) { return log_sum_exp(m, {sum, error}).high; }
  static ONEPASS_INLINE V<double> log_sum(V<double> m, V<double> sum, V<double> error) {
    return m + logarithm(sum, error);
  }
  static ONEPASS_INLINE Vec logarithm(Vec sum, Vec error) { return log_high_low({sum, error}).high; }
  static __attribute__((noinline)) V<double> logarithm(V<double> sum, V<double> error) {
    V<double> log = sum + error;
    for (int i = 0; i < kLanes<double>; ++i) log[i] = std::log(log[i]);
    return log;
  }
};

// A tile of a function.
template <class Epilogue, class Y>
struct ForwardTile : TileStates<Y> {
  using typename TileStates<Y>::A;
  using typename TileStates<Y>::Vector;
  using typename TileStates<Y>::Exp;
  using TileStates<Y>::L, TileStates<Y>::kHalf, TileStates<Y>::nan, TileStates<Y>::sequence;
  using TileStates<Y>::shape, TileStates<Y>::t, TileStates<Y>::m, TileStates<Y>::sum, TileStates<Y>::error;
  static constexpr bool kFromExp = Epilogue::kFromExp;
  static constexpr bool kInputNan = false;  // clean() prevents it
  template <class>
  static constexpr bool kReplaces = true;  // results may replace elements
  bool has_nan = false;
  bool in_registers = false;  // results are computed from the elements in one step: slices of up to kMaxShortDepth

  // Computes the epilogue's numbers from the states. As in torch, a row with an infinite maximum is NaN.
  void numbers() {
    Vector wrong{};
    for (int64_t s = 0; s < shape.sequences(); ++s) wrong += numbers_of(m[s], sum[s], error[s]);
    has_nan = any_lane<A>(wrong);
  }
  // The numbers of one vector of states. Returns 1 in lanes that are NaN.
  static ONEPASS_INLINE Vector numbers_of(Vector& m, Vector& sum, Vector& error) {
    if constexpr (!kFromExp) {
      sum = TileStates<Y>::logarithm(sum * kTileUnscale<A>, error * kTileUnscale<A>);
    } else if constexpr (std::is_same_v<A, double>) {
      sum += error;
    } else if constexpr (kHalf) {
      sum = 1 / (sum + error);
    } else {
      const HighLow inverse = reciprocal({sum, error});
      sum = inverse.high, error = inverse.low;
    }
    sum += (m - m) * 0;
    m = finite_or<A>(m, Vector{});
    const auto right = sum == sum;
    sum = right ? sum : nan();
    return right ? Vector{} : Vector{} + 1;
  }

  // Prepares a group for the results of its steps. (FromExps, below: the tile has exponentials, not elements.)
  void begin_results(int64_t g, int64_t steps) {
    if (has_nan) clean(t + g * shape.depth * shape.across * L, steps, sum + g * shape.across);
  }
  // The results of K vectors of a step, from vector w on, or, with kSteps, of vector w in K steps.
  template <bool kFromExps, bool kSteps, int K>
  ONEPASS_INLINE void results_of(const A* at, const Vector* m, const Vector* high, const Vector* low, int64_t step,
                                 Vector (&v)[K]) const {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      v[k] = load_as<A>(at + k * (kSteps ? step : L));
      if constexpr (!kFromExps) v[k] -= m[kSteps ? 0 : k];
    }
    if constexpr (kFromExp && !kFromExps) Exp::apply(v);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) v[k] = result(v[k], high[kSteps ? 0 : k], low[kSteps ? 0 : k]);
  }
  // The result from an exponential, or from a difference to the maximum.
  static ONEPASS_INLINE Vector result(Vector v, Vector high, Vector low) {
    if constexpr (!kFromExp) return v - high;
    if constexpr (std::is_same_v<A, double>) return v / high;
    return kHalf ? v * high : v * high + v * low;
  }
  // Calls put(k, v) with the results v of the vectors k, k + 1, ... of a step.
  template <class FromExps, class Put>
  ONEPASS_INLINE void step_results(int64_t i, Put put) const {
    constexpr bool kFromExps = FromExps::value;
    const A* const at = t + i * shape.across * L;
    int64_t w = 0;
    for (; w + 4 <= shape.across; w += 4) {
      Vector v[4];
      results_of<kFromExps, false>(at + w * L, m + w, sum + w, error + w, 0, v);
      put(w, v);
    }
    for (; w < shape.across; ++w) {
      Vector v[1];
      results_of<kFromExps, false>(at + w * L, m + w, sum + w, error + w, 0, v);
      put(w, v);
    }
  }
  // The exponentials of up to eight vectors. More than four at a time do not fit into the registers.
  template <int K>
  static ONEPASS_INLINE void exp_by_four(Vector (&v)[K]) {
    if constexpr (K <= 4) return Exp::apply(v);
    if constexpr (K > 4) {
      Vector first[4] = {v[0], v[1], v[2], v[3]}, rest[K - 4];
#pragma GCC unroll 4
      for (int i = 4; i < K; ++i) rest[i - 4] = v[i];
      Exp::apply(first), Exp::apply(rest);
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) v[i] = i < 4 ? first[i] : rest[i - 4];
    }
  }
  // A group of slices of D elements: everything from elements to results, in registers.
  template <int D>
  ONEPASS_INLINE void short_rows(int64_t g) const {
    const int64_t step = shape.across * L;
    A* at = t + g * D * step;
    for (int64_t w = 0; w < shape.across; ++w, at += L) {
      Vector v[D], m = broadcast_as(-kInf<A>);
#pragma GCC unroll 8
      for (int i = 0; i < D; ++i) v[i] = load_as<A>(at + i * step), m = max_as(v[i], m);
      const Vector top = finite_or<A>(m, Vector{});
#pragma GCC unroll 8
      for (int i = 0; i < D; ++i) v[i] -= top;
      Vector e[D];
#pragma GCC unroll 8
      for (int i = 0; i < D; ++i) e[i] = v[i];
      exp_by_four(e);
      Vector sum = e[0], error{};
      CompensatedLanes<A> total;
#pragma GCC unroll 8
      for (int i = kHalf ? 1 : 0; i < D; ++i) kHalf ? void(sum += e[i]) : total.add(e[i]);
      if (!kHalf) sum = total.sum - total.kStart, error = total.error;
      const bool wrong = any_lane<A>(numbers_of(m, sum, error));
#pragma GCC unroll 8
      for (int i = 0; i < D; ++i) {
        const Vector y = result(kFromExp ? e[i] : v[i], sum, error);
        store_as(at + i * step, wrong && !(y == y) ? nan() : y);
      }
    }
  }
  template <int D = 1>
  ONEPASS_INLINE void short_rows_of_depth(int64_t g) const {
    if constexpr (D <= kMaxShortDepth) {
      if (shape.depth == D) return short_rows<D>(g);
      short_rows_of_depth<D + 1>(g);
    }
  }
  __attribute__((noinline)) void short_group(int64_t g) const { short_rows_of_depth(g); }
  template <class FromExps>
  void group_results(int64_t g) const {
    in_registers ? short_group(g) : replace<FromExps>(g);
  }
  // Replaces all elements, or exponentials, of a group of slices by results.
  template <class FromExps>
  __attribute__((noinline)) void replace(int64_t g) const {
    constexpr bool kFromExps = FromExps::value;
    const int64_t step = shape.across * L, depth = shape.depth;
    for (int64_t w = 0; w < shape.across; ++w) {
      const int64_t s = g * shape.across + w;
      const Vector of_m[1] = {m[s]}, high[1] = {sum[s]}, low[1] = {error[s]};
      A* at = sequence(s);
      int64_t i = 0;
      for (; i + 4 <= depth; i += 4, at += 4 * step) {
        Vector v[4];
        results_of<kFromExps, true>(at, of_m, high, low, step, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) store_as(at + k * step, v[k]);
      }
      for (; i < depth; ++i, at += step) {
        Vector v[1];
        results_of<kFromExps, true>(at, of_m, high, low, step, v);
        store_as(at, v[0]);
      }
    }
  }
  // Replaces the elements of rows that are NaN by the NaN whose low bits are 0, which any conversion keeps.
  __attribute__((noinline)) void clean(A* at, int64_t count, const Vector* highs) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t w = 0; w < shape.across; ++w, at += L) {
        store_as(at, highs[w] == highs[w] ? load_as<A>(at) : nan());
      }
    }
  }
};

// A row of unit stride, or a chunk of one, as a tile. It is used for rows of doubles, and for rows whose maximum the
// vector code of rows cannot handle. The elements may already be at the beginning of the scratch memory.
template <class Epilogue, class Y>
struct RowTile : ForwardTile<Epilogue, Y> {
  using A = typename ForwardTile<Epilogue, Y>::A;
  static constexpr int64_t kParts = 8 * kLanes<A>;
  using ForwardTile<Epilogue, Y>::t;
  int64_t n;
  A nothing = kNan<A>;  // the results of a row that has only -inf

  template <class In>
  RowTile(const In& row, int64_t n) : n(n) {
    t = reinterpret_cast<A*>(scratch());
    this->parts = kParts, this->columns = 1;
    this->shape = {1, ceil_div(n, kParts), kParts / kLanes<A>};
    load_run(row, n, t);
    for (int64_t i = n; i % kParts; ++i) t[i] = -kInf<A>;
  }
  // The state of the elements. If `exps` is not null, their exponentials are stored there.
  State<A> state(A* exps) {
    exps ? this->template reduce<true>() : this->template reduce<false>();
    this->fold();
    if (exps) std::memcpy(exps, t, size_t(n) * sizeof(A));
    const double unscale = double(kTileUnscale<A>);
    return {this->m[0][0], {double(this->sum[0][0]) * unscale, double(this->error[0][0]) * unscale}};
  }
  template <class To>
  __attribute__((noinline)) void store(const State<A>& row, To* y, int64_t sum_offset) {
    if constexpr (Epilogue::kOnePerRow) return Epilogue::store(row, y, sum_offset);
    const double l = row.l.value() / double(kTileUnscale<A>);
    if (row.m == -kInf<A> && l == 0) return fill(y, n, nothing);
    for (int64_t s = 0; s < this->shape.across; ++s) {
      this->m[s] = broadcast_as(row.m), this->sum[s] = broadcast_as(A(l));
      this->error[s] = broadcast_as(std::isfinite(l) ? A(l - double(A(l))) : A(0));
    }
    this->numbers();
    this->begin_results(0, this->shape.depth);
    this->template replace<std::false_type>(0);
    store_run<false>(y, n, t, false);
  }
};

}  // namespace onepass::ONEPASS_ISA
