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
  return sizeof(Out) > 2 ? tanhf(v) : fmaf(-2, reciprocal(exp2_(v * (2 * kLog2e)) + 1), 1);
}
template <class Out>
__device__ inline double tanh_for(double v) {
  return tanh(v);
}

__device__ inline float abs_(float v) { return fabsf(v); }
__device__ inline double abs_(double v) { return fabs(v); }

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
// The gradient of x from that of its score; `x` is looked at with a softcap alone.
template <class C, class T, class A>
__device__ inline A score_gradient(const ScoreMap& map, A grad, T x, A factor) {
  if constexpr (C::has(kScoreSoftcap)) {
    const A t = tanh_for<typename C::Out>(A(round_through<typename C::In>(x)) * factor * per_softcap_of(map, A()));
    grad *= 1 - t * t;
  }
  return factor * grad;
}

// Where a row is in each of the tensors that the kernel reads or writes.
template <class C>
struct RowOffsets {
  int64_t at[kMapTensors] = {};
  int distance;

  __device__ RowOffsets(const ScoreMap& map, int64_t index) : distance(map.distance) {
    unsigned rest = (unsigned)index;
#pragma unroll 1
    for (int d = map.dims - 1; d >= 0; --d) {
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
           : t == kMapBias  ? C::has(kScoreBias)
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
  typedef typename Conditional<kBytes % 4 == 0, uint32_t, T>::type Word;
  static constexpr int kWords = kBytes / sizeof(Word), kPerWord = V / kWords;
  Vector<Word, kWords> words;

  // The vector that begins `at`, whose elements are `step` apart. Of one that is not whole, those that exist are read.
  // `last`: the aligned word with the tensor's last byte.
  template <BesideAccess Access, class F>
  __device__ void load(const T* at, int64_t step, bool is_whole, F exists, const uint32_t* last) {
    if constexpr (Access == BesideAccess::vectors) {
      if (is_whole) {
        words = *reinterpret_cast<const Vector<Word, kWords>*>(at);
        return;
      }
    } else if constexpr (Access == BesideAccess::words && kBytes % 4 == 0 && sizeof(T) < 4) {
      // The last of the words may hold none of the vector, and is then not to be beyond the tensor.
      if (is_whole) {
        const uint32_t* const from = reinterpret_cast<const uint32_t*>((uint64_t)at & ~(uint64_t)3);
        uint32_t loaded[kWords + 1];
        unroll<kWords>([&](int w) { loaded[w] = from[w]; });
        loaded[kWords] = *(from + kWords < last ? from + kWords : last);
        const unsigned bits = ((unsigned)(uint64_t)at & 3) * 8;
        unroll<kWords>([&](int w) { words.at[w] = __funnelshift_r(loaded[w], loaded[w + 1], bits); });
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
    memcpy(&words, elements, sizeof(words));
  }
  __device__ T operator[](int v) const {
    T elements[V];
    memcpy(elements, &words, sizeof(words));
    return elements[v];
  }
  // Whether a byte is not 0.
  __device__ bool is_set(int v) const {
    if constexpr (kPerWord == 1) return words.at[v] != 0;
    return words.at[v / kPerWord] & 0xffu << v % kPerWord * 8;
  }
};

// x of a forward function, scored.
template <class C>
struct PositionalOperand {
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  typedef typename C::Bias Bias;
  static constexpr bool kIsPositional = true;
  static constexpr bool kIsRounded = !is_lossless<typename C::In, Out>;
  static constexpr int V = C::kVecSize;
  template <class T>
  using Beside = BesideVector<C, T>;
  const ScoreMap& map;
  ScoreWindow<C> window;
  A factor, slope, sink;
  const Bias* bias;
  const unsigned char* mask;
  A* lse;
  Out* result;
  int distance;

  __device__ PositionalOperand(const ScoreMap& map, const RowOffsets<C>& at, int64_t n)
      : map(map), window(map, at.distance, n), factor(factor_of(map, A())), distance(at.distance) {
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

  // The scores of the vector at element `first` of the row; -inf where an element does not take part. `Full`: all of
  // its elements are the row's. The elements beside those that are not the row's are not read.
  template <bool Full, class T>
  __device__ void score(Vector<T, V> raw, int first, A* scores) const {
    Beside<Bias> biases = {};
    Beside<unsigned char> masks = {};
    const auto exists = [&](int v) { return window.has(first + v); };
    if (overlaps(first)) {
      const auto from = [&](const auto* row, MapTensor t) { return row + (int64_t)first * map.steps[t]; };
      if constexpr (C::has(kScoreBias))
        biases.template load<bias_access<C>>(from(bias, kMapBias), map.steps[kMapBias], Full, exists, map.bias_last);
      if constexpr (C::has(kScoreMask))
        masks.template load<mask_access<C>>(from(mask, kMapMask), map.steps[kMapMask], Full, exists, map.mask_last);
    }
    unroll<V>([&](int v) {
      const A s = score_element<C>(map, raw.at[v], factor, C::has(kScoreBias) ? A(to_acc(biases[v])) : A(0), slope,
                                   A(distance + first * map.distance_step) + A(v * map.distance_step));
      scores[v] = !C::has(kScoreMask) || masks.is_set(v) ? s : A(-infinity());
    });
    if (Full && !C::has(kScoreWindow)) return;
    if (!window.covers(first)) {
      unroll<V>([&](int v) { scores[v] = window.has(first + v) ? scores[v] : A(-infinity()); });
    }
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
      if (!C::Epilogue::kOnePerRow && map.empty_is_zero && state.m == -infinity() && state.l == 0) return {0, 1};
    }
    return state;
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
    const RowOffsets<C> at(*this, exists ? index : 0);
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
  const ScoreMap& map;
  ScoreWindow<C> window;
  A factor;
  const unsigned char* mask;
  Out* result;
  const Out* x;

  __device__ PositionalGrad(const ScoreMap& map, const RowOffsets<C>& at, int64_t n)
      : map(map), window(map, at.distance, n), factor(factor_of(map, A())) {
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
  __device__ Vector<Out, V> load_x(int first) const {
    if constexpr (C::has(kScoreXVectors)) {
      return *reinterpret_cast<const Vector<Out, V>*>(x + first);
    } else {
      Vector<Out, V> raw;
      unroll<V>([&](int v) { raw.at[v] = x[first + v]; });
      return raw;
    }
  }
  // The gradient of element `at`, which is `own`. What does not take part has none, which a softmax gives by itself:
  // its result is 0 there, unless the sum of the row is not finite.
  __device__ A backward(A grad, A sum, int at, Out own) const {
    if constexpr (C::has(kScoreWindow) || C::has(kScoreMask)) {
      if ((C::Grad::kSumsGrad || !(abs_(sum) < infinity())) && !takes_part(at)) return 0;
    }
    return score_gradient<C>(map, grad, own, factor);
  }
  __device__ A backward(A grad, A sum, int at) const {
    if constexpr (C::has(kScoreSoftcap))
      return backward(grad, sum, at, window.has(at) ? x[at] : Out());
    else
      return backward(grad, sum, at, Out());
  }

 private:
  __device__ bool takes_part(int at) const {
    if (!window.has(at)) return false;
    if constexpr (C::has(kScoreMask)) return mask[at * map.steps[kMapMask]];
    return true;
  }
};

template <class C, class Saved = typename C::In>
struct ScoredBackwardRows : ScoredRows<C> {
  typedef BackwardRow<C, Saved> Row;

  __device__ Row row(int64_t index, bool exists = true) const {
    const RowOffsets<C> at(*this, exists ? index : 0);
    const int64_t own = exists ? this->n : 0;
    return {at.template pointer<const Saved>(*this, kMapInput),
            at.template pointer<const typename C::In>(*this, kMapGrad), own, PositionalGrad<C>(*this, at, own)};
  }
  static __device__ typename C::Out* result(int64_t, const Row& row) { return row.score.result; }
};
