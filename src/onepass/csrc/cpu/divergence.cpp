// divergence.cpp: the plans of divergences, the terms of their rows, and their gradients, compiled once per instruction
// set (ONEPASS_ISA is its name and namespace).
//
// The lanes of a vector are classes of a row, or neighbouring rows. Vectors of a row are computed in place if they are
// contiguous in all tensors. In all other cases they are first copied to the scratch memory, a block at a time.
#include "../core/batch_invariant.h"
#include "divergence_rows.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kShortTerms = 128;  // the most classes of a row that is a lane, however it lies in memory
constexpr int64_t kShortGrads = 31;   // the same for gradients

// Scores minus a number, from elements. Forward and backward round in the same way.
ONEPASS_INLINE Vec relative(Vec x, float factor, Vec to) { return fmadd(x, broadcast(factor), -to); }
ONEPASS_INLINE V<double> relative(V<double> x, double factor, V<double> to) { return x * factor - to; }

// Terms ---------------------------------------------------------------------------------------------------------------

ONEPASS_INLINE float largest_of(Vec v) { return reduce_max(v); }
inline double largest_of(V<double> v) {
  double most = v[0];
  for (int j = 1; j < kLanes<double>; ++j) most = v[j] > most ? v[j] : most;
  return most;
}
template <class Vector, int K>
ONEPASS_INLINE Vector sum_of(const Vector (&v)[K]) {
  if constexpr (K == kTogether) return (v[0] + v[1]) + (v[2] + v[3]);
  return v[0];
}

// Returns vectors of A. If the elements have another type, the vectors are written to `to`. With kTops, `top` becomes
// the maximum of itself and of the scores.
template <bool kTops, class T, class A = Acc<T>>
__attribute__((noinline)) const A* widen(const Run& run, const T* from, A factor, A* to, V<A>& top) {
  using Vectors = DivergenceVectors<T>;
  constexpr bool writes = !std::is_same_v<A, T>;
  constexpr int L = kLanes<A>;
  if constexpr (!kTops && !writes) return from;
  V<A> most[kTogether];
  std::fill_n(most, kTogether, top);
  Vectors::for_each(run, [&, from, factor, to](int64_t i, auto& v, int64_t count) __attribute__((always_inline)) {
    constexpr int K = int(sizeof v / sizeof *v);
    Vectors::load(from + i * L, v, count);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      if constexpr (writes) store_as(to + (i + k) * L, v[k]);
      if constexpr (!kTops) continue;
      v[k] *= factor;
      if constexpr (K == 1) v[0] = keep_lanes(v[0], count, -kInf<A>);
      most[k] = max_as(v[k], most[k]);
    }
  });
  top = max_as(max_as(most[0], most[1]), max_as(most[2], most[3]));
  if constexpr (writes) return to;
  if constexpr (!writes) return from;
}

// The sums of rows, one row per lane, or of the parts of one row. A is the type of scores.
template <class A>
struct DivergenceSums {
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;

  // A sum in each lane, with the rounding errors of the additions of blocks.
  struct Sum {
    Vector sum, error;
    ONEPASS_INLINE void add(Vector v) { add_compensated(sum, error, v); }
    ONEPASS_INLINE void multiply(Vector v) { sum *= v, error *= v; }
    Vector value() const { return sum - sum == Vector{} ? sum + error : sum; }
  };
  // m: the maxima of s and r. l and other: the sums of exponentials of s and r, relative to these maxima. moment: the
  // sum of exponentials times (s - r), each minus its maximum. For a cross-entropy, other is the sum of shares, and
  // moment the sum of shares times (s minus its maximum).
  Vector m[2];
  Sum l, moment, other;

  void clear() {
    m[0] = m[1] = broadcast_as(-kInf<A>);
    l = moment = other = Sum{};
  }
  // Makes the sums relative to other maxima.
  template <bool kKl, class Exp>
  ONEPASS_INLINE void rescale(const Vector (&base)[2]) {
    Vector shift[2], scale[2];
    for (int k = 0; k < 2; ++k) scale[k] = shift[k] = m[k] - base[k];
    Exp::exp_of(scale);
    if constexpr (kKl) {
      // If an exponential becomes 0, so do sums that were infinite because of it.
      const Vector moved = l.sum == A(0) ? Vector{} : l.sum * (shift[0] - shift[1]);
      moment.sum = scale[0] == A(0) ? Vector{} : (moment.sum + moved) * scale[0];
      moment.error = scale[0] == A(0) ? Vector{} : moment.error * scale[0];
      other.multiply(scale[1]);
    } else {
      moment.sum += other.sum == A(0) ? Vector{} : other.sum * shift[0];
    }
    l.multiply(scale[0]);
  }
  // Adds a run of elements of x and of y (or shares), given the maxima of all scores so far. `ahead`: if not null, as
  // many elements from there on are prefetched.
  template <bool kKl, class Exp, class T>
  __attribute__((noinline)) void add(const Run& run, const A* x, const A* y, A factor, const Vector (&top)[2],
                                     const T* const (&ahead)[2]) {
    using Vectors = DivergenceVectors<A>;
    Vector base[2], sums[3] = {};
    for (int k = 0; k < 2; ++k) base[k] = finite_or<A>(top[k], Vector{});
    if (run.first > 0) rescale<kKl, Exp>(base);
    for (int k = 0; k < 2; ++k) m[k] = top[k];
    const T *const next_x = ahead[0], *const next_y = ahead[1];
    Vectors::for_each(run, [&](int64_t i, auto& v, int64_t count) __attribute__((always_inline)) {
      constexpr int K = int(sizeof v / sizeof *v);
      if (K > 1 && next_x) {
        DivergenceVectors<T>::fetch(next_x + i * L, K), DivergenceVectors<T>::fetch(next_y + i * L, K);
      }
      Vector e[K], w[K], product[K];
      Vectors::load(x + i * L, v, count), Vectors::load(y + i * L, w, count);
      for (int k = 0; k < K; ++k) {
        v[k] = relative(v[k], factor, base[0]);
        if constexpr (K == 1) v[k] = keep_lanes(v[k], count, -kInf<A>);
        e[k] = v[k];
      }
      Exp::exp_of(e);
      sums[0] += sum_of(e);
      if constexpr (kKl) {
        for (int k = 0; k < K; ++k) {
          w[k] = relative(w[k], factor, base[1]);
          if constexpr (K == 1) w[k] = keep_lanes(w[k], count, -kInf<A>);
          product[k] = e[k] == A(0) ? Vector{} : e[k] * (v[k] - w[k]);
        }
        Exp::exp_of(w);
      } else {
        if constexpr (K == 1) v[0] = keep_lanes(v[0], count, A(0)), w[0] = keep_lanes(w[0], count, A(0));
        for (int k = 0; k < K; ++k) product[k] = w[k] * v[k];
      }
      sums[1] += sum_of(product);
      sums[2] += sum_of(w);
    });
    l.add(sums[0]), moment.add(sums[1]), other.add(sums[2]);
  }

  // Adds the products of a run; only their sum is needed.
  template <class From, class T>
  __attribute__((noinline)) void add_products(const Run& run, const From* x, const From* y,
                                              const T* const (&ahead)[2]) {
    using Vectors = DivergenceVectors<From>;
    Vector products = {};
    const T *const next_x = ahead[0], *const next_y = ahead[1];
    Vectors::for_each(run, [&](int64_t i, auto& v, int64_t count) __attribute__((always_inline)) {
      constexpr int K = int(sizeof v / sizeof *v);
      if (K > 1 && next_x) {
        DivergenceVectors<T>::fetch(next_x + i * L, K), DivergenceVectors<T>::fetch(next_y + i * L, K);
      }
      Vector w[K];
      Vectors::load(x + i * L, v, count), Vectors::load(y + i * L, w, count);
      for (int k = 0; k < K; ++k) v[k] *= w[k];
      if constexpr (K == 1) v[0] = keep_lanes(v[0], count, A(0));
      products += sum_of(v);
    });
    moment.add(products);
  }

  // Merges the lanes of each row's sum into one lane.
  template <class Get>
  static Sum to_lanes(Get get) {
    Sum to;
    if constexpr (std::is_same_v<A, float>) {
      Vector sums[L], errors[L];
      for (int j = 0; j < L; ++j) sums[j] = get(j).sum, errors[j] = get(j).error;
      const CompensatedVec total = transpose_sum(sums, errors);
      to.sum = total.sum, to.error = total.error;
    } else {
      for (int j = 0; j < L; ++j) {
        const Sum of = get(j);
        Compensated total;
        for (int k = 0; k < L; ++k) total.add(of.sum[k]), total.error += of.error[k];
        to.sum[j] = total.sum, to.error[j] = total.error;
      }
    }
    return to;
  }
  static __attribute__((noinline)) DivergenceSums of_rows(const DivergenceSums (&rows)[L]) {
    DivergenceSums to;
    for (int k = 0; k < 2; ++k) {
      for (int j = 0; j < L; ++j) to.m[k][j] = rows[j].m[k][0];
    }
    to.l = to_lanes([&](int j) { return rows[j].l; });
    to.moment = to_lanes([&](int j) { return rows[j].moment; });
    to.other = to_lanes([&](int j) { return rows[j].other; });
    return to;
  }
  // log l as two numbers; NaN if m is infinite.
  static void logarithm(const Sum& l, Vector m, Vector& high, Vector& low) {
    low = Vector{};
    if constexpr (std::is_same_v<A, float>) {
      const HighLow log = log_high_low({l.sum, l.error});
      high = log.high, low = log.low;
    } else {
      high = ForwardTile<ReduceEpilogue, A>::logarithm(l.sum, l.error);
    }
    high = m - m == Vector{} ? high : broadcast_as(kNan<A>);
  }
  // Writes the terms of rows; each lane is one row.
  __attribute__((noinline)) void write(const DivergenceProblem& p, int64_t row, int64_t count) const {
    const auto put = [&](int64_t number, Vector v) {
      A* const to = static_cast<A*>(p.terms) + number * p.rows + row;
      count == L ? store_as(to, v) : void(std::memcpy(to, &v, size_t(count) * sizeof(A)));
    };
    Vector high[2], low[2];
    if (p.is_product) return put(0, moment.value());
    logarithm(l, m[0], high[0], low[0]);
    put(0, m[0]), put(1, high[0]);
    if (p.is_kl) {
      logarithm(other, m[1], high[1], low[1]);
      put(2, moment.value() / l.value() - ((high[0] - high[1]) + (low[0] - low[1])));
      put(3, m[1]), put(4, high[1]);
    } else {
      put(2, other.value() * high[0] - moment.value()), put(3, other.value());
    }
  }
};

template <class T>
struct DivergenceForward : DivergenceRows<T> {
  using Base = DivergenceRows<T>;
  using Base::L, Base::p, Base::plan, Base::factor;
  using typename Base::A, typename Base::P, typename Base::Tile, typename Base::Vector;
  using Sums = DivergenceSums<A>;
  const T *const x = static_cast<const T*>(p.x), *const y = static_cast<const T*>(p.y);
  using Base::Base;

  // Adds a run of a row, or of a group of rows. `ahead`: the elements to prefetch, if any.
  template <class From>
  void add(const Run& run, const From* of_x, const From* of_y, const T* const (&ahead)[2], Sums& sums) const {
    if (p.is_product) return sums.add_products(run, of_x, of_y, ahead);
    Vector top[2] = {sums.m[0], sums.m[1]};
    A *const to_x = this->copy_of(P::kOfX), *const to_y = this->copy_of(P::kOfY);
    const A* const wide_x = widen<true>(run, of_x, factor, to_x, top[0]);
    const A* const wide_y =
        p.is_kl ? widen<true>(run, of_y, factor, to_y, top[1]) : widen<false>(run, of_y, factor, to_y, top[1]);
    if (!run.in_columns) {
      for (Vector& each : top) each = broadcast_as(largest_of(each));
    }
    p.is_kl ? sums.template add<true, LossRows<A>>(run, wide_x, wide_y, factor, top, ahead)
            : sums.template add<false, LossRows<T>>(run, wide_x, wide_y, factor, top, ahead);
  }
  void columns(const Tile& tile) const {
    Sums sums[kGroups];
    for (int64_t j = 0; j < tile.rows; j += L) sums[j / L].clear();
    const bool fetches = rows_are_adjacent(p, plan, P::kOfX) && rows_are_adjacent(p, plan, P::kOfY);
    this->for_each_block(tile, [&](const Run& run) {
      this->with_copies(run, tile, 0, [&](const Run& group, int64_t j, const A* of_x, const A* of_y) {
        const int64_t size = group.rows * p.n;
        const T* const next_x = fetches ? tile.at(P::kOfX, x, j) + size : nullptr;
        const T* const next_y = fetches ? tile.at(P::kOfY, y, j) + size : nullptr;
        add(group, of_x, of_y, {next_x, next_y}, sums[j / L]);
      });
    });
    for (int64_t j = 0; j < tile.rows; j += L) {
      sums[j / L].write(p, tile.row + j, std::min<int64_t>(L, tile.rows - j));
    }
  }
  void rows(const Tile& tile) const {
    Sums sums[L];
    for (Sums& each : sums) each.clear();
    for (int64_t j = 0; j < tile.rows; ++j) {
      const T *const row_x = tile.at(P::kOfX, x, j), *const row_y = tile.at(P::kOfY, y, j);
      this->for_each_block(tile, [&](const Run& run) {
        if (this->is_here) {
          const auto [first, last, in_columns, rows] = run;
          return add(run, row_x + first, row_y + first, {row_x + last, row_y + last}, sums[j]);
        }
        this->with_copies(run, tile, j, [&](const Run& row, int64_t, const A* of_x, const A* of_y) {
          add(row, of_x, of_y, {}, sums[j]);
        });
      });
    }
    Sums::of_rows(sums).write(p, tile.row, tile.rows);
  }
  void run(int64_t begin, int64_t end) const {
    this->for_each_tile(begin, end, [&](const Tile& tile) { plan.in_columns ? columns(tile) : rows(tile); });
  }
};

// Gradients -----------------------------------------------------------------------------------------------------------

// The numbers that gradients are computed from, one row per lane.
template <class A>
struct DivergenceNumbers {
  V<A> m, log_l, g;
  // For the KL divergence: m and log l of r, and the mean of s - r, each minus its maximum. For a cross-entropy: the
  // factor of p, and the weighted factor of s - lse.
  V<A> a, b, c;

  DivergenceNumbers(const DivergenceProblem& p, int64_t row, int64_t count) {
    const auto get = [&](const void* planes, int64_t number) {
      V<A> v[1];
      DivergenceVectors<A>::load(static_cast<const A*>(planes) + number * p.rows + row, v, count);
      return v[0] == v[0] ? v[0] : broadcast_as(kNan<A>);  // pairs of vectors need the NaNs of arithmetic
    };
    const A factor = A(p.factor);
    m = get(p.terms, 0);
    if (p.is_product) {
      log_l = g = a = b = c = V<A>{};
      return;
    }
    log_l = get(p.terms, 1), g = get(p.grads, 2) * factor;
    if (p.is_kl) {
      a = get(p.terms, 3), b = get(p.terms, 4), c = get(p.terms, 2) + (log_l - b);
    } else {
      a = g * get(p.terms, 3) + get(p.grads, 1) * factor, b = get(p.grads, 2) * A(p.smoothing - 1), c = V<A>{};
    }
  }
  // The numbers of one row, in all lanes.
  DivergenceNumbers of_row(int64_t row) const {
    DivergenceNumbers to = *this;
    for (V<A>* each : {&to.m, &to.log_l, &to.g, &to.a, &to.b, &to.c}) *each = broadcast_as(A((*each)[row]));
    return to;
  }
};

// Elements, and where their gradients are written, if they are asked for.
template <class T>
struct Operands {
  const T *x, *y;
  T *dx, *dy;
};

// Writes gradients of the elements of `operands`. y has logits or shares. `ahead`: distance in elements to what is
// prefetched.
template <bool kKl, class T, class A = Acc<T>>
__attribute__((noinline)) void write_gradients(const Run& run, const Operands<T>& operands, A factor,
                                               const DivergenceNumbers<A>& numbers, int64_t ahead, bool streaming) {
  using Vectors = DivergenceVectors<T>;
  using Exp = LossRows<T>;
  const Operands<T> o = operands;
  const DivergenceNumbers<A> of = numbers;
  Vectors::for_each(run, [=](int64_t i, auto& v, int64_t count) __attribute__((always_inline)) {
    constexpr int K = int(sizeof v / sizeof *v);
    const int64_t at = i * kLanes<A>;
    Vectors::fetch(o.x + at + ahead, K), Vectors::fetch(o.y + at + ahead, K);
    V<A> w[K], u[K];
    Vectors::load(o.x + at, v, count), Vectors::load(o.y + at, w, count);
    if constexpr (kKl) {
      for (int k = 0; k < K; ++k) v[k] = relative(v[k], factor, of.m), w[k] = relative(w[k], factor, of.a);
      for (int k = 0; k < K; ++k) u[k] = (v[k] - w[k]) - of.c;
      for (int k = 0; k < K; ++k) v[k] -= of.log_l, w[k] -= of.b;
      Exp::exp_of(v);
      if (o.dx) {
        for (int k = 0; k < K; ++k) u[k] = v[k] == A(0) ? V<A>{} : of.g * v[k] * u[k];
        Vectors::store(o.dx + at, u, count, streaming);
      }
      if (!o.dy) return;
      Exp::exp_of(w);
      for (int k = 0; k < K; ++k) w[k] = of.g * (w[k] - v[k]);
      Vectors::store(o.dy + at, w, count, streaming);
    } else {
      for (int k = 0; k < K; ++k) v[k] = relative(v[k], factor, of.m) - of.log_l;
      if (o.dy) {
        for (int k = 0; k < K; ++k) u[k] = v[k] * of.b;
        Vectors::store(o.dy + at, u, count, streaming);
      }
      if (!o.dx) return;
      Exp::exp_of(v);
      for (int k = 0; k < K; ++k) v[k] = v[k] * of.a - w[k] * of.g;
      Vectors::store(o.dx + at, v, count, streaming);
    }
  });
}

// Writes gradients of products, whose sum is m.
template <class T, class A = Acc<T>>
__attribute__((noinline)) void write_products(const Run& run, const Operands<T>& operands, V<A> m, int64_t ahead,
                                              bool streaming) {
  using Vectors = DivergenceVectors<T>;
  const Operands<T> o = operands;
  Vectors::for_each(run, [=](int64_t i, auto& v, int64_t count) __attribute__((always_inline)) {
    constexpr int K = int(sizeof v / sizeof *v);
    const int64_t at = i * kLanes<A>;
    Vectors::fetch(o.x + at + ahead, K), Vectors::fetch(o.y + at + ahead, K);
    V<A> w[K];
    Vectors::load(o.x + at, v, count), Vectors::load(o.y + at, w, count);
    for (int k = 0; k < K; ++k) v[k] *= w[k] - m;
    Vectors::store(o.dx + at, v, count, streaming);
  });
}

template <class T>
struct DivergenceBackward : DivergenceRows<T> {
  using Base = DivergenceRows<T>;
  using Base::p, Base::plan, Base::factor;
  using typename Base::A, typename Base::P, typename Base::Tile, typename Base::Extras;
  using Numbers = DivergenceNumbers<A>;
  const T *const x = static_cast<const T*>(p.x), *const y = static_cast<const T*>(p.y);
  T *const dx = static_cast<T*>(p.dx), *const dy = static_cast<T*>(p.dy);
  using Base::Base;

  template <class From>
  void write_run(const Run& run, const Operands<From>& operands, const Numbers& numbers, int64_t ahead,
                 bool streaming) const {
    if (p.is_product) return write_products(run, operands, numbers.m, ahead, streaming);
    p.is_kl ? write_gradients<true>(run, operands, factor, numbers, ahead, streaming)
            : write_gradients<false>(run, operands, factor, numbers, ahead, streaming);
  }
  // All rows of a tile, or only its row j.
  void by_copies(const Tile& tile, int64_t j) const {
    this->for_each_block(tile, [&](const Run& run) {
      this->with_copies(run, tile, j, [&](const Run& group, int64_t row, A* of_x, A* of_y) {
        const Numbers numbers(p, tile.row + row, group.rows);
        const Operands<A> operands = {of_x, of_y, dx ? of_x : nullptr, dy ? of_y : nullptr};
        write_run(group, operands, group.in_columns ? numbers : numbers.of_row(0), 0, false);
        if (this->caps) Extras::multiply(group, of_x, this->slopes());
        if (!p.is_kl) Extras::multiply_by_weights(p, group, of_y);
      });
      if (dx) this->write(P::kOfDx, run, tile.offsets[P::kOfDx] + j);
      if (dy) this->write(P::kOfDy, run, tile.offsets[P::kOfDy] + j);
    });
  }
  void rows_here(const Tile& tile) const {
    const Numbers numbers(p, tile.row, tile.rows);
    for (int64_t j = 0; j < tile.rows; ++j) {
      const auto write = [&, of = numbers.of_row(j)](int64_t first, int64_t last, bool streaming) {
        const auto at = [&](int t, auto* data) { return data ? data + tile.offsets[t][j] + first : nullptr; };
        write_run<T>({first, last, false, 1}, {at(P::kOfX, x), at(P::kOfY, y), at(P::kOfDx, dx), at(P::kOfDy, dy)}, of,
                     kAhead, streaming);
      };
      // Streaming stores write whole lines.
      const auto head_of = [](const T* to) { return int64_t(-uintptr_t(to) % kLine / sizeof(T)); };
      const T *const to_x = tile.at(P::kOfDx, dx, j), *const to_y = tile.at(P::kOfDy, dy, j);
      const int64_t head = head_of(to_x ? to_x : to_y);
      if (plan.streaming && head < p.n && (!to_x || !to_y || head_of(to_y) == head)) {
        if (head > 0) write(0, head, false);
        write(head, p.n, true);
      } else {
        write(0, p.n, false);
      }
    }
  }
  void run(int64_t begin, int64_t end) const {
    this->for_each_tile(begin, end, [&](const Tile& tile) {
      if (this->is_here) return rows_here(tile);
      if (plan.in_columns) return by_copies(tile, 0);
      for (int64_t j = 0; j < tile.rows; ++j) by_copies(tile, j);
    });
    if (plan.streaming) fence_streaming_stores();
  }
};

// Whether streaming stores would write almost only whole lines of a result.
bool is_in_lines(const DivergenceProblem& p, const DivergencePlan& plan, int t) {
  const void* const to = t == p.kOfDx ? p.dx : p.dy;
  const int64_t line = kLine / size_of(p.type);
  if (!to) return true;
  if (p.steps[t] == 1) return plan.in_columns ? rows_are_adjacent(p, plan, t) : p.n % line == 0 || p.n >= 48 * line;
  bool all = uintptr_t(to) % kLine == 0 && plan.in_columns && columns_are_adjacent(p, plan, t);
  for (int d = 0; d < p.dims - 1; ++d) all &= p.strides[t][d] % line == 0;
  return all && p.steps[t] % line == 0;
}

}  // namespace

DivergencePlan plan_divergence(const DivergenceProblem& p) {
  const int64_t L = int64_t(sizeof(Vec)) / size_of(p.accumulator()), size = p.dims ? p.sizes[p.dims - 1] : 1;
  bool unit_steps = true, neighbours = false;  // in all tensors; in some
  for (int t = 0; t < (p.is_backward() ? p.kTensors : 2); ++t) {
    unit_steps &= p.steps[t] == 1, neighbours |= p.dims && p.strides[t][p.dims - 1] == 1;
  }
  DivergencePlan plan;
  neighbours &= size >= L;
  const bool is_short = p.n <= (p.is_backward() ? kShortGrads : kShortTerms);
  plan.in_columns = is_short || (!unit_steps && (batch_invariant() || neighbours));
  if (plan.in_columns) {
    plan.width = neighbours ? L * std::clamp<int64_t>(ceil_div(size, 32 * L), 4, kGroups) : L;
  } else {
    plan.width = std::clamp<int64_t>(kCpuGrain / p.n, 1, L);
  }
  plan.span = plan.in_columns && neighbours ? size : p.rows;
  plan.work_items = p.rows / plan.span * ceil_div(plan.span, plan.width);
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / ceil_div(p.rows * p.n, plan.work_items));
  plan.streaming = kHasStreamingStores && p.is_backward() && p.type != DType::float64 &&
                   p.rows * p.n * size_of(p.type) >= kStreamingBytes && is_in_lines(p, plan, p.kOfDx) &&
                   is_in_lines(p, plan, p.kOfDy);
  return plan;
}

void run_divergence(const DivergenceProblem& p, const DivergencePlan& plan, int64_t begin, int64_t end) {
  dispatch_type(p.type, [&](auto type) {
    using T = TypeOf<decltype(type)>;
    p.is_backward() ? DivergenceBackward<T>(p, plan).run(begin, end) : DivergenceForward<T>(p, plan).run(begin, end);
  });
}

}  // namespace onepass::ONEPASS_ISA
