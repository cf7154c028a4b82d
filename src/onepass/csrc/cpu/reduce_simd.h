// reduce_simd.h: reductions over the lanes of a vector, for one row or for one row per lane, and compensated sums.
#pragma once

#include "simd.h"

namespace onepass::ONEPASS_ISA {

template <int Distance, size_t... Lane>
ONEPASS_INLINE Vec swap_lanes(Vec v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, int(Lane ^ Distance)...);
}
// Merges all lanes of a vector in the same order as transpose_reduce, so that a row's sum has the same bits in both:
// each lane with the one that is 2 lanes away, then 1, 4 and 8.
template <int Level = 0, class Merge>
ONEPASS_INLINE float reduce_lanes(Vec v, Merge merge) {
  if constexpr (1 << Level == kWidth) {
    return v[0];
  } else {
    constexpr int distance = Level < 2 ? 2 >> Level : 1 << Level;
    return reduce_lanes<Level + 1>(merge(v, swap_lanes<distance>(v, Lanes())), merge);
  }
}
ONEPASS_INLINE float reduce_max(Vec v) { return reduce_lanes(v, max); }
ONEPASS_INLINE Vec add(Vec a, Vec b) { return a + b; }

ONEPASS_INLINE DoubleVec to_double(Vec v) { return __builtin_convertvector(v, DoubleVec); }
ONEPASS_INLINE Vec to_float(DoubleVec v) { return __builtin_convertvector(v, Vec); }
ONEPASS_INLINE double reduce_sum(DoubleVec v) {
  double sum = 0;
  for (int i = 0; i < kWidth; i += 4) sum += (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3]);
  return sum;
}

// A number in each lane, as the sum of two floats.
struct HighLow {
  Vec high, low;
};

// A sum in each lane, and the rounding errors of its additions.
struct CompensatedVec {
  Vec sum{}, error{};
  ONEPASS_INLINE void add(Vec e) { add_compensated(sum, error, e); }
  double total() const { return reduce_sum(to_double(sum) + to_double(error)); }
};

// Reduces kWidth vectors, one per row, to one vector with one row per lane: a transpose and a reduction at once. At
// each level two rows are shuffled into a low and a high vector, which are merged next. `row_lane` is the lane of (a,
// b) that goes to a lane of the low vector; for the high vector it is `up` lanes further. Level 0 is an unpack: one
// instruction.
constexpr int row_lane(int level, int lane) {
  const int of_b = (lane >> level & 1) * kWidth;
  return level == 0 ? (lane & ~3) + (lane >> 1 & 1) + of_b : (lane & ~(1 << level)) + of_b;
}
template <int Level, size_t... Lane>
ONEPASS_INLINE HighLow shuffle_rows(Vec a, Vec b, std::index_sequence<Lane...>) {
  constexpr int up = Level < 2 ? 2 : 1 << Level;
  return {__builtin_shufflevector(a, b, (row_lane(Level, Lane) + up)...),
          __builtin_shufflevector(a, b, row_lane(Level, Lane)...)};
}
template <int Level = 0, int Rows, class Merge>
ONEPASS_INLINE Vec transpose_reduce(Vec (&rows)[Rows], Merge merge) {
  if constexpr (Rows == 1) {
    return rows[0];
  } else {
    Vec next[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const HighLow pair = shuffle_rows<Level>(rows[2 * r], rows[2 * r + 1], Lanes());
      next[r] = merge(pair.low, pair.high);
    }
    return transpose_reduce<Level + 1>(next, merge);
  }
}
// transpose_reduce for compensated sums.
template <int Level = 0, int Rows>
ONEPASS_INLINE CompensatedVec transpose_sum(Vec (&sums)[Rows], Vec (&errors)[Rows]) {
  if constexpr (Rows == 1) {
    return {sums[0], errors[0]};
  } else {
    Vec next[Rows / 2], next_errors[Rows / 2];
    for (int r = 0; r < Rows / 2; ++r) {
      const HighLow sum = shuffle_rows<Level>(sums[2 * r], sums[2 * r + 1], Lanes());
      const HighLow error = shuffle_rows<Level>(errors[2 * r], errors[2 * r + 1], Lanes());
      CompensatedVec total = {sum.low, Vec{}};
      total.add(sum.high);
      total.error += error.low + error.high;
      next[r] = total.sum, next_errors[r] = total.error;
    }
    return transpose_sum<Level + 1>(next, next_errors);
  }
}

// Whether any bit of any lane is set.
template <class A>
ONEPASS_INLINE bool any_lane(V<A> marks) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(marks), __m512i(marks)) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256(__m256i(marks), __m256i(marks));
#endif
  typedef int64_t Words __attribute__((vector_size(sizeof(Vec))));
  const Words bits = Words(marks);
  int64_t any = 0;
  for (int i = 0; i < kLanes<int64_t>; ++i) any |= bits[i];
  return any != 0;
}

}  // namespace onepass::ONEPASS_ISA
