// column_view.h: ColumnView describes a problem that the kernels of rows do not take, for the kernels that take tiles
// of columns where they are in memory. tiles_of cuts the view into Tiles as a plan says. (column_params.cuh explains
// the terms.) Pure: no torch, no CUDA.
#pragma once

#include "../core/problem.h"
#include "../cuda/kernels/column_params.cuh"
#include "rows.h"

namespace onepass {

constexpr int kNarrow = 8;           // the most vectors side by side of a narrow tile: less than two cache lines
constexpr int kColumnStatic = 1024;  // the most bytes of shared memory that kernels of columns declare
constexpr int kMostGap = 4;          // the longest step from slice to slice, in slices
constexpr int kTinySlice = 1024;     // a slice of fewer bytes is not worth a block of its own
constexpr int kChunks = 4;           // chunks of a tile in shared memory (kSmemChunks, cuda/kernels/column_smem.cuh)
constexpr int kStageVecs = 4;        // vectors of a thread that are loaded together (cuda/kernels/pipeline.cuh)
constexpr int kMaxTurn = 1024;       // the most threads of a block that takes whole lines of a slab at a time

struct ColumnView {
  bool served = false;  // false if there are more dims than kernels take
  bool strided = false;
  Tiles tiles = {};                              // the members that do not depend on a plan
  int full = 1;                                  // elements of a vector of 16 bytes, in the widest type
  int tile = 0;                                  // elements of a tile's widest vectors; 0 if there can be no tiles
  int slab = 0;                                  // the same for slabs; 0 if there can be none
  int shift = 0;                                 // the same for shifted tiles; 0 if there can be none
  int shift_in = 0;                              // the same for the operands alone, wherever results begin
  bool slab_begins = false, slab_whole = false;  // whether all slabs begin with a vector; and also end with one
  int64_t lead_step = 0;                         // from line to line, in the first tensor accessed by vectors
  int64_t operand_step = 0;                      // the same in the first operand
  bool is_scattered = false;  // slices are tiny and do not follow one another: elements are faster one by one
  // Whether slices follow one another in all tensors. There may be gaps (kMostGap).
  bool slices_follow = false;
  int64_t slice_steps[kMaxTensors] = {};  // if they do: from slice to slice, in tensors accessed by vectors
  int narrowest = 16;                     // bytes of the smallest element that is accessed by vectors

  int64_t n() const { return tiles.n; }
  int64_t inner() const { return tiles.inner; }
  // After how many lines of a shifted tile a line begins at the same element of a vector again. A vector has `vector`
  // elements.
  int period(int vector) const { return period(vector, lead_step); }
  int operand_period(int vector) const { return period(vector, operand_step); }
  static int period(int vector, int64_t step) {
    int lines = 1;
    while (lines * step % vector) lines *= 2;
    return lines;
  }
  // How many columns in a shifted tile's vectors belong to its neighbours.
  int shifted_by(const CudaPlan& plan) const {
    return !plan.is_shifted() || (plan.is_in_smem() && tile >= plan.vec_size) ? 0 : plan.vec_size - 1;
  }
  int64_t slices() const {
    int64_t count = 1;
    for (int d = 0; d < tiles.outer.count; ++d) count *= tiles.outer.sizes[d];
    return count;
  }
  // The threads of the shortest turn of a slab (a whole number of lines), each with a vector of `vector` elements.
  int64_t turn(int vector) const {
    int64_t common = vector;
    while (inner() % common) common /= 2;
    return inner() / common;
  }
};

// Whether tiles have room for the dims of a problem.
inline bool fits_tiles(const Layout& layout) {
  return layout.outer.count <= kTileDims && layout.reduced.count <= kTileDims;
}

// Whether the gradient of the result has the same value for all elements of a column, and of its neighbours.
inline bool grad_is_broadcast_in_tile(const Problem& problem) {
  if (!problem.is_backward() || problem.is_reduction()) return false;
  const Layout& layout = problem.layout;
  for (int d = 0; d < layout.reduced.count; ++d) {
    if (layout.reduced.dims[d].strides[kGrad]) return false;
  }
  return layout.row_stride(kGrad) == 0;
}

// With `any_strides` the view is strided: elements are accessed one by one.
inline ColumnView column_view(const Problem& problem, bool any_strides = false) {
  ColumnView view;
  if (!fits_tiles(problem.layout)) return view;
  const auto dims = [](const DimGroup& group) {
    TileDims made = {};
    made.count = group.count;
    for (int d = 0; d < group.count; ++d) {
      made.sizes[d] = group.dims[d].size;
      for (int t = 0; t < kMaxTensors; ++t) made.steps[t][d] = group.dims[d].strides[t];
    }
    return made;
  };
  TileDims outer = dims(problem.layout.outer);
  const TileDims reduced = dims(problem.layout.reduced);
  const bool backward = problem.is_backward(), has_broadcast = grad_is_broadcast_in_tile(problem);
  const int count = problem.count_tensors() + (backward && problem.tensors[kLse].data ? 1 : 0);
  // Which tensors are accessed by vectors, all by equally many: the tensors with an element for each element of the
  // input.
  bool by_vectors[kMaxTensors];
  for (int t = 0; t < count; ++t) {
    by_vectors[t] = backward ? t < kGrad || (t == kGrad && !problem.is_reduction() && !has_broadcast)
                             : t == kX || !problem.is_reduction();
  }
  const auto size = [&](int t) { return size_of(problem.type(t)); };
  view.served = true;
  Tiles& tiles = view.tiles;
  tiles.n = tiles.inner = 1;
  for (int d = 0; d < reduced.count; ++d) tiles.n *= reduced.sizes[d];
  int widest = 1;
  for (int t = 0; t < count; ++t) widest = by_vectors[t] && size(t) > widest ? size(t) : widest;
  view.full = 16 / widest;
  const auto all = [&](auto test) {
    for (int t = 0; t < count; ++t) {
      if (by_vectors[t] && !test(t)) return false;
    }
    return true;
  };
  const int last = outer.count - 1, along = reduced.count - 1;
  const bool columns =
      !any_strides && reduced.count <= 1 && outer.count && all([&](int t) { return outer.steps[t][last] == 1; });
  const bool rows = !any_strides && reduced.count == 1 && all([&](int t) { return reduced.steps[t][along] == 1; });
  if (columns) {
    tiles.inner = outer.sizes[last];
    for (int t = 0; t < count; ++t) {
      tiles.steps[t] = by_vectors[t] ? (reduced.count ? reduced.steps[t][along] : 0) : outer.steps[t][last];
    }
    --outer.count;
  } else if (rows) {
    for (int t = 0; t < count; ++t) tiles.steps[t] = by_vectors[t] ? 1 : 0;
  } else {
    view.strided = true;
    for (int d = 0; d < outer.count; ++d) tiles.inner *= outer.sizes[d];
    tiles.reduced = reduced;
  }
  for (int t = 0; t < count; ++t) {
    tiles.extents[t] = 1 + (tiles.n - 1) * tiles.steps[t] + (columns ? tiles.inner - 1 : 0);
    for (int d = 0; d < outer.count; ++d) tiles.extents[t] += (outer.sizes[d] - 1) * outer.steps[t][d];
  }
  tiles.outer = outer;
  int64_t rest = 1;
  for (int d = 0; d < outer.count; ++d) rest *= outer.sizes[d];
  tiles.plane_stride = view.strided ? tiles.inner : tiles.inner * rest;
  if (view.strided) return view;

  const auto first = [&](int t) { return problem.address(t) / uint64_t(size(t)); };
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
  int lead = 0;
  while (!by_vectors[lead]) ++lead;
  // Whether the slices (lines_alike: and lines) of tensor t begin at the same element of a vector as those of tensor
  // `lead`.
  const auto alike = [&](int t, int width, int lead) {
    bool yes = (first(t) - first(lead)) % uint64_t(width) == 0;
    for (int d = 0; d < outer.count; ++d) yes &= (outer.steps[t][d] - outer.steps[lead][d]) % width == 0;
    return yes;
  };
  const auto lines_alike = [&](int t, int width, int lead) {
    return alike(t, width, lead) && (tiles.steps[t] - tiles.steps[lead]) % width == 0;
  };
  if (columns) {
    view.shift = view.shift_in = view.full;
    while (view.shift > 1 && !all([&](int t) { return lines_alike(t, view.shift, lead); })) view.shift /= 2;
    const int operand = backward ? int(kSaved) : int(kX);
    while (view.shift_in > 1 && backward && by_vectors[kGrad] && !lines_alike(kGrad, view.shift_in, operand))
      view.shift_in /= 2;
    view.lead_step = tiles.steps[lead], view.operand_step = tiles.steps[operand];
  }
  if (all([&](int t) { return tiles.n == 1 || tiles.steps[t] == tiles.inner; })) {
    view.slab = view.full;
    while (view.slab > 1 &&
           (view.slab > tiles.n * tiles.inner || !all([&](int t) { return alike(t, view.slab, lead); })))
      view.slab /= 2;
    view.slab_begins = all([&](int t) { return multiples(t, view.slab); });
    view.slab_whole = view.slab_begins && tiles.n * tiles.inner % view.slab == 0;
  }
  view.slices_follow = columns && !has_broadcast && !(backward && problem.is_reduction());
  for (int t = 0; t < count; ++t) {
    const int64_t slice = tiles.n * tiles.inner;
    int64_t step = by_vectors[t] ? slice : tiles.steps[t] * tiles.inner;
    if (by_vectors[t]) {
      const int64_t lines = tiles.n * tiles.steps[t];
      step = outer.count ? outer.steps[t][outer.count - 1] : lines;
      view.slices_follow &= tiles.steps[t] >= tiles.inner && step >= lines && step <= kMostGap * slice;
      view.slice_steps[t] = step;
    }
    for (int d = outer.count - 1; d >= 0; --d) {
      view.slices_follow &= outer.steps[t][d] == step;
      step *= outer.sizes[d];
    }
    if (by_vectors[t] && size(t) < view.narrowest) view.narrowest = size(t);
  }
  view.is_scattered = columns && tiles.n > 1 && !view.slices_follow && tiles.n * tiles.inner * size(lead) < kTinySlice;
  return view;
}
// The view that a plan is for.
inline ColumnView column_view(const Problem& problem, const CudaPlan& plan) {
  return column_view(problem, plan.access == VecAccess::strided);
}

// Makes the divisor `by`, for numbers below 2^31.
inline FastDivisor divider_of(int64_t by) {
  if (by >> 31) return {0, 0};
  unsigned shift = 31;
  while (int64_t(1) << (shift - 31) < by) ++shift;
  return {unsigned(((uint64_t(1) << shift) + uint64_t(by) - 1) / uint64_t(by)), shift};
}

// Counts the vectors that are `turn` elements apart and whose first element is at most `last`.
inline VecCount count_vecs(int64_t last, int64_t turn, int none) {
  if (last < 0) return {0, none};
  return {int(last / turn), int(last % turn) + 1};
}

// Sets how many threads merge the partial states of a column.
inline void set_merge_threads(Tiles& tiles, const CudaPlan& plan) {
  const int most = tiles.partials > plan.blocks_per_tile() ? tiles.partials : plan.blocks_per_tile();
  while (tiles.merge_threads_log2 < 5 && 1 << tiles.merge_threads_log2 < most &&
         (2 << tiles.merge_threads_log2) * tiles.tile_cols <= plan.threads())
    ++tiles.merge_threads_log2;
  tiles.merge_threads = 1 << tiles.merge_threads_log2;
}

// The tiles of the tier columns_staged. All slices are one sequence. It is cut into groups, and a group into tiles.
inline Tiles staged_tiles_of(const ColumnView& view, const CudaPlan& plan) {
  Tiles tiles = view.tiles;
  const int64_t slices = view.slices();
  const int64_t group = plan.slices_per_group() < slices ? plan.slices_per_group() : slices;
  tiles.threads_x = plan.threads_x(), tiles.threads_y = tiles.partials = plan.threads_y();
  tiles.tile_cols = tiles.threads_x * plan.vec_size;
  tiles.partial_stride = tiles.partials == 1 ? tiles.tile_cols : int(up_to(tiles.tile_cols, 4)) + 4;
  tiles.all_slices = slices, tiles.group_slices = int(group);
  tiles.slice_cols = int(view.inner()), tiles.slice_vecs = int(ceil_div(view.inner(), int64_t(plan.vec_size)));
  tiles.outer.count = 0;
  tiles.tiles_per_slice = ceil_div(group * tiles.slice_vecs, int64_t(tiles.threads_x));
  tiles.slices = ceil_div(slices, group);
  tiles.stages = plan.stages();
  tiles.existing = count_vecs(view.n() - 1, tiles.threads_y, 0);
  tiles.vecs_per_thread_max = int(ceil_div(view.n(), int64_t(tiles.threads_y)));
  tiles.by_tiles_per_slice = divider_of(tiles.tiles_per_slice), tiles.by_line = divider_of(tiles.threads_x);
  tiles.by_slice_vecs = divider_of(tiles.slice_vecs);
  set_merge_threads(tiles, plan);
  return tiles;
}

// Bytes of a group of slices in shared memory. Each slice is followed by `gap` bytes, and the group begins and ends
// within vectors.
inline int64_t count_span_bytes(int64_t slices, int64_t slice, int size, int gap) {
  return up_to(slices * (slice * size + gap) + 2 * 16, 128);
}
constexpr int kBulkBytes = 256;  // the smallest slice that is worth a copy of its own
constexpr int kSliceGap = 16;    // bytes after a slice, so that slices begin an odd number of vectors apart

// Sets where groups of slices and their results are in shared memory. Results replace the first operand if both are
// laid out alike, begin at the same byte of a vector and have elements of one size.
inline void set_staged_bytes(Tiles& tiles, const ColumnView& view, const Problem& problem, int operands) {
  const int first = problem.is_backward() ? int(kSaved) : int(kX), result = problem.is_backward() ? int(kDx) : int(kY);
  const auto size = [&](int t) { return size_of(problem.type(t)); };
  const auto set = [&](StagedOperand which, int t, int64_t line, int64_t slice) {
    StagedTensor& made = tiles.staged[which];
    made.line = int(line), made.slice = int(slice);
    // There is no gap if a vector belongs to two slices, or if the lanes of a warp read from few slices.
    const int bytes = made.slice * size(t);
    made.gap = bytes % 32 || problem.address(t) % 16 || tiles.slice_vecs > 32 ? 0 : kSliceGap;
    tiles.is_bulk &= !made.gap || bytes >= kBulkBytes;
    made.by_slice = divider_of(made.slice);
    return int(count_span_bytes(tiles.group_slices, made.slice, size(t), made.gap));
  };
  tiles.is_bulk = 1;
  const auto set_operand = [&](StagedOperand which, int t) {
    return set(which, t, view.tiles.steps[t], view.slice_steps[t]);
  };
  tiles.span_bytes = set_operand(kStagedFirst, first);
  if (operands > 1) tiles.span_bytes = std::max(tiles.span_bytes, set_operand(kStagedSecond, kGrad));
  tiles.smem_vecs_bytes = tiles.stages * operands * tiles.span_bytes;
  if (problem.is_reduction()) return;
  const StagedTensor &of_first = tiles.staged[kStagedFirst], &of_result = tiles.staged[kStagedResult];
  const int64_t line = view.tiles.steps[result], slice = view.slice_steps[result];
  if (line > tiles.slice_cols || slice > tiles.n * tiles.slice_cols) {
    tiles.result_line = int(line), tiles.result_slice = int(slice);
    tiles.by_slice_cols = divider_of(tiles.slice_cols), tiles.by_slice_lines = divider_of(tiles.n);
  }
  const int result_bytes = set(kStagedResult, result, tiles.slice_cols, tiles.slice_cols * tiles.n);
  if (!tiles.result_line && of_first.line == of_result.line && of_first.slice == of_result.slice &&
      size(first) == size(result) && (problem.address(first) ^ problem.address(result)) % 16 == 0)
    return;
  tiles.result_at = tiles.smem_vecs_bytes;
  tiles.smem_vecs_bytes += result_bytes;
}

// Sets where the pieces of a block are in shared memory, in the tier columns_smem. Results replace the first operand if
// both begin at the same bytes of vectors and have elements of one size.
inline void set_smem_bytes(Tiles& tiles, const ColumnView& view, const Problem& problem, const CudaPlan& plan,
                           int operands) {
  const int first = problem.is_backward() ? int(kSaved) : int(kX), result = problem.is_backward() ? int(kDx) : int(kY);
  const auto size = [&](int t) { return size_of(problem.type(t)); };
  const bool slab = plan.takes_slabs();
  int lines = 1;  // after so many lines, one begins at the same byte of a vector again
  // Sets where the pieces of a tensor are. Returns the bytes of all its pieces.
  const auto set = [&](StagedOperand which, int t) {
    const int64_t step = tiles.steps[t] * size(t) % 16;
    const int64_t bytes = tiles.tile_cols * size(t), around = step ? bytes + 30 : up_to(bytes, 16) + 16;
    while (lines * step % 16) lines *= 2;
    // Lines that are an odd number of vectors apart begin in different banks.
    int64_t pitch = up_to(around - step, 16) + step;
    if (pitch / 16 % 2 == 0) pitch += 16;
    if (slab) pitch = int64_t(tiles.threads_x) * plan.vec_size * size(t);
    tiles.staged[which] = {};
    tiles.staged[which].line = int(pitch / size(t));
    tiles.copy_lanes = std::max(tiles.copy_lanes, int((bytes + 15) / 16) + 1);
    return int(up_to(tiles.pieces_per_block * pitch + 2 * 16, 128));
  };
  tiles.span_bytes = set(kStagedFirst, first);
  if (operands > 1) tiles.span_bytes = std::max(tiles.span_bytes, set(kStagedSecond, kGrad));
  tiles.smem_vecs_bytes = operands * tiles.span_bytes;
  const int result_bytes = problem.is_reduction() ? 0 : set(kStagedResult, result);
  // All lines that a thread copies begin at the same byte of a vector.
  tiles.copy_lanes = std::min(tiles.copy_lanes, plan.threads() / lines);
  tiles.copy_rows = plan.threads() / tiles.copy_lanes / lines * lines;
  tiles.by_copy_lanes = divider_of(tiles.copy_lanes);
  if (problem.is_reduction()) return;
  if ((slab ? view.slab : view.shift) == view.full && size(first) == size(result)) return;
  tiles.results_are_elements = !slab && view.shift < plan.vec_size;
  tiles.result_at = tiles.smem_vecs_bytes;
  tiles.smem_vecs_bytes += result_bytes;
}

// How a plan cuts a view into tiles. The caller adds the bytes of vectors in shared memory.
inline Tiles tiles_of(const ColumnView& view, const CudaPlan& plan) {
  if (plan.is_staged()) return staged_tiles_of(view, plan);
  Tiles tiles = view.tiles;
  const bool slab = plan.takes_slabs();
  tiles.threads_x = plan.threads_x(), tiles.threads_y = plan.threads_y();
  const bool in_smem = plan.is_in_smem();
  tiles.tile_cols = slab ? int(tiles.inner) : tiles.threads_x * plan.vec_size - view.shifted_by(plan);
  tiles.partials = slab ? tiles.threads_x * plan.vec_size / tiles.tile_cols : tiles.threads_y;
  // With a gap between partial states, lanes that read the states of one column access different banks.
  tiles.partial_stride = slab || tiles.partials == 1 ? tiles.tile_cols : int(up_to(tiles.tile_cols, 4)) + 4;
  tiles.tiles_per_slice = ceil_div(tiles.inner, int64_t(tiles.tile_cols));
  tiles.slices = 1;
  if (!view.strided) {
    for (int d = 0; d < tiles.outer.count; ++d) tiles.slices *= tiles.outer.sizes[d];
  }
  tiles.is_narrow = !slab && !view.strided && tiles.tiles_per_slice > 1 && tiles.tile_cols <= kNarrow * view.full;
  const int64_t before = view.slab_begins ? 0 : plan.vec_size - 1;  // the most elements of a vector before a slab
  const int64_t size = slab ? view.n() * view.inner() : view.n();
  const int64_t turn = int64_t(plan.blocks_per_tile()) * (slab ? plan.threads_x() * plan.vec_size : plan.threads_y());
  tiles.vecs_per_thread_max = int(ceil_div(slab ? size + before : size, turn));
  tiles.existing = count_vecs(size - 1, turn, 0);
  tiles.full = count_vecs(size - (slab ? plan.vec_size : 1), turn, -plan.vec_size);
  for (int t = 0; t < kTileTensors; ++t) tiles.vec_strides[t] = slab ? turn : turn * tiles.steps[t];
  tiles.by_tiles_per_slice = divider_of(tiles.tiles_per_slice),
  tiles.by_line = divider_of(slab                            ? tiles.tile_cols
                             : plan.is_shifted() && !in_smem ? tiles.threads_x - 2
                                                             : tiles.threads_x);
  tiles.smem_vecs = plan.keeps_vecs_in_smem() ? plan.smem_vecs : 0;
  if (in_smem) {
    const int64_t pieces = slab ? ceil_div(size + before, int64_t(plan.threads_x()) * plan.vec_size) : size;
    tiles.pieces_per_block = int(ceil_div(pieces, int64_t(plan.blocks_per_tile())));
    tiles.vecs_per_thread_max = int(ceil_div(int64_t(tiles.pieces_per_block), int64_t(plan.threads_y())));
    tiles.chunk_vecs = int(up_to(ceil_div(int64_t(tiles.vecs_per_thread_max), int64_t(kChunks)), 2 * kStageVecs));
    tiles.chunks = int(ceil_div(int64_t(tiles.vecs_per_thread_max), int64_t(tiles.chunk_vecs)));
    tiles.chunk_pieces = tiles.chunk_vecs * plan.threads_y();
    tiles.by_threads_y = divider_of(plan.threads_y());
  }
  set_merge_threads(tiles, plan);
  return tiles;
}

// Bytes of the vectors that a block keeps in shared memory. `vec_bytes`: of one vector of each operand, together.
inline int64_t count_smem_vecs_bytes(const CudaPlan& plan, int vec_bytes) {
  return int64_t(plan.prefetches() ? plan.vecs_per_thread() : plan.smem_vecs) * plan.max_threads() * vec_bytes;
}

// How many numbers a thread's partial state of a column has. In a gradient this is its sum. Otherwise it is its sum,
// and also its maximum if sums may be relative to the thread's maximum (kThreadMaxima,
// cuda/kernels/column_softmax.cuh). `half_result`: results have a half type.
inline int numbers_per_partial(const CudaPlan& plan, bool half_result, bool gradient) {
  return gradient ? 1 : plan.in_grid() || plan.is_in_smem() || (half_result && plan.blocks_per_tile() == 1) ? 2 : 1;
}

// Bytes of shared memory in which columns are reduced over the threads of a block, and over the `peers` blocks of a
// cluster (0: none). A number has `scalar` bytes. There are `partials` partial states of `numbers` numbers each. A
// whole column has one number in a gradient, otherwise three, and the block's maximum if threads do not share their
// own.
inline int64_t count_reduce_bytes(int64_t cols, int64_t partials, int peers, int scalar, bool gradient, int numbers) {
  const int64_t whole = up_to(cols * (gradient ? 1 : 3) * scalar, 16), tops = gradient ? 0 : up_to(cols * scalar, 16);
  const int64_t part = up_to(partials * scalar, 16);
  return whole + part + (numbers > 1 ? part : tops) + 2 * peers * cols * (gradient ? 1 : 2) * scalar;
}
inline int cluster_peers(const CudaPlan& plan) {
  return (plan.tier == Tier::columns || plan.is_in_smem()) && plan.blocks_per_tile() > 1 ? plan.blocks_per_tile() : 0;
}

// All bytes of shared memory of a block.
inline int64_t count_column_bytes(const Tiles& tiles, const CudaPlan& plan, int scalar, bool gradient,
                                  bool half_result) {
  if (plan.blocks_per_tile() == 1 && tiles.partials == 1 && !plan.takes_slabs()) return tiles.smem_vecs_bytes;
  return tiles.smem_vecs_bytes + count_reduce_bytes(tiles.tile_cols, tiles.partials * tiles.partial_stride,
                                                    cluster_peers(plan), scalar, gradient,
                                                    numbers_per_partial(plan, half_result, gradient));
}

}  // namespace onepass
