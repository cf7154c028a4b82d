// divergence_rows.h: what divergences and their gradients share: vectors of elements, where they are in memory, and
// copies of elements that are not contiguous.
#pragma once

#include "divergence.h"
#include "loss_rows.h"

namespace onepass::ONEPASS_ISA {

constexpr int kTogether = 4;                     // vectors that are computed together
constexpr int64_t kBlock = 128;                  // vectors in a block, of a row or of each group of rows
constexpr int64_t kGroups = 1024 / sizeof(Vec);  // the most groups of rows of a work item; a group's rows fill a vector
constexpr int64_t kPitch = kBlock + 2;           // vectors from one group to the next, which so uses other cache lines
constexpr int64_t kAhead = 2048;                 // distance in elements of a row to what is prefetched
constexpr int64_t kClassesAhead = 8;             // the same in classes, for neighbouring rows
static_assert((2 * kGroups + 2) * kPitch * sizeof(Vec) <= kScratch * sizeof(float));

// The classes [first, last) of rows.
struct Run {
  int64_t first, last;
  bool in_columns;  // the lanes of a vector are rows; otherwise classes of one row
  int64_t rows;
  int64_t size() const { return last - first; }
  int64_t vectors(int64_t lanes) const { return in_columns ? size() : ceil_div(size(), lanes); }
};

// Loads, stores and loops for consecutive vectors of elements of type T.
template <class T>
struct DivergenceVectors {
  using A = Acc<T>;
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;
  static constexpr bool kPairs = std::is_same_v<T, bfloat16>;  // pairs of vectors stay deinterleaved

  // Calls body(i, v, L) for kTogether vectors from vector i on, or body(i, v, count) for the first lanes of one vector.
  template <class Body>
  static ONEPASS_INLINE void for_each(const Run& run, Body body) {
    const int64_t count = run.vectors(L), tail = run.in_columns ? 0 : run.size() % L, full = count - (tail > 0);
    Vector some[kTogether], one[1];
    int64_t i = 0;
    for (; i + kTogether <= full; i += kTogether) body(i, some, int64_t(L));
    for (; i < count; ++i) body(i, one, i < full ? int64_t(L) : tail);
  }
  static ONEPASS_INLINE void load(const T* from, Vector (&v)[kTogether], int64_t) {
    if constexpr (std::is_same_v<A, float>) {
      load_vectors<kPairs>(from, v);
    } else {
      std::memcpy(&v, from, sizeof v);
    }
  }
  static ONEPASS_INLINE void load(const T* from, Vector (&v)[1], int64_t count) {
    count == L ? load_operand<A>(from, 1, v) : load_operand<A>(from, 1, v, count);
  }
  static ONEPASS_INLINE void store(T* to, const Vector (&v)[kTogether], int64_t, bool streaming) {
    if constexpr (std::is_same_v<A, float>) {
      with_streaming(streaming, [&](auto streams) __attribute__((always_inline)) {
        store_vectors<kPairs, false, streams.value, !kPairs>(to, v);
      });
    } else {
      std::memcpy(to, &v, sizeof v);
    }
  }
  static ONEPASS_INLINE void store(T* to, const Vector (&v)[1], int64_t count, bool = false) {
    if constexpr (std::is_same_v<A, float>) {
      count == L ? store_vector<true>(to, v[0]) : store_tail<true>(to, count, v[0]);
    } else {
      std::memcpy(to, &v, size_t(count) * sizeof(T));
    }
  }
  static ONEPASS_INLINE void fetch(const T* from, int64_t vectors) {
    for (int64_t i = 0; i < vectors * L; i += kLine / int64_t(sizeof(T))) __builtin_prefetch(from + i);
  }
};

// Steps that only some calls need. Their vectors are copied, so that the other loops do not depend on these steps.
template <class A>
struct DivergenceExtras {
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;

  // Replaces elements by scores with a softcap, and writes the derivatives if `slopes` is not null.
  static __attribute__((noinline)) void cap(const DivergenceProblem& p, const Run& run, A* x, A* slopes) {
    const A factor = A(p.factor), softcap = A(p.softcap), uncap = 1 / softcap;
    for (int64_t i = 0; i < run.vectors(L); ++i) {
      const Vector scaled = load_as(x + i * L) * factor * uncap;
      Vector v[1] = {scaled}, slope[1] = {scaled};
      apply_tanh(v);
      store_as(x + i * L, v[0] * softcap);
      if (!slopes) continue;
      apply_tanh_slope(slope);
      store_as(slopes + i * L, slope[0]);
    }
  }
  // Replaces the elements of y by shares.
  static __attribute__((noinline)) void share(const DivergenceProblem& p, const Run& run, A* y) {
    const A own = A(1 - p.smoothing), all = A(p.smoothing / double(p.n));
    for (int64_t i = 0; i < run.vectors(L) * L; ++i) y[i] = y[i] * own + all;
    multiply_by_weights(p, run, y);
  }
  static __attribute__((noinline)) void multiply_by_weights(const DivergenceProblem& p, const Run& run, A* v) {
    const A* const weight = static_cast<const A*>(p.weight);
    for (int64_t i = 0; weight && i < run.vectors(L); ++i) {
      Vector w[1];
      if (run.in_columns) {
        load_operand<A>(weight + run.first + i, 0, w);
      } else {
        DivergenceVectors<A>::load(weight + run.first + i * L, w, std::min<int64_t>(L, run.size() - i * L));
      }
      store_as(v + i * L, load_as(v + i * L) * w[0]);
    }
  }
  static void multiply(const Run& run, A* v, const A* by) {
    for (int64_t i = 0; i < run.vectors(L) * L; ++i) v[i] *= by[i];
  }
};

// Whether the elements of a class are contiguous in a tensor; whether whole rows are, and a row is at most a block.
inline bool columns_are_adjacent(const DivergenceProblem& p, const DivergencePlan& plan, int t) {
  return p.dims && p.strides[t][p.dims - 1] == 1 && plan.span == p.sizes[p.dims - 1];
}
inline bool rows_are_adjacent(const DivergenceProblem& p, const DivergencePlan& plan, int t) {
  return p.n <= kBlock && p.steps[t] == 1 && p.dims && p.strides[t][p.dims - 1] == p.n &&
         plan.span == p.sizes[p.dims - 1];
}

// T is the type of the elements.
template <class T>
struct DivergenceRows {
  using A = Acc<T>;
  using P = DivergenceProblem;
  using Vector = V<A>;
  using Vectors = DivergenceVectors<T>;
  using Extras = DivergenceExtras<A>;
  static constexpr int L = kLanes<A>;
  const P& p;
  const DivergencePlan& plan;
  const bool caps = p.softcap != 0, makes_shares = p.weight || p.smoothing != 0;
  const bool is_here = are_here();             // vectors are computed in place
  const A factor = caps ? A(1) : A(p.factor);  // the factor of elements, or of scores that replace them
  A* const copies = reinterpret_cast<A*>(scratch());

  DivergenceRows(const P& problem, const DivergencePlan& of) : p(problem), plan(of) {}

  bool are_here() const {
    bool all = !plan.in_columns && !caps && !makes_shares;
    for (const int64_t step : p.steps) all &= step == 1;
    return all;
  }

  // Work items --------------------------------------------------------------------------------------------------------

  // The rows of a work item, and their offsets in each tensor.
  struct Tile {
    int64_t row, rows;
    int64_t offsets[P::kTensors][kGroups * L];
    template <class Data>
    Data* at(int t, Data* data, int64_t j) const {
      return data ? data + offsets[t][j] : nullptr;
    }
  };
  template <class Work>
  void for_each_tile(int64_t begin, int64_t end, Work work) const {
    DimGroup dims;
    dims.count = p.dims;
    for (int d = 0; d < p.dims; ++d) {
      dims.dims[d].size = p.sizes[d];
      for (int t = 0; t < P::kTensors; ++t) dims.dims[d].strides[t] = p.strides[t][d];
    }
    const int64_t per_span = ceil_div(plan.span, plan.width);
    Tile tile;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % per_span * plan.width;
      tile.row = item / per_span * plan.span + first, tile.rows = std::min(plan.width, plan.span - first);
      OffsetCalculator at(dims, tile.row);
      for (int64_t j = 0; j < tile.rows; ++j, at.next()) {
        for (int t = 0; t < P::kTensors; ++t) tile.offsets[t][j] = at.offset[t];
      }
      work(tile);
    }
  }
  // Calls work(run) for the blocks of a row, or of all rows of a tile.
  template <class Work>
  void for_each_block(const Tile& tile, Work work) const {
    const int64_t size = plan.in_columns ? kBlock : kBlock * L;
    for (int64_t c = 0; c < p.n; c += size) {
      work(Run{c, std::min(c + size, p.n), plan.in_columns, plan.in_columns ? tile.rows : 1});
    }
  }
  // Calls work(group, j) for each group of rows of a run. Row j of the run is the first one of the group.
  template <class Work>
  static void for_each_group(const Run& run, Work work) {
    for (int64_t j = 0; j < run.rows; j += L) {
      work(Run{run.first, run.last, run.in_columns, std::min<int64_t>(L, run.rows - j)}, j);
    }
  }

  // Copies ------------------------------------------------------------------------------------------------------------

  // The vectors of x or y, and later of dx or dy. The vectors of a group of rows follow one another.
  A* copy_of(int t, int64_t j = 0) const { return copies + (t % 2 * kGroups * L + j) * kPitch; }
  A* slopes() const { return copies + 2 * kGroups * L * kPitch; }  // of a group
  A* slices() const { return slopes() + L * kPitch; }              // the rows of a group, one after another

  // Calls copy(at, i, count) for vectors of neighbouring rows: their offset in the tensor, their number, and how many
  // elements they have.
  template <class Copy>
  ONEPASS_INLINE void for_each_vector(int t, const Run& run, const int64_t* offsets, Copy copy) const {
    const int64_t step = p.steps[t], rest = run.rows % L, full = run.rows - rest;
    for (int64_t c = 0; c < run.size(); ++c) {
      int64_t at = offsets[0] + (run.first + c) * step, i = c;
      for (const int64_t end = at + full; at < end; at += L, i += kPitch) copy(at, i, int64_t(L));
      if (rest) copy(at, i, rest);
    }
  }
  // Calls copy(at, i, count) for runs of adjacent elements of a group of rows: their offset in the tensor, their offset
  // in the slices, and their length.
  template <class Copy>
  ONEPASS_INLINE void for_each_slice(int t, const Run& run, const int64_t* offsets, Copy copy) const {
    if (rows_are_adjacent(p, plan, t)) return copy(offsets[0], 0, run.rows * p.n);
    for (int64_t j = 0; j < run.rows; ++j) copy(offsets[j] + run.first, j * run.size(), run.size());
  }
  // Calls copy(at, i) for each element: its offset in the tensor, and in the vectors.
  template <class Copy>
  ONEPASS_INLINE void for_each_element(int t, const Run& run, const int64_t* offsets, Copy copy) const {
    for (int64_t c = 0; c < run.size(); ++c) {
      const int64_t at = (run.first + c) * p.steps[t];
      if (!run.in_columns) copy(offsets[0] + at, c);
      for (int64_t j = 0; run.in_columns && j < run.rows; ++j) copy(offsets[j] + at, (j / L * kPitch + c) * L + j % L);
    }
  }
  // Copies a run of x or y.
  __attribute__((noinline)) void read(int t, const Run& run, const int64_t* offsets) const {
    const T* const from = static_cast<const T*>(t == P::kOfX ? p.x : p.y);
    A* const to = copy_of(t);
    const auto load = [&](int64_t at, int64_t count, A* vectors, int64_t ahead) {
      load_run(Input<T, A>{from + at}, count, vectors, ahead);
    };
    if (!run.in_columns && p.steps[t] == 1) {
      load(offsets[0] + run.first, run.size(), to, kAhead);
    } else if (p.steps[t] == 1) {
      for_each_group(run, [&](const Run& group, int64_t j) {
        for_each_slice(t, group, offsets + j, [&](int64_t at, int64_t i, int64_t count) {
          load(at, count, slices() + i, p.is_backward() ? count : 0);
        });
        transpose_in(slices(), run.size(), copy_of(t, j));
      });
    } else if (run.in_columns && columns_are_adjacent(p, plan, t)) {
      const int64_t ahead = kClassesAhead * p.steps[t];
      for_each_vector(t, run, offsets, [=](int64_t at, int64_t i, int64_t count) __attribute__((always_inline)) {
        Vector v[1];
        __builtin_prefetch(from + at + ahead);
        Vectors::load(from + at, v, count);
        store_as(to + i * DivergenceRows::L, v[0]);
      });
    } else {
      for_each_element(t, run, offsets, [=](int64_t at, int64_t i) { to[i] = to_acc(from[at]); });
    }
  }
  // Copies a run of results to dx or dy.
  __attribute__((noinline)) void write(int t, const Run& run, const int64_t* offsets) const {
    T* const to = static_cast<T*>(t == P::kOfDx ? p.dx : p.dy);
    const A* const from = copy_of(t);
    const bool streaming = plan.streaming;
    if (!run.in_columns && p.steps[t] == 1) {
      store_run<true>(to + offsets[0] + run.first, run.size(), from, streaming);
    } else if (p.steps[t] == 1) {
      for_each_group(run, [&](const Run& group, int64_t j) {
        transpose_out(copy_of(t, j), run.size(), slices());
        for_each_slice(t, group, offsets + j, [&](int64_t at, int64_t i, int64_t count) {
          store_run<true>(to + at, count, slices() + i, streaming);
        });
      });
    } else if (run.in_columns && columns_are_adjacent(p, plan, t)) {
      for_each_vector(t, run, offsets, [=](int64_t at, int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vector v[1] = {load_as(from + i * DivergenceRows::L)};
        if constexpr (std::is_same_v<A, float>) {
          if (streaming && count == DivergenceRows::L) return stream_vector<true>(to + at, v[0]);
        }
        Vectors::store(to + at, v, count);
      });
    } else {
      for_each_element(t, run, offsets, [=](int64_t at, int64_t i) { to[at] = from_acc<T>(from[i]); });
    }
  }
  // Copies a run of x and y, beginning with row j of the tile, and calls work(group, row, x, y) for its groups.
  template <class Work>
  void with_copies(const Run& run, const Tile& tile, int64_t j, Work work) const {
    for (const int t : {P::kOfX, P::kOfY}) read(t, run, tile.offsets[t] + j);
    for_each_group(run, [&](const Run& group, int64_t k) {
      A *const x = copy_of(P::kOfX, k), *const y = copy_of(P::kOfY, k);
      if (caps) Extras::cap(p, group, x, p.is_backward() ? slopes() : nullptr);
      if (makes_shares) Extras::share(p, group, y);
      work(group, j + k, x, y);
    });
  }
};

}  // namespace onepass::ONEPASS_ISA
