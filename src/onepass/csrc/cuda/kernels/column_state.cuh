// column_state.cuh: what a thread makes of its elements of columns, and of them once their columns' states are known.
#pragma once

#include "column_fragment.cuh"
#include "column_reduce.cuh"
#include "exp_half.cuh"

constexpr bool kReduces = FUNCTION == LOGSUMEXP || FUNCTION == STATE, kLog = FUNCTION == LOG_SOFTMAX;
typedef Accumulator<OUT>::type A;
typedef Adder<OUT>::type L;
constexpr bool kHalf = sizeof(OUT) == 2;
// Are softmaxes of halves worked on as they come, relative to the largest of the block's first elements? Those, a
// chunk, come first and wait on the shelf. (What has a logarithm of the sum needs the maximum itself, of which that is
// next to nothing where one element is far above the others.)
constexpr bool kEarly = kHalf && SHELVED && !STREAM && !kRinged && !kReduces && !kLog;
constexpr int kLead = kEarly ? kChunk : 0;
// Whether threads have their sums relative to their own maxima when they meet: over the chip 2 to 4% faster than to the
// block's, for halves in a block up to 4; floats in blocks and clusters as fast, or 2% slower, halves in clusters 7 to
// 13, by the shared memory that it takes (H200, 2026-11-23).
constexpr bool kOwnTops = (GRID && kRinged) || (kHalf && CLUSTER == 1 && !STREAM && !kEarly);
// Do exponentials take the places of their elements? Not of doubles where blocks meet: they would be rounded by what
// their maxima differ by.
constexpr bool kKeeps = !STREAM && !kRinged && !kReduces && !kLog && sizeof(IN) == sizeof(OUT) &&
                        sizeof(A) == sizeof(IN) && (sizeof(A) == 4 || (CLUSTER == 1 && !GRID));
// Are floats on the shelf worked on as they come, relative to the maximum of those in registers?
constexpr bool kComes = kKeeps && SHELVED && sizeof(A) == 4;
constexpr int kSlack = 2;  // by so much an element may be above the maximum that it is relative to

// The element of a slot, as the function takes it.
template <bool Again, class T, int Slots>
__device__ inline A value(const Held<T, Slots>& held, int slot, int v) {
  const A sign = FUNCTION == SOFTMIN ? A(-1) : A(1);
  if constexpr (Again && sizeof(T) == 2 && V > 1 && Widens<T, OUT>::value)
    return sign * widen_again<T>(held.at[slot].at[v / 2], v % 2);
  else
    return sign * load_value<T, OUT>(held.get(slot, v));
}

// The largest of a thread's elements of each column. `none`: -inf.
template <class T, int Slots>
__device__ inline void largest(const Held<T, Slots>& held, A (&m)[V], A none = -INFINITY_) {
  if constexpr (sizeof(T) == 2 && V > 1 && Widens<T, OUT>::value) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      uint32_t top = held.at[0].at[w];
#pragma unroll
      for (int i = 1; i < Slots; ++i)
        top = FUNCTION == SOFTMIN ? min_of_pairs<T>(top, held.at[i].at[w]) : max_of_pairs<T>(top, held.at[i].at[w]);
      const A sign = FUNCTION == SOFTMIN ? A(-1) : A(1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        m[2 * w + half] = max_(sign * to_wide(T{(uint16_t)(top >> half * 16)}), A(-INFINITY_));  // a NaN is none
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      m[v] = none;
#pragma unroll
      for (int i = 0; i < Slots; ++i) m[v] = max_(value<false>(held, i, v), m[v]);
    }
  }
}

// The larger of m and those.
template <class T, int Slots>
__device__ inline void raise_to(const Held<T, Slots>& held, A (&m)[V]) {
  A here[V];
  largest(held, here);
#pragma unroll
  for (int v = 0; v < V; ++v) m[v] = max_(m[v], here[v]);
}

// The sum of exp(x - m) of a thread's elements of a column, all up to m. Where exponentials take no more room than
// elements they take their place.
template <class T, int Slots>
__device__ inline A sum_below(Held<T, Slots>& held, int v, A m) {
  const A s = kEarly ? m : kHalf || kKeeps ? shift(m) : shift_to_add(m);
  if constexpr (kKeeps) {
    return plain_sum<Slots, 0>([&](int i) {
      const A e = exp_<OUT>(value<true>(held, i, v) - s);
      held.put(i, v, e);
      return e;
    });
  } else if constexpr (kHalf) {
    const A high = s * Short<OUT>::kFactor;
    A sum = 0;
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const A root = root_of_exp<OUT>(value<true>(held, i, v), high);
      sum = fmaf(root, root, sum);
    }
    return sum;
  } else {
    return plain_sum<Slots, 0>([&](int i) { return exp_to_add(value<true>(held, i, v) - s); });
  }
}

// What a thread's sums of a column are added up in. Of floats that are worked on as they come these are few, one of
// registers and one a chunk of the shelf, so that a float does, and registers are left for what comes.
template <bool Few>
struct OwnAdder : Adder<OUT> {};
template <>
struct OwnAdder<true> {
  typedef A type;
  static __device__ A of(A value) { return value; }
};
typedef OwnAdder<kComes> Own;

// exp(d), d <= 0, as exact as two floats are: (1 + low) * scale * again.
struct Lowering {
  float low, scale, again;
  __device__ explicit Lowering(float d) {
    d = fmaxf(d, -300.0f);
    const float j = rintf(d * kLog2e), r = fmaf(j, -1.42860677e-6f, fmaf(j, -0.693145752f, d));
    low = fmaf(r, 1.98412698e-4f, 1.38888889e-3f);
    low = fmaf(low, r, 8.33333333e-3f), low = fmaf(low, r, 4.16666667e-2f), low = fmaf(low, r, 1.66666667e-1f);
    low = fmaf(low, r, 0.5f), low = fmaf(low * r, r, r);
    scale = exp2_(rintf(j * 0.5f)), again = exp2_(j - rintf(j * 0.5f));
  }
  __device__ float operator()(float e) const { return fmaf(e, low, e) * scale * again; }
};

// Exponentials that are kept, or sums of them, times exp(by) of each column.
template <class T, int Slots>
__device__ inline void lower(Held<T, Slots>& held, const A (&by)[V]) {
  if constexpr (kComes) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Lowering lowered(by[v]);
#pragma unroll
      for (int i = 0; i < Slots; ++i) held.put(i, v, lowered(held.get(i, v)));
    }
  }
}
template <class Sum>
__device__ inline void lower(Sum (&sums)[V], const A (&by)[V]) {
  if constexpr (kComes) {
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = Lowering(by[v])(sums[v]);
  }
}

// What there is of an element at the end: its exponential, or itself.
template <class T, int Slots>
__device__ inline A left(const Held<T, Slots>& held, int slot, int v) {
  if constexpr (kKeeps)
    return held.get(slot, v);
  else
    return value<true>(held, slot, v);
}

// The states of all elements before, and of these.
template <int Slots>
__device__ inline void absorb(Held<IN, Slots>& held, A (&m)[V], L (&l)[V]) {
  A here[V];
  largest(held, here);
  held.forget();
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const A before = m[v];
    m[v] = max_(before, here[v]);
    l[v] = add(scaled(l[v], exp_to_add(before - shift_to_add(m[v]))), Adder<OUT>::of(sum_below(held, v, m[v])));
  }
}

// The states of columns whose elements come chunk after chunk. kPairs: of halves that lie two in a register.
constexpr bool kPairs = kHalf && sizeof(IN) == 2 && V > 1 && Widens<IN, OUT>::value;
template <bool Pairs>
struct Coming {
  typedef Online<OUT> type;
  template <int Slots>
  static __device__ void largest(const Held<IN, Slots>& some, A (&here)[V]) {
    ::largest(some, here);
  }
};
template <>
struct Coming<true> {
  typedef OnlinePairs<IN> type;
  template <int Slots>
  static __device__ void largest(const Held<IN, Slots>& some, type::Tops& here) {
    type::largest(some, here);
  }
};
typedef Coming<kPairs>::type OnlineState;

// What finishes the elements of a column, made once from its state and the block's maximum.
template <bool Half, bool Keeps, class Float>
struct Whole {
  Finish<FUNCTION, OUT, A> finish;
  __device__ static Whole of(State<Float> whole, Float) { return {Finish<FUNCTION, OUT, A>(whole)}; }
  __device__ Float operator()(Float x) const {
    if constexpr (sizeof(Float) == 8 || kHalf || kLog) {
      return finish(x);
    } else {  // as exp_to_add, with its correction in the factor: rounded once, in eight instructions for eleven
      const float v = x - finish.m, t = v * kLog2e, e = exp2_(t), off = fminf(fmaf(t, -0.693147181f, v), 1e-3f);
      return fmaf(e, finish.last, e * fmaf(off, finish.last, finish.rest));
    }
  }
};
// Of half results.
template <class Float>
struct alignas(2 * sizeof(Float)) Whole<true, false, Float> {
  float high, low;
  __device__ static Whole of(State<float> whole, float) {
    return {whole.m * Short<OUT>::kFactor, isfinite_(whole.m) ? log2_(whole.l) : NAN_};
  }
  __device__ float operator()(float x) const { return finished<OUT>(x, high, low); }
};
// Of what is kept: exp(x - top), `top` the block's maximum, that it is to be multiplied by.
template <class Float>
struct alignas(2 * sizeof(Float)) Whole<false, true, Float> {
  Float last, rest;
  __device__ static Whole of(State<Float> whole, Float top) {
    const Finish<FUNCTION, OUT, Float> finish(whole);
    Whole made = {finish.last, sizeof(Float) == 8 ? 0 : finish.rest};
    if constexpr (CLUSTER > 1 || GRID) made.lower(top == -INFINITY_ ? 0 : shift(top) - shift(whole.m));
    return made;
  }
  __device__ Float operator()(Float e) const {
    if constexpr (sizeof(Float) == 8)
      return e / last;
    else
      return fmaf(e, last, e * rest);
  }

 private:
  // By exp(d), d <= 0. (A NaN is the column's already.)
  __device__ void lower(float d) {
    const Lowering by(d);
    const float high = fmaf(last, by.low, last);
    rest = (fmaf(last, by.low, last - high) + fmaf(rest, by.low, rest)) * by.scale * by.again;
    last = high * by.scale * by.again;
  }
};
typedef Whole<kHalf && !kLog, kKeeps, A> WholeColumn;
