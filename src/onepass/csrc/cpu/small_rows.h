// small_rows.h: short rows of unit stride as vectors of floats. A group has as many rows as a vector has lanes, and
// several groups are processed together. The work per row (the maximum and the sum over lanes, 1 / l or log(l)) is then
// done for a whole group at once, one row per lane.
#pragma once

#include "rows_simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int kMaxRowGroups = 4;                                  // groups processed together, if their rows fit
constexpr int64_t kRowBuffer = kWidth * (kMaxSmallRow + kWidth);  // floats; the buffer is on the stack

// Groups of kWidth rows. There are `count` rows; the rest of the last group may be read. A row has `whole` vectors and
// the first lanes of one more. The other lanes of that vector may be read too.
template <class In>
struct RowGroups {
  In x;
  int64_t n, x_stride;
  int count;
  int64_t whole, vectors;
  int64_t ahead;  // elements from a row to a row of the next groups, which is prefetched
  IntVec tail_mask;

  // Calls `use` with the number of vectors of a row as a constant, if it is at most 4; otherwise with 0.
  template <class Use>
  ONEPASS_INLINE auto with_vectors(Use use) const {
    switch (vectors) {
      case 1: return use(std::integral_constant<int, 1>());
      case 2: return use(std::integral_constant<int, 2>());
      case 3: return use(std::integral_constant<int, 3>());
      case 4: return use(std::integral_constant<int, 4>());
      default: return use(std::integral_constant<int, 0>());
    }
  }
  ONEPASS_INLINE Vec load1(int r, int64_t v) const { return x.load1(r * x_stride + v * kWidth); }
  ONEPASS_INLINE Vec mask(Vec v) const { return tail_mask ? v : broadcast(-kInf<float>); }
  ONEPASS_INLINE void load4(int r, int64_t v, Vec (&to)[4]) const { x.load(r * x_stride + v * kWidth, to); }

  // The maxima of a group of rows of kVecs vectors.
  template <int kVecs>
  __attribute__((noinline)) Vec maxima(int first, std::integral_constant<int, kVecs>) const {
    const int64_t vecs = kVecs ? kVecs : vectors;
    Vec top[kWidth];
#pragma GCC unroll 1
    for (int lane = 0; lane < kWidth; ++lane) {
      const int r = first + lane;
      Vec a = mask(load1(r, vecs - 1)), b = a;
      int64_t v = 0;
      for (; !kVecs && v + 4 <= whole; v += 4) {
        Vec four[4];
        load4(r, v, four);
        a = max(max(four[0], four[1]), a), b = max(max(four[2], four[3]), b);
      }
      for (; v + 1 < vecs; ++v) a = max(load1(r, v), a);
      top[lane] = max(a, b);
    }
    return transpose_reduce(top, max);
  }
};

// A function of short rows. Each step is done for all groups before the next step, because the steps of one group
// depend on each other.
template <class Epilogue, class In, class Y>
struct SmallRows : RowGroups<In> {
  using Exp = ExpFor<Y>;
  using Groups = RowGroups<In>;
  using Groups::load1, Groups::load4, Groups::mask;
  using Groups::x, Groups::n, Groups::x_stride, Groups::count, Groups::whole, Groups::vectors, Groups::ahead;
  static constexpr bool kReduces = Epilogue::kOnePerRow;
  static constexpr bool kStoresElements = !kReduces && !Epilogue::kFromExp;  // in the buffer, not exponentials
  static constexpr bool kDeinterleave = In::kDeinterleave;
  // Exponentials that are only divided by their own sum are relative to the cheapest base.
  static constexpr bool kUsesBase = Epilogue::kFromExp && !ExpBase::kSubtractsMax;
  Y* y;
  int64_t y_stride;
  float* buffer;
  // For each row: the maximum, and two numbers, first of its base and, once the sum is known, of its epilogue.
  alignas(64) float m[kMaxRowGroups * kWidth], high[kMaxRowGroups * kWidth], low[kMaxRowGroups * kWidth];
  int64_t sum_offset;
  const float* sinks = nullptr;  // one more element for each row, without a result
  float nothing = kNan<float>;   // the results of a row that has only -inf

  ONEPASS_INLINE float* buffer_of(int r, int64_t vecs) const { return buffer + r * vecs * kWidth; }

  ONEPASS_INLINE ExpBase base(int r) const {
    if constexpr (kUsesBase) return {broadcast(0), broadcast(low[r]), broadcast(high[r])};
    return {broadcast(m[r])};
  }
  // The exponentials of vectors, which are stored to `to`, their places in the buffer.
  template <class Base, int K>
  ONEPASS_INLINE void exp_and_store(Vec (&e)[K], const Base& base, float* const (&to)[K]) const {
    if constexpr (kStoresElements) {
      for (int k = 0; k < K; ++k) store_vector(to[k], e[k]);
    }
    if constexpr (kUsesBase) {
      Exp::apply(e, base);
    } else {
      for (int k = 0; k < K; ++k) e[k] -= base_of(base, k).max;
      Exp::apply(e);
    }
    if constexpr (Epilogue::kFromExp) {
      for (int k = 0; k < K; ++k) store_vector(to[k], e[k]);
    }
  }

  // The exponentials of K vectors: kOfRow vectors of each row from `first` on, from vector v on. `masked`: the last
  // vector of a row has only its first lanes.
  template <int kOfRow, int K>
  ONEPASS_INLINE void exp_of_rows(int first, int64_t v, bool masked, int64_t vecs, Vec (&e)[K]) const {
    ExpBase bases[K];
    float* to[K];
    for (int k = 0; k < K; ++k) {
      const int row = first + k / kOfRow;
      const int64_t vec = v + k % kOfRow;
      e[k] = load1(row, vec), bases[k] = base(row), to[k] = buffer_of(row, vecs) + vec * kWidth;
      if (masked && k % kOfRow == kOfRow - 1) e[k] = mask(e[k]);
    }
    exp_and_store(e, bases, to);
  }

  // The sums of a group's scaled exponentials: first four vectors of a row at a time, then the remaining vectors, four
  // rows at a time. The exponentials (for log_softmax the elements) are stored to the buffer.
  template <int kVecs>
  __attribute__((noinline)) CompensatedVec sums(int first, std::integral_constant<int, kVecs>) const {
    Vec l[kWidth], errors[kWidth];
    int64_t v = 0;
    if constexpr (kVecs) {
      constexpr int kRows = 4 / kVecs;
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += kRows) {
        for (int k = 0; k < kRows; ++k) x.fetch((first + r + k) * x_stride + ahead, n);
        Vec e[kRows * kVecs];
        exp_of_rows<kVecs>(first + r, 0, true, kVecs, e);
        for (int k = 0; k < kRows; ++k) {
          l[r + k] = e[k * kVecs], errors[r + k] = Vec{};
          for (int i = 1; i < kVecs; ++i) l[r + k] += e[k * kVecs + i];
        }
      }
      return sum_lanes(l, errors);
    }
#pragma GCC unroll 1
    for (int r = 0; r < kWidth; ++r) {
      x.fetch((first + r) * x_stride + ahead, n);
      const ExpBase row_base = base(first + r);
      ExpSum<Y> total;
      for (v = 0; v + 4 <= whole; v += 4) {
        float* const to = buffer_of(first + r, vectors) + v * kWidth;
        Vec e[4];
        load4(first + r, v, e);
        exp_and_store(e, row_base, {to, to + kWidth, to + 2 * kWidth, to + 3 * kWidth});
        total.add((e[0] + e[1]) + (e[2] + e[3]));
      }
      l[r] = total.sum;
      if constexpr (sizeof(Y) != 2) errors[r] = total.error;
    }
    for (; v < vectors; ++v) {
#pragma GCC unroll 1
      for (int r = 0; r < kWidth; r += 4) {
        Vec e[4];
        exp_of_rows<1>(first + r, v, v >= whole, vectors, e);
        for (int k = 0; k < 4; ++k) {
          if constexpr (sizeof(Y) == 2) {
            l[r + k] += e[k];
          } else {
            CompensatedExpSum total = {l[r + k], errors[r + k]};
            total.add(e[k]);
            l[r + k] = total.sum, errors[r + k] = total.error;
          }
        }
      }
    }
    for (Vec& each : l) each -= sizeof(Y) == 2 ? 0 : CompensatedExpSum::kStart;
    return sum_lanes(l, errors);
  }
  static ONEPASS_INLINE CompensatedVec sum_lanes(Vec (&l)[kWidth], Vec (&errors)[kWidth]) {
    if constexpr (sizeof(Y) == 2) {
      return {transpose_reduce(l, add), Vec{}};
    } else {
      return transpose_sum(l, errors);
    }
  }

  // Replaces a group's sums of scaled exponentials by the numbers of its epilogue. Returns whether any row has no
  // finite sum or maximum. `undefined` is not 0 for such rows: 2 if the row has only -inf, and otherwise 1.
  ONEPASS_INLINE bool prepare_epilogue(int first, Vec top, CompensatedVec l, float* undefined) {
    const Vec finite = (l.sum - l.sum) + (top - top) * 0.0f, no_sum = l.sum == Vec{} ? broadcast(2) : broadcast(1);
    const Vec is_nan = finite == finite ? Vec{} : no_sum;
    store_vector(undefined + first, is_nan);
    HighLow numbers;
    if constexpr (Epilogue::kFromExp) {
      numbers = sizeof(Y) == 2 ? HighLow{1.0f / l.sum, Vec{}} : reciprocal(l);
    } else {
      l.sum *= kExpUnscale, l.error *= kExpUnscale;
      numbers = kReduces && sum_offset ? HighLow{l.sum + l.error, Vec{}} : log_sum_exp(load_vector(m + first), l);
    }
    store_vector(high + first, numbers.high);
    if constexpr (!kReduces && !(Epilogue::kFromExp && sizeof(Y) == 2)) store_vector(low + first, numbers.low);
    return reduce_max(is_nan) > 0;
  }

  // The tail vector of a row may be stored whole if results are contiguous: it then also writes to the beginning of the
  // next row, which is stored later.
  template <int kVecs>
  __attribute__((noinline)) void finish(bool streaming, bool buffered, std::integral_constant<int, kVecs> of) const {
    const int64_t beyond = count * n - vectors * kWidth;  // the last row all of whose vectors fit begins at most here
    const int64_t overrunning = buffered || whole == vectors   ? count
                                : y_stride == n && beyond >= 0 ? beyond / n + 1
                                                               : 0;
    with_streaming(streaming, [&](auto is_streaming) {
      int r = 0;
      for (; r < overrunning; ++r) this->template finish_row<is_streaming.value, true>(r, of);
      for (; r < count; ++r) this->template finish_row<is_streaming.value, false>(r, of);
    });
  }
  template <bool kStreaming, bool kOverrun, int kVecs>
  ONEPASS_INLINE void finish_row(int r, std::integral_constant<int, kVecs>) const {
    const int64_t vecs = kVecs ? kVecs : vectors;
    const Epilogue epilogue = {broadcast(high[r]), broadcast(low[r])};
    Y* const to = y + r * y_stride;
    const float* const from = buffer_of(r, vecs);
    int64_t v = 0;
    for (; !kVecs && v + 4 <= whole; v += 4) {
      Vec e[4];
      load_vectors<false>(from + v * kWidth, e);
      epilogue.template apply<Y>(e);
      store_vectors<kDeinterleave, Epilogue::kFromExp, kStreaming>(to + v * kWidth, e);
    }
    for (; v < vecs; ++v) {
      Vec e[1] = {load_vector(from + v * kWidth)};
      epilogue.template apply<Y>(e);
      if (kStreaming) {
        stream_vector(to + v * kWidth, e[0]);
      } else if (kOverrun || v < whole) {
        store_vector(to + v * kWidth, e[0]);
      } else {
        store_tail(to + v * kWidth, n - v * kWidth, e[0]);
      }
    }
  }

  void row_alone(int r) const {
    row_by_tile<Epilogue>(x + r * x_stride, y + r * y_stride, n, sum_offset, sinks ? sinks[r] : -kInf<float>, nothing);
  }
  // Adds the exponentials of a group's sinks.
  void add_sinks(int first, CompensatedVec& l) const {
    Vec e[1] = {load_vector(sinks + first)};
    if constexpr (kUsesBase) {
      Exp::apply(e, ExpBase{Vec{}, load_vector(low + first), load_vector(high + first)});
    } else {
      e[0] -= load_vector(m + first);
      Exp::apply(e);
    }
    l.add(e[0]);
  }

  // `buffered`: results are streamed from the buffer, where they replace the exponentials.
  __attribute__((noinline)) void run(bool streaming, bool buffered) {
    Vec top[kMaxRowGroups], largest{};
    CompensatedVec l[kMaxRowGroups];
    alignas(64) float undefined[kMaxRowGroups * kWidth];
    const int groups = (count + kWidth - 1) / kWidth;
    for (int g = 0; g < groups; ++g) {
      top[g] = this->with_vectors([&](auto vecs) { return this->maxima(g * kWidth, vecs); });
      if (sinks) top[g] = max(load_vector(sinks + g * kWidth), top[g]);
      const Vec finite = top[g] - top[g] == Vec{} ? top[g] : Vec{};
      if constexpr (kUsesBase) {
        const ExpBase base = ExpBase::of(finite);
        store_vector(low + g * kWidth, base.lowest), store_vector(high + g * kWidth, base.magic);
        largest = max(max(finite, -finite), largest);
      } else {
        store_vector(m + g * kWidth, finite);
      }
    }
    if (kUsesBase && exceeds_base(reduce_max(largest))) {
      for (int r = 0; r < count; ++r) row_alone(r);
      return;
    }
    for (int g = 0; g < groups; ++g) {
      l[g] = this->with_vectors([&](auto vecs) { return this->sums(g * kWidth, vecs); });
      if (sinks) add_sinks(g * kWidth, l[g]);
    }
    bool any = false;
    for (int g = 0; g < groups; ++g) any |= prepare_epilogue(g * kWidth, top[g], l[g], undefined);
    if constexpr (kReduces) {
      for (int r = 0; r < count; ++r) {
        Y* const to = y + r * y_stride;
        if (any && undefined[r] != 0) {
          row_alone(r);
        } else if (sum_offset) {
          to[0] = from_acc<Y>(m[r]), to[sum_offset] = from_acc<Y>(high[r]);
        } else {
          to[0] = from_acc<Y>(high[r]);
        }
      }
    } else {
      Y* const to = y;
      if (buffered) y = reinterpret_cast<Y*>(buffer);
      this->with_vectors([&](auto vecs) { this->finish(streaming, buffered, vecs); });
      for (int r = 0; any && r < count; ++r) {
        // As in torch, also if the maximum is infinite.
        if (undefined[r] != 0) fill(y + r * y_stride, n, undefined[r] == 2 ? nothing : kNan<float>);
      }
      if (buffered) stream_bytes(to, y, count * n * int64_t(sizeof(Y)));
    }
  }
};

// The rows [first, first + count) of the `rows` rows of a call, or of their negatives. x and y point to row 0.
template <class Epilogue, class In, class Y>
void small_rows(In x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t first, int64_t count, int64_t rows,
                int64_t sum_offset, bool negated, bool streaming) {
  alignas(64) float buffer[kRowBuffer];
  SmallRows<Epilogue, In, Y> group;
  group.n = n, group.y_stride = y_stride, group.sum_offset = sum_offset, group.buffer = buffer;
  group.whole = n / kWidth, group.vectors = (n + kWidth - 1) / kWidth;
  group.tail_mask = lane_mask(n - (group.vectors - 1) * kWidth);
  const int64_t padded = group.vectors * kWidth, end = (rows - 1) * x_stride + n, bytes = n * int64_t(sizeof(Y));
  const int64_t fit = kRowBuffer / (kWidth * padded), most = kWidth * (fit < kMaxRowGroups ? fit : kMaxRowGroups);
  const bool whole_lines = kHasStreamingStores && streaming && bytes % kLine == 0 && uintptr_t(y) % kLine == 0 &&
                           y_stride * int64_t(sizeof(Y)) % kLine == 0;
  const bool buffered = kHasStreamingStores && streaming && !whole_lines && y_stride == n;
  for (int64_t done = 0; done < count; done += group.count) {
    const int64_t at = first + done, remaining = count - done;
    const auto readable = [&](int64_t rows_read) {
      return x_stride >= 0 && (at + rows_read - 1) * x_stride + padded <= end;
    };
    group.x = x + at * x_stride, group.x_stride = x_stride, group.y = y + at * y_stride;
    group.count = int(remaining < most ? remaining : most);
    group.ahead = group.count * x_stride;
    if (!negated && !readable((group.count + kWidth - 1) / kWidth * kWidth)) {
      group.count = int(remaining < kWidth ? remaining : kWidth);
    }
    if (!negated && readable(kWidth)) {
      group.run(whole_lines, buffered);
    } else {  // the memory behind these rows must not be read
      alignas(64) typename In::X copy[kRowBuffer];
      std::memset(static_cast<void*>(copy), 0, sizeof *copy * size_t(up_to(group.count, kWidth) * padded));
      for (int64_t r = 0; r < group.count; ++r) {
        const auto* const row = group.x.x + r * x_stride;
        negated ? copy_negated(row, copy + r * padded, n)
                : void(std::memcpy(copy + r * padded, row, size_t(n) * sizeof *copy));
      }
      group.x.x = copy, group.x_stride = padded;
      group.run(whole_lines, buffered);
    }
  }
}

}  // namespace onepass::ONEPASS_ISA
