// elements.h: the elements of a row of unit stride in vectors of floats: their maximum, and the sum of their
// exponentials.
#pragma once

#include "exponential.h"
#include "rows.h"
#include "scratch.h"
#include "sizes.h"

namespace onepass::ONEPASS_ISA {

static_assert(kLong <= kScratch);
constexpr int64_t kStep = 4 * kWidth;

template <class X, class Y>
struct Row {
  typedef typename Exponential<Y>::type E;
  static constexpr bool kSplit = std::is_same_v<X, bfloat16> && std::is_same_v<Y, bfloat16>;
  const X* x;
  int64_t n;

  // What an element is to the function. (Where Y is narrower than X, torch rounds the input to Y first.)
  static ONEPASS_INLINE Floats value(Floats v) {
    if constexpr (!kWidens<X, Y>) {
      Y rounded[kWidth];
      store_vector<true>(rounded, v);
      v = load_vector(rounded);
    }
    return v;
  }
  ONEPASS_INLINE void four(int64_t i, Floats (&v)[4]) const {
    load_two<kSplit>(x + i, v[0], v[1]), load_two<kSplit>(x + i + 2 * kWidth, v[2], v[3]);
    for (Floats& each : v) each = value(each);
  }
  ONEPASS_INLINE Floats one(int64_t i) const { return value(load_vector(x + i)); }
  Floats part(int64_t i, int64_t count) const { return value(load_part(x + i, count, -kInf<float>)); }

  // Of half types by their bits: those of positive numbers grow with them, those of negative ones fall. (A NaN may be
  // the largest: then it is NaN.)
  float maximum_of_bits() const {
    constexpr int kMany = 2 * kWidth;
    constexpr int16_t kLeast = -32768;
    constexpr uint16_t kMost = 65535;
    const auto* const from = reinterpret_cast<const uint16_t*>(x);
    Shorts high[2] = {Shorts{} + kLeast, Shorts{} + kLeast};
    Codes low[2] = {Codes{} + kMost, Codes{} + kMost};
    const auto step = [&](int64_t i, int k) __attribute__((always_inline)) {
      Codes v;
      std::memcpy(&v, from + i, sizeof v);
      high[k] = Shorts(v) > high[k] ? Shorts(v) : high[k];
      low[k] = v < low[k] ? v : low[k];
    };
    int64_t i = 0;
    for (; i + 2 * kMany <= n; i += 2 * kMany) step(i, 0), step(i + kMany, 1);
    if (i + kMany <= n) step(i, 0);
    if (i < n) step(n - kMany, 1);  // some of them again
    high[0] = high[0] > high[1] ? high[0] : high[1], low[0] = low[0] < low[1] ? low[0] : low[1];
    int16_t top = kLeast;
    uint16_t bottom = kMost;
    for (int k = 0; k < kMany; ++k) {
      top = high[0][k] > top ? high[0][k] : top, bottom = low[0][k] < bottom ? low[0][k] : bottom;
    }
    const uint16_t bits = top >= 0 ? uint16_t(top) : bottom;
    X m;
    std::memcpy(static_cast<void*>(&m), &bits, sizeof m);
    return to_wide(m);
  }

  float maximum() const {
    if (sizeof(X) == 2 && n >= 2 * kWidth) {
      const float m = maximum_of_bits();
      if (m == m) return m;  // that of a row with a NaN is the largest of the others
    }
    Floats m[4] = {all(-kInf<float>), all(-kInf<float>), all(-kInf<float>), all(-kInf<float>)};
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      Floats v[4];
      four(i, v);
      for (int k = 0; k < 4; ++k) m[k] = larger(v[k], m[k]);
    }
    for (; i + kWidth <= n; i += kWidth) m[0] = larger(one(i), m[0]);
    if (i < n) m[1] = larger(part(i, n - i), m[1]);
    return maximum_of(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  }

  // The sum of the exponentials, which go to `kept`, if there is one, counted from Origin::of(m). Four are added up in
  // plain floats: an eighth that is much smaller than the first would always be rounded the same way.
  template <bool Keeps>
  double sum(float m, float* kept) const {
    const Origin from = Origin::of(m);
    SumsFor<Y> total;
    Floats late{};  // is added a step later: what waits for exponentials keeps others from beginning
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      total.add(late);
      // What comes behind the row is fetched meanwhile: no row's first pass should wait for memory.
      for (int64_t line = 0; line < kStep; line += 64 / int64_t(sizeof(X))) __builtin_prefetch(x + n + i + line);
      Floats v[4];
      four(i, v);
      exponentials<E>(v, from);
      if constexpr (Keeps) {
        for (int k = 0; k < 4; ++k) store_vector(kept + i + k * kWidth, v[k]);
      }
      late = (v[0] + v[1]) + (v[2] + v[3]);
    }
    total.add(late);
    for (; i + kWidth <= n; i += kWidth) {
      Floats e[1] = {one(i)};
      exponentials<E>(e, from);
      if constexpr (Keeps) store_vector(kept + i, e[0]);
      total.add(e[0]);
    }
    if (i < n) {
      Floats e[1] = {part(i, n - i)};
      exponentials<E>(e, from);
      if constexpr (Keeps) store_part(kept + i, n - i, e[0]);
      total.add(e[0]);
    }
    return total.total();
  }
};

}  // namespace onepass::ONEPASS_ISA
