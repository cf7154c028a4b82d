// scored_operands.h: vectors of a run: scores, the slopes that the gradients of scores are multiplied by, and results.
// The operands are read in place, in their own types and at any stride, and everything is computed in registers.
#pragma once

#include "scored_walk.h"
#include "softcap.h"
#include "tiles.h"

namespace onepass::ONEPASS_ISA {

// Operands ------------------------------------------------------------------------------------------------------------

// The first `count` lanes of v; the other lanes become `other`.
ONEPASS_INLINE Vec keep_lanes(Vec v, int64_t count, float other) { return lane_mask(count) ? v : broadcast(other); }
ONEPASS_INLINE V<double> keep_lanes(V<double> v, int64_t count, double other) {
  return V<int64_t>(lane_mask(2 * count)) ? v : broadcast_as(other);
}
// v with the first `count` lanes set to 0.
ONEPASS_INLINE Vec drop_lanes(Vec v, int64_t count) { return lane_mask(count) ? Vec{} : v; }
ONEPASS_INLINE V<double> drop_lanes(V<double> v, int64_t count) {
  return V<int64_t>(lane_mask(2 * count)) ? V<double>{} : v;
}

template <class A, class T>
ONEPASS_INLINE A widen(T v) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return A(v);
  } else {
    return A(to_acc(v));
  }
}
// Gathers elements that are `step` apart.
template <class A, class T>
__attribute__((noinline)) void gather(const T* from, int64_t step, int64_t count, A* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = widen<A>(from[j * step]);
}

// The same for the lanes of a vector, in registers: a vector that was stored in parts would have to wait to be read.
template <class A, class T, size_t... Lane>
ONEPASS_INLINE V<A> gather_lanes(const T* from, int64_t step, std::index_sequence<Lane...>) {
  return V<A>{widen<A>(from[int64_t(Lane) * step])...};
}
template <class A, class T>
__attribute__((noinline)) V<A> gather_vector(const T* from, int64_t step) {
  return gather_lanes<A>(from, step, std::make_index_sequence<size_t(kLanes<A>)>());
}

// Loads K vectors of elements that are `step` apart, or the first `count` elements of one vector. For a mask, T is a
// byte.
template <class A, class T, int K, class... Count>
ONEPASS_INLINE void load_operand(const T* from, int64_t step, V<A> (&v)[K], Count... count) {
  constexpr int L = kLanes<A>;
  constexpr bool has_vectors = std::is_same_v<A, float> && !std::is_same_v<T, double> && !std::is_same_v<T, uint8_t>;
  if (step == 0) {
    for (V<A>& each : v) each = broadcast_as(widen<A>(*from));
  } else if (has_vectors && step == 1) {
    if constexpr (has_vectors) load_vectors<false>(from, v, count...);
  } else if (std::is_same_v<A, T> && step == 1) {
    if constexpr (std::is_same_v<A, T> && sizeof...(count) == 0) std::memcpy(&v, from, sizeof v);
    if constexpr (std::is_same_v<A, T> && !has_vectors && sizeof...(count)) v[0] = load_tail(from, count...);
  } else if constexpr (sizeof...(count)) {
    A each[L] = {};
    gather(from, step, (int64_t(0) + ... + count), each);
    std::memcpy(&v, each, sizeof v);
  } else {
    for (int k = 0; k < K; ++k) v[k] = gather_vector<A>(from + k * L * step, step);
  }
}

// Calls use(Type<T>) for the type of an element.
template <class Use>
ONEPASS_INLINE auto with_element_type(DType type, const Use& use) {
  switch (type) {
    case DType::float64: return use(Type<double>());
    case DType::float16: return use(Type<float16>());
    case DType::bfloat16: return use(Type<bfloat16>());
    default: return use(Type<float>());
  }
}

// An operand of any element type.
struct AnyOperand {
  const void* data;  // null if the problem has no such tensor
  DType type;
  int64_t step;

  AnyOperand(const ScoredRows& rows, const ScoredRun& run, ScoredTensor tensor, DType type)
      : data(rows.p.has(tensor) ? static_cast<const char*>(rows.p.data[tensor]) + run.at(tensor) * size_of(type)
                                : nullptr),
        type(type),
        step(run.step[tensor]) {}
  template <class A, int K, class... Count>
  ONEPASS_INLINE void load(int64_t i, int64_t step, V<A> (&v)[K], Count... count) const {
    with_element_type(type, [&](auto of) __attribute__((always_inline)) {
      load_operand<A>(static_cast<const TypeOf<decltype(of)>*>(data) + i * step, step, v, count...);
    });
  }
};

// v where the bytes of a mask are not 0, and `other` elsewhere; with a count only for the first `count` lanes.
template <class... Count>
ONEPASS_INLINE Vec select(const uint8_t* mask, Vec v, Vec other, Count... count) {
#if defined(__AVX512F__)
  __mmask16 lanes = 0xffff;
  if constexpr (sizeof...(count)) lanes = __mmask16((1u << (count + ...)) - 1);
  const __m128i bytes = _mm_maskz_loadu_epi8(lanes, mask);
  return Vec(_mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), __m512(other), __m512(v)));
#else
  uint8_t part[kWidth] = {};
  if constexpr (sizeof...(count)) {
    for (int64_t j = 0; j < (count + ...); ++j) part[j] = mask[j];
    mask = part;
  }
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask));
  return IntVec(_mm256_cvtepu8_epi32(bytes)) != 0 ? v : other;
#else
  for (int j = 0; j < kWidth; ++j) v[j] = mask[j] ? v[j] : other[j];
  return v;
#endif
#endif
}
template <class A, int K, class... Count>
ONEPASS_INLINE void apply_mask(const uint8_t* mask, int64_t step, A other, V<A> (&v)[K], Count... count) {
  if constexpr (std::is_same_v<A, float>) {
    if (step == 1) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) v[k] = select(mask + k * kWidth, v[k], broadcast(other), count...);
      return;
    }
  }
  V<A> bytes[K];
  load_operand<A>(mask, step, bytes, count...);
  for (int k = 0; k < K; ++k) v[k] = bytes[k] != A(0) ? v[k] : broadcast_as(other);
}

// Rounds to the 16-bit type `type`.
template <int K>
ONEPASS_INLINE void round_to_half(DType type, Vec (&v)[K]) {
  const auto round = [&](auto to) __attribute__((always_inline)) {
    for (Vec& each : v) {
      TypeOf<decltype(to)> rounded[kWidth];
      store_vector<true>(rounded, each);
      each = load_vector(rounded);
    }
  };
  type == DType::bfloat16 ? round(Type<bfloat16>()) : round(Type<float16>());
}

// Scores --------------------------------------------------------------------------------------------------------------

// The factors of the elements of a run: one number and, if the elements belong to different rows, a scale for each.
template <class A>
struct ScaleOperand {
  A number = 1;
  const A* each = nullptr;
  int64_t step = 0;

  ScaleOperand() = default;
  // A number and, unless `first` is null, the scales from there on.
  ScaleOperand(double factor, const A* first, int64_t step) : number(A(factor)), step(step) {
    if (!first) return;
    step == 0 ? void(number *= *first) : void(each = first);
  }
  // kPlain: there is one scale, or the scales are contiguous.
  template <bool kPlain = false, int K, class... Count>
  ONEPASS_INLINE void multiply(int64_t i, V<A> (&v)[K], Count... count) const {
    for (V<A>& one : v) one *= number;
    if (!each) return;
    const int64_t apart = kPlain ? 1 : step;
    V<A> scale[K];
    load_operand<A>(each + i * apart, apart, scale, count...);
    for (int k = 0; k < K; ++k) v[k] *= scale[k];
  }
};

// Whether x and bias of a run are contiguous, its mask is contiguous or one value, and all other operands are one
// number. Then most of the steps to a score can be left out.
inline bool is_plain(const ScoredProblem& p, const int64_t* step) {
  const auto at_most = [&](ScoredTensor tensor, int64_t most) { return !p.has(tensor) || step[tensor] == most; };
  const bool rounds = !p.is_backward() && size_of(p.out) == 2 && p.in != p.out;
  return step[kInput] == 1 && p.softcap == 0 && !rounds && at_most(kScale, 0) && at_most(kAlibi, 0) &&
         at_most(kBias, 1) && (at_most(kMask, 1) || at_most(kMask, 0));
}

// Loads the scores of a run, whose elements are of type X, as numbers of type A. For kPlain see is_plain.
template <class A, class X, bool kPlain = false>
struct ScoreLoader {
  static constexpr int L = kLanes<A>;
  using Vector = V<A>;
  const ScoredProblem& p;
  const ScoredRun& run;
  const X* x;
  const A* scales;
  ScaleOperand<A> scale;
  const A* slopes;
  AnyOperand bias;
  const uint8_t* mask;
  const A cap, uncap;
  const bool rounds;    // elements are rounded to a 16-bit type first
  int64_t distance;     // the distance of the first element
  Vector distances[4];  // distances of the elements of four vectors from that of the first element

  // `asks_mask`: whether elements that the mask hides become -inf here.
  ScoreLoader(const ScoredRows& rows, const ScoredRun& run, bool asks_mask = true)
      : p(rows.p),
        run(run),
        x(rows.data<const X>(kInput, run)),
        scales(p.has(kScale) ? rows.data<const A>(kScale, run) : nullptr),
        scale(p.factor, scales, run.step[kScale]),
        slopes(p.has(kAlibi) ? rows.data<const A>(kAlibi, run) : nullptr),
        bias(rows, run, kBias, p.bias_type),
        mask(asks_mask && p.has(kMask) ? rows.data<const uint8_t>(kMask, run) : nullptr),
        cap(A(p.softcap)),
        uncap(1 / cap),
        rounds(!p.is_backward() && size_of(p.out) == 2 && p.in != p.out),
        distance(run.at(kDistance)) {
    Vector index{};
    for (int j = 0; j < L; ++j) index[j] = A(j);
    for (int k = 0; slopes && k < 4; ++k) distances[k] = (index + A(k * L)) * A(run.step[kDistance]);
  }

  // Moves to the next run, which is `apart` from this run in each tensor.
  ONEPASS_INLINE void next(const int64_t* apart) {
    x += apart[kInput], distance += apart[kDistance];
    if (scales && apart[kScale]) scales += apart[kScale], scale = {p.factor, scales, run.step[kScale]};
    if (slopes) slopes += apart[kAlibi];
    if (bias.data) bias.data = static_cast<const char*>(bias.data) + apart[kBias] * size_of(bias.type);
    if (mask) mask += apart[kMask];
  }
  // Prefetches operands of later runs.
  ONEPASS_INLINE void fetch(const int64_t* apart) const {
    const auto fetch_from = [&](const void* data, ScoredTensor tensor, int64_t size) {
      const char* const from = static_cast<const char*>(data) + kStepsAhead * apart[tensor] * size;
      for (int64_t j = 0; j < run.count * size; j += kLine) __builtin_prefetch(from + j);
    };
    fetch_from(x, kInput, sizeof(X));
    if (bias.data && run.step[kBias] != 0 && apart[kBias] != 0) fetch_from(bias.data, kBias, size_of(bias.type));
  }
  // Loads K vectors from element i on, or the first `count` elements of one vector.
  template <int K, class... Count>
  ONEPASS_INLINE void load(int64_t i, Vector (&v)[K], Count... count) const {
    const auto step = [&](ScoredTensor tensor, int64_t plain) { return kPlain ? plain : run.step[tensor]; };
    load_operand<A>(x + i * step(kInput, 1), step(kInput, 1), v, count...);
    if constexpr (std::is_same_v<A, float> && !kPlain) {
      if (rounds) round_to_half(p.out, v);
    }
    scale.template multiply<kPlain>(i, v, count...);
    if (!kPlain && p.softcap != 0) {
      for (Vector& each : v) each *= uncap;
      apply_tanh(v);
      for (Vector& each : v) each *= cap;
    }
    if (bias.data) {
      Vector other[K];
      bias.template load<A>(i, step(kBias, 1), other, count...);
      for (int k = 0; k < K; ++k) v[k] += other[k];
    }
    if (slopes) {
      Vector slope[K];
      load_operand<A>(slopes + i * step(kAlibi, 0), step(kAlibi, 0), slope, count...);
      const A first = A(distance + i * run.step[kDistance]);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) v[k] -= slope[k] * magnitude(distances[k] + first);
    }
    if (mask) apply_mask<A>(mask + i * step(kMask, 1), step(kMask, 1), -kInf<A>, v, count...);
  }
};

// Writes the scores of the elements [i, last) of a run, and returns their maximum in each lane. Lanes behind the last
// element, in its vector, become -inf.
template <class A, class Scores>
ONEPASS_INLINE V<A> write_part_scores(const Scores& scores, int64_t i, int64_t last, A* to) {
  constexpr int L = kLanes<A>;
  V<A> most[4], v[1];
  for (V<A>& each : most) each = broadcast_as(-kInf<A>);
  for (; i + 4 * L <= last; i += 4 * L) {
    V<A> four[4];
    scores.load(i, four);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) most[k] = max_as(four[k], most[k]), store_as(to + i + k * L, four[k]);
  }
  for (; i + L <= last; i += L) {
    scores.load(i, v);
    most[0] = max_as(v[0], most[0]), store_as(to + i, v[0]);
  }
  if (i < last) {
    scores.load(i, v, last - i);
    v[0] = keep_lanes(v[0], last - i, -kInf<A>);
    most[1] = max_as(v[0], most[1]), store_as(to + i, v[0]);
  }
  return max_as(max_as(most[0], most[1]), max_as(most[2], most[3]));
}
// The same for several runs. Each is `apart` from the run before it, and its scores are written `pitch` behind those of
// the run before it. Scores outside the window become -inf.
template <class A, class X, bool kPlain>
__attribute__((noinline)) V<A> write_runs_of(const ScoredRows& rows, const ScoredRun& run, int64_t runs,
                                             const int64_t* apart, A* to, int64_t pitch) {
  const bool has_window = rows.p.has_window(), has_one_mask = rows.p.has(kMask) && run.step[kMask] == 0;
  const uint8_t* of_run = has_one_mask ? rows.data<const uint8_t>(kMask, run) : nullptr;
  ScoreLoader<A, X, kPlain> scores(rows, run, !has_one_mask);
  const bool fetches = runs > 1 && run.step[kInput] == 1 && apart[kInput] != run.count;
  V<A> most = broadcast_as(-kInf<A>);
  while (true) {
    Span in = {0, run.count};
    if (fetches) scores.fetch(apart);
    const bool is_hidden = of_run && !*of_run;
    if (has_window || is_hidden) {
      in = is_hidden ? Span{0, 0} : rows.inside(scores.distance, run.step[kDistance], run.count);
      for (int64_t i = 0; i < run.count; i += kLanes<A>) store_as(to + i, broadcast_as(-kInf<A>));
    }
    if (in.first < in.last) most = max_as(write_part_scores(scores, in.first, in.last, to), most);
    if (--runs == 0) return most;
    to += pitch, scores.next(apart);
    if (of_run) of_run += apart[kMask];
  }
}

// The function that writes the scores of runs whose elements are `step` apart. Doubles are never plain: less to
// compile.
template <class A>
using ScoresWriter = V<A> (*)(const ScoredRows& rows, const ScoredRun& run, int64_t runs, const int64_t* apart, A* to,
                              int64_t pitch);
template <class A>
ONEPASS_INLINE ScoresWriter<A> scores_writer(const ScoredRows& rows, const int64_t* step) {
  return with_element_type(rows.p.in, [&](auto x) __attribute__((always_inline)) -> ScoresWriter<A> {
    using X = TypeOf<decltype(x)>;
    constexpr bool can_be_plain = kHasFastPaths && std::is_same_v<A, float>;
    return can_be_plain && is_plain(rows.p, step) ? write_runs_of<A, X, can_be_plain> : write_runs_of<A, X, false>;
  });
}
// Writes the scores of the elements [first, last) of the row at `row`, and returns their maximum in each lane.
template <class A>
__attribute__((noinline)) V<A> write_row_scores(const ScoredRows& rows, const int64_t* row, int64_t first, int64_t last,
                                                A* to) {
  const auto write = scores_writer<A>(rows, rows.inner.strides);
  V<A> most = broadcast_as(-kInf<A>);
  rows.for_each_run(row, first, last, [&](const ScoredRun& run, int64_t i) {
    most = max_as(write(rows, run, 1, run.step, to + i, 0), most);
  });
  return most;
}
// Writes the scores of the elements [first, last) of the rows of a tile. The steps are written `pitch` apart.
template <class A>
__attribute__((noinline)) void write_tile_scores(const ScoredRows& rows, const ScoredRun& tile, int64_t first,
                                                 int64_t last, A* to, int64_t pitch) {
  const auto write = scores_writer<A>(rows, tile.step);
  rows.for_each_run(tile.origin, first, last, [&](const ScoredRun& steps, int64_t i) {
    const RunPlace at(steps);
    write(rows, {at.of, tile.step, tile.first, tile.count}, steps.count, steps.step, to + i * pitch, pitch);
  });
}

// Slopes --------------------------------------------------------------------------------------------------------------

// Computes gradients of the elements of a run from the gradients of their scores: multiplies them by the scale and the
// derivative of the softcap. Where the mask is false and the gradient may not be 0, it becomes 0. x is the input: the
// saved one of the softcap (kOfCap), or the input of logsumexp.
template <class A>
struct SlopeLoader {
  const double factor;
  const A* scales;
  const int64_t scale_step;
  ScaleOperand<A> scale;
  AnyOperand x;
  const ScoredTensor x_tensor;
  const A softcap, uncap;
  const bool makes_half;  // whether gradients are of a 16-bit type
  const DType half;       // the 16-bit type to which x was rounded first, or the type of x
  const uint8_t* mask;
  const int64_t mask_step;

  // `given`: the scales of the elements of the run, if they are not the call's.
  SlopeLoader(const ScoredRows& rows, const ScoredRun& run, bool masks, const A* given = nullptr)
      : factor(rows.p.of_scores ? 1 : rows.p.factor),
        scales(given                                     ? given
               : rows.p.has(kScale) && !rows.p.of_scores ? rows.data<const A>(kScale, run)
                                                         : nullptr),
        scale_step(given ? 1 : run.step[kScale]),
        scale(factor, scales, scale_step),
        x(rows, run, rows.p.has(kOfCap) ? kOfCap : kInput, rows.p.has(kOfCap) ? rows.p.out : rows.p.in),
        x_tensor(rows.p.has(kOfCap) ? kOfCap : kInput),
        softcap(rows.p.of_scores ? A(0) : A(rows.p.softcap)),
        uncap(1 / softcap),
        makes_half(size_of(rows.p.out) == 2),
        half(rows.p.has(kOfCap) && size_of(rows.p.in) == 2 ? rows.p.in : x.type),
        mask(masks && rows.p.has(kMask) ? rows.data<const uint8_t>(kMask, run) : nullptr),
        mask_step(run.step[kMask]) {}
  // Moves to the next run, which is `apart` from this run in each tensor.
  ONEPASS_INLINE void next(const int64_t* apart) {
    if (scales && apart[kScale]) scales += apart[kScale], scale = {factor, scales, scale_step};
    if (softcap != 0) x.data = static_cast<const char*>(x.data) + apart[x_tensor] * size_of(x.type);
    if (mask) mask += apart[kMask];
  }
  // Whether there is one scale, or contiguous scales; and whether the elements of the softcap, which have the type of
  // the result, and the mask are contiguous.
  static bool is_plain(const ScoredRows& rows, const ScoredRun& run, bool masks) {
    const ScoredProblem& p = rows.p;
    return (p.of_scores || ((!p.has(kScale) || run.step[kScale] == 0 || run.step[kScale] == 1) &&
                            (p.softcap == 0 || (p.has(kOfCap) && run.step[kOfCap] == 1 && p.in == p.out)))) &&
           (!masks || !p.has(kMask) || run.step[kMask] == 1);
  }
  // T is the type of the function's results. kCaps: there may be a softcap.
  template <class T, bool kPlain, bool kCaps, int K, class... Count>
  ONEPASS_INLINE void multiply(int64_t i, V<A> (&v)[K], Count... count) const {
    scale.template multiply<kPlain>(i, v, count...);
    if (kCaps && softcap != 0) {
      V<A> t[K];
      if constexpr (kPlain) {
        load_operand<A>(static_cast<const T*>(x.data) + i, 1, t, count...);
      } else {
        x.template load<A>(i, x.step, t, count...);
        if constexpr (std::is_same_v<A, float>) {
          if (half != x.type) round_to_half(half, t);
        }
      }
      scale.template multiply<kPlain>(i, t, count...);
      for (V<A>& each : t) each *= uncap;
      kPlain || makes_half ? apply_tanh_slope<sizeof(T) == 2>(t) : apply_tanh_slope(t);
      for (int k = 0; k < K; ++k) v[k] *= t[k];
    }
    const int64_t step = kPlain ? 1 : mask_step;
    if (mask) apply_mask<A>(mask + i * step, step, A(0), v, count...);
  }
};

// Results -------------------------------------------------------------------------------------------------------------

template <class A>
__attribute__((noinline)) void write_run(const ScoredRows& rows, const ScoredRun& run, const A* from, bool streaming) {
  with_element_type(rows.p.out, [&](auto type) {
    using Y = TypeOf<decltype(type)>;
    Y* const y = rows.data<Y>(kResult, run);
    if (run.step[kResult] == 1) return store_run<true>(y, run.count, from, streaming);
    for (int64_t i = 0; i < run.count; ++i) y[i * run.step[kResult]] = from_acc<Y>(from[i]);
  });
}

}  // namespace onepass::ONEPASS_ISA
