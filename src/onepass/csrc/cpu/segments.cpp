// segments.cpp: rows of unequal length: their plan, functions and gradients, compiled once per instruction set
// (ONEPASS_ISA names it, and its namespace).
//
// Neighbouring segments are computed a block at a time in the scratch memory, by a few loops over the
// block: maxima and differences, exponentials, sums and results. The exponentials of a block do not care where segments
// begin. The lanes of a vector are items of a segment, or columns, or both where a few columns fill a part of a vector.
// A segment that fits no block is cut into chunks, whose states are merged.
#include "segments.h"

#include "tile_ops.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kBlockBytes = 8192;     // after which a block ends, so that it stays in the L1 cache
constexpr int64_t kWholeBytes = 98304;    // of a block that is one segment
constexpr int64_t kMaxPieces = 512;       // of a block
constexpr int64_t kSegmentChunk = 8192;   // elements of a chunk of a long segment
constexpr int64_t kMaxTileVectors = 16;   // of the columns of a tile
constexpr int64_t kItemsAhead = 32;       // from an item to that which is fetched meanwhile
constexpr int64_t kPadding = 8 * kWidth;  // elements behind a block that vectors may read and write

// The pitch of an item in a block: a few columns take as little of a vector as they fit, all others whole vectors.
template <class A>
constexpr int64_t pitch_of(int64_t columns) {
  if (columns >= kLanes<A>) return up_to(columns, kLanes<A>);
  int64_t pitch = 1;
  while (pitch < columns) pitch *= 2;
  return pitch;
}

// Lanes. A vector has P different lanes, again and again.
template <int D, class Vector, size_t... Lane>
ONEPASS_INLINE Vector swapped(Vector v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, int(Lane ^ D)...);
}
template <int P, int D, class A>
ONEPASS_INLINE void fold_max(V<A>& v) {
  if constexpr (D >= P) {
    v = max_as(v, swapped<D>(v, std::make_index_sequence<kLanes<A>>()));
    fold_max<P, D / 2, A>(v);
  }
}
template <int P, int D, class A>
ONEPASS_INLINE void fold_sum(V<A>& sum, V<A>& error) {
  if constexpr (D >= P) {
    const auto lanes = std::make_index_sequence<kLanes<A>>();
    const V<A> other = swapped<D>(sum, lanes), more = swapped<D>(error, lanes);
    add_compensated(sum, error, other);
    error += more;
    fold_sum<P, D / 2, A>(sum, error);
  }
}
template <int P, class A, size_t... Lane>
ONEPASS_INLINE V<A> repeated(const A* from, std::index_sequence<Lane...>) {
  if constexpr (P == 1) {
    return broadcast_as(*from);
  } else if constexpr (P == kLanes<A>) {
    return load_as(from);
  } else {
    Piece<P, A> v;
    std::memcpy(&v, from, sizeof v);
    return __builtin_shufflevector(v, v, int(Lane % P)...);
  }
}

// A block in the scratch memory ---------------------------------------------------------------------------------------

// The elements of a segment in lanes of the same columns: `n` from `at` on, vectors of them `step` apart.
struct SegmentPiece {
  int32_t at, n;
};

template <class A>
struct SegmentBlock {
  static constexpr int L = kLanes<A>;
  static constexpr int64_t kBlock = kBlockBytes / int64_t(sizeof(A)), kMostNumbers = kWholeBytes / int64_t(sizeof(A));
  static constexpr int64_t kNumbers = kMaxPieces * L + L;
  static_assert((3 * (kMostNumbers + kPadding) + 4 * kNumbers) * sizeof(A) <= kScratch * sizeof(float));
  using Vector = V<A>;
  template <class Epilogue>
  using Tile = ForwardTile<Epilogue, A>;

  // `base` is what is subtracted from elements, `high` and `low` are the numbers that make results; each has P numbers
  // per piece.
  A *const a = reinterpret_cast<A*>(scratch()), *const b = a + kMostNumbers + kPadding,
           *const c = b + kMostNumbers + kPadding;
  A *const m = c + kMostNumbers + kPadding, *const base = m + kNumbers, *const high = base + kNumbers;
  A* const low = high + kNumbers;
  const A *x = a, *g = b;  // the elements, of two tensors: in a and b, or where they are
  SegmentPiece pieces[kMaxPieces + kMaxTileVectors + L];
  int count = 0;         // pieces
  int64_t elements = 0;  // of the block
  int64_t step = L;

  static constexpr bool groups(int P) { return P == 1 && std::is_same_v<A, float>; }
  template <int P>
  static constexpr int kGroup = groups(P) ? L : 1;  // pieces whose lanes are folded together
  static constexpr int kShort = 4;                  // vectors of a piece without loops
  template <int P>
  static constexpr int kFirst = groups(P) ? kShort : 0;  // vectors of any piece that have no loop

  // Pieces that fill the last group.
  void finish_pieces() { std::fill_n(pieces + count, L, SegmentPiece{int32_t(elements), 0}); }

  // Vectors of the longest piece of a group: 1, 2 or kShort; or 0 for more.
  template <int P>
  int vectors_of_group(int first) const {
    int32_t most = 0;
    for (int j = 0; j < kGroup<P>; ++j) most = std::max(most, pieces[first + j].n);
    return !groups(P) || most > kShort * L ? 0 : most > 2 * L ? kShort : most > L ? 2 : 1;
  }
  // Calls work(constant) with vectors_of_group.
  template <int P, class Work>
  ONEPASS_INLINE void with_vectors(int first, Work work) const {
    if constexpr (groups(P)) {
      switch (vectors_of_group<P>(first)) {
        case 1: return work(std::integral_constant<int, 1>());
        case 2: return work(std::integral_constant<int, 2>());
        case kShort: return work(std::integral_constant<int, kShort>());
      }
    }
    work(std::integral_constant<int, 0>());
  }
  // The first n lanes of v, which begins k vectors after the piece, and `other`.
  static ONEPASS_INLINE Vector keep_first(Vector v, int32_t n, int k, A other) {
    if constexpr (std::is_same_v<A, float>) {
      IntVec lane;
      std::memcpy(&lane, kLaneNumbers, sizeof lane);
      return lane < n - k * L ? v : broadcast(other);
    } else {
      return keep_lanes(v, std::clamp<int64_t>(n - k * L, 0, L), other);
    }
  }
  static ONEPASS_INLINE Vec keep_lanes(Vec v, int64_t n, float other) { return lane_mask(n) ? v : broadcast(other); }
  static ONEPASS_INLINE V<double> keep_lanes(V<double> v, int64_t n, double other) {
    for (int64_t j = n; j < kLanes<double>; ++j) v[j] = other;
    return v;
  }
  alignas(64) static constexpr int32_t kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  // The maxima of a piece of K vectors, or of any.
  template <int P, int K>
  ONEPASS_INLINE Vector maximum(SegmentPiece piece) const {
    const A* const from = x + piece.at;
    if constexpr (K > 0) {
      Vector v[K];
      for (int k = 0; k < K; ++k) v[k] = keep_first(load_as(from + k * L), piece.n, k, -kInf<A>);
      if constexpr (K == 1) return v[0];
      return K == 2 ? max_as(v[1], v[0]) : max_as(max_as(v[K - 1], v[1]), max_as(v[K / 2], v[0]));
    }
    const int64_t full = piece.n / L, each = step;
    Vector top[2] = {broadcast_as(-kInf<A>), broadcast_as(-kInf<A>)};
    for (int k = 0; k < kFirst<P>; ++k) {
      top[k % 2] = max_as(keep_first(load_as(from + k * L), piece.n, k, -kInf<A>), top[k % 2]);
    }
    if (groups(P) && piece.n <= kFirst<P> * L) return max_as(top[0], top[1]);
    int64_t i = kFirst<P>;
    for (; i + 2 <= full; i += 2) {
      for (int k = 0; k < 2; ++k) top[k] = max_as(load_as(from + (i + k) * each), top[k]);
    }
    if (i < full) top[0] = max_as(load_as(from + i * each), top[0]);
    if (P < L && piece.n % L) {
      top[1] = max_as(keep_lanes(load_as(from + full * L), piece.n % L, -kInf<A>), top[1]);
    }
    return max_as(top[0], top[1]);
  }
  // The sum of the numbers that load(offset) gives, from a piece of K vectors or of any. `Sum` as CompensatedLanes.
  template <int P, int K, class Sum, class Load>
  ONEPASS_INLINE void sum_of(SegmentPiece piece, Vector& sum, Vector& error, Load load) const {
    if (K > 0 || (groups(P) && piece.n <= kShort * L)) {
      constexpr int N = K > 0 ? K : kShort;
      Vector v[N];
      for (int k = 0; k < N; ++k) v[k] = keep_first(load(piece.at + k * L), piece.n, k, A(0));
      sum = N == 1 ? v[0] : N == 2 ? v[0] + v[N - 1] : (v[0] + v[N / 4]) + (v[N / 2] + v[N - 1]), error = Vector{};
      return;
    }
    Sum total;
    const int64_t full = piece.n / L, each = step;
    int64_t i = 0;
    for (; i + 4 <= full; i += 4) {
      Vector v[4];
      for (int k = 0; k < 4; ++k) v[k] = load(piece.at + (i + k) * each);
      total.add((v[0] + v[1]) + (v[2] + v[3]));
    }
    for (; i < full; ++i) total.add(load(piece.at + i * each));
    if (P < L && piece.n % L) total.add(keep_lanes(load(piece.at + full * L), piece.n % L, A(0)));
    sum = total.value(), error = total.error;
  }
  // Calls work(offset) for the vectors of a piece of K vectors, or of any. What is behind the piece is another's, whose
  // turn comes later.
  template <int P, int K, class Work>
  ONEPASS_INLINE void for_each_vector(SegmentPiece piece, Work work) const {
    constexpr int first = K > 0 ? K : kFirst<P>;
#pragma GCC unroll 4
    for (int k = 0; k < first; ++k) work(piece.at + k * L);
    if (K > 0 || piece.n <= first * L) return;
    const int64_t vectors = ceil_div(piece.n, L), each = step;
    for (int64_t i = first; i < vectors; ++i) work(piece.at + i * each);
  }
  template <int P>
  static ONEPASS_INLINE Vector number(const A* numbers, int piece) {
    return repeated<P>(numbers + piece * P, std::make_index_sequence<L>());
  }

  // The steps of a group, from its first piece on -------------------------------------------------------------------

  // The maxima, and what is subtracted: those, or 0 where they are infinite.
  template <int P, int K>
  ONEPASS_INLINE void find_maxima(int first) {
    Vector top;
    if constexpr (groups(P)) {
      Vec tops[L];
#pragma GCC unroll 16
      for (int j = 0; j < L; ++j) tops[j] = maximum<P, K>(pieces[first + j]);
      top = transpose_reduce(tops, max);
    } else {
      top = maximum<P, K>(pieces[first]);
      fold_max<P, L / 2, A>(top);
    }
    store_as(m + first * P, top), store_as(base + first * P, finite_or<A>(top, Vector{}));
  }
  // b = x - base.
  template <int P, int K>
  ONEPASS_INLINE void subtract_base(int first) {
    for (int j = first; j < first + kGroup<P>; ++j) {
      const Vector by = number<P>(base, j);
      for_each_vector<P, K>(pieces[j], [=, a = a, b = b, c = c, x = x, g = g](int64_t i)
                                           __attribute__((always_inline)) { store_as(b + i, load_as(x + i) - by); });
    }
  }
  // The sums of rows, one per lane in a group, else P of them again and again.
  template <int P, int K, class Sum, class Load>
  ONEPASS_INLINE void find_sums(int first, Vector& sum, Vector& error, Load load) const {
    if constexpr (groups(P)) {
      Vec sums[L], errors[L];
#pragma GCC unroll 16
      for (int j = 0; j < L; ++j) sum_of<P, K, Sum>(pieces[first + j], sums[j], errors[j], load);
      const CompensatedVec total = transpose_sum(sums, errors);
      sum = total.sum, error = total.error;
    } else {
      sum_of<P, K, Sum>(pieces[first], sum, error, load);
      fold_sum<P, L / 2, A>(sum, error);
    }
  }
  // A sum of exponentials, and of any numbers.
  struct ExpSums : CompensatedLanes<A> {
    Vector value() const { return this->sum - this->kStart; }
  };
  struct AnySums {
    Vector sum{}, error{};
    ONEPASS_INLINE void add(Vector v) { add_compensated(sum, error, v); }
    Vector value() const { return sum; }
  };
  // The sums of the exponentials in b. The sum of a row with +inf is +inf, or NaN if there is a NaN.
  template <int P, int K>
  ONEPASS_INLINE void find_exp_sums(int first, Vector& sum, Vector& error) {
    find_sums<P, K, ExpSums>(first, sum, error,
                             [=, a = a, b = b, c = c, x = x, g = g](int64_t i)
                                 __attribute__((always_inline)) { return load_as(b + i); });
    const Vector top = load_as(m + first * P);
    if (any_lane<A>(top == kInf<A> ? Vector{} + 1 : Vector{})) mark_infinities<P>(first, sum, error);
  }
  template <int P>
  __attribute__((noinline)) void mark_infinities(int first, Vector& sum, Vector& error) {
    for (int j = 0; j < (groups(P) ? L : P); ++j) {
      if (m[first * P + j] != kInf<A>) continue;
      const SegmentPiece piece = pieces[first + (groups(P) ? j : 0)];
      A total = kInf<A>;
      for (int32_t i = groups(P) ? 0 : j; i < piece.n; i += P) {
        const A v = x[piece.at + i / L * step + i % L];
        total = v == v ? total : v;
      }
      for (int k = j; k < L; k += groups(P) ? L : P) sum[k] = total, error[k] = 0;
    }
  }
  // Replaces the state of rows by the numbers of results; the results are `base` for logsumexp, `m` and `high` for a
  // state.
  template <int P>
  ONEPASS_INLINE void make_numbers(Function function, int first, Vector sum, Vector error) {
    Vector top = load_as(m + first * P);
    if (function == Function::softmax) {
      Tile<SoftmaxEpilogue>::numbers_of(top, sum, error);
      if constexpr (std::is_same_v<A, double>) sum = 1 / sum, error = Vector{};
    } else if (function == Function::log_softmax) {
      Tile<LogSoftmaxEpilogue>::numbers_of(top, sum, error), error = Vector{};
    } else {
      sum *= kTileUnscale<A>, error *= kTileUnscale<A>;
      const Vector total = sum - sum == Vector{} ? sum + error : sum, special = top + total;
      if (function == Function::logsumexp) {
        const auto regular = total - total == Vector{} && total > Vector{};
        const Vector log = Tile<ReduceEpilogue>::log_sum(finite_or<A>(top, Vector{}), sum, error);
        store_as(base + first * P, regular ? log : total == Vector{} ? broadcast_as(-kInf<A>) : special);
      }
      sum = total;
    }
    store_as(high + first * P, sum), store_as(low + first * P, error);
  }

  // Loops over a block ------------------------------------------------------------------------------------------------

  template <int P, class Work>
  ONEPASS_INLINE void for_each_group(Work work) const {
    for (int first = 0; first < count; first += kGroup<P>) {
      with_vectors<P>(first, [&](auto vectors) __attribute__((always_inline)) { work(first, vectors); });
    }
  }
  // v = exp(v), scaled as CompensatedLanes has it.
  template <class Exp>
  void exponentials(A* at) const {
    for (int64_t i = 0; i < elements; i += 4 * L) {
      Vector v[4];
      for (int k = 0; k < 4; ++k) v[k] = load_as(at + i + k * L);
      Exp::apply(v);
      for (int k = 0; k < 4; ++k) store_as(at + i + k * L, v[k]);
    }
  }
  // The exponentials that a result of a type needs.
  void exponentials_for(DType type) {
    if constexpr (std::is_same_v<A, double>) return exponentials<ExpDouble>(b);
    if constexpr (std::is_same_v<A, float>) {
      if (type == DType::bfloat16) return exponentials<ExpHalf<3>>(b);
      if (type == DType::float16) return exponentials<ExpHalf<4>>(b);
      exponentials<ExpFloat>(b);
    }
  }
  // The same, not scaled: those below 2^-126 are 0.
  void plain_exponentials(A* at) const {
    struct Exp {
      static ONEPASS_INLINE void apply(V<double> (&v)[4]) { ExpDouble::apply(v); }
      static ONEPASS_INLINE void apply(Vec (&v)[4]) {
        const ExpBase plain = {{}, broadcast(-127 * kLn2), broadcast(kRound + 127)};
        ExpFloat::apply(v, plain);
      }
    };
    exponentials<Exp>(at);
  }

  // The differences of elements and their maxima, in b.
  template <int P>
  void begin_forward() {
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      find_maxima<P, vectors.value>(first), subtract_base<P, vectors.value>(first);
    });
  }
  // The same with a base that is there.
  template <int P>
  void begin_with_base() {
    for_each_group<P>([&](int first, auto vectors)
                          __attribute__((always_inline)) { subtract_base<P, vectors.value>(first); });
  }
  template <int P, int K>
  ONEPASS_INLINE void store_results(Function function, int first) {
    for (int j = first; j < first + kGroup<P>; ++j) {
      const Vector of_base = number<P>(base, j), by = number<P>(high, j), more = number<P>(low, j);
      for_each_vector<P, K>(pieces[j],
                            [=, a = a, b = b, c = c, x = x, g = g](int64_t i) __attribute__((always_inline)) {
                              if (function == Function::softmax) {
                                const Vector e = load_as(b + i);
                                store_as(a + i, e * by + e * more);
                              } else {
                                store_as(c + i, ((load_as(x + i) - of_base) - by) - more);
                              }
                            });
    }
  }
  // Results of numbers that are there. They are in result_of(function).
  template <int P>
  void finish_with_numbers(Function function) {
    for_each_group<P>([&](int first, auto vectors)
                          __attribute__((always_inline)) { store_results<P, vectors.value>(function, first); });
  }
  A* result_of(Function function) const { return function == Function::softmax ? a : c; }
  // The numbers of results, and the results, of rows whose exponentials are in b.
  template <int P>
  void finish_forward(Function function) {
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      Vector sum, error;
      find_exp_sums<P, vectors.value>(first, sum, error);
      make_numbers<P>(function, first, sum, error);
      if (!is_reduction(function)) store_results<P, vectors.value>(function, first);
    });
  }
  // The sums of exponentials, not scaled, in `high`.
  template <int P>
  void sum_exponentials() {
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      Vector sum, error;
      find_exp_sums<P, vectors.value>(first, sum, error);
      make_numbers<P>(Function::state, first, sum, error);
    });
  }

  // Gradients of softmax and log_softmax, of the results x and their gradients g. The sums are in `high`.
  template <int P, int K>
  ONEPASS_INLINE void sum_gradients_of(Function function, int first) {
    Vector sum, error;
    find_sums<P, K, AnySums>(first, sum, error,
                             [=, a = a, b = b, c = c, x = x, g = g](int64_t i) __attribute__((always_inline)) {
                               return function == Function::softmax ? load_as(x + i) * load_as(g + i) : load_as(g + i);
                             });
    store_as(high + first * P, sum - sum == Vector{} ? sum + error : sum);
  }
  template <int P, int K>
  ONEPASS_INLINE void store_gradients_of(Function function, int first, A factor) {
    for (int j = first; j < first + kGroup<P>; ++j) {
      const Vector sum = number<P>(high, j);
      for_each_vector<P, K>(pieces[j],
                            [=, a = a, b = b, c = c, x = x, g = g](int64_t i) __attribute__((always_inline)) {
                              if (function == Function::softmax) {
                                store_as(c + i, load_as(x + i) * (load_as(g + i) - sum) * factor);
                              } else {
                                store_as(a + i, (load_as(g + i) - load_as(c + i) * sum) * factor);
                              }
                            });
    }
  }
  A* gradient_of(Function function) const { return function == Function::softmax ? c : a; }
  template <int P>
  void sum_gradients(Function function) {
    for_each_group<P>([&](int first, auto vectors)
                          __attribute__((always_inline)) { sum_gradients_of<P, vectors.value>(function, first); });
  }
  template <int P>
  void store_gradients(Function function, A factor) {
    if (function == Function::log_softmax) std::memcpy(c, x, size_t(elements) * sizeof(A)), plain_exponentials(c);
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      store_gradients_of<P, vectors.value>(function, first, factor);
    });
  }
  template <int P>
  void gradients(Function function, A factor) {
    sum_gradients<P>(function);
    store_gradients<P>(function, factor);
  }
  // The gradients of logsumexp, whose results are in `base` and the gradients of those, times the factor, in `high`.
  template <int P>
  void logsumexp_gradients() {
    begin_with_base<P>();
    plain_exponentials(b);
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      for (int j = first; j < first + kGroup<P>; ++j) {
        const Vector by = number<P>(high, j);
        for_each_vector<P, vectors.value>(pieces[j],
                                          [=, a = a, b = b, c = c, x = x, g = g](int64_t i)
                                              __attribute__((always_inline)) { store_as(a + i, load_as(b + i) * by); });
      }
    });
  }
};

// Elements in and out, and the work items -----------------------------------------------------------------------------

// A is the type of the computation.
template <class A>
struct SegmentRows {
  using P = SegmentProblem;
  static constexpr int L = kLanes<A>;
  const P& p;
  const SegmentPlan& plan;
  SegmentBlock<A> block;
  // The tile: its columns, the pitch of items in a block, pieces of a segment, and where it begins in each tensor.
  int64_t columns = 1, pitch = 1, parts = 1, offsets[P::kTensors] = {}, column_steps[P::kTensors] = {};
  int64_t segments[kMaxPieces + 1];  // of the block
  int64_t first = 0, items = 0;      // of the block
  int filled = 0;                    // segments of the block

  SegmentRows(const P& problem, const SegmentPlan& of) : p(problem), plan(of) {}

  void set_tile(int64_t tile) {
    const DimOf<P::kTensors> last = p.inner.innermost();
    const int64_t at = tile % plan.per_span * plan.width;
    columns = plan.width == 1 ? 1 : std::min(plan.width, last.size - at);
    int64_t rest = tile / plan.per_span;
    std::fill_n(offsets, int(P::kTensors), 0), std::fill_n(column_steps, int(P::kTensors), 0);
    int d = p.inner.count - 1;
    if (plan.width > 1) {
      for (int t = 0; t < P::kTensors; ++t) column_steps[t] = last.strides[t], offsets[t] = at * last.strides[t];
      --d;
    }
    for (; d >= 0; rest /= p.inner.dims[d--].size) {
      const auto& dim = p.inner.dims[d];
      for (int t = 0; t < P::kTensors; ++t) offsets[t] += rest % dim.size * dim.strides[t];
    }
    pitch = pitch_of<A>(columns), parts = std::max<int64_t>(1, pitch / L);
    block.step = std::max<int64_t>(pitch, L);
  }
  // Calls work(constant) with the number of different lanes of a vector.
  template <class Work>
  ONEPASS_INLINE void with_period(Work work) const {
    if (pitch == 1) return work(std::integral_constant<int, 1>());
    if constexpr (L > 2) {
      if (pitch == 2) return work(std::integral_constant<int, 2>());
    }
    if constexpr (L > 4) {
      if (pitch == 4) return work(std::integral_constant<int, 4>());
    }
    if constexpr (L > 8) {
      if (pitch == 8) return work(std::integral_constant<int, 8>());
    }
    work(std::integral_constant<int, L>());
  }

  // Copies ------------------------------------------------------------------------------------------------------------

  // Whether the items of the tile are one piece of memory, which lies in a block as it is.
  bool is_run(int t) const {
    return !p.order && pitch == columns && p.steps[t] == columns && (columns == 1 || column_steps[t] == 1);
  }
  // Calls work(at, k) for each item k of the block: where its tile begins in a tensor. In an order items lie anywhere:
  // those that come soon are fetched meanwhile, kWrites: to be written.
  template <bool kWrites, class Work>
  ONEPASS_INLINE void for_each_item(int t, Work work) const {
    const int64_t tile = offsets[t], step = p.steps[t], n = items, size = size_of(p.types[t]);
    const char* const data = static_cast<const char*>(p.data[t]);
    const auto follow = [=](const auto* order) __attribute__((always_inline)) {
      for (int64_t k = 0; k < n; ++k) {
        const int64_t soon = int64_t(order[std::min(k + kItemsAhead, n - 1)]) * step + tile;
        __builtin_prefetch(data + soon * size, kWrites);
        work(int64_t(order[k]) * step + tile, k);
      }
    };
    if (!p.order) {
      for (int64_t k = 0; k < n; ++k) work((first + k) * step + tile, k);
    } else {
      p.has_wide_indices ? follow(static_cast<const int64_t*>(p.order) + first)
                         : follow(static_cast<const int32_t*>(p.order) + first);
    }
  }
  // Calls copy(element, i) for each element: its place in the tensor, and in the block.
  template <bool kWrites, class Copy>
  ONEPASS_INLINE void for_each_element(int t, Copy copy) const {
    const int64_t across = column_steps[t], wide = columns, each = pitch;
    if (wide == 1) return for_each_item<kWrites>(t, copy);
    for_each_item<kWrites>(t, [=](int64_t at, int64_t k) __attribute__((always_inline)) {
      for (int64_t j = 0; j < wide; ++j) copy(at + j * across, k * each + j);
    });
  }
  // The same for neighbouring columns that are so few that masked vectors would take longer.
  template <bool kWrites, class Copy>
  ONEPASS_INLINE void for_few_columns(int t, Copy copy) const {
    const auto with = [&](auto wide) __attribute__((always_inline)) {
      const int64_t each = pitch;
      for_each_item<kWrites>(t, [=](int64_t at, int64_t k) __attribute__((always_inline)) {
        for (int64_t j = 0; j < wide.value; ++j) copy(at + j, k * each + j);
      });
    };
    switch (columns) {
      case 2: return with(std::integral_constant<int64_t, 2>());
      case 3: return with(std::integral_constant<int64_t, 3>());
      case 4: return with(std::integral_constant<int64_t, 4>());
      case 5: return with(std::integral_constant<int64_t, 5>());
      case 6: return with(std::integral_constant<int64_t, 6>());
      default: return with(std::integral_constant<int64_t, 7>());
    }
  }
  bool has_few_columns(int t) const { return columns > 1 && columns < 8 && column_steps[t] == 1; }
  // Calls copy(element, i, count) for vectors of neighbouring columns, and the rest of them.
  template <bool kWrites, class Copy>
  ONEPASS_INLINE void for_each_part(int t, Copy copy) const {
    const int64_t each = pitch, full = columns / L * L, rest = columns - full;
    for_each_item<kWrites>(t, [=](int64_t at, int64_t k) __attribute__((always_inline)) {
      for (int64_t j = 0; j < full; j += L) copy(at + j, k * each + j, int64_t(L));
      if (rest) copy(at + full, k * each + full, rest);
    });
  }
  template <class T>
  static constexpr bool kVectors = std::is_same_v<A, float> && !std::is_same_v<T, double>;
  void load(int t, A* to) const {
    dispatch_type(p.types[t], [&](auto type) {
      using T = TypeOf<decltype(type)>;
      if constexpr (std::is_same_v<Acc<T>, A>) {
        const T* const from = static_cast<const T*>(p.data[t]);
        if (p.steps[t] == 0 && column_steps[t] == 0) {
          std::fill_n(to, items * pitch, A(to_acc(from[offsets[t]])));
        } else if (is_run(t)) {
          load_run(Input<Identity, T, A>{from + offsets[t] + first * columns, {}}, items * columns, to);
        } else if (has_few_columns(t)) {
          for_few_columns<false>(
              t, [=](int64_t at, int64_t i) __attribute__((always_inline)) { to[i] = A(to_acc(from[at])); });
        } else if (kVectors<T> && columns > 1 && column_steps[t] == 1) {
          if constexpr (kVectors<T>) {
            for_each_part<false>(t, [=](int64_t at, int64_t i, int64_t n) __attribute__((always_inline)) {
              store_as(to + i, n == L ? load_vector(from + at) : load_tail(from + at, n, 0));
            });
          }
        } else {
          for_each_element<false>(
              t, [=](int64_t at, int64_t i) __attribute__((always_inline)) { to[i] = A(to_acc(from[at])); });
        }
      }
    });
  }
  void store(int t, const A* from) const {
    dispatch_type(p.types[t], [&](auto type) {
      using T = TypeOf<decltype(type)>;
      if constexpr (std::is_same_v<Acc<T>, A>) {
        T* const to = static_cast<T*>(const_cast<void*>(p.data[t]));
        if (is_run(t)) {
          store_run<true>(to + offsets[t] + first * columns, items * columns, from, plan.streaming);
        } else if (has_few_columns(t)) {
          for_few_columns<true>(
              t, [=](int64_t at, int64_t i) __attribute__((always_inline)) { to[at] = from_acc<T>(from[i]); });
        } else if (kVectors<T> && columns > 1 && column_steps[t] == 1) {
          if constexpr (kVectors<T>) {
            for_each_part<true>(t, [=](int64_t at, int64_t i, int64_t n) __attribute__((always_inline)) {
              const Vec v = load_as(from + i);
              n == L ? store_vector<true>(to + at, v) : store_tail<true>(to + at, n, v);
            });
          }
        } else {
          for_each_element<true>(
              t, [=](int64_t at, int64_t i) __attribute__((always_inline)) { to[at] = from_acc<T>(from[i]); });
        }
      }
    });
  }
  // The elements of the block: where they are, if vectors may read them there and what is behind; or in `to`.
  const A* read(int t, A* to) const {
    const bool is_here = p.types[t] == p.accumulator() && is_run(t);
    if (is_here && (first + items) * columns + kPadding <= p.items * columns) {
      return static_cast<const A*>(p.data[t]) + offsets[t] + first * columns;
    }
    load(t, to);
    return to;
  }
  void load_scores() {
    const A factor = A(p.factor);
    const int64_t n = items * pitch;
    if (!p.has(P::kOfBias) && factor == 1) return void(block.x = read(P::kOfX, block.a));
    load(P::kOfX, block.a);
    block.x = block.a;
    if (p.has(P::kOfBias)) {
      load(P::kOfBias, block.b);
      for (int64_t i = 0; i < n; ++i) block.a[i] = block.a[i] * factor + block.b[i];
    } else {
      for (int64_t i = 0; i < n; ++i) block.a[i] *= factor;
    }
  }
  void load_gradients() { block.x = read(P::kOfY, block.a), block.g = read(P::kOfGrad, block.b); }
  // Numbers per row, of segment s.
  int64_t row(int t, int64_t s, int64_t column) const { return offsets[t] + s * p.steps[t] + column * column_steps[t]; }
  void store_row(int64_t s, int64_t column, A value, A sum) const {
    dispatch_type(p.types[P::kOfY], [&](auto type) { store_as_type<TypeOf<decltype(type)>>(s, column, value, sum); });
  }
  template <class T>
  ONEPASS_INLINE void store_as_type(int64_t s, int64_t column, A value, A sum) const {
    if constexpr (std::is_same_v<Acc<T>, A>) {
      T* const to = static_cast<T*>(const_cast<void*>(p.data[P::kOfY])) + row(P::kOfY, s, column);
      *to = from_acc<T>(value);
      if (p.function == Function::state) to[p.plane] = from_acc<T>(sum);
    }
  }
  // The results of the segments of the block.
  void store_rows(const A* values, const A* sums) const {
    dispatch_type(p.types[P::kOfY], [&](auto type) {
      for (int k = 0; k < filled; ++k) {
        for (int64_t j = 0; j < columns; ++j) {
          store_as_type<TypeOf<decltype(type)>>(segments[k], j, values[k * pitch + j], sums[k * pitch + j]);
        }
      }
    });
  }
  A read_row(int t, int64_t s, int64_t column) const { return static_cast<const A*>(p.data[t])[row(t, s, column)]; }

  // Blocks ------------------------------------------------------------------------------------------------------------

  // Fills a block with segments from s on, but for empty ones. Returns the first one behind it.
  template <class Index>
  int64_t fill_block(const Index* starts, int64_t s, int64_t last) {
    const int64_t block_size = block.kBlock / pitch, whole = block.kMostNumbers / pitch, most = plan.most;
    const int64_t each = pitch, lanes = std::min<int64_t>(pitch, L), many = parts, most_filled = kMaxPieces / parts;
    const bool stores_empty = p.is_reduction() && !p.is_backward();
    int64_t from = starts[s], begin = from, end, count = 0;
    for (; s < last; ++s, begin = end) {
      end = starts[s + 1];
      const int64_t n = end - begin, at = begin - from;
      if (n == 0 && stores_empty) {
        for (int64_t j = 0; j < columns; ++j) store_row(s, j, -kInf<A>, 0);
      } else if (n > most) {
        if (count) break;
        from = end;
      } else {
        if (count && (at >= block_size || at + n > whole || count == most_filled)) break;
        for (int64_t part = 0; part < many; ++part) {
          block.pieces[count * many + part] = {int32_t(at * each + part * L), int32_t(n * lanes)};
        }
        segments[count] = s;
        count += n > 0;
      }
    }
    first = from, items = begin - from, filled = int(count), block.count = int(count * many);
    return s;
  }
  void finish_block() {
    block.elements = items * pitch;
    block.finish_pieces();
  }
  // The numbers of logsumexp's gradient.
  void read_rows() {
    for (int k = 0; k < filled; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        block.base[k * pitch + j] = read_row(P::kOfY, segments[k], j);
        block.high[k * pitch + j] = read_row(P::kOfGrad, segments[k], j) * A(p.factor);
      }
    }
  }
  void compute_block() {
    if (!items) return;
    finish_block();
    if (p.is_backward()) return compute_gradients();
    load_scores();
    with_period([&](auto period) {
      block.template begin_forward<period.value>();
      block.exponentials_for(p.is_reduction() ? DType::float32 : p.types[P::kOfY]);
      block.template finish_forward<period.value>(p.function);
    });
    if (!p.is_reduction()) return store(P::kOfY, block.result_of(p.function));
    const A* const results = p.function == Function::state ? block.m : block.base;
    store_rows(results, block.high);
  }
  void compute_gradients() {
    if (p.function == Function::logsumexp) {
      load_scores();
      read_rows();
      with_period([&](auto period) { block.template logsumexp_gradients<period.value>(); });
      return store(P::kOfDx, block.a);
    }
    load_gradients();
    with_period([&](auto period) { block.template gradients<period.value>(p.function, A(p.factor)); });
    store(P::kOfDx, block.gradient_of(p.function));
  }

  // Work items --------------------------------------------------------------------------------------------------------

  // The first segment that is at or behind a place among items and segments.
  int64_t segment_at(int64_t place) const {
    int64_t low = 0, high = p.segments;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      p.offset(middle) + middle < place ? low = middle + 1 : high = middle;
    }
    return low;
  }
  void compute_run(int64_t number) {
    const int64_t last = segment_at((number + 1) * plan.run_size);
    for (int64_t s = segment_at(number * plan.run_size); s < last;) {
      s = p.has_wide_indices ? fill_block(static_cast<const int64_t*>(p.offsets), s, last)
                             : fill_block(static_cast<const int32_t*>(p.offsets), s, last);
      compute_block();
    }
  }
  // Calls work(segment, chunk) for the chunks of long segments that begin in a run. The chunk is counted from the first
  // one of all.
  template <class Work>
  void for_each_chunk(int64_t number, Work work) {
    const int64_t begin = number * plan.run_size, end = begin + plan.run_size;
    const auto& all = plan.long_segments;
    auto of = std::partition_point(all.begin(), all.end(), [&](const LongSegment& each) {
      return p.offset(each.segment) + each.segment + (each.chunks - 1) * plan.chunk < begin;
    });
    for (; of != all.end(); ++of) {
      const int64_t from = p.offset(of->segment) + of->segment;
      if (from >= end) return;
      int64_t chunk = std::max<int64_t>(0, ceil_div(begin - from, plan.chunk));
      for (; chunk < of->chunks && from + chunk * plan.chunk < end; ++chunk) work(*of, of->first_chunk + chunk);
    }
  }
  // The chunk of a long segment, in a block.
  void set_chunk(const LongSegment& of, int64_t chunk) {
    const int64_t from = p.offset(of.segment) + (chunk - of.first_chunk) * plan.chunk;
    first = from, items = std::min(plan.chunk, p.offset(of.segment + 1) - from), filled = 1, block.count = int(parts);
    segments[0] = of.segment;
    for (int64_t part = 0; part < parts; ++part) {
      block.pieces[part] = {int32_t(part * L), int32_t(items * std::min<int64_t>(pitch, L))};
    }
    finish_block();
  }
  void compute_chunk_state(SegmentState* state) {
    if (p.is_backward()) {
      load_gradients();
      with_period([&](auto period) { block.template sum_gradients<period.value>(p.function); });
    } else {
      load_scores();
      with_period([&](auto period) {
        block.template begin_forward<period.value>();
        block.exponentials_for(DType::float32);
        block.template sum_exponentials<period.value>();
      });
    }
    for (int64_t j = 0; j < columns; ++j) state[j] = {double(block.m[j]), double(block.high[j])};
  }
  void finish_chunk(const SegmentState* state) {
    if (p.is_backward()) {
      load_gradients();
      for (int64_t j = 0; j < columns; ++j) block.high[j] = A(state[j].l);
      with_period([&](auto period) { block.template store_gradients<period.value>(p.function, A(p.factor)); });
      return store(P::kOfDx, block.gradient_of(p.function));
    }
    for (int64_t j = 0; j < columns; ++j) {
      const double m = state[j].m, l = std::isfinite(m) ? state[j].l : kNan<double>;
      const double value = p.function == Function::softmax ? double(kTileUnscale<A>) / l : std::log(l);
      block.base[j] = A(std::isfinite(m) ? m : 0);
      block.high[j] = A(value), block.low[j] = A(value - double(A(value)));
    }
    load_scores();
    with_period([&](auto period) {
      if (p.function == Function::softmax) {
        block.template begin_with_base<period.value>();
        block.exponentials_for(p.types[P::kOfY]);
      }
      block.template finish_with_numbers<period.value>(p.function);
    });
    store(P::kOfY, block.result_of(p.function));
  }
  // Merges the states of the chunks of each long segment into that of its first chunk, in order.
  void merge(SegmentState* states) {
    for (const LongSegment& of : plan.long_segments) {
      for (int64_t tile = 0; tile < plan.tiles; ++tile) {
        set_tile(tile);
        for (int64_t j = 0; j < columns; ++j) {
          State<double> total;
          if (p.is_backward()) total.m = 0;
          for (int64_t chunk = of.first_chunk; chunk < of.first_chunk + of.chunks; ++chunk) {
            const SegmentState one = plan.state(states, chunk, tile)[j];
            if (p.is_backward()) {
              total.l.add(one.l);
            } else {
              total = onepass::ONEPASS_ISA::merge(total, State<double>{one.m, {one.l, 0}});
            }
          }
          const double l = total.l.value();
          plan.state(states, of.first_chunk, tile)[j] = {total.m, l};
          if (p.is_backward() || !p.is_reduction()) continue;
          const double lse = finite_or_zero(total.m) + std::log(l);
          store_row(of.segment, j, A(p.function == Function::state ? total.m : lse), A(l));
        }
      }
    }
  }
  void run(CpuPhase phase, SegmentState* states, int64_t begin, int64_t end) {
    if (phase == CpuPhase::merge) return merge(states);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = item % plan.tiles, number = item / plan.tiles;
      set_tile(tile);
      if (phase != CpuPhase::finish) compute_run(number);
      for_each_chunk(number, [&](const LongSegment& of, int64_t chunk) {
        set_chunk(of, chunk);
        if (!plan.reduces) return compute_gradients();  // of logsumexp, which need no sum
        phase == CpuPhase::finish ? finish_chunk(plan.state(states, of.first_chunk, tile))
                                  : compute_chunk_state(plan.state(states, chunk, tile));
      });
    }
    if (plan.streaming) fence_streaming_stores();
  }
};

}  // namespace

SegmentPlan plan_segments(const SegmentProblem& p, int64_t longest) {
  using P = SegmentProblem;
  const bool doubles = p.accumulator() == DType::float64;
  const int64_t L = doubles ? kLanes<double> : kLanes<float>, whole = kWholeBytes / (doubles ? 8 : 4);
  SegmentPlan plan;
  const DimOf<P::kTensors> last = p.inner.innermost();
  // The lanes of a row's sum follow from the columns of a tile.
  const bool in_columns = p.inner.count && last.strides[p.has(P::kOfX) ? P::kOfX : P::kOfY] == 1 && !batch_invariant();
  if (in_columns) {
    plan.per_span = ceil_div(last.size, kMaxTileVectors * L);
    plan.width = plan.per_span == 1 ? last.size : up_to(ceil_div(last.size, plan.per_span), L);
    plan.per_span = ceil_div(last.size, plan.width);
    plan.tiles = p.columns / last.size * plan.per_span;
  } else {
    plan.tiles = p.columns;
  }
  const int64_t pitch = doubles ? pitch_of<double>(plan.width) : pitch_of<float>(plan.width);
  plan.most = whole / pitch, plan.chunk = kSegmentChunk / pitch;
  plan.run_size = std::max<int64_t>(1, kCpuGrain / pitch);
  plan.runs = ceil_div(p.items + p.segments, plan.run_size);
  for (int64_t s = 0; longest > plan.most && s < p.segments; ++s) {
    const int64_t n = p.offset(s + 1) - p.offset(s);
    if (n <= plan.most) continue;
    plan.long_segments.push_back({s, plan.chunks, ceil_div(n, plan.chunk)});
    plan.chunks += plan.long_segments.back().chunks;
  }
  plan.work_items = plan.runs * plan.tiles;
  plan.grain_size =
      std::max<int64_t>(1, kCpuGrain / (pitch * std::min(plan.run_size, std::max<int64_t>(1, p.items + p.segments))));
  plan.reduces = plan.chunks > 0 && !(p.is_backward() && p.function == Function::logsumexp);
  const int made = p.result();
  const bool stores = p.is_backward() || !p.is_reduction(), in_place = p.data[made] == p.data[P::kOfX];
  const bool is_run = !p.order && p.steps[made] == plan.width && (plan.width == 1 || last.strides[made] == 1);
  plan.streaming = kHasStreamingStores && stores && !in_place && is_run && !doubles &&
                   p.items * p.columns * size_of(p.types[made]) >= kStreamingBytes;
  return plan;
}

void run_segments(const SegmentProblem& p, const SegmentPlan& plan, CpuPhase phase, SegmentState* states, int64_t begin,
                  int64_t end) {
  if (p.accumulator() == DType::float64) {
    SegmentRows<double>(p, plan).run(phase, states, begin, end);
  } else {
    SegmentRows<float>(p, plan).run(phase, states, begin, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
