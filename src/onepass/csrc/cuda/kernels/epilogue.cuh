// epilogue.cuh: how results are computed from the state of a row. There is one struct for each function, and one for
// the gradient of each. Out is the type that results are computed for. It is also the type of the results, except in a
// reduction of half types.
//
// A forward epilogue has these members:
//
//   kOnePerRow    whether the function is a reduction. Then `store` stores the result of a row. If a row has several
//                 results, each has its own plane of the result tensor; planes are `plane_stride` elements apart
//   epilogue(x)   if it is not a reduction: the result of element x. The epilogue is constructed from the row's state
//   kTakesX       whether the result is computed from x alone
//   kTakesExp     whether `from_exp` also computes the result from exp(x - m), for rows that keep their exponentials
#pragma once

#include "state.cuh"

// exp(x - m) / l
template <class Out>
struct SoftmaxEpilogue {
  typedef AccType<Out> A;
  static constexpr bool kOnePerRow = false, kTakesX = false, kTakesExp = true;
  A m;
  A factor;     // 1 / l; for doubles l itself
  A factor_lo;  // the rounding error of 1 / l

  SoftmaxEpilogue() = default;
  __device__ SoftmaxEpilogue(State<A> row) : m(row.m) {
    const bool is_undefined = row.m == infinity() || row.m == -infinity();  // torch gives NaN for the whole row
    if constexpr (sizeof(A) == 8) {
      factor = row.l;
    } else {
      factor = reciprocal(row.l);
      factor_lo = factor * fmaf(-row.l, factor, 1);
    }
    if (is_undefined) factor = A(nan_());
  }
  __device__ A operator()(A x) const { return from_exp(exp_<Out>(x - m)); }
  // Rounded once, as a division is. This takes two instructions; a half result needs one.
  __device__ A from_exp(A e) const {
    if constexpr (sizeof(A) == 8) {
      return e / factor;
    } else {
      return sizeof(Out) == 2 ? e * factor : fmaf(e, factor, e * factor_lo);
    }
  }
};

// x - m - log(l)
template <class Out>
struct LogSoftmaxEpilogue {
  typedef AccType<Out> A;
  static constexpr bool kOnePerRow = false, kTakesX = true, kTakesExp = false;
  A m, log_l;

  LogSoftmaxEpilogue() = default;
  __device__ LogSoftmaxEpilogue(State<A> row) : m(row.m) {
    const bool is_undefined = row.m == infinity() || row.m == -infinity();  // torch gives NaN for the whole row
    log_l = log_(row.l);
    if (is_undefined) log_l = A(nan_());
  }
  __device__ A operator()(A x) const { return (x - m) - log_l; }
};

// m + log(l)
template <class Out>
struct LogSumExpEpilogue {
  static constexpr bool kOnePerRow = true, kTakesX = false, kTakesExp = false;
  template <class Result>
  static __device__ void store(State<AccType<Out>> row, Result* y, int64_t) {
    *y = from_acc<Result>(finite_or_zero(row.m) + log_(row.l));
  }
};

// m in the first plane, l in the second
template <class Out>
struct StateEpilogue {
  static constexpr bool kOnePerRow = true, kTakesX = false, kTakesExp = false;
  template <class Result>
  static __device__ void store(State<AccType<Out>> row, Result* y, int64_t plane_stride) {
    *y = from_acc<Result>(row.m);
    y[plane_stride] = from_acc<Result>(row.l);
  }
};

// The gradients of the scores of a row, from a sum over the row. y is the forward's result and g the gradient of y.
//
//   kSumsGrad   whether the sum is that of g alone. If g is broadcast, the sum then needs no element

// y (g - sum(g y))
struct SoftmaxGrad {
  static constexpr bool kSumsGrad = false;
  // A broadcast g is factored out of the sum.
  template <bool BroadcastGrad, class A>
  static __device__ A sum_term(A y, A g) {
    return BroadcastGrad ? y : g * y;
  }
  template <class Out, class A>
  static __device__ A result(A y, A g, A sum) {
    return y * (g - sum);
  }
};

// g - exp(y) sum(g)
struct LogSoftmaxGrad {
  static constexpr bool kSumsGrad = true;
  template <bool BroadcastGrad, class A>
  static __device__ A sum_term(A, A g) {
    return g;
  }
  template <class Out, class A>
  static __device__ A result(A y, A g, A sum) {
    return g - exp_<Out>(y) * sum;
  }
};

// The input's gradient dx of each element of a row, from the sum of the row.
template <class C>
struct InputGrad {
  typedef typename C::Acc A;
  A sum;
  typename C::Score score;
  // Whether some elements do not take part in the row and need a test. In a softmax their result is 0 without a test.
  __device__ bool has_outsiders() const {
    if constexpr (C::kIsScored) return score.has_outsiders(sum);
    return false;
  }
  // dx of the row's element number `index`.
  template <class Index = int>
  __device__ A operator()(A y, A g, Index index = 0) const {
    return has_outsiders() ? at<true>(y, g, index) : at<false>(y, g, index);
  }
  // The same. `x`: the element of the input, if it was read.
  template <bool HasOutsiders, class Index, class... X>
  __device__ A at(A y, A g, [[maybe_unused]] Index index, X... x) const {
    const A grad = C::Grad::template result<typename C::Out>(y, g, sum);
    if constexpr (C::kIsScored)
      return score.template backward<HasOutsiders>(grad, y, index, x...);
    else
      return score.backward(grad);
  }
};

// g exp(x - y): it needs x, but no sum.
struct LogSumExpGrad {
  template <class Out, class X, class A>
  static __device__ auto result(X x, A g, A y) {
    return g * exp_<Out>(x - y);
  }
};
