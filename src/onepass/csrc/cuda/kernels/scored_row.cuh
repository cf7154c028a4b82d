// scored_row.cuh: rows with scores that depend on other tensors (a bias, a mask, scales, slopes) and on the position of
// an element. The maps of rows in this file replace those of row_map.cuh; the host fills them in (score_map.cuh).
#pragma once

#include "division.cuh"
#include "row_map.cuh"
#include "score_map.cuh"
#include "state.cuh"

// The numbers of a ScoreMap in the accumulator's type.
__device__ inline float factor_of(const ScoreMap& map, float) { return map.factor_f32; }
__device__ inline double factor_of(const ScoreMap& map, double) { return map.factor; }
__device__ inline float sink_of(const ScoreMap& map, float) { return map.sink_f32; }
__device__ inline double sink_of(const ScoreMap& map, double) { return map.sink; }

// The softcap c of x * factor: c tanh(x * factor / c). For half results an absolute error of 1e-7 c is enough: it is
// c - 2 c / (exp(2 v) + 1), where exp may be infinite.
template <class Out>
__device__ inline float capped(const ScoreMap& map, float x, float factor) {
  const float per_cap = map.per_softcap_f32, cap = map.softcap_f32;
  if (sizeof(Out) > 2) return cap * tanhf(x * factor * per_cap);
  return fmaf(-2 * cap, approximate_reciprocal(exp2_(x * (factor * per_cap * (2 * kLog2e))) + 1), cap);
}
template <class Out>
__device__ inline double capped(const ScoreMap& map, double x, double factor) {
  return map.softcap * tanh(x * factor * map.per_softcap);
}

// A quarter of its slope over x * factor, (1 - tanh(v)^2) / 4. With q = exp(-2 |v|) it is q / (1 + q)^2, which has no
// cancellation. For half results an absolute error of 1e-7 is enough: r - r^2 with r = 1 / (1 + q).
template <class Out>
__device__ inline float quarter_slope(const ScoreMap& map, float x, float factor) {
  if constexpr (sizeof(Out) == 2) {
    const float v = x * (factor * map.per_softcap_f32 * (2 * kLog2e)), r = approximate_reciprocal(1 + exp2_(-fabsf(v)));
    return fmaf(-r, r, r);
  } else {
    const float q = exp_for_sum(-2 * fabsf(x * factor * map.per_softcap_f32)), r = reciprocal(1 + q);
    return q * r * r;
  }
}
template <class Out>
__device__ inline double quarter_slope(const ScoreMap& map, double x, double factor) {
  const double q = exp(-2 * fabs(x * factor * map.per_softcap));
  return q / ((1 + q) * (1 + q));
}

// The slope itself, from the result y of a softmax of a half type: without a bias, the capped score is log(y) plus the
// logsumexp of the row. `rest`: the capped score without log(y), divided by the softcap. Where y is 0, so is the
// gradient.
__device__ inline float slope_of_result(const ScoreMap& map, float y, float rest) {
  const float tanh = fmaf(log2_(y), map.per_softcap_f32 * kLn2, rest);
  return max_(fmaf(-tanh, tanh, 1), 0.0f);
}
// A bias can make a logsumexp so large that it has not the digits of the capped score. The gradients of such rows read
// x. Up to here its rounding error is less than that of log(y).
template <class C>
constexpr bool may_be_far = C::has(kScoreSlopeOfY) && C::has(kScoreBias);
__device__ inline bool is_far(float lse) { return abs_(lse) > 1024; }

// What the gradient of each element reads beside y and its gradient: x, or the bias.
template <class C>
constexpr bool reads_x = C::kIsBackward && C::has(kScoreSoftcap) && !C::has(kScoreSlopeOfY);
template <class C>
constexpr bool reads_more = reads_x<C> || may_be_far<C>;

// The score of an element of x that takes part. Arguments for parts that the kernel does not have are ignored.
template <class C, class T, class A>
__device__ inline A score_element(const ScoreMap& map, T raw, A factor, A bias, A slope, A distance) {
  typedef typename C::Out Out;
  const A x = round_through<Out>(raw);
  A s = C::has(kScoreSoftcap) ? capped<Out>(map, x, factor) : x * factor;
  if constexpr (C::has(kScoreBias)) s += bias;
  if constexpr (C::has(kScoreAlibi)) s -= slope * abs_(distance);
  return s;
}
// The gradient of x from the gradient of its score. `x` is used only with a softcap. An element that does not take part
// has the gradient 0, whatever its x is.
template <class C, class T, class A>
__device__ inline A score_gradient(const ScoreMap& map, A grad, T x, A factor) {
  if constexpr (!C::has(kScoreSoftcap)) return factor * grad;
  const A slope = quarter_slope<typename C::Out>(map, A(round_through<typename C::In>(x)), factor);
  constexpr bool kMayHide = C::has(kScoreWindow) || C::has(kScoreMask);
  return (kMayHide && grad == 0 ? grad : grad * slope) * (4 * factor);
}

// The same without x. `lse`: that of the row. `bias` is used only if there is one.
template <class C, class T, class A>
__device__ inline A score_gradient_of_result(const ScoreMap& map, A grad, A y, A factor, A lse,
                                             [[maybe_unused]] T bias) {
  A rest = lse * map.per_softcap_f32;
  if constexpr (C::has(kScoreBias)) rest = fmaf(-A(to_acc(bias)), map.per_softcap_f32, rest);
  return grad * slope_of_result(map, y, rest) * factor;
}

// The offsets of a row in each tensor that the kernel reads or writes. Unrolled, they take half of the instructions,
// but more code.
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
  // Moves by `by` along the outer dim d.
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
           : t == kMapLse   ? C::has(kScoreRow) || C::kIsPointwise || C::has(kScoreSlopeOfY)
           : t == kMapMask  ? C::has(kScoreMask)
           : t == kMapGrad  ? C::kIsBackward
           : t == kMapX     ? reads_x<C> || may_be_far<C>
                            : true;
  }
};

// The elements of a row that are inside the window: from `first` to before `end`. Without a window these are all
// elements.
template <class C>
struct ScoreWindow {
  int first, end;

  __device__ ScoreWindow(const ScoreMap& map, int distance, int64_t n) : first(0), end((int)n) {
    if constexpr (C::has(kScoreWindow)) {
      if (map.distance_step == 0) {
        if (distance < map.least || distance > map.most) end = 0;
      } else {  // along the row, distances rise or fall
        const bool rises = map.distance_step > 0;
        const int from = rises ? map.least - distance : distance - map.most;
        const int to = (rises ? map.most - distance : distance - map.least) + 1;
        first = from > 0 ? from : 0;
        end = to < end ? to : end;
      }
    }
  }
  // Whether one element is inside; whether any, or all, elements of a vector are.
  __device__ bool has(int at) const { return at >= first && at < end; }
  __device__ bool overlaps(int at) const { return at + C::kVecSize > first && at < end; }
  __device__ bool covers(int at) const { return at >= first && at + C::kVecSize <= end; }
};

// How a vector of another tensor than x is loaded: element by element; as the aligned words that contain it, wherever
// it begins; as an aligned vector; or as one element for the whole vector.
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

// A vector of another tensor than x. It is loaded as words, because the compiler would load small elements one by one.
template <class C, class T>
struct BesideVector {
  static constexpr int V = C::kVecSize, kBytes = V * sizeof(T);
  typedef typename Conditional<sizeof(T) < 4 && kBytes % 4 == 0, uint32_t, T>::type Word;
  static constexpr int kWords = kBytes / sizeof(Word), kPerWord = V / kWords;
  // The words that contain the vector. It begins with bit `first_bit` of the first word.
  Word words[kWords + 1];
  unsigned first_bit;

  // Loads the vector that begins at `at`, whose elements are `step` apart. If it is not whole, only elements that exist
  // are read.
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
        words[kWords] = from[first_bit ? kWords : 0];  // if it has nothing of the vector, it may be beyond the tensor
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
  // Whether element v, a byte, is not 0.
  __device__ bool is_set(int v) const {
    if constexpr (kPerWord == 1) return words[v] != 0;
    return word(v / kPerWord) & 0xffu << v % kPerWord * 8;
  }

 private:
  __device__ uint32_t word(int w) const { return __funnelshift_r(words[w], words[w + 1], first_bit); }
};

// A vector of what a gradient reads beside y and its gradient.
template <class C>
using MoreVector = BesideVector<C, typename Conditional<reads_x<C>, typename C::Out, typename C::Bias>::type>;
template <class C>
constexpr BesideAccess more_access = reads_x<C> ? beside_access<C>(kScoreXVectors) : bias_access<C>;

// The operand x of a forward function with scores.
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

  // A vector of x and the vectors of the other tensors, as they are in memory. Outside of the window nothing is read.
  struct Vectors {
    typename HalfWords<In, V>::Type x;
    BesideVector<C, Bias> bias;
    BesideVector<C, unsigned char> mask;
  };
  // Loads the vector of x at `from`, which begins with element `first + offset` of the row. All its elements are the
  // row's.
  __device__ void load(Vectors& to, const In* from, int first, int offset) const {
    if constexpr (C::has(kScoreWindow)) {
      to = {};
      if (!overlaps(first + offset)) return;
    }
    to.x = *reinterpret_cast<const decltype(to.x)*>(from);
    load_beside<true>(to, first, offset);
  }
  // The scores of a vector; elements that do not take part get -inf. x(v): element v of the vector of x.
  template <bool Full, class X>
  __device__ void score(const Vectors& vectors, X x, int first, A* scores) const {
    unroll<V>([&](int v) {
      A s = score_element<C>(*map, x(v), factor, C::has(kScoreBias) ? A(to_acc(vectors.bias[v])) : A(0), slope,
                             A(distance + first * map->distance_step) + A(v * map->distance_step));
      if (C::has(kScoreMask) && !vectors.mask.is_set(v)) s = -infinity();
      scores[v] = s;
    });
    if (Full && (!C::has(kScoreWindow) || window.covers(first))) return;
    unroll<V>([&](int v) { scores[v] = window.has(first + v) ? scores[v] : A(-infinity()); });
  }
  template <bool Full>
  __device__ void score(const Vectors& vectors, int first, A* scores) const {
    score<Full>(vectors, [&](int v) { return get_element<In>(vectors.x, v); }, first, scores);
  }
  // The scores of a vector that may have elements outside the row, which are not read.
  __device__ void score_elements(const In* from, int first, int offset, A* scores) const {
    const int begin = first + offset;
    Vectors vectors = {};
    In elements[V];
    unroll<V>([&](int v) { elements[v] = window.has(begin + v) ? from[v] : neutral<In>(); });
    memcpy(&vectors.x, elements, sizeof(elements));
    if (overlaps(begin)) load_beside<false>(vectors, first, offset);
    score<false>(vectors, begin, scores);
  }
  // One element of x and of the other tensors.
  struct Element {
    In x;
    Bias bias;
    unsigned char mask;
  };
  // Loads the elements of the other tensors for element `at` of x, which may be outside of the row.
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

  // The sink. The row's first thread includes it in the maximum and in the sum.
  __device__ A max_with_sink(A max, bool is_first) const {
    return C::has(kScoreRow) && is_first ? max_(max, sink) : max;
  }
  template <class L>
  __device__ L add_sink(L sum, A max, bool is_first) const {
    return C::has(kScoreRow) && is_first ? add(sum, exp_<A>(sink - finite_or_zero(max))) : sum;
  }
  // The state from which the results of the row are computed. The logsumexp of the row is written here.
  __device__ State<A> finish(State<A> state, bool is_first) const {
    if constexpr (C::has(kScoreRow)) {
      if (is_first && lse) *lse = finite_or_zero(state.m) + log_(state.l);
      if (!C::Epilogue::kOnePerRow && map->empty_is_zero && state.m == -infinity() && state.l == 0) return {0, 1};
    }
    return state;
  }

  // Loads the vectors of the other tensors. `Whole`: whether all elements of the vector belong to the row.
  template <bool Whole>
  __device__ void load_beside(Vectors& to, int first, int offset) const {
    const auto exists = [&](int v) { return window.has(first + offset + v); };
    // Where several elements are loaded together, they are contiguous.
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

// What kernels that copy several rows as one piece need of both maps.
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
  static constexpr int64_t x_stride = 0;  // the neighbours of a row must not be read

  __device__ Row row(int64_t index, bool exists = true) const {
    const RowOffsets<C, true> at(*this, exists ? index : 0);
    const int64_t own = exists ? this->n : 0;
    return {at.template pointer<const typename C::In>(*this, kMapInput), own, PositionalOperand<C>(*this, at, own)};
  }
  static __device__ typename C::Out* result(int64_t, const Row& row) { return row.operand.result; }
};

// Computes the gradient of an element from the gradient of its score.
template <class C>
struct PositionalGrad {
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  typedef typename Conditional<reads_x<C>, Out, typename C::Bias>::type More;
  static constexpr int V = C::kVecSize;
  const ScoreMap* map;
  ScoreWindow<C> window;
  A factor, lse;
  const unsigned char* mask;
  Out* result;
  const Out* x;
  const More* more;  // x or the bias
  int64_t more_step;

  __device__ PositionalGrad(const ScoreMap& map, const RowOffsets<C, true>& at, int64_t n)
      : map(&map), window(map, at.distance, n), factor(factor_of(map, A())) {
    constexpr MapTensor kMore = reads_x<C> ? kMapX : kMapBias;
    result = at.template pointer<Out>(map, kMapResult);
    if constexpr (may_be_far<C>) x = at.template pointer<const Out>(map, kMapX);
    if constexpr (reads_more<C>) more = at.template pointer<const More>(map, kMore), more_step = map.steps[kMore];
    if constexpr (C::has(kScoreSlopeOfY)) lse = *at.template pointer<const A>(map, kMapLse);
    if constexpr (C::has(kScoreScale)) factor *= *at.template pointer<const A>(map, kMapScale);
    if constexpr (C::has(kScoreMask)) mask = at.template pointer<const unsigned char>(map, kMapMask);
  }
  // For softmax, y is 0 outside the window, so that the gradients of y need not be read there.
  template <class Index>
  __device__ bool overlaps(Index at) const {
    return C::has(kScoreWindow) && !C::Grad::kSumsGrad ? window.overlaps((int)at) : true;
  }
  // Loads a vector of x or of the bias, at element `first` of the row. If it is not whole, only elements of the row are
  // read.
  __device__ void load_more(MoreVector<C>& to, int first, bool is_whole = true) const {
    constexpr BesideAccess kAccess = more_access<C>;
    constexpr bool kContiguous = V > 1 && (kAccess == BesideAccess::vectors || kAccess == BesideAccess::words);
    to.template load<kAccess>(more + (kContiguous ? first : first * more_step), more_step, is_whole,
                              [&](int v) { return window.has(first + v); });
  }
  __device__ More load_more_one(int at) const { return window.has(at) ? more[at * more_step] : More(); }
  // For softmax, elements that do not take part have y = 0, and so no gradient, unless the sum of the row is not
  // finite. A row whose logsumexp is far from 0 counts as one that has some.
  __device__ bool has_outsiders(A sum) const {
    if constexpr (may_be_far<C>) {
      if (is_far(lse)) return true;
    }
    if constexpr (C::has(kScoreWindow) || C::has(kScoreMask)) return C::Grad::kSumsGrad || !(abs_(sum) < infinity());
    return false;
  }
  // The gradient of element `at`, from its result y. `own`: the element of x or of the bias.
  template <bool HasOutsiders>
  __device__ A backward(A grad, A y, int at, More own) const {
    if constexpr (HasOutsiders) {
      if (!takes_part(at)) return 0;
      if constexpr (may_be_far<C>) {
        if (is_far(lse)) return score_gradient<C>(*map, grad, x[at], factor);
      }
    }
    if constexpr (C::has(kScoreSlopeOfY))
      return score_gradient_of_result<C>(*map, grad, y, factor, lse, own);
    else
      return score_gradient<C>(*map, grad, own, factor);
  }
  template <bool HasOutsiders>
  __device__ A backward(A grad, A y, int at) const {
    if constexpr (reads_more<C>) return backward<HasOutsiders>(grad, y, at, load_more_one(at));
    return backward<HasOutsiders>(grad, y, at, More());
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
