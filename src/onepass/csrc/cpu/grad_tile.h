// grad_tile.h: computes gradients of a tile (tiles.h). The operands are the tensor y that the forward saved and the
// gradient g of the forward's result. The steps:
//
//   sum       the sum over each row: of y * g, or of g
//   numbers   what the epilogue needs of the sum
//   results   dx of each element
//
// Columns are read in place, in their own type. They are summed a few steps at a time across the whole tile, so that
// long runs are read, and few pages at a time.
#pragma once

#include "backward.h"
#include "tile_ops.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kSumSteps = 8;  // steps that are added as plain floats; doubles have no wider type for sums
template <class A>
constexpr int64_t kPlainSteps = std::is_same_v<A, double> ? 1 : kSumSteps;

// The operands, of elements of type E: `width` adjacent rows; `y_step` and `g_step` are the strides between steps.
template <class E>
struct Operands {
  const E *y, *g;
  int64_t y_step, g_step, width, y_ahead, g_ahead;  // distance in elements to what is prefetched; 0 for none
};

// Loads a vector of which only `count` lanes exist.
template <bool kAll, class E>
ONEPASS_INLINE V<Acc<E>> load_lanes(const E* from, int64_t count) {
  if constexpr (std::is_same_v<E, double>) {
    if constexpr (kAll) return load_as<double>(from);
    V<double> v{};
    for (int i = 0; i < count; ++i) v[i] = from[i];
    return v;
  } else if constexpr (kAll) {
    return load_vector(from);
  } else {
    return load_tail(from, count, 0);
  }
}
// Adds a few steps of `across` vectors as plain numbers, and calls last(w, sum) for each vector. The steps come one
// after another, because the hardware prefetches one run of each operand, not several. `grads`: (softmax) a gradient
// per row, or null.
template <GradOp Op, class E, class Last, class A = Acc<E>>
ONEPASS_INLINE void sum_steps(const Operands<E>& of, int64_t depth, int64_t across, bool fetches, const V<A>* grads,
                              Last last) {
  constexpr int L = kLanes<A>;
  V<A> sums[std::max(kMaxSequences, kGradLineBytes / int64_t(sizeof(E)) / L)];
  const int64_t whole = of.width / L;
  const E *y = of.y, *g = of.g;
  const auto term = [&](int64_t w, auto all) __attribute__((always_inline)) {
    const int64_t count = of.width - w * L;
    if (fetches) {
      if (Op == GradOp::softmax) __builtin_prefetch(y + w * L + of.y_ahead);
      __builtin_prefetch(g + w * L + of.g_ahead);
    }
    if (Op != GradOp::softmax) return load_lanes<all.value>(g + w * L, count);
    const V<A> of_g = __builtin_expect(grads != nullptr, 0) ? grads[w] : load_lanes<all.value>(g + w * L, count);
    return load_lanes<all.value>(y + w * L, count) * of_g;
  };
  const auto for_each = [&](auto work) __attribute__((always_inline)) {
    for (int64_t w = 0; w < whole; ++w) work(w, term(w, std::true_type()));
    if (whole < across) work(whole, term(whole, std::false_type()));
    y += of.y_step, g += of.g_step;
  };
  if (depth == 1) return for_each(last);
  for_each([&](int64_t w, V<A> v) __attribute__((always_inline)) { sums[w] = v; });
  for (int64_t i = 1; i + 1 < depth; ++i) {
    for_each([&](int64_t w, V<A> v) __attribute__((always_inline)) { sums[w] += v; });
  }
  for_each([&](int64_t w, V<A> v) __attribute__((always_inline)) { last(w, sums[w] + v); });
}
// Adds `depth` steps of the operands to the sums and their errors.
template <GradOp Op, class E, class A = Acc<E>>
__attribute__((noinline)) void add_steps(Operands<E> of, int64_t depth, int64_t across, bool fetches, V<A>* sums,
                                         V<A>* errors, const V<A>* grads) {
  constexpr int64_t some = kPlainSteps<A>;
  for (int64_t i = 0; i < depth; i += some, of.y += some * of.y_step, of.g += some * of.g_step) {
    const auto add = [=](int64_t w, V<A> v) __attribute__((always_inline)) { add_compensated(sums[w], errors[w], v); };
    sum_steps<Op>(of, std::min(depth - i, some), across, fetches, grads, add);
  }
}

// The gradients of a tile: S is the type of the saved tensor, and D that of dx.
template <GradOp Op, class S, class D>
struct GradTile {
  using A = std::conditional_t<std::is_same_v<S, double>, double, float>;
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;
  static constexpr bool kPointwise = Op == GradOp::logsumexp;
  // The exponential of a NaN is a NaN with any bits.
  static constexpr bool kInputNan = onepass::ONEPASS_ISA::kInputNan<S, D> || (Op != GradOp::softmax && sizeof(D) == 2);
  template <class Direct>
  static constexpr bool kReplaces = !Direct::value;  // results replace elements
  TileShape shape;
  int64_t parts = 1, columns = 0;  // parts of a row, one per lane; rows that are cut into parts
  A *t, *t_grad, slope;
  Operands<S> direct;    // for columns
  bool fetches = false;  // not for wide columns of float32, which the hardware prefetches itself
  bool grad_is_per_row;  // it is in `b`
  // Sums and their errors; later the epilogue's numbers. `b`: the result of logsumexp, or a gradient per row.
  static constexpr int64_t kVectors = std::max(kMaxSequences, kGradLineBytes / int64_t(sizeof(S)) / L);
  Vector a[kVectors], error[kVectors], b[kVectors];

  Operands<A> in_tile(int64_t g) const {
    const int64_t across = shape.across * L, at = g * shape.depth * across;
    return {t + at, t_grad + at, across, across, across, 0, 0};
  }

  // For log_softmax, a gradient that is the same for the whole row needs no additions.
  bool has_sums() const { return Op == GradOp::softmax || (!kPointwise && !grad_is_per_row); }
  void begin_sums() {
    for (int64_t s = 0; s < shape.sequences(); ++s) a[s] = error[s] = Vector{};
  }
  // Add the steps of the operands to the sums.
  void add_direct() { add(direct, 0); }
  void add_tile() {
    for (int64_t g = 0; g < shape.groups; ++g) add(in_tile(g), g * shape.across);
  }
  template <class E>
  void add(const Operands<E>& of, int64_t first) {
    add_steps<Op>(of, shape.depth, shape.across, fetches, a + first, error + first,
                  grad_is_per_row ? b + first : nullptr);
  }
  // dx of columns of W vectors in place. The last vector may have fewer lanes. The sums are in registers. Calls put(i,
  // v) with the vectors of step i.
  template <int W, class Put>
  ONEPASS_INLINE void narrow_columns(Put put) const {
    const int64_t rest = direct.width - (W - 1) * L;
    const auto load = [&](const S* at, Vector(&to)[W]) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int w = 0; w + 1 < W; ++w) to[w] = load_lanes<true>(at + w * L, L);
      to[W - 1] = load_lanes<false>(at + (W - 1) * L, rest);
    };
    const S *y = direct.y, *g = direct.g;
    Vector sums[W] = {}, errors[W] = {}, of_y[W], of_g[W];
    for (int64_t i = 0; i < shape.depth; i += kSumSteps) {
      Vector some[W] = {};
      for (int64_t k = std::min(shape.depth - i, kSumSteps); k > 0; --k, y += direct.y_step, g += direct.g_step) {
        load(g, of_g);
        if (Op == GradOp::softmax) load(y, of_y);
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) some[w] += Op == GradOp::softmax ? of_y[w] * of_g[w] : of_g[w];
      }
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) add_compensated(sums[w], errors[w], some[w]);
    }
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sums[w] = number_of(sums[w], errors[w]);
    y = direct.y, g = direct.g;
    for (int64_t i = 0; i < shape.depth; ++i, y += direct.y_step, g += direct.g_step) {
      load(y, of_y), load(g, of_g);
      results_of(of_y, of_g, sums, sums);
      put(i, of_y);
    }
  }
  static constexpr int kNarrow = 4;  // vectors
  template <int W = kNarrow, class Put>
  ONEPASS_INLINE void columns_in_registers(Put put) const {
    if (shape.across == W) return narrow_columns<W>(put);
    if constexpr (W > 1) columns_in_registers<W - 1>(put);
  }
  // The numbers of columns with few steps.
  __attribute__((noinline)) void numbers_of_few() {
    sum_steps<Op>(direct, shape.depth, shape.across, fetches, static_cast<const Vector*>(nullptr),
                  [this](int64_t w, Vector sum) __attribute__((always_inline)) { a[w] = number_of(sum, Vector{}); });
  }

  // Adds the sums of the lanes of each row, and computes the epilogue's numbers.
  void numbers(int64_t n) {
    for (int64_t s = 0; !has_sums() && s < shape.sequences(); ++s) a[s] = kPointwise ? a[s] * slope : b[s] * A(n);
    if (!has_sums()) return;
    A *const sums = reinterpret_cast<A*>(a), *const errors = reinterpret_cast<A*>(error);
    for (int64_t j = 0; parts > 1 && j < columns; ++j) {
      Compensated total;
      double plain = 0;
      for (int64_t lane = j; lane < parts * columns; lane += columns) {
        total.add(double(sums[lane])), total.error += double(errors[lane]), plain += double(sums[lane]);
      }
      const double sum = std::isfinite(total.value()) ? total.value() : plain;
      for (int64_t lane = j; lane < parts * columns; lane += columns) sums[lane] = A(sum), errors[lane] = 0;
    }
    for (int64_t s = 0; s < shape.sequences(); ++s) a[s] = number_of(a[s], error[s]);
  }
  // The epilogue's number, from a sum and its error.
  ONEPASS_INLINE Vector number_of(Vector sum, Vector error) const {
    const Vector total = sum + error, right = total - total == Vector{} ? total : sum;
    return Op == GradOp::softmax ? right * -slope : right;
  }

  void begin_results(int64_t, int64_t) {}
  // dx of K vectors, which replaces y.
  template <int K>
  ONEPASS_INLINE void results_of(Vector (&y)[K], const Vector (&g)[K], const Vector* a, const Vector* b) const {
    if constexpr (Op == GradOp::softmax) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) y[k] *= g[k] * slope + a[k];
    } else {
      if constexpr (kPointwise) {
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) y[k] = y[k] * slope - b[k];
      }
      if constexpr (std::is_same_v<A, double>) {
        ExpDouble::apply(y);
      } else {
        const ExpFactor one = ExpFactor::of(broadcast(1));
        exp_with_factor<sizeof(D) == 2>(y, one.base);
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) y[k] *= one.factor;
      }
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) y[k] = kPointwise ? a[k] * y[k] : (g[k] - y[k] * a[k]) * slope;
    }
  }
  template <int K, class E, class All>
  ONEPASS_INLINE void results_at(const Operands<E>& of, int64_t i, int64_t w, int64_t s, All, Vector (&v)[K]) const {
    Vector g[K];
    const E *const y = of.y + i * of.y_step + w * L, *const grad = of.g + i * of.g_step + w * L;
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      v[k] = load_lanes<All::value>(y + k * L, of.width - w * L);
      g[k] = kPointwise        ? Vector{}
             : grad_is_per_row ? b[s + k]
                               : load_lanes<All::value>(grad + k * L, of.width - w * L);
    }
    results_of(v, g, a + s, b + s);
  }
  template <class E, class Put>
  ONEPASS_INLINE void step_results_of(const Operands<E>& of, int64_t i, int64_t first_sequence, Put put) const {
    int64_t w = 0;
    const int64_t whole = of.width / L;
    for (; w + 4 <= whole; w += 4) {
      Vector v[4];
      results_at(of, i, w, first_sequence + w, std::true_type(), v);
      put(w, v);
    }
    Vector v[1];
    for (; w < whole; ++w) {
      results_at(of, i, w, first_sequence + w, std::true_type(), v);
      put(w, v);
    }
    if (w < shape.across) {
      results_at(of, i, w, first_sequence + w, std::false_type(), v);
      put(w, v);
    }
  }
  // Calls put(w, v) with dx of the vectors of a step. The operands are in place (Direct) or in the tile.
  template <class Direct, class Put>
  ONEPASS_INLINE void step_results(int64_t i, Put put) const {
    if constexpr (Direct::value) {
      step_results_of(direct, i, 0, put);
    } else {
      step_results_of(in_tile(0), i, 0, put);
    }
  }
  // dx replaces the elements of a group of slices.
  template <class Direct>
  __attribute__((noinline)) void group_results(int64_t g) {
    const Operands<A> of = in_tile(g);
    for (int64_t i = 0; i < shape.depth; ++i) {
      step_results_of(of, i, g * shape.across, [&](int64_t w, const auto& v) __attribute__((always_inline)) {
        std::memcpy(t + (of.y - t) + i * of.y_step + w * L, &v, sizeof v);
      });
    }
  }
};

}  // namespace onepass::ONEPASS_ISA
