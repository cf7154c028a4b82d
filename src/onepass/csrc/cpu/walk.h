// walk.h: walks through the tiles of a call: where each tile is in every tensor, and how it is loaded and stored.
#pragma once

#include "tiles.h"

namespace onepass::ONEPASS_ISA {

// A tile of a call: its first row, and its number of columns or slices.
struct TileItem {
  int64_t offset[kMaxTensors];
  int64_t first, count;
};

// The tiles of a call, computed in A.
template <class A>
struct TileWalk {
  static constexpr int L = kLanes<A>;
  const Layout& layout;
  const TilePlan& plan;
  const Dim n = layout.reduced.innermost(), inner = layout.outer.innermost();
  // How many of the innermost dims are not walked.
  const int of_slice = plan.kind == TileKind::columns || plan.columns > 1 ? 1 : 0;
  const int64_t slices = layout.rows / (of_slice ? inner.size : 1);
  const int64_t slice_elements = layout.n * plan.columns;

  template <class Work>
  void for_each(int64_t begin, int64_t end, Work work) const {
    const bool columns = plan.kind == TileKind::columns, in_slices = plan.kind == TileKind::slices;
    const int64_t tiles = columns ? ceil_div(inner.size, plan.rows) : 1;  // in a slice
    int64_t tile = begin % tiles;
    TileItem item;
    item.first = in_slices ? begin * plan.rows : begin / tiles;
    OffsetCalculator at(layout.outer, item.first, of_slice);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = tile * plan.rows, rest = columns ? inner.size - column : slices - item.first;
      item.count = plan.kind == TileKind::parts ? 1 : rest < plan.rows ? rest : plan.rows;
      for (int t = 0; t < kMaxTensors; ++t) {
        item.offset[t] = at.offset[t] + (columns ? column * inner.strides[t] : 0);
      }
      work(item);
      if (++tile < tiles) continue;
      tile = 0, item.first += in_slices ? plan.rows : 1;
      in_slices ? at.advance(plan.rows) : at.next();
    }
  }

  // For parts, a step of the tile is a step of all parts of a row.
  int64_t steps() const { return ceil_div(layout.n, plan.parts); }
  TileShape shape(const TileItem& item, int64_t steps) const {
    switch (plan.kind) {
      case TileKind::columns: return {1, steps, ceil_div(item.count, L)};
      case TileKind::parts: return {1, steps, plan.parts * plan.columns / L};
      default: return {ceil_div(item.count, L), steps, plan.columns};
    }
  }

  // Whether the slices of a tensor follow one another without gaps.
  bool is_one_run(int tensor) const {
    const int dims = layout.outer.count - of_slice;
    return layout.reduced.count <= 1 && n.strides[tensor] == plan.columns &&
           (dims <= 0 || (dims == 1 && layout.outer.dims[0].strides[tensor] == slice_elements));
  }
  // Calls work(offset, run, index) and work_strided(offset, stride, count, index) for the elements of slices.
  template <class Work, class Strided>
  void for_each_slice_run(int tensor, const TileItem& item, Work work, Strided work_strided) const {
    if (is_one_run(tensor)) return work(item.offset[tensor], item.count * slice_elements, 0);
    OffsetCalculator at(layout.outer, item.first, of_slice);
    for (int64_t r = 0; r < item.count; ++r, at.next()) {
      const int64_t offset = at.offset[tensor], index = r * slice_elements;
      for_each_run(
          layout.reduced, tensor, plan.columns, 0, layout.n,
          [&](int64_t o, int64_t run, int64_t i) { work(offset + o, run, index + i); },
          [&](int64_t o, int64_t stride, int64_t count, int64_t i) {
            work_strided(offset + o, stride, count, index + i);
          });
    }
  }

  // Loads the steps [first, first + count) of a tile. `flat` has room for slices as they are in memory. If a row does
  // not fill the lanes of parts, the rest becomes `fill`.
  template <class In>
  __attribute__((noinline)) void load(const In& x, int tensor, const TileItem& item, int64_t first, int64_t count,
                                      A fill, A* t, A* flat) const {
    const auto load_strided = [&](A* to) {
      return [=, &x](int64_t offset, int64_t stride, int64_t count, int64_t index) {
        for (int64_t i = 0; i < count; ++i) to[index + i] = x[offset + i * stride];
      };
    };
    if (plan.kind == TileKind::columns) {
      const int64_t pitch = ceil_div(item.count, L) * L, stride = n.strides[tensor];
      In from = x + (item.offset[tensor] + first * stride);
      for (int64_t i = 0; i < count; ++i) load_run(from + i * stride, item.count, t + i * pitch);
    } else if (plan.kind == TileKind::parts) {
      const int64_t begin = first * plan.parts, rest = layout.n - begin;
      const int64_t steps = count * plan.parts < rest ? count * plan.parts : rest;
      const In from = x + item.offset[tensor];
      for_each_run(
          layout.reduced, tensor, plan.columns, begin, steps,
          [&](int64_t offset, int64_t run, int64_t index) { load_run(from + offset, run, t + index); },
          [&](int64_t offset, int64_t stride, int64_t size, int64_t index) {
            load_strided(t)(item.offset[tensor] + offset, stride, size, index);
          });
      for (int64_t i = steps * plan.columns; i < count * plan.parts * plan.columns; ++i) t[i] = fill;
    } else {
      const int64_t group = L * slice_elements, groups = ceil_div(item.count, L);
      int64_t g = 0;
      if constexpr (std::is_same_v<typename In::X, A> && In::kIsPlain) {  // no need to copy floats that are in order
        for (; is_one_run(tensor) && g < groups_in_order(item); ++g) {
          const A* const from = x.x + item.offset[tensor] + g * group;
          transpose_in(from, slice_elements, t + g * group, item.count * slice_elements);
        }
      }
      const TileItem rest = rest_of(item, tensor, g * L);
      for_each_slice_run(
          tensor, rest,
          [&](int64_t offset, int64_t run, int64_t index) { load_run(x + offset, run, flat + index, run); },
          load_strided(flat));
      for (int64_t i = rest.count * slice_elements; i < (groups - g) * group; ++i) flat[i] = 0;
      for (const A* from = flat; g < groups; ++g, from += group) transpose_in(from, slice_elements, t + g * group);
    }
  }
  // How many groups are transposed directly from and to the tensor. Transposes of short slices read and write up to a
  // vector behind the last slice; that memory must belong to the tile.
  int64_t groups_in_order(const TileItem& item) const {
    const int64_t behind = slice_elements >= L ? 0 : ceil_div(L, slice_elements);
    return item.count > behind ? (item.count - behind) / L : 0;
  }
  // The slices of a tile from `first` on. If `first` is above 0, the slices of the tensor are one run.
  TileItem rest_of(const TileItem& item, int tensor, int64_t first) const {
    TileItem rest = item;
    rest.first += first, rest.count -= first, rest.offset[tensor] += first * slice_elements;
    return rest;
  }

  // Stores the steps [first, first + count) of a tile. The results are computed just before, from what `From` says.
  template <class From, class Y, class Tile>
  __attribute__((noinline)) void store(Y* y, int tensor, const TileItem& item, int64_t first, int64_t count, Tile& tile,
                                       A* flat, bool streaming) const {
    A* const t = tile.t;
    constexpr bool kInputNan = Tile::kInputNan && std::is_same_v<Y, bfloat16>;
    if constexpr (Tile::template kReplaces<From>) {
      if (plan.kind == TileKind::slices) {
        const int64_t group = L * slice_elements, groups = ceil_div(item.count, L);
        const bool in_order = std::is_same_v<Y, A> && !streaming && is_one_run(tensor);
        int64_t copied = 0;  // groups before those that go through `flat`
        for (int64_t g = 0; g < groups; ++g) {
          tile.begin_results(g, count);
          tile.template group_results<From>(g);
          if constexpr (std::is_same_v<Y, A>) {
            if (in_order && g < groups_in_order(item)) {
              transpose_out(t + g * group, slice_elements, y + item.offset[tensor] + g * group);
              copied = g + 1;
              continue;
            }
          }
          transpose_out(t + g * group, slice_elements, flat + (g - copied) * group);
        }
        return store_slices<kInputNan>(y, tensor, rest_of(item, tensor, copied * L), flat, streaming);
      }
    }
    Y* const to = y + item.offset[tensor];
    const int64_t width = plan.parts * plan.columns;
    const bool columns = plan.kind == TileKind::columns;
    tile.begin_results(0, count);
    if (columns || (layout.reduced.count <= 1 && n.strides[tensor] == plan.columns)) {
      const int64_t stride = columns ? n.strides[tensor] : width, row = columns ? item.count : width;
      const int64_t end = columns ? kEndless : layout.n * plan.columns;  // of a slice
      const bool whole_lines = uintptr_t(to) % kLine == 0 && stride * int64_t(sizeof(Y)) % kLine == 0;
      const bool streams = streaming && whole_lines;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = (first + i) * stride, size = end - begin < row ? end - begin : row;
        tile.template step_results<From>(i, [&](int64_t w, const auto& v) __attribute__((always_inline)) {
          store_results<kInputNan>(to + begin + w * L, size - w * L, v, streams);
        });
      }
      return;
    }
    if constexpr (Tile::template kReplaces<From>) {
      tile.template group_results<From>(0);
      const int64_t begin = first * plan.parts, rest = layout.n - begin;
      store_parts<kInputNan>(to, tensor, begin, count * plan.parts < rest ? count * plan.parts : rest, t, streaming);
    }
  }
  static constexpr int64_t kEndless = int64_t(1) << 62;

  // Stores results that are in slices, as in memory.
  template <bool kInputNan, class Y>
  __attribute__((noinline)) void store_slices(Y* y, int tensor, const TileItem& item, const A* flat,
                                              bool streaming) const {
    for_each_slice_run(
        tensor, item,
        [&](int64_t offset, int64_t run, int64_t index) {
          store_run<kInputNan>(y + offset, run, flat + index, streaming);
        },
        [&](int64_t offset, int64_t stride, int64_t size, int64_t index) {
          store_strided(y + offset, flat + index, stride, size);
        });
  }
  // Stores the results of the steps [first, first + steps) of a slice.
  template <bool kInputNan, class Y>
  __attribute__((noinline)) void store_parts(Y* y, int tensor, int64_t first, int64_t steps, const A* from,
                                             bool streaming) const {
    for_each_run(
        layout.reduced, tensor, plan.columns, first, steps,
        [&](int64_t offset, int64_t run, int64_t index) {
          store_run<kInputNan>(y + offset, run, from + index, streaming);
        },
        [&](int64_t offset, int64_t stride, int64_t size, int64_t index) {
          store_strided(y + offset, from + index, stride, size);
        });
  }
  template <class Y>
  static void store_strided(Y* to, const A* from, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i * stride] = from_acc<Y>(from[i]);
  }

  // Stores at most `count` elements of K vectors. Whole vectors may be streamed, those of 16-bit types in pairs.
  template <bool kInputNan, class Y, int K>
  static ONEPASS_INLINE void store_results(Y* y, int64_t count, const V<A> (&v)[K], bool streaming) {
    if (count >= K * L) {
      with_streaming(streaming, [&](auto is_streaming) __attribute__((always_inline)) {
        if constexpr (std::is_same_v<A, double>) {
          for (int k = 0; k < K; ++k) {
            if constexpr (is_streaming.value) {
              stream_vector(reinterpret_cast<float*>(y + k * L), Vec(v[k]));
            } else {
              store_as(y + k * L, v[k]);
            }
          }
        } else {
          store_vectors<false, false, is_streaming.value, kInputNan>(y, v);
        }
      });
      return;
    }
#pragma GCC unroll 4
    for (int k = 0; k < K && count > 0; ++k, y += L, count -= L) {
      if constexpr (std::is_same_v<A, float>) {
        count >= L ? store_vector<kInputNan>(y, v[k]) : store_tail<kInputNan>(y, count, v[k]);
      } else {
        copy_tail(y, reinterpret_cast<const Y*>(v + k), count < L ? count : L);
      }
    }
  }

  // Loads a tensor with one number per row, of any type.
  template <int kTensor>
  __attribute__((noinline)) void load_rows(const TensorArg& from, const TileItem& item, A* to) const {
    dispatch_type(from.type, [&](auto type) {
      const auto* const data = static_cast<const TypeOf<decltype(type)>*>(from.data);
      for_each_lane(kTensor, item, [=](int64_t offset, int64_t lane) __attribute__((always_inline)) {
        to[lane] = A(to_acc(data[offset]));
      });
    });
  }
  // Calls work(offset in the tensor, lane) for each row of a tile. Lanes are counted over all sequences.
  template <class Work>
  ONEPASS_INLINE void for_each_lane(int tensor, const TileItem& item, Work work) const {
    const int64_t step = of_slice ? inner.strides[tensor] : 0;
    if (plan.kind != TileKind::slices) {
      const int64_t rows = plan.kind == TileKind::columns ? item.count : plan.columns;
      for (int64_t j = 0; j < rows; ++j) work(item.offset[tensor] + j * step, j);
      return;
    }
    OffsetCalculator at(layout.outer, item.first, of_slice);
    for (int64_t r = 0; r < item.count; ++r, at.next()) {
      for (int64_t j = 0; j < plan.columns; ++j) {
        work(at.offset[tensor] + j * step, (r / L * plan.columns + j) * L + r % L);
      }
    }
  }
};

}  // namespace onepass::ONEPASS_ISA
