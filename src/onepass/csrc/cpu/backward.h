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
#include "exponential.h"
#include "sizes.h"

namespace onepass::ONEPASS_ISA {

enum class Kind { soft, log, lse };  // softmin is softmax with another sign

constexpr int64_t kBackwardStep = 4 * kWidth;

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
  const Ints whole = Ints(shifted) - (0x4b400000 + 127 + 64), half = whole >> 1;
  return (p * f + 1.0f) * Floats((half + 127) << 23) * Floats((whole - half + 127) << 23);
}

// Two vectors of neighbours. Of bfloat16 the even and the odd ones, which is the least work; so in `Split` order
// operands come and results go, or each alone where the order does not count.
struct Two {
  Floats a, b;
};
template <bool Split, class T>
ONEPASS_INLINE Two load_two(const T* from) {
  Two made;
  load_two<Split>(from, made.a, made.b);
  return made;
}
template <class Y, class D>
constexpr bool kSplit = std::is_same_v<Y, bfloat16> && std::is_same_v<D, bfloat16>;

template <bool Split, bool Any, bool Past, class T>
ONEPASS_INLINE void store_two(T* to, Two v) {
  if constexpr (Split) {
    const Floats made = Floats(rounded_pairs(v.a, v.b));
    if constexpr (Past) {
      stream_vector(reinterpret_cast<float*>(to), made);
    } else {
      std::memcpy(to, &made, sizeof made);
    }
  } else if constexpr (Past) {
    stream_vector<Any>(to, v.a), stream_vector<Any>(to + kWidth, v.b);
  } else {
    store_vector<Any>(to, v.a), store_vector<Any>(to + kWidth, v.b);
  }
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
  ONEPASS_INLINE Two operator()(Two y, Two g) const { return {(*this)(y.a, g.a), (*this)(y.b, g.b)}; }
  ONEPASS_INLINE Floats operator()(Floats y, Floats g) const {
    if constexpr (K == Kind::soft) return y * (g - a) * b;
    if constexpr (K == Kind::log) return g - exp_any<D>(y) * a;
    return a * exp_any<D>(y - b);
  }
};

// A row's operands. `mask` is 0 where the result's gradient is the same along the row: `g` is then kBackwardStep of it.
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
__attribute__((noinline)) double backward_sum(const BackwardRow<Y> row, int64_t next_y, int64_t next_g) {
  constexpr bool split = std::is_same_v<Y, bfloat16>;
  Sums total;
  int64_t i = 0;
  const auto step = [&]() __attribute__((always_inline)) {
    const Y* const g = row.g + (i & row.mask);
    const Two g0 = load_two<split>(g), g1 = load_two<split>(g + 2 * kWidth);
    if constexpr (K == Kind::soft) {
      const Two y0 = load_two<split>(row.y + i), y1 = load_two<split>(row.y + i + 2 * kWidth);
      total.add((y0.a * g0.a + y0.b * g0.b) + (y1.a * g1.a + y1.b * g1.b));
    } else {
      total.add((g0.a + g0.b) + (g1.a + g1.b));
    }
  };
  constexpr int64_t line = kLine / int64_t(sizeof(Y));
  if (next_y || next_g) {
    const Y *const y = row.y + next_y, *const g = row.g + (next_g ? next_g : 0);
    for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
      for (int64_t at = 0; at < kBackwardStep; at += line) __builtin_prefetch(y + i + at);
      if (next_g) {
        for (int64_t at = 0; at < kBackwardStep; at += line) __builtin_prefetch(g + i + at);
      }
      step();
    }
  }
  for (; i + kBackwardStep <= row.n; i += kBackwardStep) step();
  for (; i + kWidth <= row.n; i += kWidth) {
    total.add(backward_term<K>(K == Kind::soft ? row.y_at(i) : Floats{}, row.g_at(i)));
  }
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
__attribute__((noinline)) void backward_store(const BackwardRow<Y> row, D* dx, const BackwardLast<K, D> last,
                                              bool past) {
  constexpr bool any = kAnyNan<Y, D>;
  constexpr bool split = kSplit<Y, D>;
  const auto made = [&](int64_t i) __attribute__((always_inline)) {
    return last(row.y_at(i), K == Kind::lse ? Floats{} : row.g_at(i));
  };
  int64_t i = 0;
  const auto steps = [&](auto is_past) __attribute__((always_inline)) {
    for (; i + kBackwardStep <= row.n; i += kBackwardStep) {
      const Y* const g = row.g + (i & row.mask);
      for (int64_t v = 0; v < kBackwardStep; v += 2 * kWidth) {
        const Two of_g = K == Kind::lse ? Two{} : load_two<split>(g + v);
        store_two<split, any, is_past.value>(dx + i + v, last(load_two<split>(row.y + i + v), of_g));
      }
    }
  };
  const bool lines = uintptr_t(dx) % kLine == 0 && row.n * int64_t(sizeof(D)) % kLine == 0;
  if (kStreams && past && lines) {
    steps(std::true_type());
  } else {
    steps(std::false_type());
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
ONEPASS_INLINE void four_rows(const Y* const* ys, const Y* const* gs, int64_t mask, D* const* dx, int64_t n, int count,
                              Floats sign, bool past) {
  constexpr bool any = kAnyNan<Y, D>, adds_split = std::is_same_v<Y, bfloat16>, split = kSplit<Y, D>;
  const int64_t whole = n / kWidth * kWidth, pairs = n / (2 * kWidth) * (2 * kWidth), last = n - kWidth;
  Floats sums[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const Y *const y = ys[r], *const g = gs[r];
    Two sum = {};
    for (int64_t i = 0; i < pairs; i += 2 * kWidth) {
      const Two of_g = load_two<adds_split>(g + (i & mask));
      const Two of_y = K == Kind::soft ? load_two<adds_split>(y + i) : Two{};
      sum.a += backward_term<K>(of_y.a, of_g.a), sum.b += backward_term<K>(of_y.b, of_g.b);
    }
    if (pairs < whole) sum.a += backward_term<K>(load_vector(y + pairs), load_vector(g + (pairs & mask)));
    if (whole < n) {
      const Floats end = backward_term<K>(load_vector(y + last), load_vector(g + (last & mask)));
      sum.b += first_lanes(whole - last) ? Floats{} : end;
    }
    sums[r] = sum.a + sum.b;
  }
  const Quad totals = sums_across(sums);
  for (int r = 0; r < count; ++r) {
    const Y *const y = ys[r], *const g = gs[r];
    D* const to = dx[r];
    const BackwardLast<K, D> finish = {all(totals[r]), sign};
    // Computed first: in place what it reads is overwritten next.
    const Floats end = whole < n ? finish(load_vector(y + last), load_vector(g + (last & mask))) : Floats{};
    const Floats odd = pairs < whole ? finish(load_vector(y + pairs), load_vector(g + (pairs & mask))) : Floats{};
    if (kStreams && past) {
      for (int64_t i = 0; i < pairs; i += 2 * kWidth) {
        store_two<split, any, true>(to + i, finish(load_two<split>(y + i), load_two<split>(g + (i & mask))));
      }
    } else {
      for (int64_t i = 0; i < pairs; i += 2 * kWidth) {
        store_two<split, any, false>(to + i, finish(load_two<split>(y + i), load_two<split>(g + (i & mask))));
      }
    }
    if (pairs < whole) store_vector<any>(to + pairs, odd);
    if (whole < n) store_vector<any>(to + last, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
