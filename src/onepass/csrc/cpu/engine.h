// engine.h: the CPU engine's plan and entry points, one set per compiled instruction set. No torch here: the caller
// brings the threads.
#pragma once

#include "../core/problem.h"

namespace onepass {

// Pairs of types that are computed in one pass. Others are cast first (the same values, one more temporary).
inline bool cpu_fuses(Function function, DType x, DType y) {
  if (function == Function::softmin && x != y) return false;  // a rare call
  return x == y || (y == DType::float32 && size_of(x) == 2) || (x == DType::float32 && size_of(y) == 2);
}

// Likewise of a gradient: of what the forward saved, and of dx. Logsumexp saved its input, which has the type of dx.
inline bool cpu_fuses_backward(Function function, DType y, DType dx) {
  return y == dx || (y == DType::float32 && size_of(dx) == 2) ||
         (dx == DType::float32 && size_of(y) == 2 && !is_reduction(function));
}

// tiles        some hundred rows at a time, one row per vector lane: short rows, columns, any strides, doubles
// small_rows   contiguous rows of some vectors, several at a time
// rows         one row of unit stride at a time
// row_runs     (backward) runs of rows at one stride in one loop, everything in registers
// row_chunks   chunks of long rows
enum class CpuRoute { tiles, small_rows, rows, row_runs, row_chunks };
constexpr const char* kCpuRouteNames[] = {"tiles", "small_rows", "rows", "row_runs", "row_chunks"};

// How a tile comes in (tiles.h).
enum class TileKind { columns, parts, slices };
struct TilePlan {
  TileKind kind = TileKind::columns;
  int64_t columns = 1;  // rows of a slice
  int64_t rows = 1;     // columns or slices of a tile
  int64_t parts = 1;    // that a row is cut into, one per lane
  int64_t depth = 0;    // steps of a block of a tile
};

// How a call is executed, decided once per call. Work is cut into items that no two threads share: rows, groups of
// small rows, chunks of long rows, tiles of columns. An item is computed the same way whatever thread takes it, so the
// bits do not depend on the number of threads.
struct CpuPlan {
  CpuRoute route = CpuRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;  // work items below which a second thread does not pay
  int64_t chunks = 0;      // per row; 0 if rows are not cut
  TilePlan tile;
  bool reduces = false;    // the states of chunks are merged before results can be stored
  bool stores = true;      // there are results per element
  bool streaming = false;  // results are written by streaming stores
};

// The state of a chunk. A gradient's is only a sum, `l`.
struct ChunkState {
  float m;
  double l, error;
};

// One phase of a call: everything for whole items, or for chunks their states, the merged states of the rows (which are
// stored behind those of the chunks), and the results.
enum class CpuPhase { whole, states, merge, finish };

// `run_backward` is the part of `run` that backward.cpp has.
#define ONEPASS_DECLARE(isa)                                                                            \
  namespace isa {                                                                                       \
  CpuPlan plan(const Problem& call);                                                                    \
  void run(const Problem&, const CpuPlan&, CpuPhase, ChunkState*, int64_t begin, int64_t end);          \
  void run_backward(const Problem&, const CpuPlan&, CpuPhase, ChunkState*, int64_t begin, int64_t end); \
  }
ONEPASS_DECLARE(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE(avx512)
#endif
#undef ONEPASS_DECLARE

}  // namespace onepass
