// epilogue.cuh: the result of an element, given the state of its row.
#pragma once

#include "state.cuh"

// y = epilogue(x). `C` has the type Out of the result, its accumulator's type Acc, and kFunction.
template <class C>
struct Epilogue {
  typedef typename C::Acc A;
  static constexpr bool kLog = C::kFunction == Function::log_softmax;
  A m;
  A factor;     // 1 / l; of doubles l itself, of log_softmax log(l)
  A factor_lo;  // the rounding error of 1 / l

  Epilogue() = default;
  __device__ Epilogue(State<A> row) : m(row.m) {
    const bool is_undefined = row.m == infinity() || row.m == -infinity();  // torch gives NaN for the whole row
    if constexpr (kLog) {
      factor = log_(row.l);
    } else if constexpr (sizeof(A) == 8) {
      factor = row.l;
    } else {
      factor = reciprocal(row.l);
      factor_lo = factor * fmaf(-row.l, factor, 1);
    }
    if (is_undefined) factor = A(nan_());
  }
  __device__ A operator()(A x) const { return kLog ? (x - m) - factor : from_exp(exp_<typename C::Out>(x - m)); }
  // The result from e = exp(x - m), for rows that keep their exponentials. It is rounded once, as a division is, by two
  // instructions; a half result needs one.
  __device__ A from_exp(A e) const {
    if constexpr (sizeof(A) == 8) {
      return e / factor;
    } else {
      return sizeof(typename C::Out) == 2 ? e * factor : fmaf(e, factor, e * factor_lo);
    }
  }
};

// Stores the result of a reduction of one row at `y`. A state is two planes, of maxima and of sums, `plane_stride`
// elements apart.
template <class C>
__device__ inline void store_reduction(State<typename C::Acc> row, typename C::Out* y, int64_t plane_stride) {
  typedef typename C::Out Out;
  if constexpr (C::kFunction == Function::state) {
    *y = from_acc<Out>(row.m);
    y[plane_stride] = from_acc<Out>(row.l);
  } else {
    *y = from_acc<Out>(finite_or_zero(row.m) + log_(row.l));
  }
}
