// engine.h: the plan of a call and the entry points of the CPU engine, one set for each compiled instruction set. There
// is no torch here: the caller provides the threads (isa_dispatch.h runs a plan on them).
#pragma once

#include "../core/problem.h"

namespace onepass {

// Pairs of types that are computed in one pass. Other calls are cast first: the values are the same, with one more
// temporary.
inline bool cpu_fuses(Function function, DType x, DType y) {
  if (function == Function::softmin && x != y) return false;  // a rare call
  return x == y || (y == DType::float32 && size_of(x) == 2) || (x == DType::float32 && size_of(y) == 2);
}

// The same for a gradient: y is the type of the tensor that the forward saved, and dx that of the gradient. Logsumexp
// saved its input, which has the type of dx.
inline bool cpu_fuses_backward(Function function, DType y, DType dx) {
  return y == dx || (y == DType::float32 && size_of(dx) == 2) ||
         (dx == DType::float32 && size_of(y) == 2 && !is_reduction(function));
}

// The routes of the engine:
//
//   tiles        some hundred rows at a time, one row per vector lane: short rows, columns, any strides, doubles
//   small_rows   contiguous rows of a few vectors, several at a time
//   rows         one row of unit stride at a time
//   row_runs     (backward) rows at one stride in one loop, with everything in registers
//   row_chunks   long rows, cut into chunks
enum class CpuRoute { tiles, small_rows, rows, row_runs, row_chunks };
constexpr const char* kCpuRouteNames[] = {"tiles", "small_rows", "rows", "row_runs", "row_chunks"};

// The kinds of tiles (tiles.h).
enum class TileKind { columns, parts, slices };
struct TilePlan {
  TileKind kind = TileKind::columns;
  int64_t columns = 1;  // rows that lie side by side in a slice
  int64_t rows = 1;     // columns, or slices, in a tile
  int64_t parts = 1;    // into which a row is cut, one per lane
  int64_t depth = 0;    // steps in a block of a tile
};

// How a call is executed. It is decided once per call. The work is cut into items that no two threads share: rows,
// groups of small rows, chunks of long rows, tiles of columns. An item is computed in the same way by any thread, so
// the bits of results do not depend on the number of threads.
struct CpuPlan {
  CpuRoute route = CpuRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;  // with fewer work items, a second thread does not pay
  int64_t chunks = 0;      // per row; 0 if rows are not cut
  TilePlan tile;
  bool reduces = false;    // the states of chunks must be merged before results can be stored
  bool stores = true;      // there is a result for each element
  bool streaming = false;  // results are written by streaming stores
};

// The state of a chunk. In a gradient it is only a sum, `l`.
struct ChunkState {
  float m;
  double l, error;
};

// The phases of a call. whole: everything, for items that are whole. Calls with chunks have three phases: the states of
// the chunks; the merged states of the rows, which are stored behind those of the chunks; and the results.
enum class CpuPhase { whole, states, merge, finish };

// run() calls `run_backward`, which is in backward.cpp, for gradients.
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
