// grad_tile.h: gradients of a tile (tiles.h), whose operands are what the forward saved and the gradient of its result.
//
//   sum       what each row's elements add up to: y * g, or g
//   numbers   what the epilogue needs of the sum
//   results   dx of each element
//
// Columns are read where they are, in their own type. They are summed some steps at a time across the whole tile: long
// runs are read, and few pages at a time.
#pragma once

#include "backward.h"
#include "tile_ops.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kSumSteps = 8;  // that are added in plain floats

// The operands, of elements of type E: `width` adjacent rows, `y_step` and `g_step` from one step to the next.
template <class E>
struct Operands {
  const E *y, *g;
  int64_t y_step, g_step, width, y_ahead, g_ahead;  // elements to what is fetched meanwhile; 0 for none
};

// The lanes of a vector of which `count` are there.
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
// Adds `depth` steps of the operands to the sums of `across` vectors. `grads`: (softmax) a gradient per row; or null.
template <GradOp Op, class E, class A = Acc<E>>
__attribute__((noinline)) void add_steps(const Operands<E> of, int64_t depth, int64_t across, bool fetches, V<A>* sums,
                                         V<A>* errors, const V<A>* grads) {
  using Vector = V<A>;
  constexpr int L = kLanes<A>;
  const auto add = [&](int64_t i, int64_t w, auto steps, auto all) __attribute__((always_inline)) {
    constexpr int K = steps.value;
    const int64_t count = of.width - w * L;
    const E *y = of.y + i * of.y_step + w * L, *g = of.g + i * of.g_step + w * L;
    Vector sum = sums[w], of_errors = errors[w];
    Vector terms[K];
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k, y += of.y_step, g += of.g_step) {
      if (of.g_ahead && fetches) {
        if (Op == GradOp::softmax) __builtin_prefetch(y + of.y_ahead);
        __builtin_prefetch(g + of.g_ahead);
      }
      const Vector of_g =
          Op == GradOp::softmax && __builtin_expect(grads != nullptr, 0) ? grads[w] : load_lanes<all.value>(g, count);
      terms[k] = Op == GradOp::softmax ? load_lanes<all.value>(y, count) * of_g : of_g;
      if (std::is_same_v<A, double>) add_compensated(sum, of_errors, terms[k]);
    }
    if constexpr (!std::is_same_v<A, double>) {
#pragma GCC unroll 8
      for (int k = 0; k < K / 2; ++k) terms[k] = terms[2 * k] + terms[2 * k + 1];
#pragma GCC unroll 8
      for (int k = 0; k < K / 4; ++k) terms[k] = terms[2 * k] + terms[2 * k + 1];
      if constexpr (K == 8) terms[0] += terms[1];
      add_compensated(sum, of_errors, terms[0]);
    }
    sums[w] = sum, errors[w] = of_errors;
  };
  const int64_t whole = of.width / L;
  const auto add_all = [&](int64_t i, auto steps) __attribute__((always_inline)) {
    for (int64_t w = 0; w < whole; ++w) add(i, w, steps, std::true_type());
    if (whole < across) add(i, whole, steps, std::false_type());
  };
  int64_t i = 0;
  for (; i + kSumSteps <= depth; i += kSumSteps) add_all(i, std::integral_constant<int, int(kSumSteps)>());
  if (i + 4 <= depth) add_all(i, std::integral_constant<int, 4>()), i += 4;
  for (; i < depth; ++i) add_all(i, std::integral_constant<int, 1>());
}

// Of a saved tensor of type S, for dx of type D.
template <GradOp Op, class S, class D>
struct GradTile {
  using A = std::conditional_t<std::is_same_v<S, double>, double, float>;
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;
  static constexpr bool kPointwise = Op == GradOp::logsumexp;
  // An exponential of a NaN is a NaN of any bits.
  static constexpr bool kInputNan = onepass::ONEPASS_ISA::kInputNan<S, D> || (Op != GradOp::softmax && sizeof(D) == 2);
  template <class Direct>
  static constexpr bool kReplaces = !Direct::value;  // results take the place of elements
  TileShape shape;
  int64_t parts = 1, columns = 0;  // of a row, one per lane; rows that are cut
  A *t, *t_grad, slope;
  Operands<S> direct;    // of columns
  bool fetches = false;  // the hardware fetches float32 of wide columns itself
  bool grad_is_per_row;  // `b` has it
  // Sums with their errors; then numbers of the epilogue. `b`: the result of logsumexp, or a gradient per row.
  static constexpr int64_t kVectors = std::max(kMaxSequences, kGradLineBytes / int64_t(sizeof(S)) / L);
  Vector a[kVectors], error[kVectors], b[kVectors];

  Operands<A> in_tile(int64_t g) const {
    const int64_t across = shape.across * L, at = g * shape.depth * across;
    return {t + at, t_grad + at, across, across, across, 0, 0};
  }

  // A row's gradient of log_softmax that is the same everywhere needs no additions.
  bool has_sums() const { return Op == GradOp::softmax || (!kPointwise && !grad_is_per_row); }
  void begin_sums() {
    for (int64_t s = 0; s < shape.sequences(); ++s) a[s] = error[s] = Vector{};
  }
  // Adds the steps of the operands to the sums.
  void add_direct() { add(direct, 0); }
  void add_tile() {
    for (int64_t g = 0; g < shape.groups; ++g) add(in_tile(g), g * shape.across);
  }
  template <class E>
  void add(const Operands<E>& of, int64_t first) {
    add_steps<Op>(of, shape.depth, shape.across, fetches, a + first, error + first,
                  grad_is_per_row ? b + first : nullptr);
  }
  // dx of columns where they are, W vectors of them from vector `first` on: their sums, and what is read again from the
  // core's cache. The last vector may have fewer lanes (`Tail`). Calls put(i, w, v) with vector w of step i.
  template <int W, bool Tail, class Put>
  ONEPASS_INLINE void column_block(int64_t first, Put put) const {
    const int64_t rest = direct.width - (first + W - 1) * L;
    const auto load = [&](const S* at, Vector(&to)[W]) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int w = 0; w + 1 < W; ++w) to[w] = load_lanes<true>(at + w * L, L);
      to[W - 1] = load_lanes<!Tail>(at + (W - 1) * L, rest);
    };
    const S *y = direct.y + first * L, *g = direct.g + first * L;
    Vector sums[W] = {}, errors[W] = {}, of_y[W], of_g[W];
    const auto terms_of_step = [&](Vector(&terms)[W]) __attribute__((always_inline)) {
      load(g, terms), g += direct.g_step;
      if (Op != GradOp::softmax) return;
      load(y, of_y), y += direct.y_step;
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) terms[w] *= of_y[w];
    };
    for (int64_t i = 0; i < shape.depth; i += kSumSteps) {
      const int64_t end = i + kSumSteps < shape.depth ? i + kSumSteps : shape.depth;
      Vector even[W] = {}, odd[W] = {}, terms[W];
      for (int64_t k = i; k < end; ++k) {
        terms_of_step(terms);
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) even[w] += terms[w];
        if (++k == end) break;
        terms_of_step(terms);
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) odd[w] += terms[w];
      }
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) add_compensated(sums[w], errors[w], even[w] + odd[w]);
    }
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sums[w] = number_of(sums[w], errors[w]);
    y = direct.y + first * L, g = direct.g + first * L;
    for (int64_t i = 0; i < shape.depth; ++i, y += direct.y_step, g += direct.g_step) {
      load(y, of_y), load(g, of_g);
      results_of(of_y, of_g, sums, sums);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) put(i, first + w, of_y[w]);
    }
  }
  static constexpr int kBlockVectors = L == 16 ? 8 : 4;
  template <int W = kBlockVectors, class Put>
  ONEPASS_INLINE void last_block(int64_t first, int64_t vectors, Put put) const {
    if (vectors == W) return column_block<W, true>(first, put);
    if constexpr (W > 1) last_block<W - 1>(first, vectors, put);
  }
  template <class Put>
  ONEPASS_INLINE void columns_in_blocks(Put put) const {
    int64_t w = 0;
    for (; w + kBlockVectors <= direct.width / L; w += kBlockVectors) column_block<kBlockVectors, false>(w, put);
    if (w < shape.across) last_block(w, shape.across - w, put);
  }

  // Adds the sums of the lanes of each row, and makes the numbers of the epilogue.
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
  // Of a sum and its error.
  ONEPASS_INLINE Vector number_of(Vector sum, Vector error) const {
    const Vector total = sum + error, right = total - total == Vector{} ? total : sum;
    return Op == GradOp::softmax ? right * -slope : right;
  }

  void begin_results(int64_t, int64_t) {}
  // dx of K vectors, given in y.
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
  // Calls put(w, v) with dx of vectors of a step, of operands where they are, or in the tile.
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
