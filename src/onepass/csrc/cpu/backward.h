// backward.h: gradients of rows of unit stride in floats (backward_generic.h has all others, and doubles).
//
//   softmax       dx = y (dy - sum(dy y))        softmin: the negative
//   log_softmax   dx = dy - exp(y) sum(dy)
//   logsumexp     dx = dy exp(x - lse)
//
//   a row that fits a core's cache:   sum, its operands read from memory -> dx, its operands read from the cache
//   a longer one, in pieces of a fixed length: a sum each, added up in order; then dx
//
// y of log_softmax, and x - lse, are at most 0.
#pragma once

#include "../core/backward_layout.h"
#include "scaled_exp.h"
#include "thresholds.h"

namespace onepass::ONEPASS_ISA {

enum class Kind { soft, log, lse };  // softmin is softmax with another sign

constexpr int64_t kBackwardStep = 4 * kWidth, kPair = 2 * kWidth;

// 1, 2 or 4 vectors of neighbours. Of bfloat16 the even and the odd ones, which is the least work (not of 1); so in
// `Split` order operands come and results go, or each alone where the order does not count.
template <bool Split, class T, int K>
ONEPASS_INLINE void load_some(const T* from, Floats (&v)[K]) {
  if constexpr (K == 1) {
    v[0] = load_vector(from);
  } else {
    for (int k = 0; k < K; k += 2) load_two<Split>(from + k * kWidth, v[k], v[k + 1]);
  }
}
template <class Y, class D>
constexpr bool kSplit = std::is_same_v<Y, bfloat16> && std::is_same_v<D, bfloat16>;

template <bool Split, bool Any, bool Past, class T, int K>
ONEPASS_INLINE void store_some(T* to, const Floats (&v)[K]) {
  for (int k = 0; k < K; ++k) {
    if constexpr (Split && K > 1) {
      const Floats made = Floats(rounded_pairs(v[k], v[k + 1]));
      float* const at = reinterpret_cast<float*>(to + k * kWidth);
      if constexpr (Past) {
        stream_vector(at, made);
      } else {
        std::memcpy(static_cast<void*>(at), &made, sizeof made);
      }
      ++k;
    } else if constexpr (Past) {
      stream_vector<Any>(to + k * kWidth, v[k]);
    } else {
      store_vector<Any>(to + k * kWidth, v[k]);
    }
  }
}

// What an element adds to its row's sum.
template <Kind K>
ONEPASS_INLINE Floats backward_term(Floats y, Floats g) {
  return K == Kind::soft ? y * g : g;
}

// What makes dx of a row's elements: of softmax minus the sum, and a sign that both have; of log_softmax the sum; of
// logsumexp the result's gradient and the result. Each lane is a row of its own, or all are one.
template <Kind K, class D>
struct BackwardLast {
  static constexpr bool kHalf = sizeof(D) == 2;
  Floats a, b;
  Origin from;

  static ONEPASS_INLINE BackwardLast of(Floats a, Floats b) {
    if constexpr (K == Kind::soft) return {a, b, {}};
    const Factor factor = Factor::of(a);
    return {factor.number, b, factor.from};
  }
  static ONEPASS_INLINE BackwardLast of_sum(Floats sum, Floats sign) {
    return of(K == Kind::soft ? sum * -sign : sum, sign);
  }
  // Elements become dx.
  template <int M>
  ONEPASS_INLINE void operator()(Floats (&y)[M], const Floats (&g)[M]) const {
    if constexpr (K == Kind::soft) {
      for (int k = 0; k < M; ++k) y[k] *= g[k] * b + a;
    } else {
      if constexpr (K == Kind::lse) {
        for (int k = 0; k < M; ++k) y[k] -= b;
      }
      powers<kHalf>(y, from);
      for (int k = 0; k < M; ++k) y[k] = K == Kind::log ? g[k] - y[k] * a : a * y[k];
    }
  }
  ONEPASS_INLINE Floats one(Floats y, Floats g) const {
    Floats made[1] = {y};
    const Floats of_g[1] = {g};
    (*this)(made, of_g);
    return made[0];
  }
};

// A row's operands. `mask` is 0 where the result's gradient is the same along the row: `g` is then kBackwardStep of it.
template <class Y>
struct BackwardRow {
  const Y *y, *g;
  int64_t mask, n;
  ONEPASS_INLINE const Y* g_from(int64_t i) const { return g + (i & mask); }
  ONEPASS_INLINE Floats y_at(int64_t i) const { return load_vector(y + i); }
  ONEPASS_INLINE Floats g_at(int64_t i) const { return load_vector(g_from(i)); }
};

// A sum; where it is no finite number what was rounded off is none at all.
inline double total_of(const Sums& sums) {
  const double total = sums.total();
  if (std::isfinite(total)) return total;
  double plain = 0;
  for (int i = 0; i < kWidth; ++i) plain += double(sums.sum[i]);
  return plain;
}

// The same of the sums of rows that are a lane each.
ONEPASS_INLINE Floats finite_rest(const Sums& sums) {
  const Floats total = sums.sum + sums.rest;
  return total - total == Floats{} ? total : sums.sum;
}

// The sum of a row or a piece.
template <Kind K, class Y>
ONEPASS_INLINE double backward_sum(const BackwardRow<Y> row) {
  constexpr bool split = std::is_same_v<Y, bfloat16>;
  Sums total;
  int64_t i = 0;
  const auto step = [&](int64_t at) __attribute__((always_inline)) {
    Floats y[4] = {}, g[4];
    load_some<split>(row.g_from(at), g);
    if constexpr (K == Kind::soft) load_some<split>(row.y + at, y);
    for (int k = 0; k < 4; ++k) g[k] = backward_term<K>(y[k], g[k]);
    return (g[0] + g[1]) + (g[2] + g[3]);
  };
  // Eight vectors are added up in plain floats: what is done for each shows where operands come from memory.
  for (; i + 2 * kBackwardStep <= row.n; i += 2 * kBackwardStep) total.add(step(i) + step(i + kBackwardStep));
  for (; i + kBackwardStep <= row.n; i += kBackwardStep) total.add(step(i));
  for (; i + kWidth <= row.n; i += kWidth) {
    total.add(backward_term<K>(K == Kind::soft ? row.y_at(i) : Floats{}, row.g_at(i)));
  }
  if (i < row.n) {
    const int64_t left = row.n - i;
    total.add(backward_term<K>(load_part(row.y + i, left, 0), load_part(row.g_from(i), left, 0)));
  }
  return total_of(total);
}

// A NaN is one that arithmetic makes, unless it may come from floats that were given.
template <class Y, class D>
constexpr bool kAnyNan = sizeof(Y) == 4 && sizeof(D) == 2;

// dx of a row or a piece. `past`: past the cache, all whole lines; nothing is then in place.
template <Kind K, class Y, class D>
ONEPASS_INLINE void backward_store(const BackwardRow<Y> row, D* dx, const BackwardLast<K, D> last, bool past) {
  constexpr bool any = kAnyNan<Y, D>, split = kSplit<Y, D>;
  int64_t i = 0;
  const auto steps = [&](auto is_past) __attribute__((always_inline)) {
    for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
      Floats y[4], g[4] = {};
      load_some<split>(row.y + i, y);
      if constexpr (K != Kind::lse) load_some<split>(row.g_from(i), g);
      last(y, g);
      store_some<split, any, is_past.value>(dx + i, y);
    }
  };
  const auto vectors = [&](int64_t end) __attribute__((always_inline)) {
    for (; i + kWidth <= end; i += kWidth) {
      store_vector<any>(dx + i, last.one(row.y_at(i), K == Kind::lse ? Floats{} : row.g_at(i)));
    }
    if (i >= end) return;
    const int64_t left = end - i;
    const Floats g = K == Kind::lse ? Floats{} : load_part(row.g_from(i), left, 0);
    store_part<any>(dx + i, left, last.one(load_part(row.y + i, left, 0), g));
    i = end;
  };
  if (kStreams && past) {
    const int64_t lead = int64_t(-uintptr_t(dx) % kLine / sizeof(D));
    vectors(lead < row.n ? lead : row.n);
    steps(std::true_type());
  } else {
    steps(std::false_type());
  }
  vectors(row.n);
}

}  // namespace onepass::ONEPASS_ISA
