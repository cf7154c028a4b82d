// divergence.cuh: the terms of rows of two tensors x and y, from states that threads merge. x has logits. y has logits
// too for the KL divergence of two tensors, and otherwise a share of each class.
#pragma once

#include "loss.cuh"

// The offsets of a row in each tensor.
struct DivergencePlace {
  int64_t x = 0, y = 0, dx = 0, dy = 0;

  __device__ DivergencePlace(const DivergenceMap& map, int64_t row) {
#pragma unroll 1
    for (int d = map.dims - 1; d >= 0; --d) {
      const Quotient next = divide(row, map.sizes[d], map.divisors[d]);
      const int64_t at = d ? next.rest : row;
      x += at * map.x_strides[d], dx += at * map.dx_strides[d];
      y += at * map.y_strides[d], dy += at * map.dy_strides[d];
      row = next.whole;
    }
  }
};

// Converts elements of y: to a score, or to the share of a class, which depends on the weight of the class.
template <class C>
struct DivergenceNumbers : LossNumbers<C> {
  typedef typename C::A A;
  typedef typename C::In T;
  A factor, kept, smoothed;

  __device__ explicit DivergenceNumbers(const DivergenceMap& map)
      : LossNumbers<C>{map},
        factor(LossNumbers<C>::factor(0)),
        kept(1 - this->smoothing()),
        smoothed(this->smoothing() / A(map.n)) {}
  __device__ A score_of(T x) const { return this->score(x, factor); }
  __device__ A share_of(T y, int64_t c) const { return (kept * to_acc(y) + smoothed) * this->weight(c); }
  __device__ A of_y(T y, int64_t c) const {
    if constexpr (C::has(kLossProduct)) return to_acc(y);
    return C::has(kLossKl) ? to_acc(y) * factor : share_of(y, c);
  }
};

// The state of some of a row's classes. m is the maximum of the scores s of x, and l the sum of exp(s - m). For the KL
// divergence, other_m and other are m and l of the scores r of y, and apart is the sum of exp(s - m) ((s - m) - (r -
// other_m)). Otherwise other is the sum of the shares t, and apart the sum of t (s - m). An infinite maximum is
// replaced by finite_for_sum. Numbers far from the maxima would not do as m: so a class that is masked out by a large
// finite score costs no precision. While classes are added, m and other_m are set to the maxima only if one is higher
// by more than kSlack.
template <class C>
struct DivergenceState {
  typedef typename C::A A;
  static constexpr bool kIsKl = C::has(kLossKl);
  static constexpr int kNumbers = 5, kSlack = 8;
  A m, l, apart, other_m, other;
  A top, other_top;  // the maxima of the classes that have been added

  static __device__ DivergenceState empty() { return {-infinity(), 0, 0, -infinity(), 0, -infinity(), -infinity()}; }
  // Makes the sums relative to other maxima.
  __device__ void rebase(A top, A other_top) {
    const A lower = finite_for_sum(m) - finite_for_sum(top), factor = l > 0 ? exp_<float>(lower) : A(1);
    if constexpr (kIsKl) {
      const A other_lower = finite_for_sum(other_m) - finite_for_sum(other_top);
      // If l vanishes, `apart` may be beyond the largest number.
      apart = factor == 0 || l == 0 ? A(0) : (apart + (lower - other_lower) * l) * factor;
      other *= other > 0 ? exp_<float>(other_lower) : A(1), other_m = other_top;
    } else if (other != 0) {
      apart += lower * other;
    }
    l *= factor, m = top;
  }
  // Adds classes with the scores s and the converted elements u of y. Classes that do not exist have the score -inf.
  template <int Count, class Exists>
  __device__ void add(const A (&s)[Count], const A (&u)[Count], Exists exists) {
    A highest = -infinity(), other_highest = -infinity();
    unroll<Count>([&](int i) { highest = max_(highest, s[i]); });
    if constexpr (kIsKl) unroll<Count>([&](int i) { other_highest = max_(other_highest, u[i]); });
    top = max_(top, highest), other_top = max_(other_top, other_highest);
    if (highest > m + kSlack || other_highest > other_m + kSlack) settle();
    const A base = finite_for_sum(m), other_base = finite_for_sum(other_m);
    A e[Count];
    unroll<Count>([&](int i) { e[i] = exp_of(s[i] - base); });
    l += pairwise_sum<Count, 0>([&](int i) { return e[i]; });
    if constexpr (kIsKl) {
      other += pairwise_sum<Count, 0>([&](int i) { return exp_of(u[i] - other_base); });
      apart +=
          pairwise_sum<Count, 0>([&](int i) { return e[i] > 0 ? e[i] * ((s[i] - base) - (u[i] - other_base)) : A(0); });
    } else {
      other += pairwise_sum<Count, 0>([&](int i) { return exists(i) ? u[i] : A(0); });
      apart += pairwise_sum<Count, 0>([&](int i) { return exists(i) ? u[i] * (s[i] - base) : A(0); });
    }
  }
  // Makes m and other_m the maxima.
  __device__ void settle() { rebase(top, other_top); }
  // Merges another state; both are settled.
  __device__ void merge(DivergenceState with) {
    top = max_(m, with.m), other_top = max_(other_m, with.other_m);
    rebase(top, other_top), with.rebase(top, other_top);
    l += with.l, apart += with.apart, other += with.other;
  }
  // Merges the states of `lanes` neighbouring lanes, a power of two. All of them get the result.
  __device__ void reduce_in_warp(int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
      merge({shuffle_xor(m, mask), shuffle_xor(l, mask), shuffle_xor(apart, mask), shuffle_xor(other_m, mask),
             shuffle_xor(other, mask), 0, 0});
    }
  }
  // The numbers of a state are stored `stride` apart.
  __device__ void store(void* states, int64_t at, int64_t stride) const {
    A* const to = (A*)states + at;
    to[0] = m, to[stride] = l, to[2 * stride] = apart, to[3 * stride] = other_m, to[4 * stride] = other;
  }
  static __device__ DivergenceState load(const void* states, int64_t at, int64_t stride) {
    const A* const from = (const A*)states + at;
    return {from[0], from[stride], from[2 * stride], from[3 * stride], from[4 * stride], 0, 0};
  }
  // Stores the terms of a row.
  __device__ void store_terms(const DivergenceMap& map, int64_t row) const {
    A* const terms = (A*)map.terms + row;
    const A log_l = log_of(m, l);
    terms[0] = m, terms[map.rows] = log_l;
    if constexpr (kIsKl) {
      const A log_other = log_of(other_m, other);
      terms[2 * map.rows] = apart / l + (log_other - log_l);
      terms[3 * map.rows] = other_m, terms[4 * map.rows] = log_other;
    } else {
      terms[2 * map.rows] = other * log_l - apart;
      terms[3 * map.rows] = other;
    }
  }

 private:
  static __device__ A exp_of(A v) { return exp_for_sum<typename C::In>(v); }
  static __device__ A log_of(A m, A l) { return m == infinity() || m == -infinity() ? A(nan_()) : log_(l); }
};

// The state of some of a row's products: their sum.
template <class C>
struct ProductState {
  typedef typename C::A A;
  A sum;

  static __device__ ProductState empty() { return {0}; }
  template <int Count, class Exists>
  __device__ void add(const A (&x)[Count], const A (&y)[Count], Exists exists) {
    sum += pairwise_sum<Count, 0>([&](int i) { return exists(i) ? x[i] * y[i] : A(0); });
  }
  __device__ void settle() {}
  __device__ void merge(ProductState with) { sum += with.sum; }
  __device__ void reduce_in_warp(int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  }
  __device__ void store(void* states, int64_t at, int64_t) const { ((A*)states)[at] = sum; }
  static __device__ ProductState load(const void* states, int64_t at, int64_t) { return {((const A*)states)[at]}; }
  __device__ void store_terms(const DivergenceMap& map, int64_t row) const { ((A*)map.terms)[row] = sum; }
};

template <class C>
using DivergenceRowState = typename Conditional<C::has(kLossProduct), ProductState<C>, DivergenceState<C>>::type;
