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

// elements     one element at a time, for layouts and types that nothing else takes
// rows         one row of unit stride at a time
// row_runs     (backward) runs of rows at one stride in one loop, everything in registers
// small_rows   several rows per vector operation
// row_chunks   chunks of long rows
// columns      tiles of columns
enum class CpuRoute { elements, rows, row_runs, small_rows, row_chunks, columns };
constexpr const char* kCpuRouteNames[] = {"elements", "rows", "row_runs", "small_rows", "row_chunks", "columns"};

// How a call is executed, decided once per call. Work is cut into items that no two threads share: rows, groups of
// small rows, chunks of long rows, tiles of columns. An item is computed the same way whatever thread takes it, so the
// bits do not depend on the number of threads.
struct CpuPlan {
  CpuRoute route = CpuRoute::rows;
  int64_t work_items = 0;
  int64_t grain_size = 1;  // work items below which a second thread does not pay
  int64_t chunks = 0;      // per row; 0 if rows are not cut
  int64_t tile_cols = 0;   // columns per tile
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
