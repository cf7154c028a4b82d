// column_view.h: the view of a call whose rows are not one piece of memory each, for the tiers that take tiles of
// columns in place, and the plan of one. Pure: no torch, no CUDA.
#pragma once

#include <string>

#include "../core/backward_layout.h"
#include "../core/problem.h"
#include "../cuda/kernels/column_params.cuh"
#include "rows.h"

namespace onepass {

// A tensor of a call. `vectors`: its elements come and go by vectors, as many as the first one's.
struct ColumnTensor {
  uint64_t address;
  int size;  // bytes of an element
  bool vectors;
};

constexpr int kNarrow = 8;           // vectors of a tile of less than two lines of the cache
constexpr int kColumnStatic = 1024;  // bytes of shared memory that kernels of columns declare at most
constexpr int kMaxTurn = 1024;       // threads of a block, which take a whole number of lines of a slab at a time

struct ColumnView {
  bool served = false;  // not of more dims than kernels take
  bool strided = false;
  Tiles tiles = {};                              // what does not follow from a plan
  int full = 1;                                  // elements of a vector of 16 bytes of the widest type
  int tile = 0;                                  // the widest vectors of a tile, 0 where it cannot be cut into tiles
  int slab = 0;                                  // of a slab, 0 where it is none
  bool slab_begins = false, slab_whole = false;  // do all slabs begin with a vector; and end with one?

  int64_t n() const { return tiles.n; }
  int64_t inner() const { return tiles.inner; }
  // Threads of the shortest turn of a slab, in vectors of `vector`.
  int64_t turn(int vector) const {
    int64_t common = vector;
    while (inner() % common) common /= 2;
    return inner() / common;
  }
};

// `outer` and `reduced` as TileDims has them, the fastest last; sizes of 1 are not among them.
inline ColumnView column_view(TileDims outer, const TileDims& reduced, const ColumnTensor* tensors, int count) {
  ColumnView view;
  view.served = true;
  Tiles& tiles = view.tiles;
  tiles.n = tiles.inner = 1;
  for (int d = 0; d < reduced.count; ++d) tiles.n *= reduced.sizes[d];
  int widest = 1;
  for (int t = 0; t < count; ++t) widest = tensors[t].vectors && tensors[t].size > widest ? tensors[t].size : widest;
  view.full = 16 / widest;
  const auto all = [&](auto test) {
    for (int t = 0; t < count; ++t) {
      if (tensors[t].vectors && !test(t)) return false;
    }
    return true;
  };
  const int last = outer.count - 1, along = reduced.count - 1;
  const bool columns = reduced.count <= 1 && outer.count && all([&](int t) { return outer.steps[t][last] == 1; });
  const bool rows = reduced.count == 1 && all([&](int t) { return reduced.steps[t][along] == 1; });
  if (columns) {
    tiles.inner = outer.sizes[last];
    for (int t = 0; t < count; ++t) {
      tiles.steps[t] = tensors[t].vectors ? (reduced.count ? reduced.steps[t][along] : 0) : outer.steps[t][last];
    }
    --outer.count;
  } else if (rows) {
    for (int t = 0; t < count; ++t) tiles.steps[t] = tensors[t].vectors ? 1 : 0;
  } else {
    view.strided = true;
    for (int d = 0; d < outer.count; ++d) tiles.inner *= outer.sizes[d];
    tiles.reduced = reduced;
  }
  tiles.outer = outer;
  int64_t rest = 1;
  for (int d = 0; d < outer.count; ++d) rest *= outer.sizes[d];
  tiles.plane_stride = view.strided ? tiles.inner : tiles.inner * rest;
  if (view.strided) return view;

  const auto first = [&](int t) { return tensors[t].address / uint64_t(tensors[t].size); };
  const auto multiples = [&](int t, int width) {
    bool yes = first(t) % uint64_t(width) == 0;
    for (int d = 0; d < outer.count; ++d) yes &= outer.steps[t][d] % width == 0;
    return yes;
  };
  if (columns) {
    view.tile = view.full;
    while (view.tile > 1 && (view.tile > tiles.inner ||
                             !all([&](int t) { return multiples(t, view.tile) && tiles.steps[t] % view.tile == 0; })))
      view.tile /= 2;
  }
  if (all([&](int t) { return tiles.n == 1 || tiles.steps[t] == tiles.inner; })) {
    int lead = 0;
    while (!tensors[lead].vectors) ++lead;
    const auto alike = [&](int t, int width) {
      bool yes = (first(t) - first(lead)) % uint64_t(width) == 0;
      for (int d = 0; d < outer.count; ++d) yes &= (outer.steps[t][d] - outer.steps[lead][d]) % width == 0;
      return yes;
    };
    view.slab = view.full;
    while (view.slab > 1 && (view.slab > tiles.n * tiles.inner || !all([&](int t) { return alike(t, view.slab); })))
      view.slab /= 2;
    view.slab_begins = all([&](int t) { return multiples(t, view.slab); });
    view.slab_whole = view.slab_begins && tiles.n * tiles.inner % view.slab == 0;
  }
  return view;
}

// Have tiles room for the dims of a call, or of a gradient?
template <class AnyLayout>
bool fits_tiles(const AnyLayout& layout) {
  return layout.outer.count <= kTileDims && layout.reduced.count <= kTileDims;
}

// Of a forward call.
inline ColumnView column_view(const Layout& layout, DType x, DType y, uint64_t x_address, uint64_t y_address,
                              bool reduces) {
  if (!fits_tiles(layout)) return {};
  const auto dims = [](const Bag& bag) {
    TileDims made = {};
    made.count = bag.count;
    for (int d = 0; d < bag.count; ++d)
      made.sizes[d] = bag.dims[d].size, made.steps[0][d] = bag.dims[d].x_stride,
      made.steps[1][d] = bag.dims[d].y_stride;
    return made;
  };
  const ColumnTensor tensors[] = {{x_address, size_of(x), true}, {y_address, size_of(y), !reduces}};
  return column_view(dims(layout.outer), dims(layout.reduced), tensors, 2);
}
inline ColumnView column_view(const ForwardProblem& call) {
  return column_view(call.layout, call.type(kX), call.type(kY), call.address(kX), call.address(kY),
                     call.is_reduction());
}

// Of a gradient. `even`: the result's gradient has one value for a column and its neighbours.
inline bool grad_is_broadcast_in_tile(const BackwardProblem& call) {
  if (call.function == Function::logsumexp) return false;
  const BackwardLayout& layout = call.layout;
  for (int d = 0; d < layout.reduced.count; ++d) {
    if (layout.reduced.dims[d].strides[kGrad]) return false;
  }
  return !layout.outer.count || layout.outer.innermost().strides[kGrad] == 0;
}
inline ColumnView column_view(const BackwardProblem& call) {
  if (!fits_tiles(call.layout)) return {};
  const auto dims = [](const BackwardBag& bag) {
    TileDims made = {};
    made.count = bag.count;
    for (int d = 0; d < bag.count; ++d) {
      made.sizes[d] = bag.dims[d].size;
      for (int t = 0; t < kBackwardTensors; ++t) made.steps[t][d] = bag.dims[d].strides[t];
    }
    return made;
  };
  const int size = size_of(call.type(kGrad));
  const bool alike = call.function != Function::logsumexp && !grad_is_broadcast_in_tile(call);
  const ColumnTensor tensors[] = {{call.address(kDx), size_of(call.type(kDx)), true},
                                  {call.address(kSaved), size_of(call.type(kSaved)), true},
                                  {call.address(kGrad), size, alike},
                                  {call.address(kLse), size, false}};
  return column_view(dims(call.layout.outer), dims(call.layout.reduced), tensors, call.tensors[kLse].data ? 4 : 3);
}

// Of numbers below 2^31.
inline FastDivisor divider_of(int64_t by) {
  if (by >> 31) return {0, 0};
  unsigned shift = 31;
  while (int64_t(1) << (shift - 31) < by) ++shift;
  return {unsigned(((uint64_t(1) << shift) + uint64_t(by) - 1) / uint64_t(by)), shift};
}

// Of vectors `turn` apart: those whose first element is no further than `last`.
inline VecCount counted(int64_t last, int64_t turn, int none) {
  if (last < 0) return {0, none};
  return {int(last / turn), int(last % turn) + 1};
}

// What a plan makes of a view. Bytes of shared memory are in parts of `part` bytes.
inline Tiles tiles_of(const ColumnView& view, const CudaPlan& plan) {
  Tiles tiles = view.tiles;
  const bool slab = plan.access == VecAccess::slab || plan.access == VecAccess::slab_aligned;
  tiles.threads_x = plan.threads_x(), tiles.threads_y = plan.threads_y();
  tiles.tile_cols = slab ? int(tiles.inner) : tiles.threads_x * plan.vec_size;
  tiles.partials = slab ? tiles.threads_x * plan.vec_size / tiles.tile_cols : tiles.threads_y;
  // So that lanes that read parts of a column find them in other banks of shared memory.
  tiles.partial_stride = slab || tiles.partials == 1 ? tiles.tile_cols : int(up_to(tiles.tile_cols, 4)) + 4;
  tiles.tiles_per_slice = ceil_div(tiles.inner, int64_t(tiles.tile_cols));
  tiles.slices = 1;
  if (!view.strided) {
    for (int d = 0; d < tiles.outer.count; ++d) tiles.slices *= tiles.outer.sizes[d];
  }
  tiles.is_narrow = !slab && !view.strided && tiles.tiles_per_slice > 1 && tiles.tile_cols <= kNarrow * view.full;
  const int64_t before = view.slab_begins ? 0 : plan.vec_size - 1;  // elements of a vector before a slab, at most
  const int64_t size = slab ? view.n() * view.inner() : view.n();
  const int64_t turn = int64_t(plan.blocks_per_tile()) * (slab ? plan.threads_x() * plan.vec_size : plan.threads_y());
  tiles.vecs_per_thread_max = int(ceil_div(slab ? size + before : size, turn));
  tiles.existing = counted(size - 1, turn, 0);
  tiles.full = counted(size - (slab ? plan.vec_size : 1), turn, -plan.vec_size);
  for (int t = 0; t < kTileTensors; ++t) tiles.vec_strides[t] = slab ? turn : turn * tiles.steps[t];
  tiles.by_tiles_per_slice = divider_of(tiles.tiles_per_slice),
  tiles.by_line = divider_of(slab ? tiles.tile_cols : tiles.threads_x);
  tiles.smem_vecs = plan.keeps_vecs_in_smem() ? plan.smem_vecs : 0;
  const int most = tiles.partials > plan.blocks_per_tile() ? tiles.partials : plan.blocks_per_tile();
  while (tiles.merge_threads_log2 < 5 && 1 << tiles.merge_threads_log2 < most &&
         (2 << tiles.merge_threads_log2) * tiles.tile_cols <= plan.threads())
    ++tiles.merge_threads_log2;
  tiles.merge_threads = 1 << tiles.merge_threads_log2;
  return tiles;
}
// Of the vectors that wait there, `vector` bytes each with all operands.
inline int64_t waiting_bytes(const CudaPlan& plan, int vector) {
  return int64_t(plan.prefetches() ? plan.vecs_per_thread() : plan.smem_vecs) * plan.max_threads() * vector;
}
// Numbers that a thread tells of a column that it shares: of a gradient its sum, else its maximum too where sums may be
// relative to that (kOwnTops, cuda/column_state.cuh). `half`: of results.
inline int numbers_told(const CudaPlan& plan, bool half, bool gradient) {
  return gradient ? 1 : plan.in_grid() || (half && plan.blocks_per_tile() == 1) ? 2 : 1;
}
// Of what threads that share columns tell each other, in numbers of `scalar` bytes: `told` of each part; of a whole
// column one for a gradient, else three, and the block's maximum where threads do not tell theirs.
inline int64_t meeting_bytes(int64_t pitch, int64_t parts, int boxes, int scalar, bool gradient, int told) {
  const int64_t whole = up_to(pitch * (gradient ? 1 : 3) * scalar, 16), tops = gradient ? 0 : up_to(pitch * scalar, 16);
  const int64_t part = up_to(parts * scalar, 16);
  return whole + part + (told > 1 ? part : tops) + 2 * boxes * pitch * (gradient ? 1 : 2) * scalar;
}
inline int64_t column_bytes(const Tiles& tiles, const CudaPlan& plan, int scalar, bool gradient, bool half) {
  if (plan.blocks_per_tile() == 1 && tiles.partials == 1 && plan.access != VecAccess::slab &&
      plan.access != VecAccess::slab_aligned)
    return tiles.smem_vecs_bytes;
  const int boxes = plan.tier == Tier::columns && plan.blocks_per_tile() > 1 ? plan.blocks_per_tile() : 0;
  return tiles.smem_vecs_bytes + meeting_bytes(tiles.tile_cols, tiles.partials * tiles.partial_stride, boxes, scalar,
                                               gradient, numbers_told(plan, half, gradient));
}

// Why a plan cannot serve a view; empty where it can.
inline std::string column_refusal(const ColumnView& view, const CudaPlan& plan, const Gpu& gpu) {
  const auto say = [](const char* words, int64_t most) { return words + std::to_string(most); };
  const bool slab = plan.access == VecAccess::slab || plan.access == VecAccess::slab_aligned;
  if (!plan.of_columns()) return "rows that are not one piece of memory each have the tiers of columns";
  if (view.strided != (plan.access == VecAccess::strided))
    return "access strided is for strides that columns do not have";
  const int widest = view.strided ? 1 : slab ? view.slab : view.tile;
  if (!view.strided && !widest) return slab ? "these columns are no slab" : "these columns are in no tiles";
  if (plan.vec_size > widest) return say("the addresses or strides of this call allow vectors of ", widest);
  if (plan.access == VecAccess::aligned && view.inner() % plan.vec_size)
    return "access aligned: the columns are no whole vectors";
  if (plan.access == VecAccess::slab_aligned && !(view.slab_whole && plan.vec_size <= view.slab))
    return "access slab-aligned: these slabs are no whole vectors";
  if (plan.tier == Tier::columns && plan.blocks_per_tile() > most_cluster(gpu))
    return say("clusters of blocks up to ", most_cluster(gpu));
  if (slab && (plan.threads_y() != 1 || int64_t(plan.threads_x()) * plan.vec_size % view.inner()))
    return "threads take a whole number of lines of a slab";
  if (plan.in_grid() && plan.blocks_per_tile() > gpu.sm_count)
    return say("blocks that share columns: up to ", gpu.sm_count);
  if (plan.tier != Tier::columns_twopass) {
    const int64_t here =
        int64_t(plan.vecs_per_thread() + (plan.prefetches() ? 0 : plan.smem_vecs)) * plan.blocks_per_tile();
    const int64_t room = slab ? here * plan.threads_x() * plan.vec_size : here * plan.threads_y();
    const int64_t need = slab ? view.n() * view.inner() + (view.slab_begins ? 0 : plan.vec_size - 1) : view.n();
    if (room < need) return say("a plan for columns (or slabs) of so many elements: ", room);
  }
  return "";
}

}  // namespace onepass
