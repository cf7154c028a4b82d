// scored_gradient.h: gradients of runs of elements. y is the result of the function, and g the gradient of y. The
// gradient of a score is
//
//   softmax      y * (g - sum(y * g))
//   log_softmax  g - exp(y) * sum(g)
//   logsumexp    exp(score - y) * g
//
// and SlopeLoader computes the gradient of the element from it. Operands are read in place. If there is a sum, they are
// read twice, the second time from the cache. If an element of a softmax does not take part, y is 0 and so is its
// gradient, unless an operand of the row is not finite. Then the row's sum is not finite either, so the mask is read
// only for such rows.
#pragma once

#include "rows_simd.h"
#include "scored.h"
#include "scored_operands.h"

namespace onepass::ONEPASS_ISA {

// T is the type of y and g, or of the input of logsumexp.
template <Function F, class T>
struct ScoredGradient {
  using A = Acc<T>;
  using Vector = V<A>;
  using Exp = std::conditional_t<std::is_same_v<A, double>, ExpDouble, ExpFloat>;
  static constexpr int L = kLanes<A>;
  static constexpr int64_t kBlock = 1024;  // results that are buffered before their conversion
  static constexpr bool kIsSoftmax = F == Function::softmax, kHasSums = F != Function::logsumexp;
  const ScoredProblem& p;
  const ScoredPlan& plan;
  const ScoredRows rows{p};
  const bool has_marks = F == Function::log_softmax && p.empty_is_zero, hides = p.has(kMask) || p.has_window();

  // The numbers of rows. a: their sums, or the results of logsumexp. b: the gradients of these results, or marks that
  // are 0 if no element of the row takes part. They are `step` apart along a run; 0 if the run belongs to one row.
  struct Numbers {
    const A *a, *b;
    int64_t step;
    bool all_finite;           // (softmax) whether all sums are finite
    const A* scale = nullptr;  // for short rows in a run: the scale of each element
  };
  static bool are_finite(const A* sums, int64_t count) {
    Vector none{}, v[1];  // the difference of a number that is not finite with itself is NaN
    int64_t k = 0;
    for (; k + L <= count; k += L) load_operand<A>(sums + k, 1, v), none += v[0] - v[0];
    if (k < count) load_operand<A>(sums + k, 1, v, count - k), none += keep_lanes(v[0] - v[0], count - k, A(0));
    return kIsSoftmax && sum_of_lanes(none) == 0;
  }

  // Sums --------------------------------------------------------------------------------------------------------------

  // Whether y and g are contiguous. All code that reads them is also compiled for this case.
  static bool is_plain(const ScoredRun& run) { return run.step[kInput] == 1 && run.step[kGradOf] == 1; }
  template <bool kPlain, int K, class... Count>
  ONEPASS_INLINE void load(ScoredTensor tensor, const ScoredRun& run, int64_t i, Vector (&v)[K], Count... count) const {
    const int64_t step = kPlain ? 1 : run.step[tensor];
    load_operand<A>(rows.template data<const T>(tensor, run) + i * step, step, v, count...);
  }
  // The terms that K vectors of elements add to the sums of their rows; 0 behind the first `count` elements.
  template <bool kPlain, int K, class... Count>
  ONEPASS_INLINE void load_terms(const ScoredRun& run, int64_t i, Vector (&v)[K], Count... count) const {
    load<kPlain>(kGradOf, run, i, v, count...);
    if constexpr (kIsSoftmax) {
      Vector y[K];
      load<kPlain>(kInput, run, i, y, count...);
      for (int k = 0; k < K; ++k) v[k] *= y[k];
    }
    if constexpr (sizeof...(count)) v[0] = keep_lanes(v[0], (count + ...), A(0));
  }

  struct Sum {
    Vector sum{}, error{};
    ONEPASS_INLINE void add(Vector v) { add_compensated(sum, error, v); }
    // If a sum is not finite, its rounding error is meaningless.
    ONEPASS_INLINE Vector value() const { return sum - sum == Vector{} ? sum + error : sum; }
  };
  // The sum of the elements [first, last) of a row; each lane has the sum of some of them. `clips`: elements outside
  // the window, where y is 0, are not read.
  Vector sum_of(const int64_t* row, int64_t first, int64_t last, bool clips = kIsSoftmax) const {
    Sum total;
    rows.for_each_run(row, first, last, [&](const ScoredRun& run, int64_t) {
      const Span in = clips ? rows.inside(run) : Span{0, run.count};
      const ScoredRun part = run.part(in.first, in.last);
      is_plain(run) ? add_terms<kHasFastPaths>(part, total) : add_terms<false>(part, total);
    });
    return total.value();
  }
  template <bool kPlain>
  void add_terms(const ScoredRun& run, Sum& total) const {
    constexpr int64_t step = 4 * L, block = 8 * step;  // a lane adds a few numbers, then a few sums
    int64_t i = 0;
    while (i + step <= run.count) {
      Vector part[4] = {}, v[4];
      for (const int64_t end = std::min(i + block, run.count); i + step <= end; i += step) {
        load_terms<kPlain>(run, i, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) part[k] += v[k];
      }
      total.add((part[0] + part[1]) + (part[2] + part[3]));
    }
    Vector few{}, v[1];
    for (; i + L <= run.count; i += L) load_terms<kPlain>(run, i, v), few += v[0];
    if (kPlain && i < run.count && run.count >= L) {  // the last vector, without the elements that have been added
      load_terms<kPlain>(run, run.count - L, v);
      few += drop_lanes(v[0], i + L - run.count);
    } else if (i < run.count) {
      load_terms<kPlain>(run, i, v, run.count - i), few += v[0];
    }
    total.add(few);
  }
  static ONEPASS_INLINE A sum_of_lanes(Vector lanes) {
    if constexpr (std::is_same_v<A, float>)
      return reduce_lanes(lanes, add);
    else
      return A(total_of(lanes));
  }
  static double total_of(Vector lanes) {
    Compensated all;
    for (int j = 0; j < L; ++j) all.add(double(lanes[j]));
    return all.value();
  }
  // Whether any element of a row takes part: one whose log_softmax is not -inf.
  bool takes_part(const int64_t* row, int64_t first, int64_t last) const {
    bool any = false;
    rows.for_each_run(row, first, last, [&](const ScoredRun& run, int64_t) {
      const T* const y = rows.template data<const T>(kInput, run);
      for (int64_t i = 0; !any && i < run.count; ++i) any = to_acc(y[i * run.step[kInput]]) != -kInf<A>;
    });
    return any;
  }

  // The numbers of up to L rows. next() returns the place of the next row: its elements from `first` on at `row`.
  struct Place {
    const int64_t* row;
    int64_t first;
  };
  template <class Next>
  ONEPASS_INLINE void make_numbers(int64_t count, A* a, A* b, bool clips, Next next) const {
    Vector lanes[L] = {};
    for (int64_t k = 0; k < count; ++k) {
      const Place at = next(k);
      if constexpr (kHasSums) {
        lanes[k] = sum_of(at.row, at.first, at.first + p.n, clips);
        if (has_marks) b[k] = takes_part(at.row, at.first, at.first + p.n);
      } else {
        a[k] = *rows.template data<const A>(kRowLse, at.row), b[k] = *rows.template data<const A>(kGradOf, at.row);
      }
    }
    if constexpr (kHasSums) add_lanes(lanes, count, a);
  }
  // The sums over the lanes of each of the first `count` vectors. `to` has room for L sums.
  static ONEPASS_INLINE void add_lanes(Vector (&lanes)[L], int64_t count, A* to) {
    if constexpr (std::is_same_v<A, float>) {
      if (count > 2) return store_vector(to, transpose_reduce(lanes, add));
      for (int64_t k = 0; k < count; ++k) to[k] = reduce_lanes(lanes[k], add);
    } else {
      for (int64_t k = 0; k < count; ++k) to[k] = A(total_of(lanes[k]));
    }
  }
  // The sums of up to L short rows, which are contiguous in one run of all their elements. The bits are those of
  // sum_of.
  __attribute__((noinline)) void sum_short_rows(const ScoredRun& run, int64_t count, A* to) const {
    Vector lanes[L] = {}, v[1];
    const int64_t n = p.n;
    for (int64_t k = 0; k < count; ++k) {
      if (n <= L) {
        load_terms<true>(run, k * n, v, n), lanes[k] += v[0];
      } else {
        Sum total;
        add_terms<kHasFastPaths>(run.part(k * n, k * n + n), total), lanes[k] = total.value();
      }
    }
    add_lanes(lanes, count, to);
  }

  // Results -----------------------------------------------------------------------------------------------------------

  // Stores load(i, v), or load(i, v, count) for the first `count` elements of a vector, for all elements of a run. For
  // InputNan see convert.
  template <bool InputNan, class Load>
  ONEPASS_INLINE void store(const ScoredRun& run, Load load) const {
    if constexpr (std::is_same_v<A, float>) {
      if (plan.stores_in_place) {
        T* const to = rows.template data<T>(kResult, run);
        return store_row<false, false, false, InputNan>(to, run.count, plan.streaming, load);
      }
    }
    alignas(64) A block[kBlock];
    const bool copies = !std::is_same_v<A, double> || p.out != DType::float64 || run.step[kResult] != 1;
    for (int64_t first = 0; first < run.count; first += kBlock) {
      const int64_t count = std::min(kBlock, run.count - first);
      A* const to = copies ? block : rows.template data<A>(kResult, run) + first;
      Vector four[4], v[1];
      int64_t i = 0;
      for (; i + 4 * L <= count; i += 4 * L) load(first + i, four), std::memcpy(to + i, &four, sizeof four);
      for (; i + L <= count; i += L) load(first + i, v), store_as(to + i, v[0]);
      if (i < count) load(first + i, v, count - i), copy_tail(to + i, reinterpret_cast<const A*>(&v), count - i);
      if (copies) write_run(rows, run.part(first, first + count), block, plan.streaming);
    }
  }
  __attribute__((noinline)) void store_zeros(const ScoredRun& run) const {
    store<false>(run, [](int64_t, auto& v, auto...) __attribute__((always_inline)) {
      for (Vector& each : v) each = Vector{};
    });
  }
  // Several runs: each is `apart` from the run before it, and its numbers are `numbers` behind those of the run before
  // it.
  struct Runs {
    int64_t count = 1;
    const int64_t* apart = nullptr;
    int64_t numbers = 0;
    bool fetches = false;  // prefetches operands of later runs
  };
  void store_gradients(const ScoredRun& run, const Numbers& numbers, bool clips = true, const Runs& runs = {}) const {
    constexpr bool can_be_plain = kHasFastPaths && kHasSums;
    if (!can_be_plain || !is_plain(run) || !SlopeLoader<A>::is_plain(rows, run, !numbers.all_finite)) {
      store_runs<false, true>(run, numbers, clips, runs);
    } else if (p.softcap != 0 || p.has_window()) {
      store_runs<can_be_plain, true>(run, numbers, clips, runs);
    } else {
      store_runs<can_be_plain, !can_be_plain>(run, numbers, clips, runs);
    }
  }
  struct NoScores {
    NoScores(const ScoredRows&, const ScoredRun&) {}
    void next(const int64_t*) {}
  };
  // kClips: there may be a softcap or a window, which need registers.
  template <bool kPlain, bool kClips>
  __attribute__((noinline)) void store_runs(const ScoredRun& first, const Numbers& numbers, bool clips,
                                            const Runs& runs) const {
    SlopeLoader<A> slope(rows, first, !numbers.all_finite, numbers.scale);
    std::conditional_t<kHasSums, NoScores, ScoreLoader<A, T>> scores(rows, first);
    const A *a = numbers.a, *b = numbers.b;
    ScoredRun run = first;
    int64_t at[kScoredTensors];  // the origin of all runs after the first
    for (int64_t left = runs.count;;) {
      if (runs.fetches) rows.fetch_step(kOfCap, p.out, run), rows.fetch_step(kResult, p.out, run);
      const Span in = clips ? rows.inside(run) : Span{0, run.count};
      if (in.first == in.last) {
        store_zeros(run);
      } else {
        // For plain runs whole steps are stored; those at the ends of the window include zeros.
        constexpr int64_t step = kPlain ? 4 * L : 1;
        const Span part = {in.first & -step, std::min(up_to(in.last, step), run.count)};
        if (part.first > 0) store_zeros(run.part(0, part.first));
        store_inside<kPlain, kClips>(run, part, in, a, b, numbers, slope, scores);
        if (part.last < run.count) store_zeros(run.part(part.last, run.count));
      }
      if (--left == 0) return;
      for (int t = 0; t < kScoredTensors; ++t) at[t] = run.origin[t] + runs.apart[t];
      run.origin = at, a += runs.numbers, b += runs.numbers;
      slope.next(runs.apart), scores.next(runs.apart);
    }
  }
  // What the loop uses is copied to local variables: the compiler assumes that stores may change anything in memory.
  template <bool kPlain, bool kClips, class Scores>
  ONEPASS_INLINE void store_inside(const ScoredRun& run, const Span& part, const Span& window, const A* numbers_a,
                                   const A* numbers_b, const Numbers& numbers, const SlopeLoader<A>& slope_of_run,
                                   const Scores& scores_of_run) const {
    const SlopeLoader<A> slope = slope_of_run;
    const Scores scores = scores_of_run;
    const Span in = window;
    const int64_t offset = part.first, numbers_step = numbers.step;
    const T *const y = rows.template data<const T>(kInput, run), *const grad =
                                                                     rows.template data<const T>(kGradOf, run);
    const int64_t y_step = kPlain ? 1 : run.step[kInput], grad_step = kPlain ? 1 : run.step[kGradOf];
    const bool marks = has_marks, zeroes = hides, all_finite = numbers.all_finite, empty_is_zero = p.empty_is_zero;
    const auto compute = [=](int64_t i, auto& v, auto... count) __attribute__((always_inline)) {
      constexpr int K = int(sizeof(v) / sizeof(Vector));
      i += offset;
      Vector a[K], b[K], g[K];
      load_operand<A>(numbers_a + i * numbers_step, numbers_step, a, count...);
      if (!kHasSums || marks) load_operand<A>(numbers_b + i * numbers_step, numbers_step, b, count...);
      if constexpr (kHasSums) {
        load_operand<A>(y + i * y_step, y_step, v, count...),
            load_operand<A>(grad + i * grad_step, grad_step, g, count...);
      } else {
        scores.load(i, v, count...);
        for (int k = 0; k < K; ++k) v[k] -= a[k];
      }
      if constexpr (!kIsSoftmax) Exp::apply(v);
      Vector of_y[K];
      for (int k = 0; k < K; ++k) {
        if (kIsSoftmax) {
          of_y[k] = v[k], v[k] *= g[k] - a[k];
        } else if (kHasSums) {
          v[k] = g[k] - v[k] * kTileUnscale<A> * a[k];
          if (marks) v[k] = b[k] != A(0) ? v[k] : Vector{};
        } else {
          v[k] *= kTileUnscale<A> * b[k];
          if (empty_is_zero) v[k] = a[k] == -kInf<A> ? Vector{} : v[k];
        }
      }
      slope.template multiply<T, kPlain, kClips>(i, v, count...);
      // If y is 0, a factor may be infinite or NaN, so the gradient is set to 0, with the sign that zeros have outside
      // the window. This is done in each row whose sum is finite, whatever rows are beside it.
      if (kIsSoftmax && zeroes) {
        for (int k = 0; k < K; ++k) {
          Vector kept = of_y[k];  // not 0 if the gradient is kept
          if (!all_finite) kept = a[k] - a[k] == Vector{} ? kept : broadcast_as(A(1));
          v[k] = kept != A(0) ? v[k] : Vector{};
        }
      }
      // Whether all of them are inside the window. As unsigned numbers, positions before the window are the largest.
      const uint64_t whole = uint64_t(std::max<int64_t>(in.last - in.first - K * L + 1, 0));
      if (kPlain && kClips && uint64_t(i - in.first) >= whole) {
        for (int k = 0; k < K; ++k) {
          const int64_t begin = i + k * L;
          v[k] = drop_lanes(v[k], std::clamp<int64_t>(in.first - begin, 0, L));
          v[k] = keep_lanes(v[k], std::clamp<int64_t>(in.last - begin, 0, L), A(0));
        }
      }
    };
    // (The exponential of a NaN is a NaN with any bits.)
    store<!kPlain || !kIsSoftmax>(run.part(part.first, part.last), compute);
  }
};

}  // namespace onepass::ONEPASS_ISA
