// column_online.cuh: the states of columns whose elements arrive stage by stage. Each stage is reduced while later
// stages are being copied.
#pragma once

#include "column_fragment.cuh"
#include "exp_half.cuh"

__device__ inline float clamp_to_finite(float v) { return fminf(fmaxf(v, -3.40282347e38f), 3.40282347e38f); }
__device__ inline double clamp_to_finite(double v) {
  return fmin(fmax(v, -1.7976931348623157e308), 1.7976931348623157e308);
}

// The states of a thread's columns. A sum is not relative to the maximum m but to a base. The base is set to the
// maximum whenever an element exceeds it by kSlack, so that hardly any stage but the first rescales the sums. The base
// is finite: -inf is below it, and inf above it.
template <class C>
struct OnlineState {
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize, kSlack = 8;
  typedef A Maxima[V];
  Maxima m;
  A base[V];
  typename C::Sum l[V];

  __device__ void init() {
    unroll<V>([&](int v) { m[v] = -infinity(), base[v] = clamp_to_finite(m[v]), l[v] = typename C::Sum{}; });
  }
  // Takes the maxima of a stage, before the elements of the stage are added.
  __device__ void update_max(const Maxima& stage_max) {
    bool is_higher = false;
    unroll<V>([&](int v) { m[v] = max_(m[v], stage_max[v]), is_higher |= stage_max[v] - base[v] > kSlack; });
    if (!is_higher) return;
    unroll<V>([&](int v) {
      const A old_base = base[v];
      base[v] = clamp_to_finite(m[v]);
      l[v] = scale(l[v], exp_for_sum(old_base - base[v]));
    });
  }
  // Adds the elements `element(0)`, `element(1)`, ... of column v, as many as the fragment has.
  template <class T, int Vecs, class F>
  __device__ void add_elements(int v, const ColumnFragment<C, T, Vecs>&, F element) {
    l[v] = add(l[v], pairwise_sum<Vecs, 0>([&](int i) { return exp_for_sum<Out>(element(i) - base[v]); }));
  }
  __device__ A max(int v) const { return m[v]; }
  // The sum relative to `max`, which is not below the maximum. (If the maximum is infinite, the sum may be relative to
  // 0.)
  __device__ A sum_relative_to(int v, A max) const {
    const A difference = base[v] - finite_or_zero(max);
    return value_of(scale(l[v], exp_for_sum(difference < 0 ? difference : A(0))));
  }
};

// The same for half2 elements. The maxima, and the limits above which the sums are rescaled, are half2 too.
template <class C>
struct OnlineStateHalf2 {
  typedef typename C::In T;
  static constexpr int V = C::kVecSize;
  typedef uint32_t Maxima[(V + 1) / 2];
  Maxima m, limit;
  float scaled_base[V], l[V];

  __device__ void init() {
    unroll<V / 2>([&](int w) { m[w] = from_acc<T>(-infinity()).bits * 0x10001u; });
    unroll<V>([&](int v) { l[v] = 0; });
    set_base();
  }
  __device__ void update_max(const Maxima& stage_max) {
    uint32_t is_higher = 0;
    unroll<V / 2>([&](int w) {
      m[w] = max_half2<T>(m[w], stage_max[w]);
      is_higher |= max_half2<T>(limit[w], stage_max[w]) ^ limit[w];
    });
    if (!is_higher) return;
    float before[V];
    unroll<V>([&](int v) { before[v] = scaled_base[v]; });
    set_base();
    unroll<V>([&](int v) { l[v] = rescale(l[v], before[v] - scaled_base[v]); });
  }
  template <int Vecs, class F>
  __device__ void add_elements(int v, const ColumnFragment<C, T, Vecs>&, F element) {
    unroll<Vecs>([&](int i) {
      const float root = sqrt_exp<T>(element(i), scaled_base[v]);
      l[v] = fmaf(root, root, l[v]);
    });
  }
  // A NaN does not count as a maximum.
  __device__ float max(int v) const { return fmaxf(to_acc(get_half<T>(m[v / 2], v % 2)), -infinity()); }
  __device__ float sum_relative_to(int v, float max) const {
    return rescale(l[v], scaled_base[v] - finite_or_zero(max) * ShortLog2e<T>::kFactor);
  }

 private:
  static constexpr float kSlack = 8;
  static __device__ float rescale(float sum, float difference) {
    const float root = exp2_(fminf(difference, 0.0f) * (ShortLog2e<T>::kRest / 2));
    return sum * root * root;
  }
  // Makes the maxima the base, until an element exceeds them by more than kSlack.
  __device__ void set_base() {
    unroll<V>([&](int v) {
      const float base = clamp_to_finite(max(v));
      scaled_base[v] = base * ShortLog2e<T>::kFactor;
      const uint32_t bits = round_down<T>(base + kSlack);
      limit[v / 2] = v % 2 ? limit[v / 2] & 0xffff | bits << 16 : bits;
    });
  }
};

template <class C>
using ColumnOnlineState =
    typename Conditional<C::kHalfOut && C::kConvertsHalf2, OnlineStateHalf2<C>, OnlineState<C>>::type;
