// segment_block.h: a block of neighbouring segments in the scratch memory, and the loops over it: maxima and
// differences, exponentials, sums and results. The exponentials are computed without regard to where segments begin.
// The lanes of a vector are items of a segment, or columns, or both if a few columns fill only a part of a vector.
#pragma once

#include "../core/segment_problem.h"
#include "tile_ops.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kBlockBytes = 8192;     // a block ends after so many, so that it stays in the L1 cache
constexpr int64_t kWholeBytes = 98304;    // of a block that is one segment
constexpr int64_t kMaxPieces = 512;       // in a block
constexpr int64_t kMaxTileVectors = 16;   // columns of a tile
constexpr int64_t kPadding = 8 * kWidth;  // elements behind a block that vectors may read and write

// The pitch of an item in a block. A few columns take the smallest part of a vector that holds them, others whole
// vectors.
template <class A>
constexpr int64_t pitch_of(int64_t columns) {
  if (columns >= kLanes<A>) return up_to(columns, kLanes<A>);
  int64_t pitch = 1;
  while (pitch < columns) pitch *= 2;
  return pitch;
}

// Operations on lanes. A vector has P different lanes, which repeat.
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

// The elements of a segment that are in lanes of the same columns: `n` elements from `at` on, in vectors `step` apart.
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

  // `base` is what is subtracted from elements. `high` and `low` are the numbers that results are computed from. Each
  // has P numbers per piece.
  A *const a = reinterpret_cast<A*>(scratch()), *const b = a + kMostNumbers + kPadding,
           *const c = b + kMostNumbers + kPadding;
  A *const m = c + kMostNumbers + kPadding, *const base = m + kNumbers, *const high = base + kNumbers;
  A* const low = high + kNumbers;
  const A *x = a, *g = b;  // the elements of two tensors: in a and b, or in place
  // Where the next block's elements are in memory, and the size of one. They are prefetched while this block is
  // computed.
  struct Next {
    const char* at;
    int64_t size;
    ONEPASS_INLINE void fetch(int64_t i) const { __builtin_prefetch(at + i * size); }
  };
  Next next = {reinterpret_cast<const char*>(b), 0};
  SegmentPiece pieces[kMaxPieces + kMaxTileVectors + L];
  int count = 0;         // pieces
  int64_t elements = 0;  // of the block
  int64_t step = L;

  static constexpr bool groups(int P) { return P == 1 && std::is_same_v<A, float>; }
  template <int P>
  static constexpr int kGroup = groups(P) ? L : 1;  // pieces whose lanes are folded together
  static constexpr int kShort = 4;                  // the most vectors of a piece that is computed without loops
  template <int P>
  static constexpr int kFirst = groups(P) ? kShort : 0;  // the first vectors of a piece, which have no loop

  // Appends empty pieces that fill the last group.
  void finish_pieces() { std::fill_n(pieces + count, L, SegmentPiece{int32_t(elements), 0}); }

  // The number of vectors of the longest piece of a group, rounded up to 1, 2 or kShort; 0 if there are more.
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
  // The first n lanes of the piece, in v, which begins k vectors after the start of the piece. Other lanes become
  // `other`.
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

  // The maxima of a piece, of K vectors or, if K is 0, of any number.
  template <int P, int K>
  ONEPASS_INLINE Vector maximum(SegmentPiece piece) const {
    const A* const from = x + piece.at;
    if constexpr (K > 0) {
      Vector v[K];
      for (int k = 0; k < K; ++k) v[k] = keep_first(load_as(from + k * L), piece.n, k, -kInf<A>);
      Vector top = max_as(v[0], broadcast_as(-kInf<A>));  // NaN does not count as a maximum
      for (int k = 1; k < K; ++k) top = max_as(v[k], top);
      return top;
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
  // The sum of load(offset) over a piece, of K vectors or of any number. `Sum` is like CompensatedLanes.
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
  // Calls work(offset) for the vectors of a piece, of K vectors or of any number. The elements behind the piece belong
  // to another piece, which is computed later.
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

  // Computes the maxima and what is subtracted: the maximum, or 0 if it is infinite.
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
  // The sums of rows: in a group one row per lane, otherwise P sums, which repeat.
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
  // A sum of exponentials; and a sum of any numbers.
  struct ExpSums : CompensatedLanes<A> {
    Vector value() const { return this->sum - this->kStart; }
  };
  struct AnySums {
    Vector sum{}, error{};
    ONEPASS_INLINE void add(Vector v) { add_compensated(sum, error, v); }
    Vector value() const { return sum; }
  };
  // If a sum is not finite, its error is NaN.
  static ONEPASS_INLINE Vector total_of(Vector sum, Vector error) { return sum - sum == Vector{} ? sum + error : sum; }
  // The sums of the exponentials, which are in b.
  template <int P, int K>
  ONEPASS_INLINE void find_exp_sums(int first, Vector& sum, Vector& error) {
    find_sums<P, K, ExpSums>(first, sum, error,
                             [=, a = a, b = b, c = c, x = x, g = g](int64_t i)
                                 __attribute__((always_inline)) { return load_as(b + i); });
    check_sums<P>(first, sum, error);
  }
  // The sum of a row with +inf is +inf, or NaN if there is a NaN.
  template <int P>
  ONEPASS_INLINE void check_sums(int first, Vector& sum, Vector& error) {
    const Vector top = load_as(m + first * P);
    if (any_lane<A>(top == kInf<A> ? Vector{} + 1 : Vector{})) mark_infinities<P>(first, sum, error);
  }
  // For a piece of whole vectors: the exponentials of the differences from the base, in b, and their sums.
  template <class Exp>
  ONEPASS_INLINE void exponentials_of(int piece, Vector& sum, Vector& error) {
    const A* const from = x + pieces[piece].at;
    A* const to = b + pieces[piece].at;
    const int64_t vectors = pieces[piece].n / L, each = step;
    const Vector by = number<L>(base, piece);
    const Next after = {next.at + pieces[piece].at * next.size, next.size};
    ExpSums total;
    const auto take = [&](int64_t i, auto count) __attribute__((always_inline)) {
      constexpr int N = count.value;
      Vector v[N];
      for (int k = 0; k < N; ++k) v[k] = load_as(from + (i + k) * each) - by, after.fetch((i + k) * each);
      Exp::apply(v);
      for (int k = 0; k < N; ++k) store_as(to + (i + k) * each, v[k]);
      total.add(N == 4 ? (v[0] + v[N / 4]) + (v[N / 2] + v[N - 1]) : v[0]);
    };
    int64_t i = 0;
    for (; i + 4 <= vectors; i += 4) take(i, std::integral_constant<int, 4>());
    for (; i < vectors; ++i) take(i, std::integral_constant<int, 1>());
    sum = total.value(), error = total.error;
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
  // Replaces the states of rows by the numbers of results. The result itself is in `base` for logsumexp, and in `m` and
  // `high` for a state.
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
      const Vector total = total_of(sum, error), special = top + total;
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
  // v = exp(v), with the scale of CompensatedLanes.
  template <class Exp>
  void exponentials(A* at) const {
    const Next next = this->next;
    for (int64_t i = 0; i < elements; i += 4 * L) {
      Vector v[4];
      for (int k = 0; k < 4; ++k) v[k] = load_as(at + i + k * L);
      for (int k = 0; k < 4; ++k) next.fetch(i + k * L);
      Exp::apply(v);
      for (int k = 0; k < 4; ++k) store_as(at + i + k * L, v[k]);
    }
  }
  // Calls work(exp) with the exponential that a result of this type needs.
  template <class Work>
  static ONEPASS_INLINE void with_exp(DType type, Work work) {
    if constexpr (std::is_same_v<A, double>) return work(ExpDouble());
    if constexpr (std::is_same_v<A, float>) {
      if (type == DType::bfloat16) return work(ExpHalf<3>());
      if (type == DType::float16) return work(ExpHalf<4>());
      work(ExpFloat());
    }
  }
  void exponentials_for(DType type) {
    with_exp(type, [&](auto exp) { exponentials<decltype(exp)>(b); });
  }
  // The same without a scale: below 2^-126 they are 0.
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

  // Computes the differences of elements and their maxima, in b.
  template <int P>
  void begin_forward() {
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      find_maxima<P, vectors.value>(first), subtract_base<P, vectors.value>(first);
    });
  }
  // The same with a given base.
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
  // Computes results from given numbers. They are in result_of(function).
  template <int P>
  void finish_with_numbers(Function function) {
    for_each_group<P>([&](int first, auto vectors)
                          __attribute__((always_inline)) { store_results<P, vectors.value>(function, first); });
  }
  A* result_of(Function function) const { return function == Function::softmax ? a : c; }
  template <int P, int K>
  ONEPASS_INLINE void finish_group(Function function, int first, Vector sum, Vector error) {
    make_numbers<P>(function, first, sum, error);
    if (!is_reduction(function)) store_results<P, K>(function, first);
  }
  // The results of a block, or the numbers of a reduction, with the exponential that a result of this type needs.
  // Columns that fill vectors are computed piece by piece.
  template <int P>
  void forward(Function function, DType type) {
    if constexpr (P == L) {
      with_exp(type, [&](auto exp) {
        for (int piece = 0; piece < count; ++piece) {
          Vector sum, error;
          find_maxima<P, 0>(piece);
          exponentials_of<decltype(exp)>(piece, sum, error);
          check_sums<P>(piece, sum, error);
          finish_group<P, 0>(function, piece, sum, error);
        }
      });
      return;
    }
    begin_forward<P>();
    exponentials_for(type);
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      Vector sum, error;
      find_exp_sums<P, vectors.value>(first, sum, error);
      finish_group<P, vectors.value>(function, first, sum, error);
    });
  }
  // The sums of exponentials, without a scale, in `high`.
  template <int P>
  void sum_exponentials() {
    for_each_group<P>([&](int first, auto vectors) __attribute__((always_inline)) {
      Vector sum, error;
      find_exp_sums<P, vectors.value>(first, sum, error);
      make_numbers<P>(Function::state, first, sum, error);
    });
  }

  // Gradients of softmax and log_softmax, from the results x and their gradients g. The sums are in `high`.
  template <int P, int K>
  ONEPASS_INLINE void sum_gradients_of(Function function, int first) {
    Vector sum, error;
    find_sums<P, K, AnySums>(first, sum, error,
                             [=, a = a, b = b, c = c, x = x, g = g](int64_t i) __attribute__((always_inline)) {
                               return function == Function::softmax ? load_as(x + i) * load_as(g + i) : load_as(g + i);
                             });
    store_as(high + first * P, total_of(sum, error));
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
  // The gradients of logsumexp. Its results are in `base`, and their gradients, times the factor, in `high`.
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

}  // namespace onepass::ONEPASS_ISA
