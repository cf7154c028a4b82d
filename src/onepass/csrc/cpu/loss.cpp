// loss.cpp: the plans of losses, and the numbers of rows that losses are made of, compiled once per instruction set
// (ONEPASS_ISA names it, and its namespace).
//
// A tile is four vectors wide. Its lanes are rows that are neighbours, and a step is a class; or its lanes are parts of
// one row, merged in the end, and a step is as many classes as there are lanes. Blocks of steps are read twice, the
// second time from the cache: for their maxima, and for the sums of exponentials relative to the maxima so far.
#include "../core/batch_invariant.h"
#include "loss_rows.h"

#include <stdexcept>
#include <string>

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kBlockSteps = 64;  // of a tile

// kPlain: see LossPlan.
template <class T, bool kPlain>
struct LossForward : LossRows<T> {
  using Base = LossRows<T>;
  using Base::L, Base::p, Base::plan, Base::weight, Base::plane;
  using typename Base::A, typename Base::Vector;
  static constexpr int64_t kLanesOfTile = 4 * L;

  using Base::Base;
  bool has_entropy() const { return !kPlain && p.has_entropy; }
  bool has_spread() const { return !kPlain && (p.has_spread || (p.is_cross && p.smoothing != 0)); }

  static A& lane(Vector (&v)[4], int64_t j) { return reinterpret_cast<A*>(v)[j]; }
  static ONEPASS_INLINE void clear(Vector (&v)[4]) {
#pragma GCC unroll 4
    for (Vector& each : v) each = Vector{};
  }
  // A sum per lane, with the rounding errors of the additions of blocks.
  struct Sums {
    Vector sum[4], error[4];
    ONEPASS_INLINE void add(const Vector (&v)[4]) {
      for (int k = 0; k < 4; ++k) add_compensated(sum[k], error[k], v[k]);
    }
    Vector value(int k) const { return sum[k] - sum[k] == Vector{} ? sum[k] + error[k] : sum[k]; }
  };
  // Of each lane: the sum of exponentials relative to the maximum m, that of exponentials times scores less m, and that
  // of weights times scores less the reference.
  struct State {
    Vector m[4], reference[4];
    Sums l, moment, spread;
    State() {
      clear(m), clear(reference);
      for (Sums* sums : {&l, &moment, &spread}) clear(sums->sum), clear(sums->error);
    }
  };
  struct Tile {
    const T* x;
    int64_t step, lane;                // in x, between steps and between lanes
    int64_t weight_step, weight_lane;  // in the weights
    int64_t steps, full, count;        // the first `full` steps have all lanes, the others the first `count`
    int64_t row, rows, row_stride;     // the rows that begin at x
    int64_t ahead;                     // from an element to the one that is fetched meanwhile
    Vector factor[4];
  };

  // Steps -------------------------------------------------------------------------------------------------------------

  static int64_t lanes_of(int k, int64_t count) { return std::clamp<int64_t>(count - k * L, 0, L); }
  // Four vectors, or their first `count` lanes. The other lanes are 0.
  template <class From, class... Count>
  static ONEPASS_INLINE void load(const From* from, int64_t lane, Vector (&v)[4], Count... count) {
    if constexpr (sizeof...(count) == 0) {
      load_operand<A>(from, lane, v);
    } else {
      for (int k = 0; k < 4; ++k) {
        const int64_t lanes = lanes_of(k, (count + ...));
        Vector one[1] = {};
        if (lanes == L) load_operand<A>(from + k * L * lane, lane, one);
        if (lanes > 0 && lanes < L) load_operand<A>(from + k * L * lane, lane, one, lanes);
        v[k] = one[0];
      }
    }
  }
  template <class... Count>
  ONEPASS_INLINE void load_scores(const Tile& t, int64_t step, int64_t lane, Vector (&v)[4], Count... count) const {
    load(t.x + step * t.step, kPlain ? 1 : lane, v, count...);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) v[k] *= t.factor[k];
    if constexpr (!kPlain) this->cap(v);
  }
  // Calls body(step, scores), or body(step, scores, count) where the lanes behind those of the tile are -inf.
  template <class Body>
  ONEPASS_INLINE void for_each_step(const Tile& t, int64_t first, int64_t last, Body body) const {
    Vector v[4];
    int64_t step = first;
    for (; step < std::min(last, t.full); ++step) load_scores(t, step, t.lane, v), body(step, v);
    for (; step < last; ++step) {
      load_scores(t, step, t.lane, v, t.count);
      for (int k = 0; k < 4; ++k) v[k] = keep_lanes(v[k], lanes_of(k, t.count), -kInf<A>);
      body(step, v, t.count);
    }
  }

  // Relates the sums to another finite maximum.
  ONEPASS_INLINE void rescale(State& s, const Vector (&base)[4]) const {
    Vector scale[4], shift[4];
    for (int k = 0; k < 4; ++k) shift[k] = scale[k] = s.m[k] - base[k];
    this->exp_of(scale);
    for (int k = 0; has_entropy() && k < 4; ++k) {
      const Vector moved = s.l.sum[k] == A(0) ? Vector{} : shift[k] * s.l.sum[k];
      // What vanishes may have a moment beyond the largest number.
      const Vector moment = scale[k] == A(0) ? Vector{} : (s.moment.sum[k] + moved) * scale[k];
      s.moment.sum[k] = moment, s.moment.error[k] *= scale[k];
    }
    for (int k = 0; k < 4; ++k) s.l.sum[k] *= scale[k], s.l.error[k] *= scale[k];
  }
  ONEPASS_INLINE void add_block(const Tile& t, int64_t first, int64_t last, State& s) const {
    Vector top[4], base[4], sum[4], moment[4], spread[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) top[k] = s.m[k], sum[k] = moment[k] = spread[k] = Vector{};
    for_each_step(t, first, last, [&](int64_t, const Vector(&v)[4], auto...) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) top[k] = max_as(v[k], top[k]);
    });
    for (int k = 0; k < 4; ++k) base[k] = finite_or<A>(top[k], Vector{});
    if (first > 0) rescale(s, base);
    for (int k = 0; k < 4; ++k) s.m[k] = top[k];
    for_each_step(t, first, last, [&](int64_t step, Vector(&v)[4], auto... count) __attribute__((always_inline)) {
      if (has_spread()) add_spread(t, step, v, s.reference, spread, count...);
      const char* const ahead = reinterpret_cast<const char*>(t.x + step * t.step + t.ahead);
      for (int64_t line = 0; line < 4 * L * int64_t(sizeof(T)); line += kLine) __builtin_prefetch(ahead + line);
      Vector e[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) v[k] -= base[k], e[k] = v[k];
      this->exp_of(e);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sum[k] += e[k];
      if (!has_entropy()) return;
      for (int k = 0; k < 4; ++k) moment[k] += e[k] == A(0) ? Vector{} : e[k] * v[k];
    });
    s.l.add(sum);
    if (has_entropy()) s.moment.add(moment);
    if (has_spread()) s.spread.add(spread);
  }
  template <class... Count>
  ONEPASS_INLINE void add_spread(const Tile& t, int64_t step, const Vector (&v)[4], const Vector (&reference)[4],
                                 Vector (&spread)[4], Count... count) const {
    Vector w[4];
    if (weight) load(weight + step * t.weight_step, t.weight_lane, w, count...);
    for (int k = 0; k < 4; ++k) {
      Vector term = v[k] - reference[k];
      if (weight) term *= w[k];
      if constexpr (sizeof...(count)) term = keep_lanes(term, lanes_of(k, (count + ...)), A(0));
      spread[k] += term;
    }
  }
  void reduce(const Tile& t, State& s) const {
    for (Vector& m : s.m) m = broadcast_as(-kInf<A>);
    if (has_spread()) {
      load_scores(t, 0, t.row_stride, s.reference, t.rows);
      // Not that of a class that is masked out by a large number.
      for (Vector& r : s.reference) r = (r < A(3e4)) & (r > A(-3e4)) ? r : Vector{};
      if (t.rows == 1) std::fill_n(s.reference, 4, broadcast_as(s.reference[0][0]));
    }
    for (int64_t first = 0; first < t.steps; first += kBlockSteps) {
      add_block(t, first, std::min(first + kBlockSteps, t.steps), s);
    }
  }

  // Rows --------------------------------------------------------------------------------------------------------------

  static double total_of(Vector sum, Vector error) {
    if constexpr (std::is_same_v<A, float>) return reduce_sum(to_double(sum) + to_double(error));
    double total = 0;
    for (int j = 0; j < L; ++j) total += sum[j] + error[j];
    return total;
  }
  static A largest_of(Vector v) {
    if constexpr (std::is_same_v<A, float>) return reduce_max(v);
    A most = v[0];
    for (int j = 1; j < L; ++j) most = std::max<A>(most, v[j]);
    return most;
  }
  // The sum of all lanes becomes that of a lane.
  static void merge_sums(const Sums& sums, Sums& to, int64_t row) {
    Vector sum = sums.sum[0], error = (sums.error[0] + sums.error[1]) + (sums.error[2] + sums.error[3]);
    for (int k = 1; k < 4; ++k) add_compensated(sum, error, sums.sum[k]);
    const double total = total_of(sum, sum - sum == Vector{} ? error : Vector{});
    lane(to.sum, row) = A(total), lane(to.error, row) = std::isfinite(total) ? A(total - double(A(total))) : A(0);
  }
  // The state of a row whose parts are the lanes of s becomes that of a lane.
  void merge_lanes(State& s, State& to, int64_t row) const {
    const A top = largest_of(max_as(max_as(s.m[0], s.m[1]), max_as(s.m[2], s.m[3])));
    const Vector shared = broadcast_as(finite_or_zero(top));
    rescale(s, {shared, shared, shared, shared});
    lane(to.m, row) = top, lane(to.reference, row) = s.reference[0][0];
    merge_sums(s.l, to.l, row);
    if (has_entropy()) merge_sums(s.moment, to.moment, row);
    if (has_spread()) merge_sums(s.spread, to.spread, row);
  }
  // Writes make(k), vectors of a number per row.
  template <class To, class Make>
  ONEPASS_INLINE void write(To* to, int64_t rows, Make make) const {
    for (int k = 0; k * L < rows; ++k) {
      const Vector v = make(k);
      const int64_t lanes = lanes_of(k, rows);
      if constexpr (std::is_same_v<A, float>) {
        lanes == L ? store_vector<true>(to + k * L, v) : store_tail<true>(to + k * L, lanes, v);
      } else {
        for (int64_t j = 0; j < lanes; ++j) to[k * L + j] = v[j];
      }
    }
  }
  // lse - s of a class of each row, and 0 where the class is not to be looked at.
  void picks_of(const Tile& t, const State& s, const Vector* log_l, int64_t pick, Vector (&picks)[4]) const {
    clear(picks);
    const int64_t* const index = p.index + t.row * p.picks + pick;
    const int64_t each = p.picks, step = p.x_step;
    const int64_t ignored = p.is_cross ? p.ignore_index : -1;  // otherwise none is
    const T* x = t.x;
    for (int64_t j = 0; j < t.rows; ++j, x += t.row_stride) {
      const int64_t at = index[j * each];
      lane(picks, j) = to_acc(x[at == ignored ? 0 : at * step]);
    }
    for (int k = 0; k < 4; ++k) picks[k] *= t.factor[k];
    if constexpr (!kPlain) this->cap(picks);
    for (int k = 0; k * L < t.rows; ++k) picks[k] = log_l[k] - (picks[k] - s.m[k]);
  }
  Vector spread_of(const State& s, const Vector* log_l, int k) const {
    return this->weight_sum * ((s.m[k] - s.reference[k]) + log_l[k]) - s.spread.value(k);
  }
  void write_rows(const Tile& t, const State& s) const {
    Vector log_l[4], picks[4];
    for (int k = 0; k * L < t.rows; ++k) {
      log_l[k] = ForwardTile<ReduceEpilogue, A>::logarithm(s.l.sum[k], s.l.error[k]);
      log_l[k] = s.m[k] - s.m[k] == Vector{} ? log_l[k] : broadcast_as(kNan<A>);
    }
    const auto put = [&](int64_t number, auto make) { write(plane(number, t.row), t.rows, make); };
    put(0, [&](int k) { return s.m[k]; });
    put(1, [&](int k) { return log_l[k]; });
    if (p.is_cross) return write_losses(t, s, log_l);
    if (p.has_spread) put(p.spread_plane(), [&](int k) { return spread_of(s, log_l, k); });
    if (p.has_entropy) {
      put(p.entropy_plane(), [&](int k) { return log_l[k] - s.moment.value(k) / s.l.value(k); });
    }
    for (int64_t pick = 0; pick < p.picks; ++pick) {
      picks_of(t, s, log_l, pick, picks);
      put(p.first_pick_plane() + pick, [&](int k) { return picks[k]; });
    }
  }
  void write_losses(const Tile& t, const State& s, const Vector* log_l) const {
    Vector losses[4], factors[4], counts[4];
    picks_of(t, s, log_l, 0, losses);
    std::fill_n(factors, 4, broadcast_as(A(1))), std::fill_n(counts, 4, broadcast_as(A(1)));
    const bool ignores = this->ignores(t.row, t.rows);
    for (int64_t j = 0; ignores && j < t.rows; ++j) lane(counts, j) = !this->is_ignored(t.row + j);
    for (int64_t j = 0; weight && j < t.rows; ++j) {
      if (!this->is_ignored(t.row + j)) lane(factors, j) = weight[p.index[t.row + j]];
    }
    for (int k = 0; k * L < t.rows; ++k) {
      const Vector lse = s.m[k] + log_l[k];
      losses[k] *= factors[k] * (1 - this->smoothing);
      if (has_spread()) losses[k] += spread_of(s, log_l, k) * A(p.smoothing / double(p.n));
      if (p.z_loss != 0) losses[k] += lse * lse * this->z_loss;
      losses[k] = counts[k] != A(0) ? losses[k] : Vector{};
    }
    const auto loss = [&](int k) { return losses[k]; };
    write(plane(2, t.row), t.rows, loss);
    if (!p.result) return;
    if (p.is_wide) return write(static_cast<A*>(p.result) + t.row, t.rows, loss);
    write(static_cast<T*>(p.result) + t.row, t.rows, loss);
  }

  Tile tile_of(int64_t row, int64_t rows) const {
    Tile t = {};
    t.x = static_cast<const T*>(p.x) + this->offset_of(row, p.x_strides);
    t.row = row, t.rows = rows, t.row_stride = this->last_stride(p.x_strides);
    std::fill_n(t.factor, 4, broadcast_as(this->factor_of(row)));
    for (int64_t j = 1; this->scale && j < rows; ++j) lane(t.factor, j) = this->factor_of(row + j);
    return t;
  }
  // The rows of a tile, one per lane.
  void reduce_columns(const Tile& rows, State& s) const {
    Tile t = rows;
    t.step = p.x_step, t.lane = t.row_stride, t.weight_step = 1, t.ahead = kLanesOfTile;
    t.steps = p.n, t.count = t.rows, t.full = t.count == kLanesOfTile ? t.steps : 0;
    if (t.lane != 1 && p.n <= kShortRow) {
      T* const copy = reinterpret_cast<T*>(scratch());
      this->copy_rows(t.x, t.lane, t.step, copy, 1, kLanesOfTile, t.rows, p.n);
      t.x = copy, t.step = kLanesOfTile, t.lane = t.row_stride = 1;
    }
    reduce(t, s);
  }
  // One row after another.
  void reduce_rows(const Tile& rows, State& s) const {
    for (int64_t j = 0; j < rows.rows; ++j) {
      Tile t = rows;
      State parts;
      t.x += j * t.row_stride, t.row += j, t.rows = 1;
      std::fill_n(t.factor, 4, broadcast_as(lane(t.factor, j)));
      t.step = kLanesOfTile * p.x_step, t.lane = p.x_step, t.weight_step = kLanesOfTile, t.weight_lane = 1;
      t.full = p.n / kLanesOfTile, t.steps = ceil_div(p.n, kLanesOfTile), t.count = p.n % kLanesOfTile;
      t.ahead = kBlockSteps * t.step;
      reduce(t, parts);
      merge_lanes(parts, s, j);
    }
  }
  void run(int64_t begin, int64_t end) const {
    for (int64_t item = begin; item < end; ++item) {
      const auto rows = this->tile(item);
      const Tile t = tile_of(rows.row, rows.count);
      State s;
      plan.in_columns ? reduce_columns(t, s) : reduce_rows(t, s);
      write_rows(t, s);
    }
  }
};

void check_classes(const LossProblem& p) {
  const int64_t count = p.rows * p.picks, ignored = p.is_cross ? p.ignore_index : 0;
  const int64_t* const index = p.index;
  const uint64_t classes = uint64_t(p.n);
  int64_t is_wrong = 0;
#pragma omp simd reduction(| : is_wrong)
  for (int64_t i = 0; i < count; ++i) is_wrong |= (uint64_t(index[i]) >= classes) & (index[i] != ignored);
  for (int64_t i = 0; is_wrong; ++i) {
    if (uint64_t(p.index[i]) < uint64_t(p.n) || p.index[i] == ignored) continue;
    throw std::runtime_error("onepass: class " + std::to_string(p.index[i]) + " is out of range for " +
                             std::to_string(p.n) + " classes");
  }
}

// Whether streaming stores write whole lines of the gradient, but for a few.
bool is_in_lines(const LossProblem& p, bool in_columns) {
  const int64_t size = size_of(p.type), line = kLine / size, run = p.n * size;
  if (!in_columns || p.dims == 0) return p.dx_step == 1 && (run % kLine == 0 || run >= 16 * kLine);
  bool all = uintptr_t(p.dx) % kLine == 0 && p.dx_step % line == 0 && p.dx_strides[p.dims - 1] == 1;
  for (int d = 0; d < p.dims - 1; ++d) all &= p.dx_strides[d] % line == 0;
  return all;
}

}  // namespace

LossPlan plan_loss(const LossProblem& p) {
  check_classes(p);
  const int64_t L = int64_t(sizeof(Vec)) / size_of(p.accumulator()), size = p.dims ? p.sizes[p.dims - 1] : 1;
  const int64_t stride = p.dims ? p.x_strides[p.dims - 1] : 0, bytes = p.rows * p.n * size_of(p.type);
  LossPlan plan;
  const bool is_short = p.n <= (p.is_backward() ? short_grad_row(size_of(p.type)) : kShortRow);
  plan.in_columns = is_short || (p.x_step != 1 && stride == 1);
  if (batch_invariant()) {
    plan.in_columns = is_short || p.x_step != 1;
  } else if (size < L) {
    plan.in_columns = false;
  }
  const int64_t most = p.is_backward() ? kLossColumns : 4 * L;
  if (!plan.in_columns && p.is_backward() && p.n > kLossChunk) {
    plan.per_dim = ceil_div(p.n, kLossChunk), plan.work_items = p.rows * plan.per_dim;
  } else {
    plan.width = plan.in_columns ? most : std::clamp<int64_t>(kCpuGrain / p.n, 1, most);
    plan.per_dim = ceil_div(size, plan.width), plan.work_items = p.rows / size * plan.per_dim;
  }
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / ceil_div(p.rows * p.n, plan.work_items));
  plan.is_plain = (plan.in_columns ? stride == 1 || is_short : p.x_step == 1) && p.softcap == 0 && !p.has_entropy &&
                  !p.has_spread && (p.smoothing == 0 || (p.is_backward() && !p.weight));
  plan.streaming = kHasStreamingStores && p.is_backward() && p.dx != p.x && bytes >= kStreamingBytes &&
                   is_in_lines(p, plan.in_columns);
  return plan;
}

void run_loss(const LossProblem& p, const LossPlan& plan, int64_t begin, int64_t end) {
  if (p.is_backward()) return run_loss_backward(p, plan, begin, end);
  dispatch_type(p.type, [&](auto type) {
    using T = TypeOf<decltype(type)>;
    plan.is_plain ? LossForward<T, true>(p, plan).run(begin, end) : LossForward<T, false>(p, plan).run(begin, end);
  });
}

}  // namespace onepass::ONEPASS_ISA
