// loss_rows.h: what losses and their gradients share: the numbers of rows, scores, exponentials, and the rows of a work
// item.
#pragma once

#include "loss.h"
#include "rows_simd.h"
#include "scored_operands.h"

namespace onepass::ONEPASS_ISA {

// Elements of the longest row that is a lane of a tile, however it lies; of a gradient.
constexpr int64_t kShortRow = 128, kShortGradRow = 16;
constexpr int64_t kLossChunk = 4096;   // (backward) elements of a chunk of a row
constexpr int64_t kLossColumns = 256;  // (backward) rows of a tile

// T is the type of the elements.
template <class T>
struct LossRows {
  using A = Acc<T>;
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;
  const LossProblem& p;
  const LossPlan& plan;
  const A softcap = A(p.softcap), uncap = 1 / softcap, smoothing = A(p.smoothing), z_loss = A(p.z_loss);
  const A* const scale = static_cast<const A*>(p.scale);
  const A* const weight = static_cast<const A*>(p.weight);
  const A weight_sum = p.weight_sum ? *static_cast<const A*>(p.weight_sum) : A(p.n);
  A* const terms = static_cast<A*>(p.terms);

  LossRows(const LossProblem& problem, const LossPlan& of) : p(problem), plan(of) {}
  A* plane(int64_t number, int64_t row) const { return terms + number * p.rows + row; }
  A factor_of(int64_t row) const { return scale ? A(p.factor) * scale[row] : A(p.factor); }
  bool is_ignored(int64_t row) const { return p.is_cross && p.index[row] == p.ignore_index; }

  // Where a row begins, from the strides of x or dx, and from one row of the last dim to the next.
  int64_t offset_of(int64_t row, const int64_t* strides) const {
    int64_t offset = 0;
    for (int d = p.dims - 1; d >= 0; row /= p.sizes[d--]) offset += row % p.sizes[d] * strides[d];
    return offset;
  }
  int64_t last_stride(const int64_t* strides) const { return p.dims ? strides[p.dims - 1] : 0; }

  // The rows of a tile.
  struct Tile {
    int64_t row, count;
  };
  Tile tile(int64_t item) const {
    const int64_t size = p.dims ? p.sizes[p.dims - 1] : 1, first = item % plan.per_dim * plan.width;
    return {item / plan.per_dim * size + first, std::min(plan.width, size - first)};
  }

  // Copies short rows that do not lie side by side, so that they do.
  static void copy_rows(const T* from, int64_t row_step, int64_t step, T* to, int64_t to_row_step, int64_t to_step,
                        int64_t rows, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t j = 0; j < rows; ++j) to[j * to_row_step + c * to_step] = from[j * row_step + c * step];
    }
  }
  // Scores, from elements times their factor.
  template <int K>
  ONEPASS_INLINE void cap(Vector (&v)[K]) const {
    if (softcap == 0) return;
    for (Vector& each : v) each *= uncap;
    apply_tanh(v);
    for (Vector& each : v) each *= softcap;
  }
  // Exponentials of numbers that are at most 0, -inf or NaN. They are not scaled: those below 2^-126 are 0.
  template <int K>
  static ONEPASS_INLINE void exp_of(Vector (&v)[K]) {
    if constexpr (std::is_same_v<T, double>) {
      ExpDouble::apply(v);
    } else {
      const ExpBase base = {{}, broadcast(-127 * kLn2), broadcast(kRound + 127)};
      std::conditional_t<std::is_same_v<T, float>, ExpFloat, ExpHalf<4>>::apply(v, base);
    }
  }
};

}  // namespace onepass::ONEPASS_ISA
