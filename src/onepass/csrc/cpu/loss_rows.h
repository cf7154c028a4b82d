// loss_rows.h: what losses and their gradients share: the numbers of rows, scores, exponentials, and the rows of a work
// item.
#pragma once

#include "loss.h"
#include "rows_simd.h"
#include "scored_operands.h"

namespace onepass::ONEPASS_ISA {

// The most elements of a row that is computed in one lane of a tile, however it lies in memory. In a gradient, where
// rows are copied twice, the limit depends on the size of an element.
constexpr int64_t kShortRow = 128;
constexpr int64_t short_grad_row(int64_t size) { return size == 2 ? 44 : 24; }
constexpr int64_t kLossChunk = 4096;   // (backward) elements in a chunk of a longer row
constexpr int64_t kLossColumns = 256;  // (backward) rows in a tile, or in a work item of whole rows

// T is the type of the elements.
template <class T>
struct LossRows {
  using A = Acc<T>;
  using Vector = V<A>;
  using Exp = std::conditional_t<std::is_same_v<T, float>, ExpFloat, ExpHalf<4>>;  // used for floats
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
  // Whether any of these rows is ignored. (Only a cross-entropy has a class to ignore.)
  bool ignores(int64_t row, int64_t count) const {
    const int64_t* const index = p.index + row;
    const int64_t ignored = p.ignore_index;
    int64_t any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t j = 0; j < count; ++j) any |= index[j] == ignored;
    return any;
  }

  // The offset of a row in x or dx, whose strides are given; and the stride between rows of the last dim.
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

  // Copies short rows into a layout in which they lie side by side, or back.
  static void copy_rows(const T* from, int64_t row_step, int64_t step, T* to, int64_t to_row_step, int64_t to_step,
                        int64_t rows, int64_t n) {
    if (step == 1 && to_row_step == 1) return transpose(from, row_step, rows, n, to, to_step);
    if (row_step == 1 && to_step == 1) return transpose(from, step, n, rows, to, to_row_step);
    const bool are_adjacent = row_step == 1 && to_row_step == 1;
    for (int64_t c = 0; c < n; ++c, from += step, to += to_step) {
      if (are_adjacent) std::memcpy(static_cast<void*>(to), from, size_t(rows) * sizeof(T));
      for (int64_t j = 0; !are_adjacent && j < rows; ++j) to[j * to_row_step] = from[j * row_step];
    }
  }
  // Copies rows of adjacent elements to columns of adjacent elements.
  static void transpose(const T* from, int64_t row_step, int64_t rows, int64_t columns, T* to, int64_t column_step) {
    constexpr int64_t kSide = 8;  // of a square
    int64_t i = 0;
    for (; i + kSide <= rows; i += kSide) {
      int64_t j = 0;
      for (; j + kSide <= columns; j += kSide) {
        transpose_square(from + i * row_step + j, row_step, to + j * column_step + i, column_step);
      }
      for (; j < columns; ++j) {
        for (int64_t k = 0; k < kSide; ++k) to[j * column_step + i + k] = from[(i + k) * row_step + j];
      }
    }
    for (; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) to[j * column_step + i] = from[i * row_step + j];
    }
  }
  // Transposes eight rows of eight elements: three times, the first half of the rows is interleaved with the second
  // half.
  static ONEPASS_INLINE void transpose_square(const T* from, int64_t row_step, T* to, int64_t column_step) {
    using U = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    typedef U Eight __attribute__((vector_size(8 * sizeof(U))));
    Eight a[8], b[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) std::memcpy(&a[k], from + k * row_step, sizeof(Eight));
#pragma GCC unroll 3
    for (int round = 0; round < 3; ++round) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        b[2 * k] = __builtin_shufflevector(a[k], a[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        b[2 * k + 1] = __builtin_shufflevector(a[k], a[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
      }
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) a[k] = b[k];
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) std::memcpy(to + k * column_step, &a[k], sizeof(Eight));
  }
  // Computes scores from elements times their factor, by the softcap.
  template <int K>
  ONEPASS_INLINE void cap(Vector (&v)[K]) const {
    if (softcap == 0) return;
    for (Vector& each : v) each *= uncap;
    apply_tanh(v);
    for (Vector& each : v) each *= softcap;
  }
  // Exponentials of numbers that are at most 0, -inf or NaN. They are not scaled: below 2^-126 they are 0.
  template <int K>
  static ONEPASS_INLINE void exp_of(Vector (&v)[K]) {
    if constexpr (std::is_same_v<T, double>) {
      ExpDouble::apply(v);
    } else {
      const ExpBase base = {{}, broadcast(-127 * kLn2), broadcast(kRound + 127)};
      Exp::apply(v, base);
    }
  }
};

}  // namespace onepass::ONEPASS_ISA
