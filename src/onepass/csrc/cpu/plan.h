// plan.h: decides how a call is executed, forward and backward: the route, the work items, and whether results are
// written by streaming stores. This happens once per call.
#pragma once

#include "engine.h"
#include "simd.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kLine = 64;                 // bytes; a row that has only part of a line writes it through the caches
constexpr int64_t kStreamingBytes = 8 << 20;  // outputs from so many bytes on are written by streaming stores
constexpr int64_t kMaxWholeRow = 65536;       // elements of the longest row that is not cut into chunks
constexpr int64_t kChunk = 8192;              // elements of a chunk
constexpr int64_t kRowsPerItem = 64;          // small rows of a work item
constexpr int64_t kMaxSequences = 64;         // vectors of rows in a tile
constexpr int64_t kPair = 2 * kWidth, kUnroll = 4 * kWidth;  // elements of a pair of vectors, and of an unrolled step

// Forward
constexpr int64_t kMinSmallRow = kWidth * 3 / 4;  // elements of the shortest small row; shorter ones go to tiles
constexpr int64_t kMaxSmallRow = 384;             // of the longest one of a 16-bit type; of float32 it is 256
constexpr int64_t kMinRow = 160;                  // of the shortest row that is computed alone
constexpr int64_t kMinScatteredRow = 25;          // the same if rows are at several strides: then a tile costs more

// Backward
constexpr int64_t kMinGradRow = 16;  // elements of the shortest row that does not go to a tile
// Up to so many elements, a row is streamed either as a whole or not at all.
constexpr int64_t kMaxUniformRow = 512;
constexpr int64_t kRowBufferBytes = 4096;  // bytes of rows that are streamed through a buffer, at a time
// Rows in chunks are streamed from so many bytes on, because their operands are read through the cache twice.
constexpr int64_t kStreamingChunkBytes = 2 << 20;

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

// Tiles ---------------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxSliceElements = 1024;  // of a slice that is transposed, one slice per lane
constexpr int64_t kSliceTile = 4096;         // elements of a tile of slices
constexpr int64_t kMaxColumns = 256;         // of a tile, if it does not have too many vectors
constexpr int64_t kGradLineBytes = 4096;     // of a line of a gradient's tile, which is read in place: a page
constexpr int64_t kGradTogether = 1024;      // columns of steps that are processed together in a gradient of scores
constexpr int64_t kFetchBytes = 262144;      // of the largest tile of columns that is prefetched
constexpr int64_t kFetchSteps = 64;          // steps of the longest prefetched tile of a gradient

// The most columns of a tile whose vectors have `lanes` lanes.
constexpr int64_t most_columns(int64_t lanes) {
  return kMaxColumns < kMaxSequences * lanes ? kMaxColumns : kMaxSequences * lanes;
}

// Chooses the tiles of a call. The scratch memory has room for one tile of a function, or for two of a gradient. A
// gradient does not copy columns, so these may be of any length.
template <class A>
inline void set_tiles(CpuPlan& plan, const Problem& call) {
  constexpr int64_t L = kLanes<A>, line = 32;
  const bool backward = call.is_backward();
  const Layout& layout = call.layout;
  const bool in_columns = layout.view == View::columns;
  const int64_t n = layout.n, b = in_columns ? layout.outer.innermost().size : 1, slices = layout.rows / b;
  // Runs end with a whole vector.
  const int64_t scratch = (kScratch - 2 * kWidth) * int64_t(sizeof(float)) / int64_t(sizeof(A));
  const int64_t capacity = backward ? scratch / 3 : scratch;
  TilePlan& tile = plan.tile;
  tile = TilePlan{};
  tile.columns = b;
  // Gradients read columns in place, and keep the sums of a few vectors in registers.
  const bool fills = b % L == 0 || b >= 4 * L || (backward && b > L);
  int64_t items = slices, elements = n * b;
  if (in_columns && fills) {
    tile.kind = TileKind::columns, tile.columns = 1;
    const int64_t most = backward ? kGradLineBytes / size_of(call.type(kSaved)) : most_columns(L);
    const int64_t fit = capacity / n / line * line;
    int64_t columns = call.is_reduction() || fit < 2 * line || fit > most ? most : fit;
    if (backward) columns = most;
    while (backward && columns > 4 * line && slices * ceil_div(b, columns) < call.threads) columns /= 2;
    // All tiles of a function are equally wide. In a gradient, lines of a tile are whole pages, except in the last
    // tile.
    tile.rows = backward && columns < b ? columns : ceil_div(ceil_div(b, ceil_div(b, columns)), line) * line;
    tile.depth = backward || n * tile.rows <= capacity ? n : capacity / 16 / tile.rows;
    items = slices * ceil_div(b, tile.rows), elements = n * (tile.rows < b ? tile.rows : b);
  } else if (n * b <= kMaxSliceElements) {
    tile.kind = TileKind::slices, tile.depth = n;
    const int64_t fit = kSliceTile / (L * n * b), most = kMaxSequences / b;
    tile.rows = L * (fit < 1 ? 1 : fit < most ? fit : most);
    items = ceil_div(slices, tile.rows), elements = n * b * tile.rows;
  } else {
    tile.kind = TileKind::parts;
    int64_t unit = 1;  // parts that fill vectors
    while (unit * b % L) ++unit;
    tile.parts = unit * (unit * b >= 8 * L ? 1 : 8 * L / (unit * b));
    const int64_t steps = ceil_div(n, tile.parts), width = tile.parts * b;
    tile.depth = steps * width <= capacity ? steps : ceil_div(capacity / 8, width);
  }
  set_items(plan, CpuRoute::tiles, items, elements);
}

// Forward -------------------------------------------------------------------------------------------------------------

inline CpuPlan make_forward_plan(const Problem& call) {
  const Layout& layout = call.layout;
  const int64_t rows = layout.rows, n = layout.n;
  const bool simd = call.type(kY) != DType::float64;
  CpuPlan plan;
  plan.stores = !call.is_reduction();
  plan.streaming = kHasStreamingStores && plan.stores && call.address(kX) != call.address(kY) &&
                   rows * n * size_of(call.type(kY)) >= kStreamingBytes;
  const bool small = kHasFastPaths && layout.view == View::rows &&
                     call.type(kX) == call.type(kY) &&  // rows of two types are tiles, or alone: less to compile
                     n <= (size_of(call.type(kY)) == 2 ? kMaxSmallRow : 256);
  const int64_t least = small ? kMinSmallRow : layout.view == View::rows ? kMinRow : kMinScatteredRow;
  if (!simd || !layout.has_unit_rows() || n < least) {
    simd ? set_tiles<float>(plan, call) : set_tiles<double>(plan, call);
  } else if (small) {
    set_rows(plan, CpuRoute::small_rows, rows, n);
  } else if (n > kMaxWholeRow) {
    set_chunks(plan, rows, n, true);
  } else {
    set_rows(plan, CpuRoute::rows, rows, n);
  }
  return plan;
}

// Backward ------------------------------------------------------------------------------------------------------------

// Whether rows are computed in one loop, with everything in registers. All other rows are long, or have a broadcast
// gradient.
inline bool goes_by_run(const Problem& call) {
  return kHasFastPaths && !call.grad_is_broadcast() && call.layout.n <= kMaxWholeRow;
}

// Whether a row of dx consists of whole lines and whole steps. Streaming only a part of a row is slower than streaming
// none of it, by a fifth to a third.
inline bool streams_whole_rows(const Problem& call) {
  const int64_t n = call.layout.n, stride = call.layout.outer.innermost().strides[kDx] * size_of(call.type(kDx));
  return call.address(kDx) % kLine == 0 && stride % kLine == 0 && n % (n > 64 ? kUnroll : kPair) == 0;
}

// Whether rows of dx that are not whole lines are collected in a buffer, from which whole lines are streamed. It pays
// for float32 without exponentials: all other rows wait for arithmetic, not for memory.
inline bool streams_by_buffer(const Problem& call) {
  const int64_t n = call.layout.n;
  return goes_by_run(call) && size_of(call.type(kDx)) == 4 && call.function != Function::log_softmax && n >= kUnroll &&
         n <= kMaxUniformRow && call.layout.outer.innermost().strides[kDx] == n && !streams_whole_rows(call);
}

inline CpuPlan make_backward_plan(const Problem& call) {
  const Layout& layout = call.layout;
  const int64_t rows = layout.rows, n = layout.n;
  const bool floats = call.type(kDx) != DType::float64;
  const bool by_row = floats && layout.view == View::rows && n >= kMinGradRow;
  const bool lse = call.function == Function::logsumexp, long_rows = by_row && n > kMaxWholeRow;
  CpuPlan plan;
  plan.streaming =
      kHasStreamingStores && call.address(kDx) != call.address(kSaved) && call.address(kDx) != call.address(kGrad) &&
      rows * n * size_of(call.type(kDx)) >= (long_rows ? kStreamingChunkBytes : kStreamingBytes) &&
      (!by_row || n > kMaxUniformRow || streams_whole_rows(call) || streams_by_buffer(call) || !goes_by_run(call));
  if (!by_row) {
    floats ? set_tiles<float>(plan, call) : set_tiles<double>(plan, call);
  } else if (goes_by_run(call)) {
    set_rows(plan, CpuRoute::row_runs, rows, n);
  } else if (long_rows && (lse || rows < 2 * call.threads)) {
    set_chunks(plan, rows, n, !lse);
  } else {  // if long rows suffice for all threads, they stay whole, and are read again soon after the first time
    set_rows(plan, CpuRoute::rows, rows, n);
  }
  return plan;
}

}  // namespace onepass::ONEPASS_ISA
