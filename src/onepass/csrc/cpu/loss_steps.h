// loss_steps.h: passes over the elements of rows that compute the numbers of losses: maxima, sums of exponentials,
// moments, and sums of scores. A pass goes step by step; it does not depend on what the lanes of a step are.
//
// A step has several vectors. They are one class of neighbouring rows, one row per lane (Kind::columns); or as many
// classes as there are lanes, of one long row (parts) or of rows that have a vector each (rows). Lanes of one row are
// merged at the end.
//
// Most elements are read once. Their exponentials are relative to a power of two near that of class 0, and the maxima
// are computed in the same pass. A sum has the same digits whatever power of two it is relative to, unless it is too
// large or vanishes. For rows where this happens, and for the entropy, the maxima are computed first, block by block.
#pragma once

#include "loss_rows.h"

namespace onepass::ONEPASS_ISA {

// Only loss.cpp includes this file. In an anonymous namespace the compiler inlines these functions as if they were
// written there. In a named one, long rows of bfloat16 take 3% longer.
namespace {

constexpr int64_t kBlockSteps = 64;  // steps in a block

template <class T>
struct LossSteps : LossRows<T> {
  using Base = LossRows<T>;
  using Base::L, Base::p, Base::weight;
  using typename Base::A, typename Base::Vector;
  static constexpr int64_t kLanesOfTile = 4 * L;
  // Whether elements are scores as they are.
  const bool is_unit = p.softcap == 0 && p.factor == 1 && !this->scale;

  using Base::Base;
  bool has_spread() const { return p.has_spread || (p.is_cross && p.smoothing != 0); }

  // States and steps --------------------------------------------------------------------------------------------------

  static ONEPASS_INLINE void clear(Vector (&v)[4]) {
#pragma GCC unroll 4
    for (Vector& each : v) each = Vector{};
  }
  // A sum in each lane, with the rounding errors of the additions of blocks.
  struct Sums {
    Vector sum[4], error[4];
    ONEPASS_INLINE void add(const Vector (&v)[4]) {
      for (int k = 0; k < 4; ++k) add_compensated(sum[k], error[k], v[k]);
    }
    Vector value(int k) const { return sum[k] - sum[k] == Vector{} ? sum[k] + error[k] : sum[k]; }
  };
  // For each lane: the maximum m; the sum l of exponentials relative to m; the sum (moment) of exponentials times
  // (score minus m); and the sum (spread) of weights times (score minus reference).
  struct State {
    Vector m[4], reference[4];
    Sums l, moment, spread;
  };
  void clear(State& s) const {
    std::fill_n(s.m, 4, broadcast_as(-kInf<A>));
    clear(s.l.sum), clear(s.l.error), clear(s.reference);
    if (p.has_entropy) clear(s.moment.sum), clear(s.moment.error);
    if (has_spread()) clear(s.spread.sum), clear(s.spread.error);
  }
  // What the vectors of a step are (see the beginning of the file).
  enum class Kind { columns, parts, rows };
  struct Steps {
    Kind kind;
    int64_t vectors;
    const T* x[kLanesOfTile];                         // where each vector begins
    int64_t step, lane;                               // strides in x between steps and between lanes
    int64_t weight_step, weight_vector, weight_lane;  // strides in the weights
    int64_t count, full;                              // the first `full` of the steps have all lanes
    int64_t lanes[4];                                 // how many lanes each vector of the other steps has
    int64_t ahead;                                    // distance to the element that is prefetched
    Vector factor[kLanesOfTile];
  };
  static int64_t lanes_of(int k, int64_t count) { return std::clamp<int64_t>(count - k * L, 0, L); }
  // Loads the first lanes of a vector. The other lanes are 0.
  template <class From>
  static Vector load_part(const From* from, int64_t lane, int64_t lanes) {
    Vector one[1] = {};
    if (lanes == L) load_operand<A>(from, lane, one);
    if (lanes > 0 && lanes < L) load_operand<A>(from, lane, one, lanes);
    return one[0];
  }
  static A largest_of(Vector v) {
    if constexpr (std::is_same_v<A, float>) return reduce_max(v);
    A most = v[0];
    for (int j = 1; j < L; ++j) most = std::max<A>(most, v[j]);
    return most;
  }

  // Passes ------------------------------------------------------------------------------------------------------------

  // What a pass over steps computes: everything at once, or maxima first.
  enum class Pass { whole, maxima, exps, moments };
  // Computes the maxima of scores and of `top`; the sums of exponentials relative to `base`; and the sums of
  // exponentials times (score minus base). Pass::whole: relative to the power of two near that of `base`. kUnit: the
  // lanes are contiguous, and elements are scores.
  template <Pass kPass, bool kUnit>
  __attribute__((noinline)) void pass_over(const Steps& t, int64_t first, int64_t last, const Vector* base, Vector* top,
                                           Vector* sums, Vector* moments) const {
    constexpr int K = 2;  // vectors at a time: more would not fit into the registers
    constexpr bool has_maxima = kPass == Pass::whole || kPass == Pass::maxima, has_exps = kPass != Pass::maxima;
    const int64_t lane = kUnit ? 1 : t.lane, step = t.step, full = std::min(last, t.full);
    for (int64_t r = 0; r < t.vectors; r += K) {
      const T *const *const x = t.x + r, *const x0 = x[0], *const x1 = x[1];
      Vector factor[K], most[K], sum[K], moment[K], b[K];
      ExpBase bases[K];
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) {
        factor[k] = t.factor[r + k], sum[k] = moment[k] = Vector{};
        if constexpr (has_maxima) most[k] = top[r + k];
        if constexpr (kPass == Pass::whole) bases[k] = power_near(base[r + k]);
        if constexpr (kPass == Pass::exps || kPass == Pass::moments) b[k] = base[r + k];
      }
      const auto add = [&](int64_t at, Vector(&v)[K], auto... partial) __attribute__((always_inline)) {
        if constexpr (has_exps) __builtin_prefetch(x0 + at + t.ahead), __builtin_prefetch(x1 + at + t.ahead);
#pragma GCC unroll 2
        for (int k = 0; k < K && !kUnit; ++k) v[k] *= factor[k];
        if constexpr (!kUnit) this->cap(v);
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) {
          if constexpr (sizeof...(partial)) v[k] = keep_lanes(v[k], t.lanes[(r + k) % 4], -kInf<A>);
          if constexpr (has_maxima) most[k] = max_as(v[k], most[k]);
        }
        if constexpr (!has_exps) return;
        Vector e[K];
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) e[k] = v[k] = kPass == Pass::whole ? v[k] : v[k] - b[k];
        if constexpr (kPass == Pass::whole) {
          Base::Exp::apply(e, bases);
        } else {
          this->exp_of(e);
        }
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) {
          sum[k] += e[k];
          if constexpr (kPass == Pass::moments) moment[k] += e[k] == A(0) ? Vector{} : e[k] * v[k];
        }
      };
      const auto load = [=](const T* from) __attribute__((always_inline)) {
        Vector one[1];
        load_operand<A>(from, lane, one);
        return one[0];
      };
      int64_t i = first, at = first * step;
      for (; i < full; ++i, at += step) {
        Vector v[K] = {load(x0 + at), load(x1 + at)};
        add(at, v);
      }
      for (; i < last; ++i, at += step) {
        Vector v[K];
        for (int k = 0; k < K; ++k) v[k] = load_part(x[k] + at, lane, t.lanes[(r + k) % 4]);
        add(at, v, true);
      }
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) {
        if constexpr (has_maxima) top[r + k] = most[k];
        if constexpr (has_exps) sums[r + k] = sum[k];
        if constexpr (kPass == Pass::moments) moments[r + k] = moment[k];
      }
    }
  }
  template <Pass kPass>
  void pass(const Steps& t, int64_t first, int64_t last, const Vector* base, Vector* top, Vector* sums,
            Vector* moments = nullptr) const {
    t.lane == 1 && is_unit ? pass_over<kPass, true>(t, first, last, base, top, sums, moments)
                           : pass_over<kPass, false>(t, first, last, base, top, sums, moments);
  }
  void add_exps(const Steps& t, int64_t first, int64_t last, const Vector* base, Vector* sums, Vector* moments) const {
    p.has_entropy ? pass<Pass::moments>(t, first, last, base, nullptr, sums, moments)
                  : pass<Pass::exps>(t, first, last, base, nullptr, sums);
  }
  // Whether one pass may suffice: for floats, if products are not rounded (FMA).
  static constexpr bool kReadsOnce = std::is_same_v<A, float> && !ExpBase::kSubtractsMax;
  static ONEPASS_INLINE ExpBase power_near(Vec m) {
    const Vec exponent = (m * kLog2e + kRound) - kRound;
    return {Vec{}, (exponent - 127.0f) * kLn2, (kRound + 127) - exponent};
  }
  // Makes sums that are relative to `base` relative to m. In lanes where such sums are not accurate, the sums of
  // `others()` replace them. `count`: the number of lanes that have a row.
  template <class Others>
  static void relate(const Vector (&m)[4], const Vector (&base)[4], int64_t count, Sums& sums, Others others) {
    Vector far[4], any = {};
    for (int k = 0; k < 4; ++k) {
      const int64_t lanes = lanes_of(k, count);
      const Vector above = keep_lanes(m[k] - base[k], lanes, A(0));
      far[k] = (above <= A(64)) & (above >= A(-20)) ? Vector{} : broadcast_as(A(1));
      any = max_as(far[k], any);
      if constexpr (kReadsOnce) {
        Vector one[1] = {keep_lanes(m[k], lanes, 0)};
        Base::Exp::apply(one, power_near(base[k]));
        const Vector inverted = inverse(one[0]), high = sums.sum[k] * inverted;
        sums.error[k] = (fmadd(-high, one[0], sums.sum[k]) + sums.error[k]) * inverted, sums.sum[k] = high;
      }
    }
    if (largest_of(any) == A(0)) return;
    const Sums right = others();
    for (int k = 0; k < 4; ++k) {
      sums.sum[k] = far[k] != A(0) ? right.sum[k] : sums.sum[k];
      sums.error[k] = far[k] != A(0) ? right.error[k] : sums.error[k];
    }
  }
  // The sums of weights times (score minus reference).
  void sum_spread(const Steps& t, int64_t first, int64_t last, const Vector* reference, Vector* spread) const {
    for (int64_t r = 0; r < t.vectors; ++r) {
      spread[r] = Vector{};
      for (int64_t step = first; step < last; ++step) {
        const int64_t lanes = step < t.full ? L : t.lanes[r % 4];
        Vector v[1] = {load_part(t.x[r] + step * t.step, t.lane, lanes) * t.factor[r]};
        this->cap(v);
        v[0] -= reference[r];
        if (weight) v[0] *= load_part(weight + step * t.weight_step + r * t.weight_vector, t.weight_lane, lanes);
        spread[r] += keep_lanes(v[0], lanes, A(0));
      }
    }
  }
  // The score of class 0 in each lane, or 0 if that class is masked out by a large number.
  void get_references(const Steps& t, Vector* reference) const {
    for (int64_t r = 0; r < t.vectors; ++r) {
      Vector v[1];
      if (t.kind == Kind::columns) {
        v[0] = load_part(t.x[r], t.lane, t.full > 0 ? L : t.lanes[r]);
      } else {
        v[0] = broadcast_as(A(to_acc(t.x[t.kind == Kind::parts ? 0 : r][0])));
      }
      v[0] *= t.factor[r];
      this->cap(v);
      reference[r] = (v[0] < A(3e4)) & (v[0] > A(-3e4)) ? v[0] : Vector{};
    }
  }
  // Makes the sums relative to another finite maximum.
  ONEPASS_INLINE void rescale(State& s, const Vector (&base)[4]) const {
    Vector scale[4], shift[4];
    for (int k = 0; k < 4; ++k) shift[k] = scale[k] = s.m[k] - base[k];
    this->exp_of(scale);
    for (int k = 0; p.has_entropy && k < 4; ++k) {
      const Vector moved = s.l.sum[k] == A(0) ? Vector{} : shift[k] * s.l.sum[k];
      // If the sum vanishes, its moment may be beyond the largest number.
      const Vector moment = scale[k] == A(0) ? Vector{} : (s.moment.sum[k] + moved) * scale[k];
      s.moment.sum[k] = moment, s.moment.error[k] *= scale[k];
    }
    for (int k = 0; k < 4; ++k) s.l.sum[k] *= scale[k], s.l.error[k] *= scale[k];
  }
  // Calls work(first, last) for blocks of steps.
  template <class Work>
  static void for_each_block(const Steps& t, Work work) {
    for (int64_t first = 0; first < t.count; first += kBlockSteps) work(first, std::min(first + kBlockSteps, t.count));
  }
  static void share_maxima(const Steps& t, Vector (&m)[4]) {
    if (t.kind == Kind::columns) return;
    std::fill_n(m, 4, broadcast_as(largest_of(max_as(max_as(m[0], m[1]), max_as(m[2], m[3])))));
  }
  // The maxima, the sums of exponentials, and their moments, block by block.
  void reduce_blocks(const Steps& t, State& s) const {
    for_each_block(t, [&](int64_t first, int64_t last) {
      Vector top[4], base[4], sums[4], moments[4];
      clear(sums), clear(moments);
      for (int k = 0; k < 4; ++k) top[k] = s.m[k];
      pass<Pass::maxima>(t, first, last, nullptr, top, nullptr);
      share_maxima(t, top);
      for (int k = 0; k < 4; ++k) base[k] = finite_or<A>(top[k], Vector{});
      if (first > 0) rescale(s, base);
      for (int k = 0; k < 4; ++k) s.m[k] = top[k];
      add_exps(t, first, last, base, sums, moments);
      s.l.add(sums);
      if (p.has_entropy) s.moment.add(moments);
    });
  }
  // Reduces neighbouring rows, or the parts of one row, with any number of steps. `rows`: the number of lanes that have
  // a row.
  void reduce(const Steps& t, int64_t rows, State& s) const {
    get_references(t, s.reference);
    for_each_block(t, [&](int64_t first, int64_t last) {
      Vector sums[4];
      clear(sums);
      if (has_spread()) sum_spread(t, first, last, s.reference, sums), s.spread.add(sums);
      if constexpr (kReadsOnce) {
        if (!p.has_entropy) pass<Pass::whole>(t, first, last, s.reference, s.m, sums), s.l.add(sums);
      }
    });
    if (!kReadsOnce || p.has_entropy) return reduce_blocks(t, s);
    share_maxima(t, s.m);
    relate(s.m, s.reference, rows, s.l, [&] {
      State other;
      clear(other);
      reduce_blocks(t, other);
      return other.l;
    });
  }
};

}  // namespace

}  // namespace onepass::ONEPASS_ISA
