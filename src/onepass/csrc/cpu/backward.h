// backward.h: gradients of rows of unit stride in floats (backward_scalar.h has all others, and doubles).
//
//   softmax       dx = y (dy - sum(dy y))        softmin: the negative
//   log_softmax   dx = dy - exp(y) sum(dy)
//   logsumexp     dx = dy exp(x - lse)
//
//   a row that fits a core's cache:   sum, its operands read from memory -> dx, its operands read from the cache
//   a longer one, in pieces of a fixed length: a sum each, added up in order; then dx
//   short ones, four at a time:       four sums across lanes at once -> dx
#pragma once

#include "../backward_layout.h"
#include "simd.h"

namespace onepass::ONEPASS_ISA {

enum class Kind { soft, log, lse };  // softmin is softmax with another sign

constexpr int64_t kBackwardStep = 4 * kWidth;
constexpr int64_t kBackwardLine = 64;  // bytes

ONEPASS_INLINE Floats smaller(Floats a, Floats b) {  // of a NaN and something, `b`
#if defined(__AVX512F__)
  return Floats(_mm512_min_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
  return Floats(_mm256_min_ps(__m256(a), __m256(b)));
#elif defined(__SSE__)
  return Floats(_mm_min_ps(__m128(a), __m128(b)));
#else
  return a < b ? a : b;
#endif
}

// exp(x) for any x, to 1 ulp, or to 2^-18 for half results. The power of two goes in two factors: it may be subnormal.
template <class D>
ONEPASS_INLINE Floats exp_any(Floats x) {
  const Floats v = smaller(all(89.0f), larger(all(-104.0f), x));
  const Floats shifted = v * kLog2e + kMagic, k = shifted - kMagic;
#if defined(__FMA__)
  const Floats f = sizeof(D) == 2 ? v * kLog2e - k : v * 1.92596298909109e-8f + (v * kLog2e - k);
#else
  const Floats f = ((v - k * 0.693359375f) - k * -2.12194440e-4f) * kLog2e;
#endif
  Floats p;
  if constexpr (sizeof(D) == 2) {
    p = f * 0.00958277683f + 0.0559072132f;
    p = p * f + 0.240241045f;
    p = p * f + 0.693124105f;
  } else {
    p = f * 0.000153532579f + 0.00133990035f;
    p = p * f + 0.0096184386f;
    p = p * f + 0.0555033216f;
    p = p * f + 0.240226479f;
    p = p * f + 0.693147203f;
  }
  const Ints whole = Ints(shifted) - 0x4b400000, half = whole >> 1;
  return (p * f + 1.0f) * Floats((half + 127) << 23) * Floats((whole - half + 127) << 23);
}

// What an element adds to its row's sum.
template <Kind K>
ONEPASS_INLINE Floats backward_term(Floats y, Floats g) {
  return K == Kind::soft ? y * g : g;
}

// What makes dx of a row's elements: of softmax the sum and a sign, of log_softmax the sum, of logsumexp the result's
// gradient and the result.
template <Kind K, class D>
struct BackwardLast {
  Floats a, b;
  ONEPASS_INLINE Floats operator()(Floats y, Floats g) const {
    if constexpr (K == Kind::soft) return y * (g - a) * b;
    if constexpr (K == Kind::log) return g - exp_any<D>(y) * a;
    return a * exp_any<D>(y - b);
  }
};

// A row's operands. `mask` is 0 where the result's gradient is the same along the row: `g` is then one vector.
template <class Y>
struct BackwardRow {
  const Y *y, *g;
  int64_t mask, n;
  ONEPASS_INLINE Floats y_at(int64_t i) const { return load_vector(y + i); }
  ONEPASS_INLINE Floats g_at(int64_t i) const { return load_vector(g + (i & mask)); }
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

// The sum of a row or a piece. `next_y` and `next_g` are elements to the next row, which is fetched meanwhile, or 0.
template <Kind K, class Y>
double backward_sum(const BackwardRow<Y>& row, int64_t next_y, int64_t next_g) {
  const auto term = [&](int64_t i) __attribute__((always_inline)) {
    return backward_term<K>(K == Kind::soft ? row.y_at(i) : Floats{}, row.g_at(i));
  };
  Sums total;
  int64_t i = 0;
  for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
    for (int64_t line = 0; line < kBackwardStep; line += kBackwardLine / int64_t(sizeof(Y))) {
      if (next_y) __builtin_prefetch(row.y + next_y + i + line);
      if (next_g) __builtin_prefetch(row.g + next_g + i + line);
    }
    total.add((term(i) + term(i + kWidth)) + (term(i + 2 * kWidth) + term(i + 3 * kWidth)));
  }
  for (; i + kWidth <= row.n; i += kWidth) total.add(term(i));
  if (i < row.n) {
    const int64_t left = row.n - i;
    total.add(backward_term<K>(load_part(row.y + i, left, 0), load_part(row.g + (i & row.mask), left, 0)));
  }
  return total_of(total);
}

// A NaN is one that arithmetic makes, unless it may come from floats that were given.
template <class Y, class D>
constexpr bool kAnyNan = sizeof(Y) == 4 && sizeof(D) == 2;

template <Kind K, class Y, class D>
void backward_store(const BackwardRow<Y>& row, D* dx, const BackwardLast<K, D>& last, bool past) {
  constexpr bool any = kAnyNan<Y, D>;
  const auto made = [&](int64_t i) __attribute__((always_inline)) {
    return last(row.y_at(i), K == Kind::lse ? Floats{} : row.g_at(i));
  };
  int64_t i = 0;
  if (kStreams && past && uintptr_t(dx) % kBackwardLine == 0 && row.n * int64_t(sizeof(D)) % kBackwardLine == 0) {
    for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
      for (int64_t v = i; v < i + kBackwardStep; v += kWidth) stream_vector<any>(dx + v, made(v));
    }
  } else {
    for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
      for (int64_t v = i; v < i + kBackwardStep; v += kWidth) store_vector<any>(dx + v, made(v));
    }
  }
  for (; i + kWidth <= row.n; i += kWidth) store_vector<any>(dx + i, made(i));
  if (i < row.n) {
    const int64_t left = row.n - i;
    const Floats g = K == Kind::lse ? Floats{} : load_part(row.g + (i & row.mask), left, 0);
    store_part<any>(dx + i, left, last(load_part(row.y + i, left, 0), g));
  }
}

typedef float Quad __attribute__((vector_size(16)));

// Four lanes of which the sum is that of all.
ONEPASS_INLINE Quad folded(Floats v) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

// The sums of four vectors.
ONEPASS_INLINE Quad sums_across(const Floats* v) {
  const Quad a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
  const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// Four rows (or fewer, the last being there more than once: `count` are stored) of kWidth elements or more. What is
// left of a row after whole vectors is taken with some of the elements before it, in one vector that ends with the row.
template <Kind K, class Y, class D>
ONEPASS_INLINE void four_rows(const BackwardRow<Y>* rows, D* const* dx, int64_t n, int count, Floats sign) {
  constexpr bool any = kAnyNan<Y, D>;
  const int64_t whole = n / kWidth * kWidth, last = n - kWidth;
  const auto term = [&](int r, int64_t i) __attribute__((always_inline)) {
    return backward_term<K>(K == Kind::soft ? rows[r].y_at(i) : Floats{}, rows[r].g_at(i));
  };
  Floats sums[4] = {term(0, 0), term(1, 0), term(2, 0), term(3, 0)};
  for (int64_t i = kWidth; i < whole; i += kWidth) {
    for (int r = 0; r < 4; ++r) sums[r] += term(r, i);
  }
  if (whole < n) {
    const Ints before = first_lanes(whole - last);
    for (int r = 0; r < 4; ++r) sums[r] += before ? Floats{} : term(r, last);
  }
  const Quad totals = sums_across(sums);
  for (int r = 0; r < count; ++r) {
    const BackwardLast<K, D> finish = {all(totals[r]), sign};
    // Computed first: in place what it reads is overwritten next.
    const Floats end = whole < n ? finish(rows[r].y_at(last), rows[r].g_at(last)) : Floats{};
    for (int64_t i = 0; i < whole; i += kWidth) {
      store_vector<any>(dx[r] + i, finish(rows[r].y_at(i), rows[r].g_at(i)));
    }
    if (whole < n) store_vector<any>(dx[r] + last, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
