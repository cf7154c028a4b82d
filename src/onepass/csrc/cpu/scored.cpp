// scored.cpp: functions of scores and their gradients (core/scored_problem.h has the problem), compiled once per
// instruction set.
//
//   a row, or a tile of rows, comes in:  elements are read, become floats or doubles in the scratch memory of the
//                                        thread, and are scored there, one step after another
//   it is reduced:                       maximum -> exponentials and their sum, or the sum of a gradient
//   it goes out:                         results replace the elements, and are stored
//
// So each element is read once and each result is written once, a call in place needs no care, and element types matter
// only where tensors are read and written. Tensors may have any strides along a run of elements; stride 1 is fast. Two
// kinds of calls read twice: rows that are too long for the scratch memory, in chunks, and gradients of softmax whose
// operands lie side by side, the second time from the cache.
#include "scored.h"

#include <memory>

#include "rows_simd.h"

namespace onepass::ONEPASS_ISA {

namespace {

using ScoredGroup = DimGroupOf<kScoredTensors>;

constexpr int64_t kMaxShortRow = 3 * kWidth;  // elements of the longest row that is transposed
constexpr int64_t kShortTile = 2048;          // elements of a tile of short rows
constexpr int64_t kMaxTile = 256;             // rows of a tile
constexpr int64_t kBlock = 1024;              // elements that are scored at a time, in the fastest cache
constexpr int64_t kStepsAhead = 4;            // of columns that are fetched meanwhile
constexpr int64_t kFarDistance = int64_t(1) << 62;

// Calls f(Type<T>) for the type of an element, where f is inlined: a run may be so short that its arguments count.
template <class F>
ONEPASS_INLINE auto with_type(DType type, const F& f) {
  switch (type) {
    case DType::float64: return f(Type<double>());
    case DType::float16: return f(Type<float16>());
    case DType::bfloat16: return f(Type<bfloat16>());
    default: return f(Type<float>());
  }
}

// Steps through the dims of a group in order, the innermost ones excepted.
struct ScoredWalk {
  const ScoredGroup& group;
  const int count;
  int64_t index[kMaxDims], at[kScoredTensors];

  ScoredWalk(const ScoredGroup& over, int64_t first, int innermost, const int64_t* origin)
      : group(over), count(over.count > innermost ? over.count - innermost : 0) {
    std::copy_n(origin, int(kScoredTensors), at);
    for (int i = count - 1; i >= 0; --i) {
      index[i] = first % group.dims[i].size;
      first /= group.dims[i].size;
      for (int t = 0; t < kScoredTensors; ++t) at[t] += index[i] * group.dims[i].strides[t];
    }
  }
  ONEPASS_INLINE void next() {
    for (int i = count - 1; i >= 0; --i) {
      const auto& dim = group.dims[i];
      for (int t = 0; t < kScoredTensors; ++t) at[t] += dim.strides[t];
      if (++index[i] < dim.size) return;
      for (int t = 0; t < kScoredTensors; ++t) at[t] -= index[i] * dim.strides[t];
      index[i] = 0;
    }
  }
};

// Vectors of elements -------------------------------------------------------------------------------------------------

template <class A, class T>
ONEPASS_INLINE A widen(T v) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return A(v);
  } else {
    return A(to_acc(v));
  }
}
template <class A, class T>
ONEPASS_INLINE V<A> load_wide(const T* from) {
  if constexpr (std::is_same_v<A, float> && !std::is_same_v<T, double> && !std::is_same_v<T, uint8_t>) {
    return load_vector(from);
  } else {
    V<A> v;
    for (int j = 0; j < kLanes<A>; ++j) v[j] = widen<A>(from[j]);
    return v;
  }
}

// v where the bytes of a mask are not 0, elsewhere `other`.
ONEPASS_INLINE Vec select(const uint8_t* mask, Vec v, Vec other) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask));
  return Vec(_mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), __m512(other), __m512(v)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask));
  return IntVec(_mm256_cvtepu8_epi32(bytes)) != 0 ? v : other;
#else
  for (int j = 0; j < kWidth; ++j) v[j] = mask[j] ? v[j] : other[j];
  return v;
#endif
}

// to[i] = op(to[i], from[i * step], i) for vectors of elements. The last vector is stored as a whole; what is behind
// the elements is combined with `fill`, or with anything if the step is 0.
template <class T, class A, class Op>
ONEPASS_INLINE void combine(const T* from, int64_t step, int64_t count, A* to, Op op, A fill = 0) {
  constexpr int L = kLanes<A>;
  int64_t i = 0;
  const auto put = [&](V<A> v) __attribute__((always_inline)) { store_as(to + i, op(load_as<A>(to + i), v, i)); };
  if (step == 0) {
    const V<A> all = broadcast_as(widen<A>(*from));
    for (; i < count; i += L) put(all);
    return;
  }
  if (step == 1) {
#pragma GCC unroll 4
    for (; i + L <= count; i += L) put(load_wide<A>(from + i));
    if constexpr (std::is_same_v<A, float> && !std::is_same_v<T, double> && !std::is_same_v<T, uint8_t>) {
      if (i < count) put(load_tail(from + i, count - i, fill));
      return;
    }
  }
  for (; i < count; i += L) {
    A some[L];
    for (int64_t j = 0; j < L; ++j) some[j] = i + j < count ? widen<A>(from[(i + j) * step]) : fill;
    put(load_as<A>(some));
  }
}

// tanh to some ulp: a polynomial near 0 (that of Cephes' tanhf), elsewhere from the exponential.
ONEPASS_INLINE void apply_tanh(Vec (&v)[4]) {
  Vec e[4];
  for (int k = 0; k < 4; ++k) e[k] = (v[k] < 0 ? v[k] : -v[k]) * 2.0f;
  ExpFloat::apply(e);
  for (int k = 0; k < 4; ++k) {
    const Vec exp = e[k] * kExpUnscale, far = (1.0f - exp) / (1.0f + exp), z = v[k] * v[k];
    Vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const Vec size = v[k] < 0 ? -v[k] : v[k], near = v[k] + v[k] * (z * p);
    v[k] = size < 0.625f ? near : v[k] < 0 ? -far : far;
  }
}
ONEPASS_INLINE void apply_tanh(V<double> (&v)[4]) {
  for (V<double>& each : v) {
    for (int j = 0; j < kLanes<double>; ++j) each[j] = std::tanh(each[j]);
  }
}

// Calls -------------------------------------------------------------------------------------------------------------

// Where a lane has its row's number in the tensors that have one per row.
struct LaneOffsets {
  int64_t scale, sink, lse, result;
  static LaneOffsets of(const int64_t* at) { return {at[kScale], at[kSink], at[kRowLse], at[kResult]}; }
};

template <class A>
class Scored {
 public:
  static constexpr int L = kLanes<A>;
  using Vector = V<A>;
  using Exp = std::conditional_t<std::is_same_v<A, double>, ExpDouble, ExpFloat>;
  // For softmax with 16-bit results.
  using CoarseExp = std::conditional_t<std::is_same_v<A, double>, ExpDouble, ExpHalf<4>>;
  using Tile = ForwardTile<ReduceEpilogue, A>;  // has the logarithms

  Scored(const ScoredProblem& problem, const ScoredPlan& plan)
      : p(problem),
        plan(plan),
        inner(problem.reduced.innermost()),
        is_softmax(problem.function == Function::softmax),
        is_reduction(problem.function == Function::logsumexp),
        backward(problem.is_backward()),
        has_sink(problem.has(kSink) || problem.sink != -std::numeric_limits<double>::infinity()) {
    if (problem.reduced.count == 0) std::fill_n(inner.strides, int(kScoredTensors), 0);
    origin[kDistance] = problem.distance;
    pad = backward && is_softmax ? A(0) : -kInf<A>;
    const bool narrows = size_of(p.out) == 2 && p.in != p.out;
    rounds = !backward && narrows;
    reads_all = backward && !is_softmax;
    is_coarse = size_of(p.out) == 2 && !p.has(kRowLse);
  }

  void run(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) {
    if (phase == CpuPhase::merge) return merge_chunks(states);
    plan.reads_in_place ? gradients(begin, end) : run_route(phase, states, begin, end);
    if (plan.streaming) fence_streaming_stores();
  }

 private:
  void run_route(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) {
    switch (plan.route) {
      case ScoredRoute::row_chunks: chunks(phase, states, begin, end); break;
      case ScoredRoute::rows: rows(begin, end); break;
      case ScoredRoute::short_rows: short_rows(begin, end); break;
      case ScoredRoute::columns: columns(begin, end); break;
    }
  }

  const ScoredProblem& p;
  const ScoredPlan& plan;
  DimOf<kScoredTensors> inner;  // of the reduced dims
  const bool is_softmax, is_reduction, backward, has_sink;
  bool rounds;     // the input, to a 16-bit type, before all else
  bool reads_all;  // what is outside the window counts, too
  bool is_coarse;  // are exponentials good to no more than 16-bit results need?
  A pad;           // an element that changes no sum
  int64_t origin[kScoredTensors] = {};
  std::unique_ptr<A, decltype(&std::free)> large{nullptr, &std::free};
  LaneOffsets lanes[kMaxTile];
  A *t = nullptr, *g = nullptr;  // the elements, or y; the gradient of y

  template <class T>
  T* data(int tensor) const {
    return static_cast<T*>(p.data[tensor]);
  }

  A* memory(int64_t elements) {
    const int64_t bytes = up_to(elements * int64_t(sizeof(A)), 64);
    if (bytes <= kScratch * int64_t(sizeof(float))) return reinterpret_cast<A*>(scratch());
    large.reset(static_cast<A*>(std::aligned_alloc(64, size_t(bytes))));
    if (!large) throw std::bad_alloc();
    return large.get();
  }

  // Runs: `count` elements from `at` on, `step` from one to the next --------------------------------------------------

  // The elements of a run that are inside the window: [first, last).
  void clip(const int64_t* at, const int64_t* step, int64_t count, int64_t* first, int64_t* last) const {
    *first = 0, *last = count;
    if (!p.has_window()) return;
    const int64_t least = std::max(p.least, -kFarDistance), most = std::min(p.most, kFarDistance);
    const int64_t d = at[kDistance], s = step[kDistance];
    if (s == 0) {
      if (d < least || d > most) *last = 0;
      return;
    }
    const int64_t from = s > 0 ? least - d : d - most, to = s > 0 ? most - d : d - least;
    *first = std::clamp<int64_t>(from, 0, count), *last = std::clamp<int64_t>(to + 1, *first, count);
  }

  template <class Op>
  ONEPASS_INLINE void combine_input(ScoredTensor tensor, int64_t at, int64_t step, int64_t count, A* to, Op op) const {
    with_type(p.in, [&](auto type) {
      using T = TypeOf<decltype(type)>;
      combine(data<const T>(tensor) + at, step, count, to, op);
    });
  }
  template <class Op>
  ONEPASS_INLINE static void each_vector(int64_t count, A* to, Op op) {
    for (int64_t i = 0; i < count; i += L) store_as(to + i, op(load_as<A>(to + i), i));
  }

  // Where the mask is false, elements become `value`.
  void apply_mask(const int64_t* at, const int64_t* step, int64_t count, A value, A* to) const {
    const Vector other = broadcast_as(value);
    const uint8_t* const mask = data<const uint8_t>(kMask) + at[kMask];
    if (step[kMask] == 0) {
      if (!*mask) std::fill_n(to, count, value);
      return;
    }
    if constexpr (std::is_same_v<A, float>) {
      if (step[kMask] == 1) {
        const int64_t whole = count & -int64_t(L);
#pragma GCC unroll 4
        for (int64_t i = 0; i < whole; i += L) store_as(to + i, select(mask + i, load_as<A>(to + i), other));
        for (int64_t i = whole; i < count; ++i) to[i] = mask[i] ? to[i] : value;
        return;
      }
    }
    combine(
        mask, step[kMask], count, to,
        [=](Vector v, Vector m, int64_t) __attribute__((always_inline)) { return m != A(0) ? v : other; }, A(1));
  }

  void score_block(const int64_t* at, const int64_t* step, int64_t count, A* to) const {
    A scale = A(p.factor);
    const bool scales_each = p.has(kScale) && step[kScale] != 0;
    if (p.has(kScale) && !scales_each) scale *= data<const A>(kScale)[at[kScale]];
    const Vector times = broadcast_as(rounds ? A(1) : scale);
    combine_input(kInput, at[kInput], step[kInput], count, to,
                  [=](Vector, Vector x, int64_t) __attribute__((always_inline)) { return x * times; });
    if constexpr (std::is_same_v<A, float>) {
      if (rounds) round_and_scale(count, scale, to);
    }
    if (scales_each) {
      combine(data<const A>(kScale) + at[kScale], step[kScale], count, to,
              [](Vector v, Vector s, int64_t) __attribute__((always_inline)) { return v * s; });
    }
    if (p.softcap != 0) apply_softcap(count, to);
    if (p.has(kBias)) {
      with_type(p.bias_type, [&](auto type) {
        using T = TypeOf<decltype(type)>;
        combine(data<const T>(kBias) + at[kBias], step[kBias], count, to,
                [](Vector v, Vector b, int64_t) __attribute__((always_inline)) { return v + b; });
      });
    }
    if (p.has(kAlibi)) {
      Vector index;
      for (int j = 0; j < L; ++j) index[j] = A(j);
      const A from = A(at[kDistance]), by = A(step[kDistance]);
      combine(data<const A>(kAlibi) + at[kAlibi], step[kAlibi], count, to,
              [=](Vector v, Vector slope, int64_t i) __attribute__((always_inline)) {
                const Vector distance = (index + A(i)) * by + from;
                return v - slope * (distance < A(0) ? -distance : distance);
              });
    }
    if (p.has(kMask)) apply_mask(at, step, count, -kInf<A>, to);
  }
  void round_and_scale(int64_t count, float scale, float* to) const {
    const auto round = [&](auto type) {
      using T = TypeOf<decltype(type)>;
      each_vector(count, to, [=](Vec v, int64_t) __attribute__((always_inline)) {
        T rounded[kWidth];
        store_vector<true>(rounded, v);
        return load_vector(rounded) * scale;
      });
    };
    p.out == DType::bfloat16 ? round(Type<bfloat16>()) : round(Type<float16>());
  }
  void apply_softcap(int64_t count, A* to) const {
    const A cap = A(p.softcap);
    for (int64_t i = 0; i < count; i += 4 * L) {
      Vector v[4];
      for (int k = 0; k < 4; ++k) v[k] = i + k * L < count ? load_as<A>(to + i + k * L) / cap : Vector{};
      apply_tanh(v);
      for (int k = 0; k < 4 && i + k * L < count; ++k) store_as(to + i + k * L, v[k] * cap);
    }
  }

  // Reads a run. Up to a vector less one element behind it may be written.
  void read_run(const int64_t* at, const int64_t* step, int64_t count, int64_t to) const {
    if (backward) {
      const auto copy = [](Vector, Vector v, int64_t) __attribute__((always_inline)) { return v; };
      combine_input(kInput, at[kInput], step[kInput], count, t + to, copy);
      combine_input(kGradOf, at[kGradOf], step[kGradOf], count, g + to, copy);
      return;
    }
    int64_t first, last;
    clip(at, step, count, &first, &last);
    std::fill_n(t + to, first, -kInf<A>);
    if (first == 0 && last <= kBlock) {
      if (last > 0) score_block(at, step, last, t + to);
      first = last;
    }
    for (int64_t i = first; i < last; i += kBlock) {
      int64_t from[kScoredTensors];
      for (int s = 0; s < kScoredTensors; ++s) from[s] = at[s] + i * step[s];
      score_block(from, step, std::min(last - i, kBlock), t + to + i);
    }
    std::fill_n(t + to + last, count - last, -kInf<A>);
  }

  // Stores the results of a run. A gradient is 0 where elements take no part.
  void write_run(const int64_t* at, const int64_t* step, int64_t count, A* from) const {
    if (backward) {
      int64_t first, last;
      if (p.has(kMask)) apply_mask(at, step, count, A(0), from);
      clip(at, step, count, &first, &last);
      std::fill_n(from, first, A(0));
      std::fill_n(from + last, count - last, A(0));
    }
    with_type(p.out, [&](auto type) {
      using Y = TypeOf<decltype(type)>;
      Y* const y = data<Y>(kResult) + at[kResult];
      if (step[kResult] == 1) return store_run<true>(y, count, from, plan.streaming);
      for (int64_t i = 0; i < count; ++i) y[i * step[kResult]] = from_acc<Y>(from[i]);
    });
  }

  // Calls work(at, elements, first) for the runs of a row.
  template <class Work>
  ONEPASS_INLINE void for_each_run(const int64_t* row, Work work) const {
    if (p.reduced.count <= 1) return work(row, p.n, int64_t(0));
    ScoredWalk at(p.reduced, 0, 1, row);
    for (int64_t i = 0; i < p.n; i += inner.size, at.next()) work(at.at, inner.size, i);
  }

  // Reductions: `steps` vectors, `step` elements apart, whose lanes are rows, or all of one row ----------------------

  struct Sum {
    Vector sum{}, error{};
  };
  // What results are made with: forward, what is subtracted, and 1 / sum or its logarithm; backward, the sum, the
  // scale, and whether there is an element that takes part.
  struct Numbers {
    Vector a, b, c{};
  };

  // The sum of the lanes, in all lanes.
  static Sum fold(const Sum& lanes) {
    double total;
    if constexpr (std::is_same_v<A, float>) {
      total = reduce_sum(to_double(lanes.sum) + to_double(lanes.error));
    } else {
      Compensated sum;
      for (int j = 0; j < L; ++j) sum.add(lanes.sum[j]), sum.error += lanes.error[j];
      total = sum.value();
    }
    if (!std::isfinite(total)) {  // where a sum is not finite its rounding error is meaningless
      total = 0;
      for (int j = 0; j < L; ++j) total += double(lanes.sum[j]);
      return {broadcast_as(A(total)), Vector{}};
    }
    return {broadcast_as(A(total)), broadcast_as(A(total - double(A(total))))};
  }
  static A largest(Vector v) {
    if constexpr (std::is_same_v<A, float>) return reduce_max(v);
    A m = v[0];
    for (int j = 1; j < L; ++j) m = v[j] > m ? v[j] : m;
    return m;
  }

  static Vector maximum(const A* from, int64_t steps, int64_t step) {
    Vector m[4];
    for (Vector& each : m) each = broadcast_as(-kInf<A>);
    int64_t i = 0;
    for (; i + 4 <= steps; i += 4, from += 4 * step) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) m[k] = max_as(load_as<A>(from + k * step), m[k]);
    }
    for (; i < steps; ++i, from += step) m[0] = max_as(load_as<A>(from), m[0]);
    return max_as(max_as(m[0], m[1]), max_as(m[2], m[3]));
  }

  // The sum of the exponentials of elements and of the sink, relative to `top`.
  template <bool kStoreExp, class Exp>
  static Sum exp_sum(A* from, int64_t steps, int64_t step, Vector top, Vector sink) {
    CompensatedLanes<A> total;
    int64_t i = 0;
    for (; i + 4 <= steps; i += 4, from += 4 * step) {
      Vector e[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) __builtin_prefetch(from + (8 + k) * step), e[k] = load_as<A>(from + k * step) - top;
      Exp::apply(e);
#pragma GCC unroll 4
      for (int k = 0; kStoreExp && k < 4; ++k) store_as(from + k * step, e[k]);
      total.add((e[0] + e[1]) + (e[2] + e[3]));
    }
    Vector e[1];
    for (; i < steps; ++i, from += step) {
      e[0] = load_as<A>(from) - top;
      Exp::apply(e);
      if (kStoreExp) store_as(from, e[0]);
      total.add(e[0]);
    }
    e[0] = sink - top;
    Exp::apply(e);
    total.add(e[0]);
    return {total.sum - total.kStart, total.error};
  }

  struct RowState {
    Vector most;
    Sum l;
  };
  // The state of elements and the sink, given the maximum of the elements in each lane. With kStoreExp exponentials,
  // times 1 / kTileUnscale, replace the elements.
  template <bool kStoreExp>
  RowState state_of(A* from, int64_t steps, int64_t step, Vector most, Vector sink, bool one_row) const {
    const Vector nan = broadcast_as(std::numeric_limits<A>::quiet_NaN());
    most = max_as(sink, most);
    if (one_row) most = broadcast_as(largest(most));
    const Vector top = finite_or<A>(most, Vector{});
    // The sum of a row with +inf is +inf, or NaN if there is a NaN.
    const bool has_infinity = any_lane<A>(most == kInf<A> ? Vector{} + A(1) : Vector{});
    Vector infinite = sink == sink ? broadcast_as(kInf<A>) : nan;
    for (int64_t i = 0; has_infinity && i < steps; ++i) {
      const Vector v = load_as<A>(from + i * step);
      infinite = v == v ? infinite : nan;
    }
    Sum l;
    if constexpr (kStoreExp) {
      l = is_coarse ? exp_sum<true, CoarseExp>(from, steps, step, top, sink)
                    : exp_sum<true, Exp>(from, steps, step, top, sink);
    } else {
      l = exp_sum<false, Exp>(from, steps, step, top, sink);
    }
    l.sum = most == kInf<A> ? infinite : l.sum, l.error = most == kInf<A> ? Vector{} : l.error;
    return {most, one_row ? fold(l) : l};
  }

  // Reduces elements, of which `most` is the maximum. The exponentials of softmax replace them. The numbers of the rows
  // are those of `count` lanes, or of one row.
  Numbers reduce(A* from, int64_t steps, int64_t step, Vector most, const LaneOffsets* lane, int64_t count,
                 bool one_row) const {
    Vector sink = broadcast_as(-kInf<A>);
    if (has_sink) {
      A each[L];
      for (int64_t j = 0; j < L; ++j) each[j] = one_row && j ? -kInf<A> : A(p.sink);
      for (int64_t j = 0; p.has(kSink) && j < count; ++j) each[j] = data<const A>(kSink)[lane[j].sink];
      sink = load_as<A>(each);
    }
    const RowState state = is_softmax ? state_of<true>(from, steps, step, most, sink, one_row)
                                      : state_of<false>(from, steps, step, most, sink, one_row);
    const Sum& l = state.l;
    most = state.most;
    const Vector top = finite_or<A>(most, Vector{}), nan = broadcast_as(std::numeric_limits<A>::quiet_NaN());
    const Vector total = l.sum + l.error;
    const auto regular = total - total == Vector{} && total > Vector{};
    if (is_reduction || p.has(kRowLse)) {
      Vector lse = Tile::log_sum(top, l.sum * kTileUnscale<A>, l.error * kTileUnscale<A>);
      lse = regular ? lse : most + total;
      for (int64_t j = 0; p.has(kRowLse) && j < count; ++j) data<A>(kRowLse)[lane[j].lse] = lse[j];
      if (is_reduction) store_results(lse, lane, count);
    }
    const Vector special = p.empty_is_zero ? (most == -kInf<A> && total == Vector{} ? Vector{} : nan) : nan;
    const Vector number =
        is_softmax ? A(1) / total : Tile::logarithm(l.sum * kTileUnscale<A>, l.error * kTileUnscale<A>);
    return {top, regular ? number : special};
  }
  void store_results(Vector results, const LaneOffsets* lane, int64_t count) const {
    with_type(p.out, [&](auto type) {
      using Y = TypeOf<decltype(type)>;
      for (int64_t j = 0; j < count; ++j) data<Y>(kResult)[lane[j].result] = from_acc<Y>(A(results[j]));
    });
  }

  // The sums of gradients: what they are of is added up four vectors at a time.
  template <bool kOfProducts>
  static Sum grad_sum(const A* y, const A* g, int64_t steps, int64_t step) {
    Sum l;
    int64_t i = 0;
    const auto term = [=](int64_t i) __attribute__((always_inline)) {
      const Vector e = load_as<A>(g + i * step);
      return kOfProducts ? load_as<A>(y + i * step) * e : e;
    };
    for (; i + 4 <= steps; i += 4) {
      add_compensated(l.sum, l.error, (term(i) + term(i + 1)) + (term(i + 2) + term(i + 3)));
    }
    for (; i < steps; ++i) add_compensated(l.sum, l.error, term(i));
    return l;
  }
  // 1 where a row has an element that takes part, from the result of log_softmax.
  static Vector takes_part(const A* y, int64_t steps, int64_t step) {
    Vector some{};
    for (int64_t i = 0; i < steps; ++i) some = load_as<A>(y + i * step) == -kInf<A> ? some : Vector{} + A(1);
    return some;
  }
  Numbers grad_numbers(Sum l, Vector some, const LaneOffsets* lane, int64_t count, bool one_row) const {
    Vector scale = broadcast_as(A(p.factor));
    if (p.has(kScale)) {
      A each[L] = {};
      for (int64_t j = 0; j < L; ++j) each[j] = data<const A>(kScale)[lane[j < count ? j : 0].scale];
      scale *= load_as<A>(each);
    }
    if (one_row) {
      l = fold(l);
      if (any_lane<A>(some)) some = Vector{} + A(1);
    }
    return {l.sum - l.sum == Vector{} ? l.sum + l.error : l.sum, scale, p.empty_is_zero ? some : Vector{} + A(1)};
  }

  // The numbers of one vector of rows, from elements in the scratch memory.
  Numbers numbers_of(int64_t from, int64_t steps, int64_t step, const LaneOffsets* lane, int64_t count,
                     bool one_row) const {
    if (!backward) return reduce(t + from, steps, step, maximum(t + from, steps, step), lane, count, one_row);
    const Sum l =
        is_softmax ? grad_sum<true>(t + from, g + from, steps, step) : grad_sum<false>(t + from, g + from, steps, step);
    const bool asks = !is_softmax && p.empty_is_zero;
    return grad_numbers(l, asks ? takes_part(t + from, steps, step) : Vector{}, lane, count, one_row);
  }

  // Makes results of `count` vectors, `step` elements apart, with the same numbers, or with each its own (kEach).
  template <bool kEach>
  void finish(int64_t from, int64_t count, int64_t step, const Numbers* numbers) const {
    A* const y = t + from;
    const A* const dy = g + from;
    const auto each = [&](auto result) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) {
        const Numbers& row = numbers[kEach ? i : 0];
        store_as(y + i * step, result(load_as<A>(y + i * step), i, row.a, row.b, row.c));
      }
    };
    if (!backward && is_softmax) {
      each([](Vector v, int64_t, Vector, Vector b, Vector) __attribute__((always_inline)) { return v * b; });
    } else if (!backward) {
      each([](Vector v, int64_t, Vector a, Vector b, Vector) __attribute__((always_inline)) { return (v - a) - b; });
    } else if (is_softmax) {
      each([=](Vector v, int64_t i, Vector a, Vector b, Vector)
               __attribute__((always_inline)) { return v * (load_as<A>(dy + i * step) - a) * b; });
    } else {
      each([=](Vector v, int64_t i, Vector a, Vector b, Vector c) __attribute__((always_inline)) {
        Vector e[1] = {v};
        Exp::apply(e);
        const Vector ds = (load_as<A>(dy + i * step) - e[0] * kTileUnscale<A> * a) * b;
        return c != A(0) ? ds : Vector{};
      });
    }
  }

  // Routes ------------------------------------------------------------------------------------------------------------

  void rows(int64_t begin, int64_t end) {
    const int64_t room = up_to(p.n, L) + L;
    t = memory(backward ? 2 * room : room), g = t + room;
    ScoredWalk row(p.outer, begin, 0, origin);
    for (int64_t r = begin; r < end; ++r, row.next()) {
      // The row keeps its place in the scratch memory. The whole vectors outside the window are left out.
      int64_t first = 0, last = p.n;
      if (p.reduced.count <= 1 && !reads_all) clip(row.at, inner.strides, p.n, &first, &last);
      const int64_t from = first & -int64_t(L), to = std::max(from, up_to(last, L));
      if (first > 0) {
        int64_t at[kScoredTensors];
        for (int s = 0; s < kScoredTensors; ++s) at[s] = row.at[s] + first * inner.strides[s];
        read_run(at, inner.strides, last - first, first);
      } else if (p.reduced.count <= 1) {
        read_run(row.at, inner.strides, last, 0);
      } else {
        for_each_run(row.at,
                     [&](const int64_t* at, int64_t count, int64_t i) { read_run(at, inner.strides, count, i); });
      }
      std::fill(t + from, t + first, pad);
      std::fill(t + last, t + to, pad);
      if (backward) {
        std::fill(g + from, g + first, A(0));
        std::fill(g + last, g + to, A(0));
      }
      const LaneOffsets lane = LaneOffsets::of(row.at);
      const Numbers numbers = numbers_of(from, (to - from) / L, L, &lane, 1, true);
      if (is_reduction) continue;
      if (backward) {
        finish<false>(from, (to - from) / L, L, &numbers);
      } else {
        const A other = is_softmax ? A(0) : -kInf<A>;
        std::fill(t, t + from, other);
        if (to < p.n) std::fill(t + to, t + p.n, other);
        if (p.reduced.count <= 1 && finish_row(row.at, p.n, numbers)) continue;
        finish<false>(0, ceil_div(p.n, L), L, &numbers);
      }
      for_each_run(row.at,
                   [&](const int64_t* at, int64_t count, int64_t i) { write_run(at, inner.strides, count, t + i); });
    }
  }

  // Makes and stores the results of a row, or of a part of it, at once, if they lie side by side.
  bool finish_row(const int64_t* at, int64_t size, const Numbers& numbers) const {
    if (inner.strides[kResult] != 1) return false;
    return with_type(p.out, [&](auto type) {
      using Y = TypeOf<decltype(type)>;
      if constexpr (std::is_same_v<A, float> && !std::is_same_v<Y, double>) {
        const float* const from = t;
        const Vec a = numbers.a, b = numbers.b;
        const auto store = [&](auto result) __attribute__((always_inline)) {
          store_row<false, false, false, true>(data<Y>(kResult) + at[kResult], size, plan.streaming,
                                               [=](int64_t i, auto& v, auto... count) __attribute__((always_inline)) {
                                                 load_vectors<false>(from + i, v, count...);
                                                 for (Vec& each : v) each = result(each);
                                               });
        };
        if (is_softmax) {
          store([=](Vec v) __attribute__((always_inline)) { return v * b; });
        } else {
          store([=](Vec v) __attribute__((always_inline)) { return (v - a) - b; });
        }
        return true;
      }
      return false;
    });
  }

  // Gradients of softmax, whose operands are read where they are: once for the sum, and once more from the cache.
  template <class T, class Y>
  void gradient_rows(int64_t begin, int64_t end) const {
    ScoredWalk row(p.outer, begin, 0, origin);
    for (int64_t r = begin; r < end; ++r, row.next()) {
      int64_t first, last;
      clip(row.at, inner.strides, p.n, &first, &last);
      const T* const y = data<const T>(kInput) + row.at[kInput] + first;
      const T* const g = data<const T>(kGradOf) + row.at[kGradOf] + first;
      const uint8_t* const mask = p.has(kMask) ? data<const uint8_t>(kMask) + row.at[kMask] + first : nullptr;
      const Vec sum = gradient_sum(y, g, last - first);
      float scale = float(p.factor);
      if (p.has(kScale)) scale *= data<const float>(kScale)[row.at[kScale]];
      const Vec factor = broadcast(scale);
      Y* const dx = data<Y>(kResult) + row.at[kResult];
      if (first > 0) std::memset(static_cast<void*>(dx), 0, size_t(first) * sizeof(Y));
      if (last < p.n) std::memset(static_cast<void*>(dx + last), 0, size_t(p.n - last) * sizeof(Y));
      store_gradients(dx + first, y, g, mask, last - first,
                      [=](int64_t, Vec v, Vec e) __attribute__((always_inline)) { return v * (e - sum) * factor; });
    }
  }
  // Stores result(i, y, g) of a run of vectors, and 0 where the mask is false.
  template <class T, class Y, class Result>
  ONEPASS_INLINE void store_gradients(Y* dx, const T* y, const T* g, const uint8_t* mask, int64_t n,
                                      Result result) const {
    const auto compute = [=](int64_t i, auto& v, auto... count) __attribute__((always_inline)) {
      constexpr int K = int(sizeof(v) / sizeof(Vec));
      Vec e[K];
      load_vectors<false>(y + i, v, count...), load_vectors<false>(g + i, e, count...);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) v[k] = result(i + k * kWidth, v[k], e[k]);
      if (!mask) return;
      if constexpr (sizeof...(count) == 0) {
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) v[k] = select(mask + i + k * kWidth, v[k], Vec{});
      } else {
        uint8_t bytes[kWidth] = {};
        for (int64_t l = 0; l < (count + ...); ++l) bytes[l] = mask[i + l];
        v[0] = select(bytes, v[0], Vec{});
      }
    };
    store_row<false, false, false, true>(dx, n, plan.streaming, compute);
  }
  // The same for tiles of columns.
  template <class T, class Y>
  void gradient_columns(int64_t begin, int64_t end) {
    const int64_t ahead_y = kStepsAhead * inner.strides[kInput], ahead_g = kStepsAhead * inner.strides[kGradOf];
    for_each_tile(begin, end, [&](const ScoredWalk& start, int64_t count) {
      Sum sums[kMaxTile / L];
      alignas(64) float a[kMaxTile + kWidth], b[kMaxTile + kWidth];
      for_each_step(start, [&](const int64_t* at, int64_t) {
        const T *const y = data<const T>(kInput) + at[kInput], *const g = data<const T>(kGradOf) + at[kGradOf];
        int64_t i = 0;
        Sum* sum = sums;
        for (; i + kWidth <= count; i += kWidth, ++sum) {
          __builtin_prefetch(y + i + ahead_y), __builtin_prefetch(g + i + ahead_g);
          add_compensated(sum->sum, sum->error, load_vector(y + i) * load_vector(g + i));
        }
        if (i == count) return;
        add_compensated(sum->sum, sum->error, load_tail(y + i, count - i, 0) * load_tail(g + i, count - i, 0));
      });
      for (int64_t i = 0; i < count; i += kWidth) {
        const Numbers made =
            grad_numbers(sums[i / kWidth], Vec{}, lanes + i, std::min<int64_t>(kWidth, count - i), false);
        store_vector(a + i, made.a), store_vector(b + i, made.b);
      }
      for_each_step(start, [&](const int64_t* at, int64_t) {
        const uint8_t* const mask = p.has(kMask) ? data<const uint8_t>(kMask) + at[kMask] : nullptr;
        const float *const sum = a, *const scale = b;
        store_gradients(data<Y>(kResult) + at[kResult], data<const T>(kInput) + at[kInput],
                        data<const T>(kGradOf) + at[kGradOf], mask, count,
                        [=](int64_t i, Vec v, Vec e) __attribute__((always_inline)) {
                          return v * (e - load_vector(sum + i)) * load_vector(scale + i);
                        });
      });
    });
  }
  // The sum of y * g, in all lanes.
  template <class T>
  static Vec gradient_sum(const T* y, const T* g, int64_t n) {
    Vec few{};
    int64_t i = 0;
    Sum l;
    for (; i + kUnroll <= n; i += kUnroll) {
      Vec v[4], e[4];
      load_vectors<false>(y + i, v), load_vectors<false>(g + i, e);
      add_compensated(l.sum, l.error, (v[0] * e[0] + v[1] * e[1]) + (v[2] * e[2] + v[3] * e[3]));
    }
    for (; i + kWidth <= n; i += kWidth) few += load_vector(y + i) * load_vector(g + i);
    if (i < n) few += load_tail(y + i, n - i, 0) * load_tail(g + i, n - i, 0);
    if (n < kUnroll) return broadcast(reduce_lanes(few, add));
    add_compensated(l.sum, l.error, few);
    return fold(l).sum;
  }
  void gradients(int64_t begin, int64_t end) {
    with_type(p.in, [&](auto in) {
      with_type(p.out, [&](auto out) {
        using T = TypeOf<decltype(in)>;
        using Y = TypeOf<decltype(out)>;
        if constexpr (std::is_same_v<A, float> && (std::is_same_v<T, Y> ? sizeof(T) < 8 : sizeof(T) * sizeof(Y) == 8)) {
          plan.route == ScoredRoute::rows ? gradient_rows<T, Y>(begin, end) : gradient_columns<T, Y>(begin, end);
        }
      });
    });
  }

  // Chunks of rows. First come their states; merged, they are the numbers of the rows, which lie behind the states.
  void chunks(CpuPhase phase, ScoredState* states, int64_t begin, int64_t end) {
    const ScoredState* const rows = states + plan.work_items;
    t = memory(2 * (kChunk + L)), g = t + kChunk + L;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % plan.chunks * kChunk, count = std::min(kChunk, p.n - first);
      ScoredWalk chunk(p.outer, item / plan.chunks, 0, origin);
      for (int s = 0; s < kScoredTensors; ++s) chunk.at[s] += first * inner.strides[s];
      read_run(chunk.at, inner.strides, count, 0);
      const int64_t steps = ceil_div(count, L);
      std::fill(t + count, t + steps * L, pad);
      if (backward) std::fill(g + count, g + steps * L, A(0));
      const Vector none = broadcast_as(-kInf<A>);
      if (phase == CpuPhase::states) {
        states[item] = backward ? gradient_state(steps) : state_of_chunk(steps);
        continue;
      }
      const ScoredState& row = rows[item / plan.chunks];
      const Numbers numbers = {broadcast_as(A(row.m)), broadcast_as(A(row.l)), broadcast_as(A(row.error))};
      if (!backward && is_softmax) exp_sum<true, Exp>(t, steps, L, numbers.a, none);
      if (!backward && finish_row(chunk.at, count, numbers)) continue;
      finish<false>(0, steps, L, &numbers);
      write_run(chunk.at, inner.strides, count, t);
    }
  }
  ScoredState state_of_chunk(int64_t steps) const {
    const RowState state = state_of<false>(t, steps, L, maximum(t, steps, L), broadcast_as(-kInf<A>), true);
    const double unscale = double(kTileUnscale<A>);
    return {double(state.most[0]), double(state.l.sum[0]) * unscale, double(state.l.error[0]) * unscale};
  }
  ScoredState gradient_state(int64_t steps) const {
    const Sum l = fold(is_softmax ? grad_sum<true>(t, g, steps, L) : grad_sum<false>(t, g, steps, L));
    return {any_lane<A>(takes_part(t, steps, L)) ? 1.0 : 0.0, double(l.sum[0]), double(l.error[0])};
  }
  void merge_chunks(ScoredState* states) const {
    ScoredState* numbers = states + plan.work_items;
    ScoredWalk row(p.outer, 0, 0, origin);
    for (int64_t r = 0; r < p.rows; ++r, row.next(), ++numbers, states += plan.chunks) {
      const LaneOffsets lane = LaneOffsets::of(row.at);
      if (backward) {
        Compensated sum;
        double some = 0;
        for (int64_t i = 0; i < plan.chunks; ++i) {
          some += states[i].m, sum.add(states[i].l), sum.error += states[i].error;
        }
        const Numbers made =
            grad_numbers(Sum{broadcast_as(A(sum.value())), Vector{}}, broadcast_as(A(some)), &lane, 1, false);
        *numbers = {double(made.a[0]), double(made.b[0]), double(made.c[0])};
        continue;
      }
      State<double> state;
      const double sink = p.has(kSink) ? double(data<const A>(kSink)[lane.sink]) : p.sink;
      if (sink != -kInf<double>) state = {sink, {1, 0}};
      for (int64_t i = 0; i < plan.chunks; ++i) {
        state = merge(state, State<double>{states[i].m, {states[i].l, states[i].error}});
      }
      const double l = state.l.value(), top = finite_or_zero(state.m);
      const bool regular = std::isfinite(l) && l > 0 && std::isfinite(state.m);
      const Vector lse = broadcast_as(A(regular ? top + std::log(l) : state.m + l));
      if (p.has(kRowLse)) data<A>(kRowLse)[lane.lse] = lse[0];
      if (is_reduction) store_results(lse, &lane, 1);
      const double special = p.empty_is_zero && state.m == -kInf<double> && l == 0 ? 0.0 : std::nan("");
      *numbers = {top, !regular ? special : is_softmax ? double(kTileUnscale<A>) / l : std::log(l), 0};
    }
  }

  // Do the elements of rows one behind the other lie in every tensor as those of one long row do?
  bool is_one_run() const {
    if (p.outer.count > 1 || p.reduced.count > 1) return false;
    const auto row = p.outer.innermost();
    for (const ScoredTensor each : {kInput, kResult, kGradOf, kScale, kBias, kAlibi, kMask, kDistance}) {
      if ((each == kResult && is_reduction) || (each == kScale && backward)) continue;
      if ((p.has(each) || each == kDistance) && row.strides[each] != p.n * inner.strides[each]) return false;
    }
    return true;
  }

  void short_rows(int64_t begin, int64_t end) {
    const int64_t room = up_to(plan.width, L) * p.n + 4 * L;
    A* const flat = memory(4 * room);
    const bool one_run = is_one_run() && p.outer.count == 1 && p.reduced.count == 1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item * plan.width, count = std::min(plan.width, p.rows - first);
      const ScoredWalk start(p.outer, first, 0, origin);
      const auto for_each_part = [&](auto work) __attribute__((always_inline)) {
        if (one_run) return work(start.at, count * p.n, int64_t(0));
        ScoredWalk row(start);
        for (int64_t r = 0; r < count; ++r, row.next()) {
          for_each_run(row.at, [&](const int64_t* at, int64_t n, int64_t i) { work(at, n, r * p.n + i); });
        }
      };
      t = flat, g = flat + room;
      for_each_part([&](const int64_t* at, int64_t n, int64_t i) { read_run(at, inner.strides, n, i); });
      const int64_t groups = ceil_div(count, L), used = groups * L * p.n;
      std::fill(t + count * p.n, t + used, A(0));
      if (backward) std::fill(g + count * p.n, g + used, A(0));
      ScoredWalk row(start);
      for (int64_t r = 0; r < count; ++r, row.next()) lanes[r] = LaneOffsets::of(row.at);
      t = flat + 2 * room, g = flat + 3 * room;
      for (int64_t i = 0; i < groups; ++i) {
        const int64_t at = i * L * p.n;
        transpose_in(flat + at, p.n, t + at);
        if (backward) transpose_in(flat + room + at, p.n, g + at);
        const Numbers numbers = numbers_of(at, p.n, L, lanes + i * L, std::min<int64_t>(L, count - i * L), false);
        if (!is_reduction) finish<false>(at, p.n, L, &numbers);
      }
      if (is_reduction) continue;
      for (int64_t i = 0; i < groups; ++i) transpose_out(t + i * L * p.n, p.n, flat + i * L * p.n);
      for_each_part([&](const int64_t* at, int64_t n, int64_t i) { write_run(at, inner.strides, n, flat + i); });
    }
  }

  // Calls work(start, count) for tiles of columns, whose lanes are then known.
  template <class Work>
  void for_each_tile(int64_t begin, int64_t end, Work work) {
    const auto column = p.outer.innermost();
    const int64_t tiles = ceil_div(column.size, plan.width);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % tiles * plan.width, count = std::min(plan.width, column.size - first);
      ScoredWalk start(p.outer, item / tiles, 1, origin);
      for (int s = 0; s < kScoredTensors; ++s) start.at[s] += first * column.strides[s];
      for (int64_t j = 0; j < count; ++j) {
        int64_t at[kScoredTensors];
        for (int s = 0; s < kScoredTensors; ++s) at[s] = start.at[s] + j * column.strides[s];
        lanes[j] = LaneOffsets::of(at);
      }
      work(start, count);
    }
  }
  template <class Work>
  ONEPASS_INLINE void for_each_step(const ScoredWalk& start, Work work) const {
    ScoredWalk step(p.reduced, 0, 0, start.at);
    for (int64_t i = 0; i < p.n; ++i, step.next()) work(step.at, i);
  }

  void columns(int64_t begin, int64_t end) {
    const auto column = p.outer.innermost();
    const int64_t across = up_to(plan.width, L), room = p.n * across + L;
    const int64_t size = size_of(p.in), ahead = kStepsAhead * inner.strides[kInput] * size;
    t = memory(backward ? 2 * room : room), g = t + room;
    for_each_tile(begin, end, [&](const ScoredWalk& start, int64_t count) {
      // Maxima, or the sums of gradients, are taken of elements that have just come in.
      Numbers numbers[kMaxTile / L];
      Vector most[kMaxTile / L], some[kMaxTile / L] = {};
      Sum sums[kMaxTile / L];
      const int64_t vectors = ceil_div(count, L);
      for (Vector& each : most) each = broadcast_as(-kInf<A>);
      for_each_step(start, [&](const int64_t* at, int64_t i) {
        const char* const next = data<const char>(kInput) + at[kInput] * size + ahead;
        for (int64_t k = 0; k < count * size; k += kLine) __builtin_prefetch(next + k);
        read_run(at, column.strides, count, i * across);
        for (int64_t w = 0; w < vectors; ++w) {
          const Vector v = load_as<A>(t + i * across + w * L);
          if (!backward) {
            most[w] = max_as(v, most[w]);
            continue;
          }
          const Vector e = load_as<A>(g + i * across + w * L);
          add_compensated(sums[w].sum, sums[w].error, is_softmax ? v * e : e);
          if (!is_softmax) some[w] = v == -kInf<A> ? some[w] : Vector{} + A(1);
        }
      });
      for (int64_t w = 0; w < vectors; ++w) {
        const int64_t rest = std::min<int64_t>(L, count - w * L);
        numbers[w] = backward ? grad_numbers(sums[w], some[w], lanes + w * L, rest, false)
                              : reduce(t + w * L, p.n, across, most[w], lanes + w * L, rest, false);
      }
      if (is_reduction) return;
      for_each_step(start, [&](const int64_t* at, int64_t i) {
        finish<true>(i * across, vectors, L, numbers);
        write_run(at, column.strides, count, t + i * across);
      });
    });
  }
};

}  // namespace

namespace {

// Are gradients of softmax made of operands that lie side by side along a dim?
bool reads_in_place(const ScoredProblem& p, const DimOf<kScoredTensors>& dim) {
  const bool fuses = p.in == p.out ? p.in != DType::float64 : size_of(p.in) * size_of(p.out) == 8;
  if (!p.is_backward() || p.function != Function::softmax || !fuses || p.reduced.count != 1) return false;
  for (const ScoredTensor each : {kInput, kGradOf, kResult, kMask}) {
    if (p.has(each) && dim.strides[each] != 1) return false;
  }
  return true;
}

}  // namespace

ScoredPlan plan_scored(const ScoredProblem& p) {
  const int64_t wide = size_of(p.accumulator()), L = int64_t(sizeof(Vec)) / wide, tensors = p.is_backward() ? 2 : 1;
  const auto column = p.outer.innermost(), row = p.reduced.innermost();
  ScoredPlan plan;
  if (p.outer.count && column.size >= L && column.strides[kInput] == 1 && p.reduced.count && row.strides[kInput] != 1) {
    plan.route = ScoredRoute::columns, plan.reads_in_place = reads_in_place(p, column) && !p.has_window();
    const int64_t size = plan.reads_in_place ? size_of(p.in) : wide;
    const int64_t fit = kScratch * int64_t(sizeof(float)) / size / tensors / (p.n + 1);
    const int64_t most = std::clamp<int64_t>(fit & -2 * L, 2 * L, kMaxTile);
    // All tiles are about equally wide.
    plan.width = std::min(up_to(ceil_div(column.size, ceil_div(column.size, most)), L), most);
    plan.work_items = p.rows / column.size * ceil_div(column.size, plan.width);
  } else if (p.reduced.count == 1 && p.n > kScratch) {
    plan.route = ScoredRoute::row_chunks, plan.chunks = ceil_div(p.n, kChunk);
    plan.work_items = p.rows * plan.chunks;
  } else if (reads_in_place(p, row) && (size_of(p.in) == 4 || p.n > kMaxShortRow)) {
    // (Of short rows of 16-bit types what is no whole vector costs more than a transpose.)
    plan.reads_in_place = true, plan.work_items = p.rows;
  } else if (p.n <= kMaxShortRow) {
    plan.route = ScoredRoute::short_rows;
    plan.width = std::clamp<int64_t>(kShortTile / p.n & -L, L, kMaxTile);
    plan.work_items = ceil_div(p.rows, plan.width);
  } else {
    plan.work_items = p.rows;
  }
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / (plan.width * (plan.chunks ? kChunk : p.n)));
  const bool in_place = p.data[kResult] == p.data[kInput] || p.data[kResult] == p.data[kGradOf];
  const bool stores = p.is_backward() || p.function != Function::logsumexp;
  // Runs of which a good part is no whole lines are slower with streaming stores.
  const int64_t run = plan.route == ScoredRoute::rows ? p.n * size_of(p.out) : kLine;
  const int64_t pitch = plan.route == ScoredRoute::columns ? row.strides[kResult] * size_of(p.out) : 0;
  plan.streaming = kHasStreamingStores && stores && !in_place && p.rows * p.n * size_of(p.out) >= kStreamingBytes &&
                   (run % kLine == 0 || run >= 16 * kLine) && pitch % kLine == 0;
  return plan;
}

void run_scored(const ScoredProblem& problem, const ScoredPlan& plan, CpuPhase phase, ScoredState* states,
                int64_t begin, int64_t end) {
  if (problem.accumulator() == DType::float64) {
    Scored<double>(problem, plan).run(phase, states, begin, end);
  } else {
    Scored<float>(problem, plan).run(phase, states, begin, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
