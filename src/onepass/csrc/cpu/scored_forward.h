// scored_forward.h: functions of scores. Scores are written to the scratch memory of the thread, and the kernels of
// plain rows and tiles read them from there:
//
//   rows        one row at a time (rows_simd.h); doubles as a tile (tile_ops.h)
//   small_rows  some dozen rows at a time (small_rows.h)
//   columns     tiles of rows that lie side by side, one per lane (tile_ops.h)
//   row_chunks  chunks of long rows, whose states are merged
#pragma once

#include "scored.h"
#include "scored_operands.h"
#include "scored_scratch.h"
#include "small_rows.h"
#include "walk.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kSmallRowScores = 1024;  // their offset in the scratch memory; a row tile has room before them

// Y is the type of results that are adjacent in memory. Other results are computed in the accumulator's type, then
// scattered.
template <Function F, class Y>
struct ScoredForward {
  using A = Acc<Y>;
  using Vector = V<A>;
  using Epilogue = EpilogueOf<F>;
  using RowEpilogue = std::conditional_t<F == Function::softmax, ScoredSoftmaxEpilogue, Epilogue>;
  using Reader = ScoreReader<A>;
  static constexpr int L = kLanes<A>;
  static constexpr bool kReduces = Epilogue::kOnePerRow, kIsFloat = std::is_same_v<A, float>;
  const ScoredProblem& p;
  const ScoredPlan& plan;
  const ScoredRows rows{p};
  const bool has_sink = p.has(kSink) || p.sink != -kInf<double>;
  const bool streaming = plan.streaming && plan.stores_in_place;
  // The result of an element outside the window; and the results of a row in which no element takes part.
  const A outside = F == Function::softmax ? A(0) : -kInf<A>;
  const A nothing = p.empty_is_zero ? outside : kNan<A>;
  A* const t = reinterpret_cast<A*>(scratch());

  A sink(const int64_t* row) const { return p.has(kSink) ? *rows.template data<const A>(kSink, row) : A(p.sink); }
  // The address for the results of a row: the scratch memory, if they are scattered later.
  Y* results(const int64_t* row) const {
    return plan.stores_in_place ? rows.template data<Y>(kResult, row) : reinterpret_cast<Y*>(t);
  }
  void scatter(const int64_t* row, int64_t first, int64_t last) const {
    if (kReduces || plan.stores_in_place) return;
    rows.for_each_run(row, first, last, [&](const ScoredRun& run, int64_t i) { write_run(rows, run, t + i, false); });
  }
  void store_lse(const int64_t* row, const State<A>& state) const {
    if (p.has(kRowLse)) ReduceEpilogue::store(state, rows.template data<A>(kRowLse, row), 0);
    if constexpr (kReduces) ReduceEpilogue::store(state, rows.template data<Y>(kResult, row), 0);
  }
  __attribute__((noinline)) void store_same(Y* y, int64_t n, A value) const {
    if constexpr (kIsFloat) {
      store_row<false, false, false, false>(y, n, streaming,
                                            [=](int64_t, auto& v, auto...) __attribute__((always_inline)) {
                                              for (Vec& each : v) each = broadcast(value);
                                            });
    } else {
      fill(y, n, value);
    }
  }

  // Rows --------------------------------------------------------------------------------------------------------------

  void whole_rows(int64_t begin, int64_t end) const {
    const bool clips = rows.is_one_run() && (kReduces || plan.stores_in_place);
    const auto write_scores = scores_writer<A>(rows, rows.inner.strides);
    ScoredWalk row = rows.from(begin);
    for (int64_t r = begin; r < end; ++r, row.next()) {
      Span in = {0, p.n};
      Vector most = broadcast_as(-kInf<A>);
      if (clips) {  // elements outside the window are left out
        const ScoredRun run = {row.at, rows.inner.strides, 0, p.n};
        in = rows.inside(run);
        if (in.first < in.last) most = write_scores(rows, run.part(in.first, in.last), 1, run.step, t, 0);
      } else {
        most = write_row_scores(rows, row.at, 0, p.n, t);
      }
      int64_t count = in.last - in.first;
      A m = largest(most);
      if (has_sink) {  // one more element, without a result
        const A last = t[count++] = sink(row.at);
        m = last > m ? last : m;
      }
      finish(row.at, in, count, m, {row.at, row.step, 1, 1});
      scatter(row.at, 0, p.n);
    }
  }
  static A largest(Vector v) {
    if constexpr (kIsFloat) return reduce_max(v);
    A m = v[0];
    for (int j = 1; j < L; ++j) m = v[j] > m ? v[j] : m;
    return m;
  }

  // Stores the results of a row from its `count` scores, of which m is the largest. The first score is that of the
  // first element of `in`. Meanwhile the row at the beginning of `next` is prefetched.
  void finish(const int64_t* row, Span in, int64_t count, A m, const ScoredRun& next) const {
    if constexpr (kIsFloat) {
      if (!exceeds_base(m)) return finish_near(row, in, count, m, next);
    }
    RowTile<Epilogue, A> tile(Reader(t), count);
    const State<A> state = tile.state(nullptr);
    store_lse(row, state);
    if constexpr (!kReduces) {
      const double l = state.l.value();
      const bool is_empty = state.m == -kInf<A> && l == 0;
      Y* const y = begin_results(row, in, std::isfinite(state.m) && !std::isnan(l), is_empty ? nothing : kNan<A>);
      if (!y) return;
      tile.n = in.last - in.first;
      tile.store(state, y, 0);
    }
  }
  __attribute__((noinline)) void finish_near(const int64_t* row, Span in, int64_t count, float m,
                                             const ScoredRun& next) const {
    const Reader scores(t, p, next, count);
    // Exponentials are as accurate as the results need.
    const bool exact = kReduces || p.has(kRowLse);
    const double sum = exact ? row_exp_sum<Epilogue::kFromExp, float>(scores, count, m, t)
                             : row_exp_sum<Epilogue::kFromExp, Y>(scores, count, m, t);
    const auto l = [&] {
      return sum * double(kExpUnscale) / (exact ? relative_to_base<ExpFor<float>>(m) : relative_to_base<ExpFor<Y>>(m));
    };
    if (exact) store_lse(row, {m, {l(), 0}});
    if constexpr (!kReduces) {
      Y* const y = begin_results(row, in, !std::isnan(sum), kNan<A>);
      const int64_t n = in.last - in.first;
      if (!y) return;
      if constexpr (Epilogue::kFromExp) {
        const RowEpilogue epilogue = RowEpilogue::of(m, sum * double(kExpUnscale));
        store_row_of<false, true>(ExpReader{t}, y, n, streaming,
                                  [&](auto& v) __attribute__((always_inline)) { epilogue.template apply<Y>(v); });
      } else {
        finish_from_input<Epilogue>(scores, y, n, m, l(), streaming);
      }
    }
  }
  // Stores the results that follow from the state of the row alone: if the row is not `regular`, all of them are
  // `special`; otherwise those outside the window. Returns the address for the other results, or null.
  Y* begin_results(const int64_t* row, Span in, bool regular, A special) const {
    Y* const y = results(row);
    if (!regular) return store_same(y, p.n, special), nullptr;
    if (in.first > 0) store_same(y, in.first, outside);
    if (in.last < p.n) store_same(y + in.last, p.n - in.last, outside);
    return y + in.first;
  }

  // Small rows --------------------------------------------------------------------------------------------------------

  void small_rows(int64_t begin, int64_t end) const {
    const int64_t n = p.n, vectors = ceil_div(n, kWidth), padded = vectors * kWidth, pitch = result_pitch();
    const int64_t most = kWidth * std::min<int64_t>(kRowBuffer / (kWidth * padded), kMaxRowGroups);
    const bool one_run = !p.has_window() && !p.has(kAlibi) && rows.follow_each_other({kInput, kScale, kBias, kMask});
    const int64_t apart = one_run ? n : padded;
    const auto write_scores = scores_writer<A>(rows, rows.inner.strides);
    A *const scores = t + kSmallRowScores, *const buffer = scores + kRowBuffer + 2 * kWidth;
    Y* const copies = reinterpret_cast<Y*>(buffer + kRowBuffer + kWidth);
    alignas(64) float sinks[kMaxRowGroups * kWidth] = {}, of_rows[kMaxRowGroups * kWidth];
    int64_t at_lse[kMaxRowGroups * kWidth], at_result[kMaxRowGroups * kWidth];
    const auto inner = p.outer.innermost();
    const int64_t last = std::min(p.rows, end * kRowsPerItem);
    int64_t first = begin * kRowsPerItem, at = first % inner.size, count;
    ScoredWalk walk(p.outer, first / inner.size, 1, rows.origin);
    for (; first < last; first += count) {
      count = std::min(most, last - first);
      for (int64_t r = 0, some; r < count; r += some) {  // rows along the innermost dim
        some = std::min(inner.size - at, count - r);
        const ScoredRun those = {walk.at, inner.strides, at, some};
        const RunPlace at_first(those);
        const ScoredRun row = {at_first.of, rows.inner.strides, 0, one_run ? some * n : n};
        write_scores(rows, row, one_run ? 1 : some, those.step, scores + r * apart, apart);
        if (has_sink) write_sinks(those, sinks + r);
        for (int64_t k = 0; k < some; ++k) {
          at_lse[r + k] = those.part(k, some).at(kRowLse);
          at_result[r + k] = those.part(k, some).at(kResult);
        }
        at += some;
        if (at == inner.size) at = 0, walk.next();
      }
      std::fill(scores + count * apart, scores + up_to(count, kWidth) * apart + kWidth, 0.0f);
      const ScoredRun next = {walk.at, inner.strides, at, 1};
      const auto run = [&](auto group, auto* y, int64_t y_stride, bool whole_lines, bool buffered) {
        group.x = Reader(scores, p, next, 0), group.y = y, group.n = n, group.x_stride = apart,
        group.y_stride = y_stride;
        group.count = int(count), group.whole = n / kWidth, group.vectors = vectors, group.ahead = 0;
        group.tail_mask = lane_mask(n - (vectors - 1) * kWidth), group.buffer = buffer, group.sum_offset = 0;
        group.sinks = has_sink ? sinks : nullptr, group.nothing = nothing;
        group.run(whole_lines, buffered);
      };
      if (kReduces || p.has(kRowLse)) {
        run(SmallRows<ReduceEpilogue, Reader, float>(), of_rows, 1, false, false);
        for (int64_t r = 0; p.has(kRowLse) && r < count; ++r) static_cast<A*>(p.data[kRowLse])[at_lse[r]] = of_rows[r];
        for (int64_t r = 0; kReduces && r < count; ++r) {
          static_cast<Y*>(p.data[kResult])[at_result[r]] = from_acc<Y>(of_rows[r]);
        }
      }
      if constexpr (!kReduces) {
        const int64_t bytes = n * int64_t(sizeof(Y));
        Y* const y = pitch ? static_cast<Y*>(p.data[kResult]) + at_result[0] : copies;
        const bool whole_lines =
            streaming && bytes % kLine == 0 && uintptr_t(y) % kLine == 0 && pitch * int64_t(sizeof(Y)) % kLine == 0;
        run(SmallRows<RowEpilogue, Reader, Y>(), y, pitch ? pitch : n, pitch && whole_lines,
            streaming && !whole_lines && pitch == n);
        for (int64_t r = 0; !pitch && r < count; ++r) {
          std::memcpy(static_cast<void*>(static_cast<Y*>(p.data[kResult]) + at_result[r]), copies + r * n,
                      size_t(bytes));
        }
      }
    }
  }
  // The stride from a row's results to those of the next row, if it is the same for all rows; otherwise 0.
  int64_t result_pitch() const {
    for (int i = 1; i < p.outer.count; ++i) {
      const auto &slow = p.outer.dims[i - 1], &fast = p.outer.dims[i];
      if (slow.strides[kResult] != fast.size * fast.strides[kResult]) return 0;
    }
    return p.outer.count ? p.outer.innermost().strides[kResult] : p.n;
  }

  // Columns -----------------------------------------------------------------------------------------------------------

  // How many steps of a narrow tile are processed together, as one wide step with more columns. It takes steps that are
  // contiguous in memory.
  int64_t steps_together(const ScoredRun& tile) const {
    const auto follows = [&](ScoredTensor tensor) {
      return !p.has(tensor) || rows.inner.strides[tensor] == tile.count * tile.step[tensor];
    };
    const bool all = rows.is_one_run() && !p.has_window() && !p.has(kAlibi) && follows(kInput) && follows(kScale) &&
                     follows(kBias) && follows(kMask) && (kReduces || follows(kResult));
    return all && p.n > kMaxShortDepth ? std::clamp<int64_t>(most_columns(L) / tile.count, 1, p.n) : 1;
  }
  // Writes the scores of the wide steps [first, last). Elements that the last one lacks become -inf.
  void write_wide_scores(const ScoredRun& columns, int64_t together, int64_t first, int64_t last,
                         int64_t across) const {
    const auto write = scores_writer<A>(rows, columns.step);
    int64_t apart[kScoredTensors];
    for (int tensor = 0; tensor < kScoredTensors; ++tensor) apart[tensor] = together * rows.inner.strides[tensor];
    const auto write_steps = [&](int64_t begin, int64_t steps, int64_t count) {
      const RunPlace at(ScoredRun{columns.origin, rows.inner.strides, begin * together, 1});
      if (steps) {
        write(rows, {at.of, columns.step, columns.first, count * columns.count}, steps, apart,
              t + (begin - first) * across, across);
      }
    };
    const int64_t whole = std::min(last, p.n / together), rest = p.n - whole * together;
    write_steps(first, whole - first, together);
    if (whole == last) return;
    std::fill_n(t + (whole - first) * across, across, -kInf<A>);
    write_steps(whole, 1, rest);
  }
  // The exponentials have the precision of type E, which is the type of the results, or of a logsumexp.
  template <class E>
  void columns(int64_t begin, int64_t end) const {
    ForwardTile<Epilogue, E> tile;
    tile.t = t;
    const int64_t size = size_of(p.in);
    rows.for_each_tile(begin, end, plan.width, [&](const ScoredRun& columns) {
      const int64_t together = steps_together(columns), width = together * columns.count;
      const int64_t steps = ceil_div(p.n, together), across = ceil_div(width, L) * L, sinks = has_sink ? 1 : 0;
      const int64_t depth = std::min(steps, tile_depth(across) - sinks);
      const bool fits = depth == steps, fetches = fits && p.n * columns.count * size <= kFetchBytes;
      const char* const x = static_cast<const char*>(p.data[kInput]) + columns.at(kInput) * size;
      tile.next = fetches && rows.is_one_run() && columns.step[kInput] == 1 ? x + columns.count * size : nullptr;
      tile.next_step = together * rows.inner.strides[kInput] * size, tile.next_vector = L * size;
      tile.parts = together, tile.columns = columns.count;
      const bool keeps_exps = Epilogue::kFromExp && fits && !p.has(kRowLse);  // +inf would spoil the logsumexp
      // Loads a block of steps. The sinks follow the first block.
      const auto load = [&](int64_t first) {
        const int64_t last = std::min(first + depth, steps), count = last - first;
        if (together == 1) {
          write_tile_scores(rows, columns, first, last, t, across);
        } else {
          write_wide_scores(columns, together, first, last, across);
        }
        if (sinks && first == 0) write_sink_step(columns, t + count * across, across);
        tile.shape = {1, count + (first == 0 ? sinks : 0), across / L};
        return count;
      };
      if constexpr (!kReduces && kHasFastPaths) {
        if (p.n + sinks <= kMaxShortDepth && !p.has(kRowLse) && !p.empty_is_zero) {
          load(0);
          tile.short_group(0);
          return store_short(columns, across);
        }
      }
      for (int64_t first = 0; first < steps; first += depth) {
        load(first);
        if (first > 0) {
          tile.reduce_more();
        } else {
          keeps_exps ? tile.template reduce<Epilogue::kFromExp>() : tile.template reduce<false>();
        }
      }
      tile.fold();
      if (kReduces || p.has(kRowLse)) store_lse_of(columns, tile);
      if constexpr (!kReduces) {
        for (int64_t s = 0; p.empty_is_zero && s < across / L; ++s) {
          const auto is_empty = tile.m[s] == -kInf<A> && tile.sum[s] == Vector{};
          tile.m[s] = is_empty ? Vector{} : tile.m[s];
          tile.sum[s] = is_empty ? Vector{} + 1 / kTileUnscale<A> : tile.sum[s];
        }
        // The lanes behind the last column are empty; they must not become NaN.
        const int64_t last = across / L - 1, lanes = width - last * L;
        tile.m[last] = keep_lanes(tile.m[last], lanes, 0);
        tile.sum[last] = keep_lanes(tile.sum[last], lanes, 1 / kTileUnscale<A>);
        tile.numbers();
        for (int64_t first = 0; first < steps; first += depth) {
          const int64_t count = fits ? steps : load(first);
          if (keeps_exps) {
            store_steps<std::bool_constant<Epilogue::kFromExp>>(columns, together, first, count, tile);
          } else {
            store_steps<std::false_type>(columns, together, first, count, tile);
          }
        }
      }
    });
  }
  static int64_t tile_depth(int64_t across) {
    return kScratch * int64_t(sizeof(float)) / int64_t(sizeof(A)) / across - 1;
  }
  // Writes the sinks of the columns of a tile, and -inf behind them, in whole vectors.
  void write_sink_step(const ScoredRun& columns, A* to, int64_t across) const {
    const bool is_same = !p.has(kSink) || columns.step[kSink] == 0;
    const Vector all = broadcast_as(is_same ? sink(columns.origin) : -kInf<A>), none = broadcast_as(-kInf<A>);
    for (int64_t i = 0; i < across; i += L) {
      const int64_t lanes = columns.count - i;
      store_as(to + i, lanes >= L ? all : lanes > 0 ? keep_lanes(all, lanes, -kInf<A>) : none);
    }
    if (!is_same) write_sinks(columns, to);
  }
  // Writes the sinks of rows one after another.
  void write_sinks(const ScoredRun& those, A* to) const {
    const int64_t step = those.step[kSink];
    if (p.has(kSink) && step != 0) {
      gather(rows.template data<const A>(kSink, those), step, those.count, to);
    } else {
      std::fill_n(to, those.count, p.has(kSink) ? *rows.template data<const A>(kSink, those) : A(p.sink));
    }
  }
  template <class Tile>
  void store_lse_of(const ScoredRun& columns, const Tile& tile) const {
    alignas(64) A lse[kMaxSequences * L];
    for (int64_t s = 0; s < tile.shape.across; ++s) store_as(lse + s * L, tile.log_sum_of(s));
    A* const of_rows = p.has(kRowLse) ? rows.template data<A>(kRowLse, columns) : nullptr;
    for (int64_t j = 0; of_rows && j < columns.count; ++j) of_rows[j * columns.step[kRowLse]] = lse[j];
    if constexpr (kReduces) {
      Y* const y = rows.template data<Y>(kResult, columns);
      for (int64_t j = 0; j < columns.count; ++j) y[j * columns.step[kResult]] = from_acc<Y>(lse[j]);
    }
  }
  // Stores the steps of a tile in which results have replaced the elements.
  void store_short(const ScoredRun& columns, int64_t across) const {
    rows.for_each_step(columns, 0, p.n, [&](const ScoredRun& run, int64_t i) {
      if (!plan.stores_in_place) return write_run(rows, run, t + i * across, false);
      store_run<false>(rows.template data<Y>(kResult, run), run.count, t + i * across, streaming);
    });
  }
  template <class FromExps, class Tile>
  __attribute__((noinline)) void store_steps(const ScoredRun& columns, int64_t together, int64_t first, int64_t count,
                                             Tile& tile) const {
    tile.begin_results(0, count);
    const auto store = [&](const ScoredRun& run, int64_t i) {
      Y* const y = plan.stores_in_place ? rows.template data<Y>(kResult, run) : reinterpret_cast<Y*>(t);
      if (!streaming && together == 1) rows.fetch_step(kResult, p.out, run);
      tile.template step_results<FromExps>(i - first, [&](int64_t w, const auto& v) __attribute__((always_inline)) {
        if (w * L < run.count) {
          TileWalk<A>::template store_results<false>(y + w * L, run.count - w * L, v, streaming);
        }
      });
      if (!plan.stores_in_place) write_run(rows, run, t, false);
    };
    if (together == 1) return rows.for_each_step(columns, first, first + count, store);
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t begin = i * together, some = std::min(together, p.n - begin) * columns.count;
      store({columns.origin, columns.step, columns.first + begin * columns.count, some}, i);
    }
  }

  // Chunks ------------------------------------------------------------------------------------------------------------

  // The first phase stores the states of the chunks. They are merged to the states of the rows, which lie behind them.
  void chunks(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) const {
    const ScoredState* const merged = states + plan.work_items;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % plan.chunks * kChunk, last = std::min(first + kChunk, p.n);
      const ScoredWalk row = rows.from(item / plan.chunks);
      write_row_scores(rows, row.at, first, last, t);
      if (phase == CpuPhase::states) {
        states[item] = state_of_chunk(last - first);
      } else if constexpr (!kReduces) {
        const ScoredState& of_row = merged[item / plan.chunks];
        finish_chunk_of({A(of_row.m), {of_row.l, of_row.error}}, results(row.at) + (plan.stores_in_place ? first : 0),
                        last - first);
        scatter(row.at, first, last);
      }
    }
  }
  ScoredState state_of_chunk(int64_t count) const {
    const Reader scores(t);
    State<A> state;
    if constexpr (kIsFloat) {
      state = chunk_state<float>(scores, count, nullptr);
    } else {
      state = RowTile<ReduceEpilogue, A>(scores, count).state(nullptr);
    }
    return {state.m, state.l.sum, state.l.error};
  }
  void finish_chunk_of(const State<A>& row, Y* y, int64_t count) const {
    const Reader scores(t);
    if (row.m == -kInf<A> && row.l.value() == 0) return store_same(y, count, nothing);
    if constexpr (kIsFloat) {
      finish_chunk<Epilogue>(scores, y, count, row, false, 0.0f, streaming);
    } else {
      RowTile<Epilogue, A>(scores, count).store(row, y, 0);
    }
  }
  void merge_chunks(ScoredState* states) const {
    ScoredState* merged = states + plan.work_items;
    ScoredWalk row = rows.from(0);
    for (int64_t r = 0; r < p.rows; ++r, row.next()) {
      State<A> state;
      if (has_sink) state = {sink(row.at), {1, 0}};
      for (int64_t i = 0; i < plan.chunks; ++i, ++states) {
        state = merge(state, State<A>{A(states->m), {states->l, states->error}});
      }
      *merged++ = {state.m, state.l.sum, state.l.error};
      store_lse(row.at, state);
    }
  }

  void run(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) const {
    switch (plan.route) {
      case ScoredRoute::rows: whole_rows(begin, end); break;
      case ScoredRoute::small_rows:
        if constexpr (kIsFloat && kHasFastPaths) small_rows(begin, end);
        break;
      case ScoredRoute::columns: p.has(kRowLse) ? columns<A>(begin, end) : columns<Y>(begin, end); break;
      case ScoredRoute::row_chunks: phase == CpuPhase::merge ? merge_chunks(states) : chunks(phase, states, begin, end);
    }
    if (streaming) fence_streaming_stores();
  }
};

}  // namespace onepass::ONEPASS_ISA
