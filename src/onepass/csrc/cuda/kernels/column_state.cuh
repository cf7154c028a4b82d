// column_state.cuh: how a thread of columns.cu reduces its elements to the states of its columns, and computes their
// results from the states of whole columns.
#pragma once

#include "column_fragment.cuh"
#include "column_online.cuh"
#include "column_reduce.cuh"
#include "epilogue.cuh"
#include "exp_half.cuh"

template <class Config>
struct OneOperand : Config {
  static constexpr int kOperands = 1;
};
// The choices of columns.cu, from the ForwardConfig.
template <class Config>
struct ColumnConfig : OneOperand<Config> {
  typedef typename Config::In In;
  typedef typename Config::Out Out;
  typedef typename Config::Acc Acc;
  static constexpr bool kPipelined = is_pipelined<OneOperand<Config>>, kHalfOut = sizeof(Out) == 2;
  static constexpr bool kConvertsHalf2 = sizeof(In) == 2 && (Config::kVecSize > 1) && is_lossless<In, Out>;
  // Softmaxes with half results are reduced as elements arrive, relative to a provisional maximum: that of the block's
  // first elements. Those, a stage, come first and stay in shared memory. (A function with the logarithm of the sum
  // needs the maximum itself, because the logarithm is next to nothing where one element is far above the others.)
  static constexpr bool kProvisionalMax =
      kHalfOut && Config::kUsesSmemVecs && !Config::kTwoPass && !kPipelined && Config::Epilogue::kTakesExp;
  static constexpr int kFirstVecs = kProvisionalMax ? kStageVecs : 0;
  // Whether the sums of threads are relative to their own maxima when they are reduced, not to the block's. Over the
  // grid that is 2 to 4% faster, for half results in one block up to 4%. For float results in blocks and clusters it is
  // as fast or 2% slower, for half results in clusters 7 to 13% slower, because of its shared memory (H200,
  // 2026-11-23).
  static constexpr bool kThreadMaxima =
      (Config::kGrid && kPipelined) || (kHalfOut && Config::kClusterSize == 1 && !Config::kTwoPass && !kProvisionalMax);
  // Whether exponentials take the places of their elements. Exponentials of doubles do not where blocks share columns:
  // they would be rounded by the difference of the maxima.
  static constexpr bool kKeepsExp = !Config::kTwoPass && !kPipelined && Config::Epilogue::kTakesExp &&
                                    sizeof(In) == sizeof(Out) && sizeof(Acc) == sizeof(In) &&
                                    (sizeof(Acc) == 4 || (Config::kClusterSize == 1 && !Config::kGrid));
  // Whether floats in shared memory are reduced as they arrive, relative to the maximum of those in registers.
  static constexpr bool kRescaleOnArrival = kKeepsExp && Config::kUsesSmemVecs && sizeof(Acc) == 4;
  static constexpr int kSlack = 2;  // an element may be so much above the maximum that it is relative to
};

// An element as the function takes it. With `Again` it is converted a second time, by another instruction.
template <bool Again, class C, class T, int Vecs>
__device__ inline typename C::Acc element_value(const ColumnFragment<C, T, Vecs>& fragment, int i, int v) {
  typedef typename C::Acc A;
  if constexpr (Again && C::kConvertsHalf2)
    return typename C::Score()(A(reconvert<T>(fragment.at[i].at[v / 2], v % 2)));
  else
    return typename C::Score()(round_through<typename C::Out>(fragment.get(i, v)));
}

// The maximum of a thread's elements of each column. `neutral` is -inf.
template <class C, class T, int Vecs>
__device__ inline void max_of(const ColumnFragment<C, T, Vecs>& fragment, typename C::Acc (&m)[C::kVecSize],
                              typename C::Acc neutral = -infinity()) {
  typedef typename C::Acc A;
  constexpr int V = C::kVecSize;
  if constexpr (C::kConvertsHalf2) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      const auto score = [&](int i) { return typename C::Score().apply_half2(fragment.at[i].at[w]); };
      uint32_t max = score(0);
#pragma unroll
      for (int i = 1; i < Vecs; ++i) max = max_half2<T>(max, score(i));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        m[2 * w + half] = max_(A(to_acc(get_half<T>(max, half))), A(-infinity()));  // a NaN is no maximum
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      m[v] = neutral;
#pragma unroll
      for (int i = 0; i < Vecs; ++i) m[v] = max_(element_value<false>(fragment, i, v), m[v]);
    }
  }
}

template <class C, class T, int Vecs>
__device__ inline void update_max(const ColumnFragment<C, T, Vecs>& fragment, typename C::Acc (&m)[C::kVecSize]) {
  typename C::Acc here[C::kVecSize];
  max_of(fragment, here);
#pragma unroll
  for (int v = 0; v < C::kVecSize; ++v) m[v] = max_(m[v], here[v]);
}

// The sum of exp(x - m) of a thread's elements of a column, none of which is above m. With kKeepsExp the exponentials
// take the places of the elements.
template <class C, class T, int Vecs>
__device__ inline typename C::Acc sum_exp(ColumnFragment<C, T, Vecs>& fragment, int v, typename C::Acc m) {
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  const A base = C::kProvisionalMax ? m : C::kHalfOut || C::kKeepsExp ? finite_or_zero(m) : finite_for_sum(m);
  if constexpr (C::kKeepsExp) {
    return pairwise_sum<Vecs, 0>([&](int i) {
      const A e = exp_<Out>(element_value<true>(fragment, i, v) - base);
      fragment.set(i, v, e);
      return e;
    });
  } else if constexpr (C::kHalfOut) {
    const A scaled_base = base * ShortLog2e<Out>::kFactor;
    A sum = 0;
#pragma unroll
    for (int i = 0; i < Vecs; ++i) {
      const A root = sqrt_exp<Out>(element_value<true>(fragment, i, v), scaled_base);
      sum = fmaf(root, root, sum);
    }
    return sum;
  } else {
    return pairwise_sum<Vecs, 0>([&](int i) { return exp_for_sum(element_value<true>(fragment, i, v) - base); });
  }
}

// The type of a thread's sum of a column. With kRescaleOnArrival it has few terms, one of the registers and one per
// stage, so that a float is exact enough, and registers are left for the elements.
template <class C>
using ThreadSum = typename Conditional<C::kRescaleOnArrival, typename C::Acc, typename C::Sum>::type;

// Multiplies by exp(d), d <= 0, as exact as two floats are: (1 + low) * scale * scale_rest.
struct ScaledExp {
  float low, scale, scale_rest;
  __device__ explicit ScaledExp(float d) {
    d = fmaxf(d, -300.0f);
    const float j = rintf(d * kLog2e), r = fmaf(j, -1.42860677e-6f, fmaf(j, -0.693145752f, d));
    low = fmaf(r, 1.98412698e-4f, 1.38888889e-3f);
    low = fmaf(low, r, 8.33333333e-3f), low = fmaf(low, r, 4.16666667e-2f), low = fmaf(low, r, 1.66666667e-1f);
    low = fmaf(low, r, 0.5f), low = fmaf(low * r, r, r);
    scale = exp2_(rintf(j * 0.5f)), scale_rest = exp2_(j - rintf(j * 0.5f));
  }
  __device__ float operator()(float e) const { return fmaf(e, low, e) * scale * scale_rest; }
};

// Multiplies exponentials that are kept, or sums of them, by exp(difference) of each column.
template <class C, class T, int Vecs>
__device__ inline void rescale(ColumnFragment<C, T, Vecs>& fragment, const typename C::Acc (&difference)[C::kVecSize]) {
  if constexpr (C::kRescaleOnArrival) {
#pragma unroll
    for (int v = 0; v < C::kVecSize; ++v) {
      const ScaledExp factor(difference[v]);
#pragma unroll
      for (int i = 0; i < Vecs; ++i) fragment.set(i, v, factor(fragment.get(i, v)));
    }
  }
}
template <class C, class L>
__device__ inline void rescale_sums(L (&sums)[C::kVecSize], const typename C::Acc (&difference)[C::kVecSize]) {
  if constexpr (C::kRescaleOnArrival) {
#pragma unroll
    for (int v = 0; v < C::kVecSize; ++v) sums[v] = ScaledExp(difference[v])(sums[v]);
  }
}

// The argument of a column's epilogue: the exponential of an element, or the element.
template <class C, class T, int Vecs>
__device__ inline typename C::Acc epilogue_input(const ColumnFragment<C, T, Vecs>& fragment, int i, int v) {
  if constexpr (C::kKeepsExp)
    return fragment.get(i, v);
  else
    return element_value<true>(fragment, i, v);
}

// Adds the elements of a fragment to the states of the columns.
template <class C, class T, int Vecs>
__device__ inline void absorb(ColumnFragment<C, T, Vecs>& fragment, typename C::Acc (&m)[C::kVecSize],
                              typename C::Sum (&l)[C::kVecSize]) {
  typedef typename C::Acc A;
  A here[C::kVecSize];
  max_of(fragment, here);
  fragment.opaque_registers();
#pragma unroll
  for (int v = 0; v < C::kVecSize; ++v) {
    const A old_m = m[v];
    m[v] = max_(old_m, here[v]);
    l[v] = add(scale(l[v], exp_for_sum(old_m - finite_for_sum(m[v]))),
               begin_sum<typename C::Sum>(sum_exp(fragment, v, m[v])));
  }
}

// The states of columns whose elements arrive stage after stage.
template <class C>
struct StageState : OnlineState<C> {
  typedef typename OnlineState<C>::Maxima Maxima;
  template <int Vecs>
  static __device__ void max_of(const ColumnFragment<C, typename C::In, Vecs>& fragment, Maxima& max) {
    ::max_of(fragment, max);
  }
};
template <class C>
using ColumnOnlineState =
    typename Conditional<C::kHalfOut && C::kConvertsHalf2, OnlineStateHalf2<C>, StageState<C>>::type;

template <class C>
__device__ inline void store_reduction(State<typename C::Acc> column, typename C::Out* y, int64_t plane_stride) {
  if constexpr (C::Epilogue::kOnePerRow) C::Epilogue::store(column, y, plane_stride);
}

// The epilogue of the elements of a column, made once from the column's state and the block's maximum.
template <class C>
struct ElementEpilogue {
  typedef typename C::Acc A;
  typedef typename C::Epilogue Own;
  typename Conditional<Own::kOnePerRow, SoftmaxEpilogue<typename C::Out>, Own>::type epilogue;
  __device__ static ElementEpilogue make(State<A> column, A) { return {{column}}; }
  __device__ A operator()(A x) const {
    if constexpr (sizeof(A) == 8 || C::kHalfOut || C::Epilogue::kTakesX) {
      return epilogue(x);
    } else {  // exp_for_sum with its correction in the factor: rounded once, in eight instructions instead of eleven
      const float v = x - epilogue.m, t = v * kLog2e, e = exp2_(t), off = fminf(fmaf(t, -0.693147181f, v), 1e-3f);
      return fmaf(e, epilogue.factor, e * fmaf(off, epilogue.factor, epilogue.factor_lo));
    }
  }
};
// For half results.
template <class C>
struct alignas(2 * sizeof(typename C::Acc)) HalfEpilogue {
  float scaled_m, log2_l;
  __device__ static HalfEpilogue make(State<float> column, float) {
    return {column.m * ShortLog2e<typename C::Out>::kFactor, is_finite(column.m) ? log2_(column.l) : nan_()};
  }
  __device__ float operator()(float x) const { return softmax_half<typename C::Out>(x, scaled_m, log2_l); }
};
// For exponentials that are kept: exp(x - block_max) is multiplied by a factor.
template <class C>
struct alignas(2 * sizeof(typename C::Acc)) ExpEpilogue {
  typedef typename C::Acc A;
  A factor, factor_lo;
  __device__ static ExpEpilogue make(State<A> column, A block_max) {
    const typename C::Epilogue epilogue(column);
    ExpEpilogue made = {epilogue.factor, sizeof(A) == 8 ? 0 : epilogue.factor_lo};
    if constexpr (C::kClusterSize > 1 || C::kGrid)
      made.rescale(block_max == -infinity() ? 0 : finite_or_zero(block_max) - finite_or_zero(column.m));
    return made;
  }
  __device__ A operator()(A e) const {
    if constexpr (sizeof(A) == 8)
      return e / factor;
    else
      return fmaf(e, factor, e * factor_lo);
  }

 private:
  // By exp(d), d <= 0. (A NaN is in the factor already.)
  __device__ void rescale(float d) {
    const ScaledExp by(d);
    const float high = fmaf(factor, by.low, factor);
    factor_lo = (fmaf(factor, by.low, factor - high) + fmaf(factor_lo, by.low, factor_lo)) * by.scale * by.scale_rest;
    factor = high * by.scale * by.scale_rest;
  }
};
template <class C>
using ColumnEpilogue = typename Conditional<
    C::kKeepsExp, ExpEpilogue<C>,
    typename Conditional<C::kHalfOut && !C::Epilogue::kTakesX, HalfEpilogue<C>, ElementEpilogue<C>>::type>::type;
