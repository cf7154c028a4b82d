// segments.h: rows of unequal length (segments) on the CPU: the plan of a call and the entry points, one set for each
// compiled instruction set. There is no torch here.
#pragma once

#include <vector>

#include "../core/segment_problem.h"
#include "engine.h"

namespace onepass {

// A segment that is cut into chunks of items.
struct LongSegment {
  int64_t segment, first_chunk, chunks;
};

// The state of a chunk, or of a long segment, in one column. For a gradient it is only a sum, `l`.
struct SegmentState {
  double m, l;
};

// How a call is executed. No two threads share a work item, and an item is computed in the same way by any thread, so
// the bits do not depend on the number of threads. The list of items and segments is cut into runs of equal size; so
// neither many empty segments nor one long segment is the work of one thread. A work item is a tile of columns in a
// run: the segments that begin in the run, and the chunks of long segments that do. The tiles of a run come one after
// another.
struct SegmentPlan {
  int64_t width = 1;     // columns in a tile
  int64_t per_span = 1;  // tiles in the innermost dim, if tiles have several columns
  int64_t tiles = 1;
  int64_t run_size = 1;  // items and segments in a run
  int64_t runs = 0;
  int64_t most = 0;   // items in the longest segment that is not cut
  int64_t chunk = 1;  // items in a chunk
  int64_t chunks = 0;
  std::vector<LongSegment> long_segments;
  int64_t work_items = 0;
  int64_t grain_size = 1;  // with fewer work items, a second thread does not pay
  bool reduces = false;    // the states of chunks must be merged before results can be stored
  bool streaming = false;  // results are written by streaming stores

  // The state of a chunk. Once states are merged, the state of a long segment is in the place of its first chunk.
  SegmentState* state(SegmentState* states, int64_t chunk, int64_t tile) const {
    return states + (chunk * tiles + tile) * width;
  }
};

// `longest`: the number of items in the longest segment.
#define ONEPASS_DECLARE_SEGMENTS(isa)                                                                      \
  namespace isa {                                                                                          \
  SegmentPlan plan_segments(const SegmentProblem& problem, int64_t longest);                               \
  void run_segments(const SegmentProblem&, const SegmentPlan&, CpuPhase, SegmentState*, int64_t, int64_t); \
  }
ONEPASS_DECLARE_SEGMENTS(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE_SEGMENTS(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE_SEGMENTS(avx512)
#endif
#undef ONEPASS_DECLARE_SEGMENTS

}  // namespace onepass
