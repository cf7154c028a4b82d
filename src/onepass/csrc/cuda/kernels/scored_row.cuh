// scored_row.cuh: rows whose elements are scored from other tensors and from where they lie. These maps of rows take
// the place of those in row_map.cuh; the host fills in score_map.cuh.
#pragma once

#include "division.cuh"
#include "row_map.cuh"
#include "score_map.cuh"
#include "state.cuh"

// The numbers of a score in the accumulator's type.
__device__ inline float factor_of(const ScoreMap& map, float) { return map.factor_f32; }
__device__ inline double factor_of(const ScoreMap& map, double) { return map.factor; }
__device__ inline float softcap_of(const ScoreMap& map, float) { return map.softcap_f32; }
__device__ inline double softcap_of(const ScoreMap& map, double) { return map.softcap; }
__device__ inline float per_softcap_of(const ScoreMap& map, float) { return map.per_softcap_f32; }
__device__ inline double per_softcap_of(const ScoreMap& map, double) { return map.per_softcap; }
__device__ inline float sink_of(const ScoreMap& map, float) { return map.sink_f32; }
__device__ inline double sink_of(const ScoreMap& map, double) { return map.sink; }

// tanh. Half results need no more than an absolute error of 1e-7. It is 1 from 20 on, where exp would be infinite.
template <class Out>
__device__ inline float tanh_for(float v) {
  if (sizeof(Out) == 2) v = v > 20 ? 20 : v;
  return sizeof(Out) > 2 ? tanhf(v) : fmaf(-2, approximate_reciprocal(exp2_(v * (2 * kLog2e)) + 1), 1);
}
template <class Out>
__device__ inline double tanh_for(double v) {
  return tanh(v);
}

// Its derivative, 1 - tanh(v)^2: with q = exp(-2 |v|) it is 4 q / (1 + q)^2, in which nothing cancels. Half results
// need no more than an absolute error of 1e-7: 4 (r - r^2) with r = 1 / (1 + q).
template <class Out>
__device__ inline float tanh_derivative(float v) {
  if constexpr (sizeof(Out) == 2) {
    const float r = approximate_reciprocal(1 + exp2_(-2 * kLog2e * fabsf(v)));
    return 4 * fmaf(-r, r, r);
  } else {
    const float q = exp_for_sum(-2 * fabsf(v)), r = reciprocal(1 + q);
    return 4 * q * r * r;
  }
}
template <class Out>
__device__ inline double tanh_derivative(double v) {
  const double q = exp(-2 * fabs(v));
  return 4 * q / ((1 + q) * (1 + q));
}

// The score of an element of x that takes part. What the kernel has no part for is not looked at.
template <class C, class T, class A>
__device__ inline A score_element(const ScoreMap& map, T raw, A factor, A bias, A slope, A distance) {
  typedef typename C::Out Out;
  A s = round_through<Out>(raw) * factor;
  if constexpr (C::has(kScoreSoftcap)) s = softcap_of(map, A()) * tanh_for<Out>(s * per_softcap_of(map, A()));
  if constexpr (C::has(kScoreBias)) s += bias;
  if constexpr (C::has(kScoreAlibi)) s -= slope * abs_(distance);
  return s;
}
// The gradient of x from that of its score; `x` is looked at with a softcap alone. What does not take part has no
// gradient, whatever x is there.
template <class C, class T, class A>
__device__ inline A score_gradient(const ScoreMap& map, A grad, T x, A factor) {
  if constexpr (C::has(kScoreSoftcap)) {
    const A scaled = A(round_through<typename C::In>(x)) * factor;
    const A slope = tanh_derivative<typename C::Out>(scaled * per_softcap_of(map, A()));
    constexpr bool kMayHide = C::has(kScoreWindow) || C::has(kScoreMask);
    grad = kMayHide && grad == 0 ? grad : grad * slope;
  }
  return factor * grad;
}

// Where a row is in each of the tensors that the kernel reads or writes. Unrolled, it takes half of the instructions,
// and more of the code.
template <class C, bool Unrolled = false>
struct RowOffsets {
  int64_t at[kMapTensors] = {};
  int distance;

  __device__ RowOffsets(const ScoreMap& map, int64_t index) : distance(map.distance) {
    unsigned rest = (unsigned)index;
#pragma unroll(Unrolled ? kMapDims : 1)
    for (int d = 0; d < kMapDims; ++d) {
      if (d + 1 >= map.dims || d + 1 == kMapDims) {
        move(map, d, rest);
        break;
      }
      const unsigned next = divide(rest, map.divisors[d]);
      move(map, d, rest - next * (unsigned)map.sizes[d]);
      rest = next;
    }
  }
  // Moves on along one of the outer dims.
  __device__ void move(const ScoreMap& map, int d, int64_t by) {
    unroll<kMapTensors>([&](int t) {
      if (reads(MapTensor(t))) at[t] += by * map.strides[t][d];
    });
    if (C::has(kScoreWindow) || C::has(kScoreAlibi)) distance += int(by) * (int)map.distances[d];
  }
  template <class T>
  __device__ T* pointer(const ScoreMap& map, MapTensor tensor) const {
    return static_cast<T*>(map.data[tensor]) + at[tensor];
  }

 private:
  static __device__ constexpr bool reads(MapTensor t) {
    return t == kMapScale   ? C::has(kScoreScale)
           : t == kMapBias  ? C::has(kScoreBias) || C::has(kScoreBiasGrad)
           : t == kMapAlibi ? C::has(kScoreAlibi)
           : t == kMapSink  ? C::has(kScoreRow)
           : t == kMapLse   ? C::has(kScoreRow) || C::kIsPointwise
           : t == kMapMask  ? C::has(kScoreMask)
           : t == kMapGrad  ? C::kIsBackward
           : t == kMapX     ? C::kIsBackward && C::has(kScoreSoftcap)
                            : true;
  }
};

// The elements of a row that are inside the window: from `first` up to `end`. Without a window, those of the row.
template <class C>
struct ScoreWindow {
  int first, end;

  __device__ ScoreWindow(const ScoreMap& map, int distance, int64_t n) : first(0), end((int)n) {
    if constexpr (C::has(kScoreWindow)) {
      if (map.distance_step == 0) {
        if (distance < map.least || distance > map.most) end = 0;
      } else {  // In the order of the elements distances rise, or fall.
        const bool rises = map.distance_step > 0;
        const int from = rises ? map.least - distance : distance - map.most;
        const int to = (rises ? map.most - distance : distance - map.least) + 1;
        first = from > 0 ? from : 0;
        end = to < end ? to : end;
      }
    }
  }
  // Whether one element is inside; any and all elements of a vector.
  __device__ bool has(int at) const { return at >= first && at < end; }
  __device__ bool overlaps(int at) const { return at + C::kVecSize > first && at < end; }
  __device__ bool covers(int at) const { return at >= first && at + C::kVecSize <= end; }
};

// How a vector of a tensor beside x is loaded: element by element; from the aligned words that hold it, wherever it
// begins; as a vector in memory; or as one element.
enum class BesideAccess { elements, words, vectors, same };
template <class C>
constexpr BesideAccess beside_access(ScorePart vectors, ScorePart same = ScorePart()) {
  return C::has(same)             ? BesideAccess::same
         : C::has(vectors)        ? BesideAccess::vectors
         : C::has(kScoreElements) ? BesideAccess::elements
                                  : BesideAccess::words;
}
template <class C>
constexpr BesideAccess bias_access = beside_access<C>(kScoreBiasVectors, kScoreBiasSame);
template <class C>
constexpr BesideAccess mask_access = beside_access<C>(kScoreMaskVectors, kScoreMaskSame);

// A vector of a tensor beside x. It is loaded as words: the compiler would load smaller elements one by one.
template <class C, class T>
struct BesideVector {
  static constexpr int V = C::kVecSize, kBytes = V * sizeof(T);
  typedef typename Conditional<sizeof(T) < 4 && kBytes % 4 == 0, uint32_t, T>::type Word;
  static constexpr int kWords = kBytes / sizeof(Word), kPerWord = V / kWords;
  // The words that hold the vector, which begins with bit `first_bit` of the first one.
  Word words[kWords + 1];
  unsigned first_bit;

  // The vector that begins `at`, whose elements are `step` apart. Of one that is not whole, those that exist are read.
  template <BesideAccess Access, class F>
  __device__ void load(const T* at, int64_t step, bool is_whole, F exists) {
    first_bit = 0;
    if constexpr (Access == BesideAccess::vectors) {
      if (is_whole) {
        const auto vector = *reinterpret_cast<const Vector<Word, kWords>*>(at);
        unroll<kWords>([&](int w) { words[w] = vector.at[w]; });
        return;
      }
    } else if constexpr (Access == BesideAccess::words && is_same<Word, uint32_t>) {
      if (is_whole) {
        const int first_byte = (unsigned)(uint64_t)at & 3;
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(at) - first_byte);
        first_bit = first_byte * 8;
        unroll<kWords>([&](int w) { words[w] = from[w]; });
        words[kWords] = from[first_bit ? kWords : 0];  // with nothing of the vector in it, it may be beyond the tensor
        return;
      }
    }
    T elements[V] = {};
    if constexpr (Access == BesideAccess::same) elements[0] = *at;
    unroll<V>([&](int v) {
      if constexpr (Access == BesideAccess::same)
        elements[v] = elements[0];
      else if (is_whole || exists(v))
        elements[v] = at[Access == BesideAccess::elements ? v * step : v];
    });
    memcpy(words, elements, sizeof(elements));
  }
  __device__ T operator[](int v) const {
    if constexpr (kPerWord == 1) {
      return words[v];
    } else if constexpr (sizeof(T) == 2) {
      return get_half<T>(word(v / 2), v % 2);
    } else {
      return T(word(v / kPerWord) >> v % kPerWord * 8);
    }
  }
  // Whether a byte is not 0.
  __device__ bool is_set(int v) const {
    if constexpr (kPerWord == 1) return words[v] != 0;
    return word(v / kPerWord) & 0xffu << v % kPerWord * 8;
  }

 private:
  __device__ uint32_t word(int w) const { return __funnelshift_r(words[w], words[w + 1], first_bit); }
};

// x of a forward function, scored.
template <class C>
struct PositionalOperand {
  typedef typename C::Acc A;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Bias Bias;
  static constexpr bool kIsPositional = true;
  static constexpr bool kIsRounded = !is_lossless<In, Out>;
  static constexpr int V = C::kVecSize;
  const ScoreMap* map;
  ScoreWindow<C> window;
  A factor, slope, sink;
  const Bias* bias;
  const unsigned char* mask;
  A* lse;
  Out* result;
  int distance;

  __device__ PositionalOperand(const ScoreMap& map, const RowOffsets<C, true>& at, int64_t n)
      : map(&map), window(map, at.distance, n), factor(factor_of(map, A())), distance(at.distance) {
    result = at.template pointer<Out>(map, kMapResult);
    if constexpr (C::has(kScoreScale)) factor *= *at.template pointer<const A>(map, kMapScale);
    if constexpr (C::has(kScoreBias)) bias = at.template pointer<const Bias>(map, kMapBias);
    if constexpr (C::has(kScoreMask)) mask = at.template pointer<const unsigned char>(map, kMapMask);
    if constexpr (C::has(kScoreAlibi)) slope = *at.template pointer<const A>(map, kMapAlibi);
    if constexpr (C::has(kScoreRow)) {
      sink = map.data[kMapSink] ? *at.template pointer<const A>(map, kMapSink) : sink_of(map, A());
      lse = n && map.data[kMapLse] ? at.template pointer<A>(map, kMapLse) : nullptr;
    }
  }
  template <class T>
  static __device__ T neutral() {
    return from_acc<T>(0.0f);
  }
  template <class Index>
  __device__ bool overlaps(Index at) const {
    return C::has(kScoreWindow) ? window.overlaps((int)at) : true;
  }

  // A vector of x, and what lies beside it, as they are in memory. Of what is outside the window nothing is read.
  struct Vectors {
    typename HalfWords<In, V>::Type x;
    BesideVector<C, Bias> bias;
    BesideVector<C, unsigned char> mask;
  };
  // Loads the vector of x at `from`, which is element `first + offset` of the row. All its elements are the row's.
  __device__ void load(Vectors& to, const In* from, int first, int offset) const {
    if constexpr (C::has(kScoreWindow)) {
      to = {};
      if (!overlaps(first + offset)) return;
    }
    to.x = *reinterpret_cast<const decltype(to.x)*>(from);
    load_beside<true>(to, first, offset);
  }
  // Its scores, -inf where an element does not take part.
  template <bool Full>
  __device__ void score(const Vectors& vectors, int first, A* scores) const {
    unroll<V>([&](int v) {
      A s = score_element<C>(*map, get_element<In>(vectors.x, v), factor,
                             C::has(kScoreBias) ? A(to_acc(vectors.bias[v])) : A(0), slope,
                             A(distance + first * map->distance_step) + A(v * map->distance_step));
      if (C::has(kScoreMask) && !vectors.mask.is_set(v)) s = -infinity();
      scores[v] = s;
    });
    if (Full && (!C::has(kScoreWindow) || window.covers(first))) return;
    unroll<V>([&](int v) { scores[v] = window.has(first + v) ? scores[v] : A(-infinity()); });
  }
  // The scores of a vector that may have elements that are not the row's: those are not read.
  __device__ void score_elements(const In* from, int first, int offset, A* scores) const {
    const int begin = first + offset;
    Vectors vectors = {};
    In elements[V];
    unroll<V>([&](int v) { elements[v] = window.has(begin + v) ? from[v] : neutral<In>(); });
    memcpy(&vectors.x, elements, sizeof(elements));
    if (overlaps(begin)) load_beside<false>(vectors, first, offset);
    score<false>(vectors, begin, scores);
  }
  // An element of x, and what lies beside it.
  struct Element {
    In x;
    Bias bias;
    unsigned char mask;
  };
  // Loads what lies beside element `at`, which may be outside of the row.
  __device__ Element load_beside_one(int at) const {
    Element one = {neutral<In>()};
    if (!window.has(at)) return one;
    if constexpr (C::has(kScoreBias)) one.bias = bias[(int64_t)at * map->steps[kMapBias]];
    if constexpr (C::has(kScoreMask)) one.mask = mask[(int64_t)at * map->steps[kMapMask]];
    return one;
  }
  __device__ A score_one(const Element& one, int at) const {
    const A s = score_element<C>(*map, one.x, factor, C::has(kScoreBias) ? A(to_acc(one.bias)) : A(0), slope,
                                 A(distance + at * map->distance_step));
    return window.has(at) && (!C::has(kScoreMask) || one.mask) ? s : A(-infinity());
  }

  // The part of the row's first thread in the maximum and in the sum: the sink.
  __device__ A max_with_sink(A max, bool is_first) const {
    return C::has(kScoreRow) && is_first ? max_(max, sink) : max;
  }
  template <class L>
  __device__ L add_sink(L sum, A max, bool is_first) const {
    return C::has(kScoreRow) && is_first ? add(sum, exp_<A>(sink - finite_or_zero(max))) : sum;
  }
  // The state from which the results of the row are made; its logsumexp is written on the way.
  __device__ State<A> finish(State<A> state, bool is_first) const {
    if constexpr (C::has(kScoreRow)) {
      if (is_first && lse) *lse = finite_or_zero(state.m) + log_(state.l);
      if (!C::Epilogue::kOnePerRow && map->empty_is_zero && state.m == -infinity() && state.l == 0) return {0, 1};
    }
    return state;
  }

 private:
  // `Whole`: all elements of the vector are the row's.
  template <bool Whole>
  __device__ void load_beside(Vectors& to, int first, int offset) const {
    const auto exists = [&](int v) { return window.has(first + offset + v); };
    // Elements lie one after another where they are loaded by more than one.
    const auto from = [&](const auto* row, MapTensor t, BesideAccess access) {
      if (V > 1 && (access == BesideAccess::vectors || access == BesideAccess::words)) return row + first + offset;
      return row + (int64_t)(first + offset) * map->steps[t];
    };
    if constexpr (C::has(kScoreBias)) {
      constexpr BesideAccess access = bias_access<C>;
      to.bias.template load<access>(from(bias, kMapBias, access), map->steps[kMapBias], Whole, exists);
    }
    if constexpr (C::has(kScoreMask)) {
      constexpr BesideAccess access = mask_access<C>;
      to.mask.template load<access>(from(mask, kMapMask, access), map->steps[kMapMask], Whole, exists);
    }
  }
};

// What kernels ask of both maps that copy several rows as one piece.
template <class C>
struct ScoredRows : ScoreMap {
  __device__ const typename C::In* operand(int which) const {
    return static_cast<const typename C::In*>(data[which ? kMapGrad : kMapInput]);
  }
  __device__ int64_t stride(int which) const { return pitches[which ? kMapGrad : kMapInput]; }
  __device__ typename C::Out* results() const { return static_cast<typename C::Out*>(data[kMapResult]); }
  __device__ int64_t result_stride() const { return pitches[kMapResult]; }
};

template <class C>
struct ScoredForwardRows : ScoredRows<C> {
  typedef ForwardRow<C> Row;
  static constexpr int64_t x_stride = 0;  // no row has a neighbour that may be read

  __device__ Row row(int64_t index, bool exists = true) const {
    const RowOffsets<C, true> at(*this, exists ? index : 0);
    const int64_t own = exists ? this->n : 0;
    return {at.template pointer<const typename C::In>(*this, kMapInput), own, PositionalOperand<C>(*this, at, own)};
  }
  static __device__ typename C::Out* result(int64_t, const Row& row) { return row.operand.result; }
};

// How the gradient of an element follows from that of its score.
template <class C>
struct PositionalGrad {
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  static constexpr int V = C::kVecSize;
  const ScoreMap* map;
  ScoreWindow<C> window;
  A factor;
  const unsigned char* mask;
  Out* result;
  const Out* x;

  __device__ PositionalGrad(const ScoreMap& map, const RowOffsets<C, true>& at, int64_t n)
      : map(&map), window(map, at.distance, n), factor(factor_of(map, A())) {
    result = at.template pointer<Out>(map, kMapResult);
    if constexpr (C::has(kScoreSoftcap)) x = at.template pointer<const Out>(map, kMapX);
    if constexpr (C::has(kScoreScale)) factor *= *at.template pointer<const A>(map, kMapScale);
    if constexpr (C::has(kScoreMask)) mask = at.template pointer<const unsigned char>(map, kMapMask);
  }
  // Of softmax, elements outside the window are 0 and their gradients are not read.
  template <class Index>
  __device__ bool overlaps(Index at) const {
    return C::has(kScoreWindow) && !C::Grad::kSumsGrad ? window.overlaps((int)at) : true;
  }
  // With a softcap, the vector of x at element `first` of the row, whose elements are all the row's.
  __device__ auto load_x(int first) const {
    typename HalfWords<Out, V>::Type loaded;
    if constexpr (C::has(kScoreXVectors)) {
      loaded = *reinterpret_cast<const decltype(loaded)*>(x + first);
    } else {
      Out elements[V];
      unroll<V>([&](int v) { elements[v] = x[first + v]; });
      memcpy(&loaded, elements, sizeof(elements));
    }
    return loaded;
  }
  __device__ Out load_x_one(int at) const { return window.has(at) ? x[at] : Out(); }
  // Of softmax, what does not take part has the result 0, and so no gradient, unless the sum of the row is not finite.
  __device__ bool has_outsiders(A sum) const {
    if constexpr (C::has(kScoreWindow) || C::has(kScoreMask)) return C::Grad::kSumsGrad || !(abs_(sum) < infinity());
    return false;
  }
  // The gradient of element `at`, which is `own`.
  template <bool HasOutsiders>
  __device__ A backward(A grad, int at, Out own) const {
    if constexpr (HasOutsiders) {
      if (!takes_part(at)) return 0;
    }
    return score_gradient<C>(*map, grad, own, factor);
  }
  template <bool HasOutsiders>
  __device__ A backward(A grad, int at) const {
    if constexpr (C::has(kScoreSoftcap)) return backward<HasOutsiders>(grad, at, load_x_one(at));
    return backward<HasOutsiders>(grad, at, Out());
  }

  __device__ bool takes_part(int at) const {
    if (!window.has(at)) return false;
    if constexpr (C::has(kScoreMask)) return mask[at * map->steps[kMapMask]];
    return true;
  }
};

template <class C, class Saved = typename C::In>
struct ScoredBackwardRows : ScoredRows<C> {
  typedef BackwardRow<C, Saved> Row;

  __device__ Row row(int64_t index, bool exists = true) const {
    const RowOffsets<C, true> at(*this, exists ? index : 0);
    const int64_t own = exists ? this->n : 0;
    return {at.template pointer<const Saved>(*this, kMapInput),
            at.template pointer<const typename C::In>(*this, kMapGrad), own, PositionalGrad<C>(*this, at, own)};
  }
  static __device__ typename C::Out* result(int64_t, const Row& row) { return row.score.result; }
};
