// segment_copies.h: where the elements of a block of segments are in the tensors, and how they are copied into the
// block and out of it: as one run of memory, in vectors of neighbouring columns, or one by one. The same for numbers
// per segment.
#pragma once

#include "segment_block.h"
#include "segments.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kItemsAhead = 32;  // distance to the item that is prefetched

// The current tile of columns and the current block. A is the accumulator's type.
template <class A>
struct SegmentCopies {
  using P = SegmentProblem;
  static constexpr int L = kLanes<A>;
  const P& p;
  const SegmentPlan& plan;
  SegmentBlock<A> block;
  // The tile: its columns, the pitch of items in a block, the pieces of a segment, and its offset in each tensor.
  int64_t columns = 1, pitch = 1, parts = 1, offsets[P::kTensors] = {}, column_steps[P::kTensors] = {};
  int64_t first = 0, items = 0;  // of the block

  SegmentCopies(const P& problem, const SegmentPlan& of) : p(problem), plan(of) {}

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

  // Items and elements ------------------------------------------------------------------------------------------------

  // Whether the items of the tile are contiguous in memory, as they are in a block.
  bool is_run(int t) const {
    return !p.order && pitch == columns && p.steps[t] == columns && (columns == 1 || column_steps[t] == 1);
  }
  // Calls work(at, k) for each item k of the block; `at` is the offset of its tile in tensor t. With an order items lie
  // anywhere, so later ones are prefetched; kWrites: to be written.
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
  // Calls copy(element, i) for each element: its offset in the tensor, and in the block.
  template <bool kWrites, class Copy>
  ONEPASS_INLINE void for_each_element(int t, Copy copy) const {
    const int64_t across = column_steps[t], wide = columns, each = pitch;
    if (wide == 1) return for_each_item<kWrites>(t, copy);
    for_each_item<kWrites>(t, [=](int64_t at, int64_t k) __attribute__((always_inline)) {
      for (int64_t j = 0; j < wide; ++j) copy(at + j * across, k * each + j);
    });
  }
  // The same for so few neighbouring columns that masked vectors would be slower.
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
  // Calls copy(element, i, count) for vectors of neighbouring columns, and for the remaining columns.
  template <bool kWrites, class Copy>
  ONEPASS_INLINE void for_each_part(int t, Copy copy) const {
    const int64_t each = pitch, full = columns / L * L, rest = columns - full;
    for_each_item<kWrites>(t, [=](int64_t at, int64_t k) __attribute__((always_inline)) {
      for (int64_t j = 0; j < full; j += L) copy(at + j, k * each + j, int64_t(L));
      if (rest) copy(at + full, k * each + full, rest);
    });
  }

  // In and out --------------------------------------------------------------------------------------------------------

  // Whether elements of type T are loaded and stored in vectors.
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
          load_run(Input<T, A>{from + offsets[t] + first * columns}, items * columns, to);
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
  // The elements of the block: in place, if they have type A, are a run, and vectors may be read beyond them; otherwise
  // copied to `to`.
  const A* read(int t, A* to) const {
    const bool is_here = p.types[t] == p.accumulator() && is_run(t);
    if (is_here && (first + items) * columns + kPadding <= p.items * columns) {
      return static_cast<const A*>(p.data[t]) + offsets[t] + first * columns;
    }
    load(t, to);
    return to;
  }
  // If the elements of the next block are a run too, they are prefetched.
  void set_next() {
    const int64_t size = is_run(P::kOfX) ? size_of(p.types[P::kOfX]) : 0;
    const void* const at = size ? p.data[P::kOfX] : block.b;
    block.next = {static_cast<const char*>(at) + (offsets[P::kOfX] + (first + items) * columns) * size, size};
  }
  void load_scores() {
    set_next();
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

  // Numbers per segment -----------------------------------------------------------------------------------------------

  // The offset of the number of segment s.
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
  A read_row(int t, int64_t s, int64_t column) const { return static_cast<const A*>(p.data[t])[row(t, s, column)]; }
};

}  // namespace onepass::ONEPASS_ISA
