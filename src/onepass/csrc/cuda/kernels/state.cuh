// state.cuh: the state of a row, its arithmetic, and the exponentials and compensated sums that all kernels use. The
// state is the pair (m, l) = (maximum of the row, sum of exp(x - m)). Two states of parts of a row merge into one. Each
// function computes its results from an element and the state of the element's row (the online softmax of Milakov &
// Gimelshein, arXiv:1805.02867).
#pragma once

#include "types.cuh"

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float nan_() { return __int_as_float(0x7fffffff); }
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

__device__ inline float exp2_(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
  return e;
}
__device__ inline float log2_(float v) {
  float l;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(v));
  return l;
}

// exp(v) for v <= 0, exact enough for a result of type Out. For float it is CUDA's expf, which is within 2 ulp because
// it splits log2(e) into two terms. For half types, one rounded product has an error of 2^-24 * |v|. That is far below
// half an ulp of the result for every v whose result is not 0, and saves four of about twenty instructions per element.
template <class Out>
__device__ inline float exp_(float v) {
  return sizeof(Out) > 2 ? expf(v) : exp2_(v * kLog2e);
}
template <class Out>
__device__ inline double exp_(double v) {
  return exp(v);
}

// exp(v) for v <= 0, if only the sum of such exponentials is needed for results of type Out. For float it is exp2 of
// the rounded product, with a first-order correction of the product's rounding error. It takes five instructions; expf
// takes eight. Without the correction a row of equal elements was off by 2 ulp.
template <class Out = float>
__device__ inline float exp_for_sum(float v) {
  if (sizeof(Out) == 2) return exp_<Out>(v);
  const float t = v * kLog2e, e = exp2_(t);
  return fmaf(e, fminf(fmaf(t, -0.693147181f, v), 1e-3f), e);  // fminf: the correction of an infinite v is NaN
}
template <class Out = double>
__device__ inline double exp_for_sum(double v) {
  return exp(v);
}
__device__ inline float log_(float v) { return logf(v); }
__device__ inline double log_(double v) { return log(v); }

// The number to subtract before exp: the maximum, or 0 if the maximum is infinite. Then -inf - -inf never happens: a
// part of a row that is all -inf adds 0 to l, and a +inf makes l +inf.
template <class A>
__device__ inline A finite_or_zero(A m) {
  return m == infinity() || m == -infinity() ? A(0) : m;
}

// The same for exp_for_sum, which gives NaN far above 0: if the maximum is +inf, it is the largest finite number.
__device__ inline float finite_for_sum(float m) { return m == infinity() ? 3.40282347e38f : finite_or_zero(m); }
__device__ inline double finite_for_sum(double m) {
  return m == infinity() ? 1.7976931348623157e308 : finite_or_zero(m);
}

__device__ inline float abs_(float v) { return fabsf(v); }
__device__ inline double abs_(double v) { return fabs(v); }
__device__ inline bool is_finite(float v) { return fabsf(v) < infinity(); }

// The maximum of two numbers. It ignores a NaN, because l already carries the NaN.
__device__ inline float max_(float a, float b) { return fmaxf(a, b); }
__device__ inline double max_(double a, double b) { return fmax(a, b); }

template <class A>
struct State {
  A m, l;
};

// A sum (hi) and its rounding error (lo). Knuth's TwoSum finds the error in six instructions; a plain addition takes
// one.
template <class A>
struct Compensated {
  A hi, lo;
};
template <class T>
constexpr bool is_compensated = false;
template <class A>
constexpr bool is_compensated<Compensated<A>> = true;

template <class A>
__device__ inline Compensated<A> add(Compensated<A> a, Compensated<A> b) {
  const A hi = a.hi + b.hi, part = hi - a.hi;
  return {hi, a.lo + b.lo + ((a.hi - (hi - part)) + (b.hi - part))};
}
template <class A>
__device__ inline Compensated<A> add(Compensated<A> a, A b) {
  const A hi = a.hi + b, part = hi - a.hi;
  return {hi, a.lo + ((a.hi - (hi - part)) + (b - part))};
}
__device__ inline float add(float a, float b) { return a + b; }
__device__ inline double add(double a, double b) { return a + b; }

template <class A>
__device__ inline A value_of(Compensated<A> sum) {
  return sum.hi == infinity() ? sum.hi : sum.hi + sum.lo;
}
__device__ inline float value_of(float sum) { return sum; }
__device__ inline float value_of(double sum) { return (float)sum; }

template <class A>
__device__ inline Compensated<A> scale(Compensated<A> sum, A factor) {
  return {sum.hi * factor, sum.lo * factor};
}
__device__ inline float scale(float sum, float factor) { return sum * factor; }
__device__ inline double scale(double sum, float factor) { return sum * factor; }

// The type in which l is summed. An error of l is in every element of the row. Results of full precision therefore add
// partial sums with compensation, and only a few elements at a time as a plain sum. Half types take plain sums.
template <class Out>
using SumType = typename Conditional<sizeof(Out) == 2, float, Compensated<AccType<Out>>>::type;

// Begins a sum with `value`.
template <class Sum, class A>
__device__ inline Sum begin_sum(A value) {
  if constexpr (is_compensated<Sum>)
    return {value, 0};
  else
    return value;
}

// The pairwise sum of f(First) .. f(First + Count - 1): its error grows only with log2(Count).
template <int Count, int First, class F>
__device__ inline auto pairwise_sum(F f) {
  if constexpr (Count == 1) {
    return f(First);
  } else {
    return pairwise_sum<Count / 2, First>(f) + pairwise_sum<Count - Count / 2, First + Count / 2>(f);
  }
}
// The same in the type Sum: plain sums of up to `Plain` elements, which are added with compensation if Sum has it.
template <class Sum, int Count, int First = 0, int Plain = (Count < 4 ? 1 : Count / 4), class F>
__device__ inline Sum accurate_sum(F f) {
  if constexpr (Count <= Plain) {
    return begin_sum<Sum>(pairwise_sum<Count, First>(f));
  } else {
    return add(accurate_sum<Sum, Count / 2, First, Plain>(f),
               accurate_sum<Sum, Count - Count / 2, First + Count / 2, Plain>(f));
  }
}

__device__ inline float approximate_reciprocal(float l) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(l));
  return r;
}
// 1 / l for l from 1 to the number of elements; a NaN stays NaN. A division would also have a branch for subnormal
// numbers, which calls a function and so costs registers.
__device__ inline float reciprocal(float l) {
  const float r = approximate_reciprocal(l);
  return fmaf(r, fmaf(-l, r, 1), r);
}
