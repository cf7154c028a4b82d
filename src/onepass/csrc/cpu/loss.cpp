// loss.cpp: the plans of losses, and the numbers per row that losses are computed from, compiled once per instruction
// set (ONEPASS_ISA is its name and namespace).
//
// Rows go through the passes of loss_steps.h in one of three ways, and the lanes of each row are merged. Then the
// numbers are written, or the losses that follow from them.
#include "../core/batch_invariant.h"
#include "loss_steps.h"

#include <stdexcept>
#include <string>

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kFetched = 2048;  // in rows: distance in elements to what is prefetched
constexpr int64_t kRowSteps = 128;  // the most steps of a row that is computed with others; a step is one vector

template <class T>
struct LossForward : LossSteps<T> {
  using Base = LossSteps<T>;
  using Base::L, Base::kLanesOfTile, Base::kReadsOnce, Base::p, Base::plan, Base::weight, Base::plane;
  using Base::lanes_of, Base::largest_of, Base::clear, Base::has_spread;
  using Base::reduce, Base::relate, Base::add_exps, Base::sum_spread, Base::get_references;
  using typename Base::A, typename Base::Vector, typename Base::Sums, typename Base::State, typename Base::Steps;
  using typename Base::Kind, typename Base::Pass;

  using Base::Base;

  static A& lane(Vector (&v)[4], int64_t j) { return reinterpret_cast<A*>(v)[j]; }
  struct Tile {
    int64_t row, rows, row_stride, step;  // neighbouring rows that begin at x; step: from class to class
    const T* x;
    Vector factor[4];  // of each row
  };
  T* const copy = reinterpret_cast<T*>(scratch());  // of short rows

  // Lanes -------------------------------------------------------------------------------------------------------------

  static Vector largest_of_each(const Vector* rows) {
    Vector each;
    if constexpr (std::is_same_v<A, float>) {
      Vector v[L];
#pragma GCC unroll 16
      for (int j = 0; j < L; ++j) v[j] = rows[j];
      return transpose_reduce(v, max);
    }
    for (int j = 0; j < L; ++j) each[j] = largest_of(rows[j]);
    return each;
  }
  // Merges the lanes of each row's sum into one lane.
  static void merge_lanes(const Vector* rows, int64_t count, Sums& to) {
    for (int64_t k = 0; k * L < count; ++k, rows += L) {
      if constexpr (std::is_same_v<A, float>) {
        Vector sums[L], errors[L];
#pragma GCC unroll 16
        for (int j = 0; j < L; ++j) sums[j] = rows[j], errors[j] = Vector{};
        const CompensatedVec total = transpose_sum(sums, errors);
        to.sum[k] = total.sum, to.error[k] = total.error;
      } else {
        for (int j = 0; j < L; ++j) {
          Compensated total;
          for (int i = 0; i < L; ++i) total.add(rows[j][i]);
          to.sum[k][j] = total.sum, to.error[k][j] = total.error;
        }
      }
    }
  }
  // Merges the parts of a row's sum into one lane.
  static void merge_parts(const Sums& parts, Sums& to, int64_t row) {
    Vector sum = parts.sum[0], error = (parts.error[0] + parts.error[1]) + (parts.error[2] + parts.error[3]);
    for (int k = 1; k < 4; ++k) add_compensated(sum, error, parts.sum[k]);
    Compensated total;
    for (int j = 0; j < L; ++j) total.add(sum[j]), total.error += error[j];
    const double whole = total.value();
    lane(to.sum, row) = A(whole), lane(to.error, row) = std::isfinite(whole) ? A(whole - double(A(whole))) : A(0);
  }

  // Numbers of rows ---------------------------------------------------------------------------------------------------

  // Writes make(k), which are vectors with one number per row.
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
  // lse - s of a class of each row; for ignored classes the value is not used.
  void picks_of(const Tile& t, const State& s, const Vector* log_l, int64_t pick, Vector (&picks)[4]) const {
    clear(picks);
    const int64_t* const index = p.index + t.row * p.picks + pick;
    const int64_t each = p.picks, step = t.step;
    const int64_t ignored = p.is_cross ? p.ignore_index : -1;  // otherwise no class is ignored
    const T* x = t.x;
    for (int64_t j = 0; j < t.rows; ++j, x += t.row_stride) {
      const int64_t at = index[j * each];
      lane(picks, j) = to_acc(x[at == ignored ? 0 : at * step]);
    }
    for (int k = 0; k < 4; ++k) picks[k] *= t.factor[k];
    this->cap(picks);
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

  // Work items --------------------------------------------------------------------------------------------------------

  const T* x_of(int64_t row) const { return static_cast<const T*>(p.x) + this->offset_of(row, p.x_strides); }
  Tile tile_of(int64_t row, int64_t rows) const {
    Tile t;
    t.x = x_of(row);
    t.row = row, t.rows = rows, t.row_stride = this->last_stride(p.x_strides), t.step = p.x_step;
    std::fill_n(t.factor, 4, broadcast_as(this->factor_of(row)));
    for (int64_t j = 1; this->scale && j < rows; ++j) lane(t.factor, j) = this->factor_of(row + j);
    return t;
  }
  // Reduces the rows of a tile, one per lane.
  void reduce_columns(const Tile& rows, State& s) const {
    Steps t;
    t.kind = Kind::columns, t.vectors = 4, t.step = rows.step, t.lane = rows.row_stride;
    t.weight_step = 1, t.weight_vector = t.weight_lane = 0;
    t.count = p.n, t.full = rows.rows == kLanesOfTile ? t.count : 0, t.ahead = kLanesOfTile;
    for (int k = 0; k < 4; ++k) {
      t.x[k] = rows.x + k * L * t.lane, t.lanes[k] = lanes_of(k, rows.rows), t.factor[k] = rows.factor[k];
    }
    reduce(t, rows.rows, s);
  }
  Steps steps_of(Kind kind) const {
    const int64_t classes = kind == Kind::parts ? 2 * L : L;
    Steps t;
    t.kind = kind, t.vectors = 2, t.step = classes * p.x_step, t.lane = p.x_step;
    t.weight_step = classes, t.weight_vector = kind == Kind::parts ? L : 0, t.weight_lane = 1;
    t.full = p.n / classes, t.count = ceil_div(p.n, classes);
    for (int k = 0; k < 4; ++k) t.lanes[k] = kind == Kind::parts ? lanes_of(k, p.n % classes) : p.n % classes;
    return t;
  }
  // Reduces one row after another.
  void reduce_long_rows(const Tile& rows, State& s) const {
    Steps t = steps_of(Kind::parts);
    t.ahead = kFetched * p.x_step;
    for (int64_t j = 0; j < rows.rows; ++j) {
      for (int k = 0; k < 2; ++k) {
        t.x[k] = rows.x + j * rows.row_stride + k * L * p.x_step;
        t.factor[k] = broadcast_as(reinterpret_cast<const A*>(rows.factor)[j]);
      }
      State parts;
      clear(parts);
      reduce(t, 2 * L, parts);
      lane(s.m, j) = parts.m[0][0], lane(s.reference, j) = parts.reference[0][0];
      merge_parts(parts.l, s.l, j);
      if (p.has_entropy) merge_parts(parts.moment, s.moment, j);
      if (has_spread()) merge_parts(parts.spread, s.spread, j);
    }
  }
  // Reduces all rows together. In place of missing rows, the first row is read.
  void reduce_rows(const Tile& rows, State& s) const {
    Steps t = steps_of(Kind::rows);
    t.vectors = up_to(up_to(rows.rows, L), 2);
    const int64_t count = t.vectors;
    t.ahead = ceil_div(kFetched, count * p.n) * count * rows.row_stride;
    Vector tops[kLanesOfTile], bases[kLanesOfTile], sums[kLanesOfTile], moments[kLanesOfTile];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = j < rows.rows ? j : 0;
      t.x[j] = rows.x + row * rows.row_stride;
      t.factor[j] = broadcast_as(reinterpret_cast<const A*>(rows.factor)[row]), tops[j] = broadcast_as(-kInf<A>);
    }
    get_references(t, bases);
    for (int64_t j = 0; j < count; ++j) lane(s.reference, j) = bases[j][0];
    if (has_spread()) sum_spread(t, 0, t.count, bases, sums), merge_lanes(sums, count, s.spread);
    const bool at_once = kReadsOnce && !p.has_entropy;
    if constexpr (kReadsOnce) {
      if (at_once) this->template pass<Pass::whole>(t, 0, t.count, bases, tops, sums), merge_lanes(sums, count, s.l);
    }
    if (!at_once) this->template pass<Pass::maxima>(t, 0, t.count, nullptr, tops, nullptr);
    for (int64_t j = 0; j < count; j += L) s.m[j / L] = largest_of_each(tops + j);
    const auto relative_to_maxima = [&] {
      Sums of;
      clear(of.sum), clear(of.error);
      for (int64_t j = 0; j < count; ++j) bases[j] = broadcast_as(finite_or_zero(lane(s.m, j)));
      add_exps(t, 0, t.count, bases, sums, moments);
      merge_lanes(sums, count, of);
      return of;
    };
    if (at_once) return relate(s.m, s.reference, count, s.l, relative_to_maxima);
    s.l = relative_to_maxima();
    if (p.has_entropy) merge_lanes(moments, count, s.moment);
  }
  void run(int64_t begin, int64_t end) const {
    for (int64_t item = begin; item < end; ++item) {
      const auto rows = this->tile(item);
      const int64_t stride = this->last_stride(p.x_strides);
      const bool copies = plan.in_columns && stride != 1 && p.n <= kShortRow;
      if (copies) this->copy_rows(x_of(rows.row), stride, p.x_step, copy, 1, plan.width, rows.count, p.n);
      for (int64_t j = 0; j < rows.count; j += kLanesOfTile) {
        Tile t = tile_of(rows.row + j, std::min(kLanesOfTile, rows.count - j));
        if (copies) t.x = copy + j, t.row_stride = 1, t.step = plan.width;
        State s;
        clear(s);
        if (plan.in_columns) {
          reduce_columns(t, s);
        } else {
          p.n <= kRowSteps* L ? reduce_rows(t, s) : reduce_long_rows(t, s);
        }
        write_rows(t, s);
      }
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

// Whether streaming stores would write almost only whole lines of the gradient.
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
  const bool is_short = p.n <= (p.is_backward() ? short_grad_row(size_of(p.type))
                                : p.x_step == 1 ? 2 * L - 1
                                                : kShortRow);
  plan.in_columns = is_short || (p.x_step != 1 && stride == 1);
  if (batch_invariant()) {
    plan.in_columns = is_short || p.x_step != 1;
  } else if (size < L) {
    plan.in_columns = false;
  }
  const int64_t most = p.is_backward() || plan.in_columns ? kLossColumns : 4 * L;
  if (!plan.in_columns && p.is_backward() && p.n > kLossChunk) {
    plan.per_dim = ceil_div(p.n, kLossChunk), plan.work_items = p.rows * plan.per_dim;
  } else {
    plan.width = plan.in_columns ? most : std::clamp<int64_t>(kCpuGrain / p.n, 1, most);
    plan.per_dim = ceil_div(size, plan.width), plan.work_items = p.rows / size * plan.per_dim;
  }
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / ceil_div(p.rows * p.n, plan.work_items));
  plan.is_plain = (plan.in_columns ? stride == 1 || is_short : p.x_step == 1) && p.softcap == 0 && !p.scale &&
                  !p.has_entropy && !p.has_spread && (p.smoothing == 0 || !p.weight);
  plan.streaming = kHasStreamingStores && p.is_backward() && p.dx != p.x && bytes >= kStreamingBytes &&
                   is_in_lines(p, plan.in_columns);
  return plan;
}

void run_loss(const LossProblem& p, const LossPlan& plan, int64_t begin, int64_t end) {
  if (p.is_backward()) return run_loss_backward(p, plan, begin, end);
  dispatch_type(p.type, [&](auto type) {
    using T = TypeOf<decltype(type)>;
    LossForward<T>(p, plan).run(begin, end);
  });
}

}  // namespace onepass::ONEPASS_ISA
