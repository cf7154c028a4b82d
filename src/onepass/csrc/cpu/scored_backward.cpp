// scored_backward.cpp: gradients of functions of scores, compiled once per instruction set (ONEPASS_ISA is its name and
// namespace). It processes the rows of a problem in one of these ways:
//
//   rows        a few rows at a time; short rows that are contiguous in memory as one run of elements
//   columns     tiles of rows that lie side by side, one per lane
//   row_chunks  chunks of long rows, whose sums are merged
#include "grad_tile.h"
#include "scored_gradient.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kMaxInRun = 128;  // the most elements of a row that is stored as a part of a run

template <Function F, class T>
struct ScoredBackward : ScoredGradient<F, T> {
  using Base = ScoredGradient<F, T>;
  using Base::are_finite, Base::has_marks, Base::is_plain, Base::kHasSums, Base::kIsSoftmax, Base::L,
      Base::make_numbers, Base::p, Base::plan, Base::rows, Base::store_gradients, Base::sum_of, Base::sum_short_rows,
      Base::takes_part, Base::total_of;
  using typename Base::A, typename Base::Numbers, typename Base::Place, typename Base::Runs, typename Base::Sum,
      typename Base::Vector;

  // The numbers of several rows are computed first, so that their sums need not wait for each other.
  static constexpr int64_t kTogether = kRowsTogetherBytes / int64_t(sizeof(T));  // elements
  void whole_rows(int64_t begin, int64_t end) const {
    const int64_t together = std::clamp<int64_t>(kTogether / p.n, 1, L);
    alignas(64) A a[L], b[L];
    ScoredWalk row = rows.from(begin), next = rows.from(begin);
    for (int64_t first = begin, count; first < end; first += count) {
      count = std::min({together, end - first, row.rest()});
      make_numbers(count, a, b, kIsSoftmax, [&](int64_t k) {
        if (k > 0) next.next();
        return Place{next.at, 0};
      });
      next.next();
      if (rows.is_one_run() && (!kIsSoftmax || are_finite(a, count))) {
        store_gradients({row.at, rows.inner.strides, 0, p.n}, {a, b, 0, kIsSoftmax}, true, {count, row.step, 1});
        for (int64_t k = 0; k < count; ++k) row.next();
        continue;
      }
      for (int64_t k = 0; k < count; ++k, row.next()) {
        store_row_gradients(row.at, 0, p.n, {a + k, b + k, 0, are_finite(a + k, 1)});
      }
    }
  }
  // Whether short rows that are contiguous in memory are stored as one run, each element with the numbers of its row.
  bool go_in_runs() const {
    constexpr ScoredTensor mask = kIsSoftmax ? kInput : kMask;
    return kHasSums && p.n <= kMaxInRun && (kIsSoftmax || !p.has_window()) &&
           rows.follow_each_other({kInput, kGradOf, kOfCap, kResult, mask}) && rows.inner.strides[kScale] == 0;
  }
  // How many of the last dims of the rows are contiguous in this way. The mask need not be: it is rarely read, and then
  // row by row.
  int dims_in_runs() const {
    constexpr ScoredTensor mask = kIsSoftmax ? kInput : kMask;
    const auto& dims = p.outer.dims;
    const auto follows = [&](int d) {
      bool all = true;
      for (const ScoredTensor t : {kInput, kGradOf, kOfCap, kResult, kScale, mask})
        all &= !p.has(t) || dims[d - 1].strides[t] == dims[d].size * dims[d].strides[t];
      return all;
    };
    int count = 1;
    while (count < p.outer.count && follows(p.outer.count - count)) ++count;
    return count;
  }
  void rows_in_runs(int64_t begin, int64_t end) const {
    alignas(64) A a[L], b[L], of_elements[3][kMaxInRun * L + L];
    const auto& column = p.outer.dims[p.outer.count - 1];
    const int dims = dims_in_runs();
    const int64_t n = p.n;
    int64_t size = 1;
    for (int d = p.outer.count - dims; d < p.outer.count; ++d) size *= p.outer.dims[d].size;
    ScoredWalk slice(p.outer, begin / size, dims, rows.origin);
    int64_t at = begin % size;
    for (int64_t first = begin, count; first < end; first += count) {
      count = std::min({int64_t(L), end - first, size - at});
      const ScoredRun run = {slice.at, rows.inner.strides, at * n, count * n};
      if (!has_marks && is_plain(run))
        sum_short_rows(run, count, a);
      else
        make_numbers(count, a, b, false, [&](int64_t k) { return Place{slice.at, (at + k) * n}; });
      for (int64_t k = 0; k < count; ++k) repeat(a[k], of_elements[0] + k * n);
      for (int64_t k = 0; has_marks && k < count; ++k) repeat(b[k], of_elements[1] + k * n);
      const A* scales = nullptr;
      if (column.strides[kScale] != 0) {
        const ScoredRun those = {slice.at, column.strides, at, count};
        const A* const first_scale = rows.template data<const A>(kScale, those);
        for (int64_t k = 0; k < count; ++k) repeat(first_scale[k * column.strides[kScale]], of_elements[2] + k * n);
        scales = of_elements[2];
      }
      const Numbers numbers = {of_elements[0], of_elements[1], 1, are_finite(a, count), scales};
      if (!kIsSoftmax || numbers.all_finite) {
        store_gradients(run, numbers, false);
      } else {
        ScoredWalk row = rows.from(first);
        for (int64_t k = 0; k < count; ++k, row.next())
          store_row_gradients(row.at, 0, n, {a + k, b + k, 0, are_finite(a + k, 1)});
      }
      at += count;
      if (at == size) at = 0, slice.next();
    }
  }
  void repeat(A number, A* to) const {
    for (int64_t i = 0; i < p.n; i += L) store_as(to + i, broadcast_as(number));
  }
  void store_row_gradients(const int64_t* row, int64_t first, int64_t last, const Numbers& numbers) const {
    rows.for_each_run(row, first, last, [&](const ScoredRun& run, int64_t) { store_gradients(run, numbers); });
  }

  // How many steps of a narrow tile are processed together, as one step with more columns. It takes steps that are
  // contiguous in memory.
  int64_t steps_together(const ScoredRun& tile) const {
    constexpr ScoredTensor mask = kIsSoftmax ? kInput : kMask;
    const auto follows = [&](ScoredTensor tensor) {
      return !p.has(tensor) || rows.inner.strides[tensor] == tile.count * tile.step[tensor];
    };
    const bool all = rows.is_one_run() && kHasSums && !p.has_window() && !has_marks && follows(kInput) &&
                     follows(kGradOf) && follows(kResult) && follows(kScale) && follows(kOfCap) && follows(mask);
    return all ? std::clamp<int64_t>(kGradTogether / tile.count, 1, p.n) : 1;
  }
  // Calls work(run) for the steps of a tile, `together` at a time.
  template <class Work>
  ONEPASS_INLINE void for_each_steps(const ScoredRun& tile, int64_t together, Work work) const {
    if (together == 1) {
      return rows.for_each_step(tile, 0, p.n, [&](const ScoredRun& run, int64_t) { work(run); });
    }
    for (int64_t i = 0; i < p.n; i += together) {
      work(ScoredRun{tile.origin, tile.step, tile.first + i * tile.count, std::min(together, p.n - i) * tile.count});
    }
  }
  static constexpr int64_t kColumns = std::max(kGradTogether, kGradLineBytes / int64_t(sizeof(T)));
  void columns(int64_t begin, int64_t end) const {
    alignas(64) A a[kColumns + L], b[kColumns + L];
    rows.for_each_tile(begin, end, plan.width, [&](const ScoredRun& tile) {
      int64_t together = steps_together(tile);
      if constexpr (kHasSums) {
        sum_columns(tile, together, a, b);
      } else {
        gather(rows.template data<const A>(kRowLse, tile), tile.step[kRowLse], tile.count, a);
        gather(rows.template data<const A>(kGradOf, tile), tile.step[kGradOf], tile.count, b);
      }
      const Numbers numbers = {a, b, 1, are_finite(a, tile.count)};
      if (kIsSoftmax && !numbers.all_finite) together = 1;  // the mask need not be contiguous
      for (int64_t i = 1; i < together; ++i) std::copy_n(a, tile.count, a + i * tile.count);
      if (!rows.is_one_run()) {
        rows.for_each_step(tile, 0, p.n, [&](const ScoredRun& run, int64_t) { store_gradients(run, numbers); });
        return;
      }
      int64_t apart[kScoredTensors];
      for (int t = 0; t < kScoredTensors; ++t) apart[t] = together * rows.inner.strides[t];
      const auto store_steps = [&](int64_t first, int64_t steps, int64_t count) {
        const RunPlace at(ScoredRun{tile.origin, rows.inner.strides, first, 1});
        store_gradients({at.of, tile.step, tile.first, count * tile.count}, numbers, true,
                        {steps, apart, 0, together == 1});
      };
      store_steps(0, p.n / together, together);
      if (p.n % together) store_steps(p.n - p.n % together, 1, p.n % together);
    });
  }
  void sum_columns(const ScoredRun& tile, int64_t together, A* sums, A* marks) const {
    Vector of[kColumns / L], errors[kColumns / L];
    const int64_t width = together * tile.count, across = ceil_div(width, L);
    std::fill_n(of, across, Vector{}), std::fill_n(errors, across, Vector{});
    if (rows.is_one_run() && is_plain(tile)) {
      const auto add = [&](int64_t first, int64_t steps, int64_t columns) {
        const int64_t y_step = rows.inner.strides[kInput], g_step = rows.inner.strides[kGradOf];
        const T* const y = rows.template data<const T>(kInput, tile) + first * y_step;
        const T* const g = rows.template data<const T>(kGradOf, tile) + first * g_step;
        const Operands<T> operands = {y,
                                      g,
                                      together * y_step,
                                      together * g_step,
                                      columns,
                                      kSumSteps * together * y_step,
                                      kSumSteps * together * g_step};
        add_steps<kIsSoftmax ? GradOp::softmax : GradOp::log_softmax>(operands, steps, ceil_div(columns, L),
                                                                      sizeof(T) == 2, of, errors, nullptr);
      };
      add(0, p.n / together, width);
      if (p.n % together) add(p.n / together * together, 1, p.n % together * tile.count);
    } else {
      for_each_steps(tile, together, [&](const ScoredRun& run) {
        if (together == 1) rows.fetch_step(kInput, p.in, run), rows.fetch_step(kGradOf, p.in, run);
        is_plain(run) ? add_to_columns<kHasFastPaths>(run, of, errors) : add_to_columns<false>(run, of, errors);
      });
    }
    if (has_marks) {
      std::fill_n(marks, tile.count, A(0));
      rows.for_each_step(tile, 0, p.n, [&](const ScoredRun& run, int64_t) {
        const T* const y = rows.template data<const T>(kInput, run);
        for (int64_t j = 0; j < run.count; ++j) marks[j] = to_acc(y[j * run.step[kInput]]) != -kInf<A> ? 1 : marks[j];
      });
    }
    for (int64_t i = 0; i < across; ++i) store_as(sums + i * L, Sum{of[i], errors[i]}.value());
    if (together == 1) return;
    double totals[kGradTogether];
    std::fill_n(totals, tile.count, 0.0);
    for (int64_t i = 0; i < together; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < tile.count; ++j) totals[j] += double(sums[i * tile.count + j]);
    }
#pragma omp simd
    for (int64_t j = 0; j < tile.count; ++j) sums[j] = A(totals[j]);
  }
  template <bool kPlain>
  void add_to_columns(const ScoredRun& run, Vector* sums, Vector* errors) const {
    Vector v[1];
    int64_t i = 0;
    for (; i + L <= run.count; i += L)
      this->template load_terms<kPlain>(run, i, v), add_compensated(sums[i / L], errors[i / L], v[0]);
    if (i >= run.count) return;
    this->template load_terms<kPlain>(run, i, v, run.count - i), add_compensated(sums[i / L], errors[i / L], v[0]);
  }

  // The first phase stores the sums of the chunks, if sums are needed. They are merged to the sums of the rows, which
  // lie behind them.
  void chunks(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) const {
    const ScoredState* const merged = states + plan.work_items;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % plan.chunks * kChunk, last = std::min(first + kChunk, p.n);
      ScoredWalk row = rows.from(item / plan.chunks);
      if (phase == CpuPhase::states) {
        states[item] = {has_marks ? double(takes_part(row.at, first, last)) : 0, total_of(sum_of(row.at, first, last)),
                        0};
        continue;
      }
      A a, b;
      if constexpr (kHasSums) {
        a = A(merged[item / plan.chunks].l), b = A(merged[item / plan.chunks].m);
      } else {
        a = *rows.template data<const A>(kRowLse, row.at), b = *rows.template data<const A>(kGradOf, row.at);
      }
      store_row_gradients(row.at, first, last, {&a, &b, 0, are_finite(&a, 1)});
    }
  }
  void merge_chunks(ScoredState* states) const {
    for (int64_t i = 0; i < plan.work_items; ++i) {
      ScoredState& of_row = states[plan.work_items + i / plan.chunks];
      of_row.m += states[i].m, of_row.l += states[i].l;
    }
  }

  void run(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) const {
    if (plan.route == ScoredRoute::columns) {
      columns(begin, end);
    } else if (plan.route == ScoredRoute::row_chunks) {
      phase == CpuPhase::merge ? merge_chunks(states) : chunks(phase, states, begin, end);
    } else if (go_in_runs()) {
      rows_in_runs(begin, end);
    } else {
      whole_rows(begin, end);
    }
    if (plan.streaming) fence_streaming_stores();
  }
};

}  // namespace

void run_scored_backward(const ScoredProblem& p, const ScoredPlan& plan, CpuPhase phase, ScoredState* states,
                         int64_t begin, int64_t end) {
  dispatch_type(p.in, [&](auto type) {
    using T = TypeOf<decltype(type)>;
    switch (p.function) {
      case Function::softmax: return ScoredBackward<Function::softmax, T>{{p, plan}}.run(phase, states, begin, end);
      case Function::log_softmax:
        return ScoredBackward<Function::log_softmax, T>{{p, plan}}.run(phase, states, begin, end);
      default: return ScoredBackward<Function::logsumexp, T>{{p, plan}}.run(phase, states, begin, end);
    }
  });
}

}  // namespace onepass::ONEPASS_ISA
