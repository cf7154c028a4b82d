// state.cuh: the state of a row, the pair (m, l) = (maximum, sum of exp(x - m)), and how each function of the family
// finishes an element from it (Milakov & Gimelshein, arXiv:1805.02867).
#pragma once

#include "types.cuh"

#define INFINITY_ __int_as_float(0x7f800000)
#define NAN_ __int_as_float(0x7fffffff)

enum Function { SOFTMAX, LOG_SOFTMAX, SOFTMIN, LOGSUMEXP, STATE };

constexpr float kLog2e = 1.44269504f;

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

// exp(v) for v <= 0, good enough for a result of type Out. float: CUDA's own, 2 ulp, log2(e) in two terms. Half types:
// one rounded multiply is off by 2^-24 * |v|, far under half an ulp of the result before that itself vanishes; four
// instructions an element less, of some twenty.
template <class Out>
__device__ inline float exp_(float v) {
  return sizeof(Out) > 2 ? expf(v) : exp2_(v * kLog2e);
}
template <class Out>
__device__ inline double exp_(double v) {
  return exp(v);
}

// exp(v) for v <= 0 that is only added up: exp2 of the rounded product, and what that is off by to first order. Five
// instructions where expf has eight. Without the second step a row whose elements are all alike was off by 2 ulp.
__device__ inline float exp_to_add(float v) {
  const float t = v * kLog2e, e = exp2_(t);
  return fmaf(e, fminf(fmaf(t, -0.693147181f, v), 1e-3f), e);  // fminf: for infinite v, where it is NaN
}
__device__ inline double exp_to_add(double v) { return exp(v); }
__device__ inline float log_(float v) { return logf(v); }
__device__ inline double log_(double v) { return log(v); }

// What is subtracted before exp: the maximum, or 0 where that is infinite, so that -inf - -inf never happens: a part of
// a row that is all -inf adds 0 to l, and a +inf makes l +inf.
template <class A>
__device__ inline A shift(A m) {
  return m == INFINITY_ || m == -INFINITY_ ? A(0) : m;
}

// The same for exp_to_add, which is no number far above 0: the largest number where the maximum is +inf.
__device__ inline float shift_to_add(float m) { return m == INFINITY_ ? 3.40282347e38f : shift(m); }
__device__ inline double shift_to_add(double m) { return m == INFINITY_ ? 1.7976931348623157e308 : shift(m); }

__device__ inline bool isfinite_(float v) { return fabsf(v) < INFINITY_; }

// These ignore a NaN: l carries it.
__device__ inline float max_(float a, float b) { return fmaxf(a, b); }
__device__ inline double max_(double a, double b) { return fmax(a, b); }

template <class A>
struct State {
  A m, l;
};

// A sum that keeps beside it what its additions round off (Knuth's TwoSum): six instructions instead of one.
template <class A>
struct Total {
  A sum, rest;
};
template <class A>
__device__ inline Total<A> add(Total<A> a, Total<A> b) {
  const A sum = a.sum + b.sum, part = sum - a.sum;
  return {sum, a.rest + b.rest + ((a.sum - (sum - part)) + (b.sum - part))};
}
__device__ inline float add(float a, float b) { return a + b; }

template <class A>
__device__ inline A value_of(Total<A> total) {
  return total.sum == INFINITY_ ? total.sum : total.sum + total.rest;
}
__device__ inline float value_of(float total) { return total; }

template <class A>
__device__ inline Total<A> scaled(Total<A> total, A factor) {
  return {total.sum * factor, total.rest * factor};
}
__device__ inline float scaled(float total, float factor) { return total * factor; }

// What l is added up in. Its error is in every element of its row, so results of full precision take a Total where
// parts meet and a plain sum, of a few elements, below; half types a plain sum throughout.
template <class Out>
struct Adder {
  typedef Total<typename Accumulator<Out>::type> type;
  static __device__ type of(typename Accumulator<Out>::type value) { return {value, 0}; }
};
template <>
struct Adder<half_t> {
  typedef float type;
  static __device__ float of(float value) { return value; }
};
template <>
struct Adder<bfloat16_t> : Adder<half_t> {};

// The sum of f(First) .. f(First + Count - 1) as a tree, whose error grows with log2(Count) only.
template <int Count, int First, class F>
__device__ inline auto plain_sum(F f) {
  if constexpr (Count == 1) {
    return f(First);
  } else {
    return plain_sum<Count / 2, First>(f) + plain_sum<Count - Count / 2, First + Count / 2>(f);
  }
}
template <class Out, int Count, int First = 0, int Plain = (Count < 4 ? 1 : Count / 4), class F>
__device__ inline typename Adder<Out>::type tree_sum(F f) {
  if constexpr (Count <= Plain) {
    return Adder<Out>::of(plain_sum<Count, First>(f));
  } else {
    return add(tree_sum<Out, Count / 2, First, Plain>(f),
               tree_sum<Out, Count - Count / 2, First + Count / 2, Plain>(f));
  }
}

// 1 / l for l from 1 to the number of elements; a NaN stays one. Without the branch for subnormal numbers that a
// division has, whose call costs registers.
__device__ inline float reciprocal(float l) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(l));
  return fmaf(r, fmaf(-l, r, 1), r);
}

// y = finish(x): what is left to do to an element once the state of its whole row is known.
template <int F, class Out, class A>
struct Finish {
  A m, last, rest;
  Finish() = default;
  __device__ Finish(State<A> row) : m(row.m) {
    const bool undefined = row.m == INFINITY_ || row.m == -INFINITY_;  // torch: NaN for the whole row
    if constexpr (F == LOG_SOFTMAX) {
      last = log_(row.l);
    } else if constexpr (sizeof(A) == 8) {
      last = row.l;
    } else {
      last = reciprocal(row.l);
      rest = last * fmaf(-row.l, last, 1);  // what 1 / l was rounded by
    }
    if (undefined) last = A(NAN_);
  }
  __device__ A operator()(A x) const { return F == LOG_SOFTMAX ? (x - m) - last : from_exp(exp_<Out>(x - m)); }
  // The same from e = exp(x - m), where the row has kept that. Rounded once, as a division is, for two instructions; a
  // half result needs but one.
  __device__ A from_exp(A e) const {
    if constexpr (sizeof(A) == 8) {
      return e / last;
    } else {
      return sizeof(Out) == 2 ? e * last : fmaf(e, last, e * rest);
    }
  }
};

// Of a function that reduces: what it gives of a row, at `y`. The state is a plane of maxima and, `plane` elements on,
// one of sums.
template <int F, class Out, class A>
__device__ inline void store_reduced(State<A> row, Out* y, int64_t plane) {
  if constexpr (F == STATE) {
    *y = narrow<Out>(row.m);
    y[plane] = narrow<Out>(row.l);
  } else {
    *y = narrow<Out>(shift(row.m) + log_(row.l));
  }
}
