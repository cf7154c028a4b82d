// plan.h: how a call is executed: the route, the work items, and streaming stores or not. Forward and backward are
// planned here, once per call.
#pragma once

#include "engine.h"
#include "simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kLine = 64;                 // bytes; a row that has part of a line writes it through the caches
constexpr int64_t kStreamingBytes = 8 << 20;  // of an output that is written by streaming stores
constexpr int64_t kMaxWholeRow = 65536;       // elements of the longest row that is not cut into chunks
constexpr int64_t kChunk = 8192;              // elements of a chunk
constexpr int64_t kRowsPerItem = 64;          // small rows of a work item
constexpr int64_t kPair = 2 * kWidth, kUnroll = 4 * kWidth;  // elements of a pair of vectors, and of an unrolled step

// Forward
constexpr int64_t kMaxSmallRow = 384;  // elements of the longest small row of a 16-bit type; of float32 it is 256
constexpr int kGroupCols = 32;         // columns of a group: a cache line of a 16-bit type, two of float32
constexpr int64_t kMaxTileCols = 256;

// Backward
constexpr int64_t kMaxSmallBackward = 128;  // elements of the longest small row
// The same for float32 rows without and with an exponential.
constexpr int64_t kMaxSmallProducts = 16, kMaxSmallExps = kWidth == 16 ? 64 : kPair;
// Elements of the longest row that is streamed as a whole or not at all.
constexpr int64_t kMaxUniformRow = 512;
// Rows in chunks are streamed from fewer bytes on: their operands come through the cache a second time.
constexpr int64_t kStreamingChunkBytes = 2 << 20;
constexpr int64_t kTileBytes = 4096;     // of one element of each row of a tile: a page
constexpr int64_t kScalarTileCols = 64;  // columns per tile of doubles

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Work items of `elements` elements each.
inline void set_items(CpuPlan& plan, CpuRoute route, int64_t items, int64_t elements) {
  plan.route = route, plan.work_items = items;
  plan.grain_size = elements >= kCpuGrain ? 1 : kCpuGrain / (elements > 0 ? elements : 1);
}
inline void set_rows(CpuPlan& plan, CpuRoute route, int64_t rows, int64_t n) {
  const int64_t each = route == CpuRoute::small_rows ? kRowsPerItem : 1;
  set_items(plan, route, ceil_div(rows, each), n * each);
}
inline void set_chunks(CpuPlan& plan, int64_t rows, int64_t n, bool reduces) {
  plan.chunks = ceil_div(n, kChunk), plan.reduces = reduces;
  set_items(plan, CpuRoute::row_chunks, rows * plan.chunks, kChunk);
}
// `inner`: columns that lie side by side.
inline void set_columns(CpuPlan& plan, int64_t rows, int64_t n, int64_t inner, int64_t tile_cols) {
  plan.tile_cols = tile_cols;
  set_items(plan, CpuRoute::columns, rows / inner * ceil_div(inner, tile_cols),
            n * (inner < tile_cols ? inner : tile_cols));
}

// Forward -------------------------------------------------------------------------------------------------------------

// Columns per tile for columns of n elements. A function that reduces does not keep its tile.
inline int64_t forward_tile_cols(int64_t n, bool reduces) {
  const int64_t fit = kScratch / (n > 0 ? n : 1) / kGroupCols * kGroupCols;
  return reduces || fit < 2 * kGroupCols || fit > kMaxTileCols ? kMaxTileCols : fit;
}

inline CpuPlan make_forward_plan(const Problem& call) {
  const Layout& layout = call.layout;
  const int64_t rows = layout.rows, n = layout.n;
  const bool simd = call.type(kY) != DType::float64;
  CpuPlan plan;
  plan.stores = !call.is_reduction();
  plan.streaming = kHasStreamingStores && plan.stores && call.address(kX) != call.address(kY) &&
                   rows * n * size_of(call.type(kY)) >= kStreamingBytes;
  if (layout.view == View::columns) {
    const int64_t inner = layout.outer.dims[layout.outer.count - 1].size;
    set_columns(plan, rows, n, inner, forward_tile_cols(n, call.is_reduction()));
  } else if (!layout.has_unit_rows()) {
    set_rows(plan, CpuRoute::elements, rows, n);
  } else if (simd && layout.view == View::rows &&
             call.type(kX) == call.type(kY) &&  // other types row by row: less to compile
             n <= (size_of(call.type(kY)) == 2 ? kMaxSmallRow : 256)) {
    set_rows(plan, CpuRoute::small_rows, rows, n);
  } else if (simd && n > kMaxWholeRow) {
    set_chunks(plan, rows, n, true);
  } else {
    set_rows(plan, CpuRoute::rows, rows, n);
  }
  return plan;
}

// Backward ------------------------------------------------------------------------------------------------------------

// Is a gradient computed in vectors of floats?
inline bool backward_in_floats(const Problem& call) {
  const DType y = call.type(kGrad), dx = call.type(kDx);
  return call.layout.view != View::strided && y != DType::float64 && dx != DType::float64 &&
         (y == dx || y == DType::float32 || dx == DType::float32);
}
// Is it computed in loops over doubles?
inline bool backward_in_doubles(const Problem& call) {
  return call.layout.view != View::strided && call.type(kGrad) == DType::float64 && call.type(kDx) == DType::float64;
}

// Columns per tile. There are fewer if threads would have no tile. (The bits of a column do not depend on it.)
inline int64_t backward_tile_cols(const Problem& call) {
  if (backward_in_doubles(call)) return kScalarTileCols;
  const int64_t line = kLine / size_of(call.type(kGrad)), inner = call.layout.outer.innermost().size;
  int64_t cols = kTileBytes / size_of(call.type(kGrad));
  while (cols > 16 * line && call.layout.rows / inner * ceil_div(inner, cols) < call.threads) cols /= 2;
  return cols;
}

// Do rows go one by one? The shortest rows are faster a vector's lanes of them together, and so are longer ones of
// whole pairs of vectors, of 16-bit types or with exponentials.
inline bool goes_by_row(const Problem& call) {
  const int64_t n = call.layout.n;
  if (call.function == Function::logsumexp || call.grad_is_broadcast() || n > kMaxWholeRow) return false;
  const bool float32 = call.type(kGrad) == DType::float32 && call.type(kDx) == DType::float32;
  if (float32 && call.function != Function::log_softmax) return n > kMaxSmallProducts;
  return n > (n % kPair ? kPair : float32 ? kMaxSmallExps : kMaxSmallBackward);
}

// Does a row of dx consist of whole lines and whole steps? Rows of which a part is streamed are slower than those of
// which none is: 65536 x 100 float32 by a fifth to a third.
inline bool streams_whole_rows(const Problem& call) {
  const int64_t n = call.layout.n, stride = call.layout.outer.innermost().strides[kDx] * size_of(call.type(kDx));
  return call.address(kDx) % kLine == 0 && stride % kLine == 0 &&
         n % (n > kMaxSmallBackward / 2 ? kUnroll : kPair) == 0;
}

inline CpuPlan make_backward_plan(const Problem& call) {
  const int64_t rows = call.layout.rows, n = call.layout.n;
  const bool in_floats = backward_in_floats(call), in_doubles = backward_in_doubles(call);
  const bool lse = call.function == Function::logsumexp, long_rows = call.layout.view == View::rows && n > kMaxWholeRow;
  CpuPlan plan;
  plan.streaming = kHasStreamingStores && call.address(kDx) != call.address(kSaved) &&
                   call.address(kDx) != call.address(kGrad) &&
                   rows * n * size_of(call.type(kDx)) >= (long_rows ? kStreamingChunkBytes : kStreamingBytes) &&
                   (n > kMaxUniformRow || streams_whole_rows(call) || !goes_by_row(call));
  if (call.layout.view == View::columns && (in_floats || in_doubles)) {
    set_columns(plan, rows, n, call.layout.outer.innermost().size, backward_tile_cols(call));
  } else if (!in_floats) {
    set_rows(plan, in_doubles ? CpuRoute::rows : CpuRoute::elements, rows, n);
  } else if (goes_by_row(call)) {
    set_rows(plan, CpuRoute::row_runs, rows, n);
  } else if (n <= kMaxSmallBackward) {
    set_rows(plan, CpuRoute::small_rows, rows, n);
  } else if (n > kMaxWholeRow && (lse || rows < 2 * call.threads)) {
    set_chunks(plan, rows, n, !lse);
  } else {  // long rows that are enough for all threads stay whole: they are then read again soon after the first time
    set_rows(plan, CpuRoute::rows, rows, n);
  }
  return plan;
}

}  // namespace onepass::ONEPASS_ISA
