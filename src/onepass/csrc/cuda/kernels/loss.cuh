// loss.cuh: the terms of a row, from states that threads merge, and the gradient of its elements. The code here does
// not depend on whether the classes of a row (loss_rows.cu) or neighbouring rows (loss_columns.cu) are adjacent in
// memory.
#pragma once

#include "block_reduce.cuh"
#include "division.cuh"
#include "launch_overlap.cuh"
#include "loss_map.cuh"
#include "state.cuh"
#include "warp_reduce.cuh"

// tanh. For half results an absolute error of 1e-7 is enough. From 20 on the result is 1; exp would become infinite
// later.
template <class Out>
__device__ inline float tanh_for(float v) {
  if (sizeof(Out) == 2) v = v > 20 ? 20 : v;
  return sizeof(Out) > 2 ? tanhf(v) : fmaf(-2, approximate_reciprocal(exp2_(v * (2 * kLog2e)) + 1), 1);
}
template <class Out>
__device__ inline double tanh_for(double v) {
  return tanh(v);
}

// Operations on vectors of elements in registers.
template <class C>
struct LossElements {
  typedef typename C::In T;
  typedef typename C::Raw Raw;
  static constexpr int V = C::kVecSize;

  static __device__ Raw load(const T* at) { return *reinterpret_cast<const Raw*>(at); }
  static __device__ T get(const Raw& raw, int v) { return get_element<T>(raw, v); }
  static __device__ void set(Raw& raw, int v, T value) {
    if constexpr (C::kHalf2)
      raw.at[v / 2] =
          v % 2 ? (raw.at[v / 2] & 0xffffu) | (uint32_t)value.bits << 16 : (raw.at[v / 2] & 0xffff0000u) | value.bits;
    else
      raw.at[v] = value;
  }
  static __device__ void fill(Raw& raw, T value) {
    unroll<V>([&](int v) { set(raw, v, value); });
  }
  // Whether elements of a half type are far enough above the least number that their products with log2(e) are finite.
  template <int Vecs>
  static __device__ bool have_finite_products(const Raw (&raw)[Vecs]) {
    uint32_t low = raw[0].at[0];
    unroll<Vecs>([&](int i) { unroll<V / 2>([&](int w) { low = min_half2<T>(low, raw[i].at[w]); }); });
    return fminf(to_acc(get_half<T>(low, 0)), to_acc(get_half<T>(low, 1))) > -2e38f;
  }
  template <int Vecs>
  static __device__ typename C::A max(const Raw (&raw)[Vecs]) {
    if constexpr (C::kHalf2) {
      uint32_t top = raw[0].at[0];
      unroll<Vecs>([&](int i) { unroll<V / 2>([&](int w) { top = max_half2<T>(top, raw[i].at[w]); }); });
      return max_(to_acc(get_half<T>(top, 0)), to_acc(get_half<T>(top, 1)));
    } else {
      typename C::A top = -infinity();
      unroll<Vecs * V>([&](int i) { top = max_(top, to_acc(raw[i / V].at[i % V])); });
      return top;
    }
  }
  static __device__ T neutral() { return from_acc<T>(-infinity()); }
  // Prevents the compiler from keeping the converted elements from one use to the next, in twice the registers.
  static __device__ void opaque(Raw& raw) {
    if constexpr (C::kHalf2) unroll<V / 2>([&](int w) { asm volatile("" : "+r"(raw.at[w])); });
  }
};

// Selects a number of a map in the type of the computation.
__device__ inline float of_type(float, double, float narrow) { return narrow; }
__device__ inline double of_type(double, double wide, float) { return wide; }

// A product that is rounded whatever is added to it, so that an element has the same score wherever it is computed.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

template <class C>
struct LossNumbers {
  typedef typename C::A A;
  const LossMap& map;

  __device__ const A* plane(const void* planes, int which) const { return (const A*)planes + which * map.rows; }
  __device__ A* plane(void* planes, int which) const { return (A*)planes + which * map.rows; }
  static constexpr int kEntropyPlane = 2 + C::has(kLossSpread), kPickPlane = kEntropyPlane + C::has(kLossEntropy);

  __device__ A smoothing() const { return of_type(A(), map.smoothing, map.smoothing_f32); }
  __device__ A z_loss() const { return of_type(A(), map.z_loss, map.z_loss_f32); }
  // The factor of the elements of a row.
  __device__ A factor(int64_t row) const {
    if constexpr (!C::has(kLossScale)) return 1;
    const A factor = of_type(A(), map.factor, map.factor_f32);
    return map.scale ? factor * ((const A*)map.scale)[row] : factor;
  }
  __device__ A weight(int64_t c) const { return C::has(kLossWeight) ? ((const A*)map.weight)[c] : A(1); }
  __device__ A weight_sum() const { return C::has(kLossWeight) ? *(const A*)map.weight_sum : A(map.n); }
  // The class of a row's pick number `which`.
  __device__ int64_t pick(int64_t row, int which) const { return map.index[row * map.picks + which]; }
  template <class T>
  __device__ A score(T raw, A factor) const {
    A s = to_acc(raw);
    if constexpr (C::has(kLossScale)) s = rounded_product(s, factor);
    if constexpr (C::has(kLossSoftcap)) return cap() * tanh_for<T>(s * per_cap());
    return s;
  }
  // The derivative of the score of an element.
  template <class T>
  __device__ A slope(T raw, A factor) const {
    if constexpr (!C::has(kLossSoftcap)) return factor;
    const A t = tanh_for<T>(rounded_product(to_acc(raw), factor) * per_cap());
    return factor * (1 - t * t);
  }

 private:
  __device__ A cap() const { return of_type(A(), map.softcap, map.softcap_f32); }
  __device__ A per_cap() const { return of_type(A(), map.per_softcap, map.per_softcap_f32); }
};

// Whether a base is so small that its rounding error can be corrected.
__device__ inline bool is_small_base(float base) { return fabsf(base) < 1e6f; }

// exp(s - m) for a fixed m. For half types it is computed as 2^(s log2(e) - base), where base is m log2(e), rounded:
// two instructions instead of three. The rounding error of base is the same for all s, so a sum is corrected once:
// exp(s - m) is 2^-correction times the computed number. If the base is not small, this form is not used.
template <class C>
struct RelativeExp {
  typedef typename C::A A;
  static constexpr bool kHasBase = sizeof(typename C::In) == 2;
  A m, base;

  __device__ explicit RelativeExp(A m) : m(m), base(m * kLog2e) {}
  __device__ bool is_exact() const { return !kHasBase || !is_small_base((float)base); }
  __device__ A correction() const {
    if constexpr (kHasBase) return is_exact() ? A(0) : fmaf(m, kLog2e, -base);
    return 0;
  }
  // exp(s - m), by base or not. The caller knows which of the two it needs.
  template <bool ByBase>
  __device__ A of(A s) const {
    if constexpr (ByBase) return exp2_(logarithm<true>(s));
    return exp_for_sum<typename C::In>(logarithm<false>(s));
  }
  // The logarithm of exp(s - m); with ByBase to the base 2.
  template <bool ByBase>
  __device__ A logarithm(A s) const {
    if constexpr (ByBase) return fmaf(s, kLog2e, -base);
    return s - m;
  }
  // The factor that makes a number relative to m relative to the m of `to`.
  __device__ A ratio(const RelativeExp& to) const {
    if (is_exact() || to.is_exact()) return exp_<float>(m - to.m);
    if constexpr (kHasBase) return exp2_(base - to.base);
    return 0;
  }
};

// The number that is subtracted from the scores of a row in their sum: the score of class 0, or 0 if that score is far
// off, because it is masked out.
template <class A>
__device__ inline A reference_of(A s) {
  return abs_(s) < A(3e4) ? s : A(0);
}

// The state of some of a row's scores. top: their maximum. l and moment: the sums of exp(s - m) and exp(s - m) (s - m),
// as RelativeExp computes them. spread: the sum of weight (s - r), where r is reference_of the row. m is finite. It is
// set to the maximum only if a score exceeds it by more than kSlack, so that hardly any score changes it. `settle`
// makes it the maximum.
template <class C>
struct LossState {
  typedef typename C::A A;
  typedef typename C::In T;
  static constexpr int kSlack = 8;
  A m, l, moment, spread, top;

  static __device__ LossState empty() { return {lowest(), 0, 0, 0, -infinity()}; }
  // The state before any of the scores is added, if the highest score is already known.
  static __device__ LossState of_maximum(A top) { return {finite_for_sum(top), 0, 0, 0, top}; }
  static __device__ A lowest() { return -finite_for_sum(A(infinity())); }
  // Adds the scores s(0), s(1), ..., the highest of which is `highest`. `has_finite`: whether their logarithms are
  // known to be finite; this saves the entropy a comparison per score.
  template <int Count, class F>
  __device__ void add(A highest, F s, bool has_finite = false) {
    top = max_(top, highest);
    if (highest > m + kSlack) rebase(top);
    const RelativeExp<C> exp(m);
    constexpr bool kHasBase = RelativeExp<C>::kHasBase;
    if (exp.is_exact())
      add_exps<Count, false, false>(exp, s);
    else if (C::has(kLossEntropy) && has_finite)
      add_exps<Count, kHasBase, true>(exp, s);
    else
      add_exps<Count, kHasBase, false>(exp, s);
  }
  __device__ void settle() {
    if (m != finite_for_sum(top)) rebase(top);
  }
  // The logarithm of the sum of exp(s - top). It is NaN if the maximum is infinite: then torch gives NaN for the whole
  // row.
  __device__ A log_sum() const {
    if (top == infinity() || top == -infinity()) return nan_();
    return log_(l) - RelativeExp<C>(m).correction() * kLn2;
  }
  __device__ void merge(LossState other) {
    top = max_(top, other.top);
    rebase(top), other.rebase(top);
    l += other.l;
    if constexpr (C::has(kLossEntropy)) moment += other.moment;
    if constexpr (C::has(kLossSpread)) spread += other.spread;
  }
  // Merges the states of `Lanes` neighbouring lanes.
  template <int Lanes>
  __device__ void reduce_in_warp() {
    top = warp_reduce<Lanes>(top, Max());
    settle();
    l = warp_reduce<Lanes>(l, Sum());
    if constexpr (C::has(kLossEntropy)) moment = warp_reduce<Lanes>(moment, Sum());
    if constexpr (C::has(kLossSpread)) spread = warp_reduce<Lanes>(spread, Sum());
  }
  // The numbers of a settled state are stored `stride` apart.
  __device__ void store(void* states, int64_t at, int64_t stride) const {
    A* to = (A*)states + at;
    to[0] = top, to[stride] = l;
    if constexpr (C::has(kLossEntropy)) to += stride, to[stride] = moment;
    if constexpr (C::has(kLossSpread)) to += stride, to[stride] = spread;
  }
  __device__ void load(const void* states, int64_t at, int64_t stride) {
    const A* from = (const A*)states + at;
    top = from[0], m = finite_for_sum(top), l = from[stride];
    if constexpr (C::has(kLossEntropy)) from += stride, moment = from[stride];
    if constexpr (C::has(kLossSpread)) from += stride, spread = from[stride];
  }

 private:
  static constexpr A kLn2 = A(0.693147180559945309);

  // Makes the sums relative to another maximum.
  __device__ void rebase(A maximum) {
    const RelativeExp<C> from(m), to(finite_for_sum(maximum));
    const A factor = l > 0 ? from.ratio(to) : A(1);
    // If the sum vanishes, its moment may be beyond the largest number.
    if constexpr (C::has(kLossEntropy)) moment = factor == 0 ? A(0) : (moment + (from.m - to.m) * l) * factor;
    l *= factor, m = to.m;
  }
  template <int Count, bool ByBase, bool AreFinite, class F>
  __device__ void add_exps(const RelativeExp<C>& exp, F s) {
    if constexpr (C::has(kLossEntropy)) {
      constexpr int kSums = Count < 4 ? Count : 4;
      A sums[kSums] = {}, moments[kSums] = {};
      unroll<Count>([&](int i) {
        const A e = exp.template of<ByBase>(s(i)), log_e = exp.template logarithm<ByBase>(s(i));
        sums[i % kSums] += e;
        moments[i % kSums] += e * (AreFinite ? log_e : max_(log_e, lowest()));  // an infinite logarithm times 0 is NaN
      });
      const A sum = pairwise_sum<kSums, 0>([&](int i) { return sums[i]; });
      const A added = pairwise_sum<kSums, 0>([&](int i) { return moments[i]; });
      l += sum, moment += ByBase ? kLn2 * (added - exp.correction() * sum) : added;
    } else {
      l += pairwise_sum<Count, 0>([&](int i) { return exp.template of<ByBase>(s(i)); });
    }
  }
};

// The class of a row of a cross-entropy, and its element. They are loaded separately and ahead of their use: where the
// element is depends on the class.
template <class C>
struct LossPick {
  static constexpr int kIgnored = -1, kMissing = -2;  // in place of a class: the row is ignored; there is no such class
  int c;
  typename C::In raw;

  // `exists`: whether this thread needs the class.
  __device__ void load_class(const LossMap& map, int64_t row, bool exists) {
    c = kIgnored;
    if (!C::has(kLossCross) || !exists) return;
    const int64_t own = map.index[row];
    c = own == map.ignore_index ? kIgnored : (uint64_t)own < (uint64_t)map.n ? (int)own : kMissing;
  }
  // `x`: the address of the element of class 0.
  __device__ void load_element(const typename C::In* x, int64_t step) {
    raw = {};
    if (C::has(kLossCross) && c >= 0) raw = x[c * step];
  }
};

// The sums of the losses of some rows and of the weights of their classes, both compensated.
template <class C>
struct LossSums {
  typedef typename C::A A;
  typedef Compensated<A> Sum2;
  Sum2 loss, weight;

  __device__ void add(A of_loss, A of_weight) {
    loss = ::add(loss, of_loss);
    if (C::has(kLossWeight))
      weight = ::add(weight, of_weight);
    else
      weight.hi += of_weight;  // a count
  }
  // Adds the sums of all threads of a block, and stores them as the sums of the block.
  __device__ void finish(const LossMap& map) {
    if (!C::has(kLossCross) || !map.partials) return;
    __shared__ ReduceStorage<1, Sum2> of_losses, of_weights;
    loss = block_reduce(loss, Sum(), of_losses), weight = block_reduce(weight, Sum(), of_weights);
    if (threadIdx.x) return;
    A* const to = (A*)map.partials + blockIdx.x;
    to[0] = loss.hi, to[gridDim.x] = loss.lo, to[2 * gridDim.x] = weight.hi, to[3 * gridDim.x] = weight.lo;
  }
};

// The terms of a row, computed from its state: m, log l and the further planes, except those of picks.
template <class C>
struct LossTerms {
  typedef typename C::A A;
  static constexpr int kPlanes = C::has(kLossCross) ? 3 : LossNumbers<C>::kPickPlane;
  // Of a cross-entropy, the loss of a row is not a stored plane: it goes to the result or to a sum.
  static constexpr int kStoredPlanes = C::has(kLossCross) ? 2 : kPlanes;
  A planes[kPlanes];

  // `first`: the element of class 0.
  __device__ LossTerms(const LossMap& map, int64_t row, typename C::In first, const LossPick<C>& pick,
                       const LossState<C>& state, LossSums<C>& sums) {
    const LossNumbers<C> numbers = {map};
    const A factor = numbers.factor(row), m = state.top, log_l = state.log_sum();
    planes[0] = m, planes[1] = log_l;
    A spread = 0;
    if constexpr (C::has(kLossSpread))
      spread = numbers.weight_sum() * ((m - reference_of(numbers.score(first, factor))) + log_l) - state.spread;
    if constexpr (C::has(kLossCross)) {
      A loss = 0, weight = 0;
      if (pick.c != LossPick<C>::kIgnored) {
        check_class(map, pick.c);
        const A lse = m + log_l;
        weight = numbers.weight(pick.c);
        loss = (1 - numbers.smoothing()) * weight * (log_l - (numbers.score(pick.raw, factor) - m));
        if constexpr (C::has(kLossSpread)) loss += numbers.smoothing() / A(map.n) * spread;
        if (numbers.z_loss() != 0) loss += numbers.z_loss() * lse * lse;
      }
      planes[2] = loss;
      sums.add(loss, weight);
    } else {
      if constexpr (C::has(kLossSpread)) planes[2] = spread;
      if constexpr (C::has(kLossEntropy)) planes[LossNumbers<C>::kEntropyPlane] = log_l - state.moment / state.l;
    }
  }
  __device__ void store(const LossMap& map, int64_t row) const {
    const LossNumbers<C> numbers = {map};
    unroll<kStoredPlanes>([&](int p) { numbers.plane(map.terms, p)[row] = planes[p]; });
    if constexpr (C::has(kLossCross)) store_result(map, row);
  }
  __device__ void store_result(const LossMap& map, int64_t row) const {
    if (map.result && map.is_wide)
      ((A*)map.result)[row] = planes[2];
    else if (map.result)
      ((typename C::In*)map.result)[row] = from_acc<typename C::In>(planes[2]);
  }
  // Stores the terms of the picks of a row. `threads` threads share them.
  static __device__ void store_picks(const LossMap& map, int64_t row, const typename C::In* x, int64_t step,
                                     const LossState<C>& state, int thread, int threads) {
    if constexpr (C::has(kLossPicks) && !C::has(kLossCross)) {
      const LossNumbers<C> numbers = {map};
      const A factor = numbers.factor(row), log_l = state.log_sum();
      for (int k = thread; k < map.picks; k += threads) {
        const int64_t c = numbers.pick(row, k);
        check_class(map, c);
        numbers.plane(map.terms, numbers.kPickPlane + k)[row] =
            log_l - (numbers.score(x[c * step], factor) - state.top);
      }
    }
  }

 private:
  // A class that does not exist aborts the program, as torch's losses do.
  static __device__ void check_class(const LossMap& map, int64_t c) {
    if ((uint64_t)c >= (uint64_t)map.n) asm volatile("trap;");
  }
};

// The gradient of the elements of a row. Members that begin with of_ are factors of the named quantity.
template <class C>
struct LossGrad {
  typedef typename C::A A;
  typedef typename C::In T;
  A m, log_l, factor;
  A of_p;                 // the factor of p = exp(s - lse)
  A base, of_exp2;        // half types: p is also of_exp2 / of_p * 2^(s log2(e) - base), in fewer instructions
  A of_weight;            // of the class's weight
  A of_entropy, entropy;  // the factor of p (log p + entropy)
  A of_pick;              // cross-entropy: the factor of the class `pick`
  int pick;
  bool is_ignored;
  static constexpr bool kHasBase = sizeof(T) == 2 && !C::has(kLossEntropy);
  __device__ bool has_base() const { return kHasBase && is_small_base((float)base); }

  LossGrad() = default;
  __device__ LossGrad(const LossMap& map, int64_t row) : base(0), of_weight(0), pick(-1), is_ignored(false) {
    const LossNumbers<C> numbers = {map};
    m = numbers.plane(map.terms, 0)[row], log_l = numbers.plane(map.terms, 1)[row];
    factor = numbers.factor(row);
    if constexpr (C::has(kLossCross)) {
      const int64_t c = numbers.pick(row, 0);
      is_ignored = c == map.ignore_index;
      if (is_ignored) return;
      pick = (int)c;
      const int64_t at = map.grads_per_row ? row : 0;
      A g = map.is_wide ? ((const A*)map.grads)[at] : to_acc(((const T*)map.grads)[at]);
      if (map.total) g /= *(const A*)map.total;
      const A to_class = g * (1 - numbers.smoothing()) * numbers.weight(c);
      of_p = to_class, of_pick = -to_class;
      if constexpr (C::has(kLossSpread)) {
        of_weight = -g * (numbers.smoothing() / A(map.n));
        of_p -= of_weight * numbers.weight_sum();
      }
      if (numbers.z_loss() != 0) of_p += 2 * g * numbers.z_loss() * (m + log_l);
      if constexpr (C::has(kLossGradLse)) of_p += ((const A*)map.grad_lse)[row];
    } else {
      of_p = numbers.plane(map.grads, 1)[row];
      if constexpr (C::has(kLossSpread)) {
        of_weight = -numbers.plane(map.grads, 2)[row];
        of_p -= of_weight * numbers.weight_sum();
      }
      if constexpr (C::has(kLossEntropy)) {
        of_entropy = numbers.plane(map.grads, numbers.kEntropyPlane)[row];
        entropy = numbers.plane(map.terms, numbers.kEntropyPlane)[row];
      }
      if constexpr (C::has(kLossPicks)) {
        for (int k = 0; k < map.picks; ++k) of_p += numbers.plane(map.grads, numbers.kPickPlane + k)[row];
      }
    }
    if constexpr (kHasBase) {
      const A lse = m + log_l;
      base = lse * kLog2e;
      // Corrects the rounding errors of m + log l and of its product.
      of_exp2 = of_p * exp2_(((lse - m) - log_l) * kLog2e - fmaf(lse, kLog2e, -base));
    }
  }
  // The gradient of the score of an element, without that of picks. `ByBase`: only if has_base().
  template <bool ByBase>
  __device__ A of_score(const LossNumbers<C>& numbers, T raw, A weight) const {
    const A s = numbers.score(raw, factor), log_p = (s - m) - log_l;
    A grad = 0;
    if constexpr (ByBase) {
      grad = of_exp2 * exp2_(fmaf(s, kLog2e, -base));
    } else {
      const A p = exp_<T>(log_p);
      grad = of_p * p;
      if constexpr (C::has(kLossEntropy)) {
        if (p > 0) grad -= of_entropy * p * (log_p + entropy);
      }
    }
    if constexpr (C::has(kLossSpread)) grad += of_weight * weight;
    return grad;
  }
};
// The offsets of a row, or of a slice of columns, in x and in dx.
struct LossPlace {
  int64_t x = 0, dx = 0;
  // `dims`: the number of dims that `index` counts in.
  __device__ LossPlace(const LossMap& map, int64_t index, int dims) {
#pragma unroll 1
    for (int d = dims - 1; d > 0; --d) {
      const Quotient next = divide(index, map.sizes[d], map.divisors[d]);
      x += next.rest * map.x_strides[d], dx += next.rest * map.dx_strides[d];
      index = next.whole;
    }
    if (dims) x += index * map.x_strides[0], dx += index * map.dx_strides[0];
  }
};
