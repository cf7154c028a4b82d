// simd_reduce.h: what the lanes of a vector, or of as many vectors as it has lanes, are together; sums with what they
// were rounded by.
#pragma once

#include "simd.h"

namespace onepass::ONEPASS_ISA {

// Each lane with another: half a vector, a quarter, ... away.
template <class Merge>
ONEPASS_INLINE float across(Floats v, Merge merge) {
#if defined(__AVX512F__)
  v = merge(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX__)
  v = merge(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = merge(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  v = merge(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
#endif
  return v[0];
}
ONEPASS_INLINE float maximum_of(Floats v) { return across(v, larger); }

// Of two rows' vectors, at each of the levels on which as many rows as a vector has lanes become one vector: the parts
// that are merged next.
struct Pair {
  Floats low, high;
};
template <int Level>
ONEPASS_INLINE Pair crossed(Floats a, Floats b) {
#define ONEPASS_MIX(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if defined(__AVX512F__)
  if constexpr (Level == 0)
    return {ONEPASS_MIX(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
            ONEPASS_MIX(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)};
  if constexpr (Level == 1)
    return {ONEPASS_MIX(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
            ONEPASS_MIX(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)};
  if constexpr (Level == 2)
    return {ONEPASS_MIX(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
            ONEPASS_MIX(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)};
  return {ONEPASS_MIX(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          ONEPASS_MIX(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)};
#elif defined(__AVX__)
  if constexpr (Level == 0) return {ONEPASS_MIX(0, 8, 1, 9, 4, 12, 5, 13), ONEPASS_MIX(2, 10, 3, 11, 6, 14, 7, 15)};
  if constexpr (Level == 1) return {ONEPASS_MIX(0, 1, 8, 9, 4, 5, 12, 13), ONEPASS_MIX(2, 3, 10, 11, 6, 7, 14, 15)};
  return {ONEPASS_MIX(0, 1, 2, 3, 8, 9, 10, 11), ONEPASS_MIX(4, 5, 6, 7, 12, 13, 14, 15)};
#else
  if constexpr (Level == 0) return {ONEPASS_MIX(0, 4, 1, 5), ONEPASS_MIX(2, 6, 3, 7)};
  return {ONEPASS_MIX(0, 1, 4, 5), ONEPASS_MIX(2, 3, 6, 7)};
#endif
#undef ONEPASS_MIX
}

// The values of the lanes together.
typedef double Doubles __attribute__((vector_size(8 * kWidth)));
ONEPASS_INLINE double total_of(Doubles wide) {
  double all = 0;
  for (int i = 0; i < kWidth; i += 4) all += (wide[i] + wide[i + 1]) + (wide[i + 2] + wide[i + 3]);
  return all;
}
ONEPASS_INLINE Doubles widened(Floats v) { return __builtin_convertvector(v, Doubles); }

// A sum, and what its additions rounded off (Knuth's TwoSum).
struct Sums {
  Floats sum{}, rest{};
  ONEPASS_INLINE void add(Floats e) {
    const Floats next = sum + e, part = next - sum;
    rest += (sum - (next - part)) + (e - part);
    sum = next;
  }
  double total() const { return total_of(widened(sum) + widened(rest)); }
};

ONEPASS_INLINE Floats narrowed(Doubles v) { return __builtin_convertvector(v, Floats); }

// What the lanes of each of kWidth vectors are together: of vector r in lane r.
template <int Level = 0, int Rows, class Merge>
ONEPASS_INLINE Floats each_across(Floats (&rows)[Rows], Merge merge) {
  if constexpr (Rows == 1) {
    return rows[0];
  } else {
    Floats next[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const Pair pair = crossed<Level>(rows[2 * r], rows[2 * r + 1]);
      next[r] = merge(pair.low, pair.high);
    }
    return each_across<Level + 1>(next, merge);
  }
}
// The same of sums, and of what they were rounded by.
template <int Level = 0, int Rows>
ONEPASS_INLINE Sums totals_of(Floats (&sums)[Rows], Floats (&rests)[Rows]) {
  if constexpr (Rows == 1) {
    Sums all;
    all.sum = sums[0], all.rest = rests[0];
    return all;
  } else {
    Floats next[Rows / 2], next_rests[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const Pair pair = crossed<Level>(sums[2 * r], sums[2 * r + 1]);
      Sums sum;
      sum.sum = pair.low;
      sum.add(pair.high);
      const Pair more = crossed<Level>(rests[2 * r], rests[2 * r + 1]);
      sum.rest += more.low + more.high;
      next[r] = sum.sum, next_rests[r] = sum.rest;
    }
    return totals_of<Level + 1>(next, next_rests);
  }
}

}  // namespace onepass::ONEPASS_ISA
