// segments.h: rows of unequal length on the CPU: the plan and the entry points, one set per compiled instruction set.
// No torch here.
#pragma once

#include <vector>

#include "../core/segment_problem.h"
#include "engine.h"

namespace onepass {

// A segment that is cut into chunks of items.
struct LongSegment {
  int64_t segment, first_chunk, chunks;
};

// The state of a chunk, or of a long segment, in one column. A gradient has a sum alone, `l`.
struct SegmentState {
  double m, l;
};

// How a call is executed. No two threads share a work item, and an item is computed the same way whatever thread takes
// it, so the bits do not depend on the number of threads. A work item is a tile of columns of a run: of the segments
// that begin there, and of the chunks of long segments that do. All tiles of a run come one after another. Runs are cut
// at equal numbers of items and segments together, so that neither many empty segments nor a long one is one thread's.
struct SegmentPlan {
  int64_t width = 1;     // columns of a tile
  int64_t per_span = 1;  // tiles of the innermost dim, if tiles have several columns
  int64_t tiles = 1;
  int64_t run_size = 1;  // items and segments of a run
  int64_t runs = 0;
  int64_t most = 0;   // items of the longest segment that is not cut
  int64_t chunk = 1;  // items of a chunk
  int64_t chunks = 0;
  std::vector<LongSegment> long_segments;
  int64_t work_items = 0;
  int64_t grain_size = 1;  // work items below which a second thread does not pay
  bool reduces = false;    // the states of chunks are merged before their results can be stored
  bool streaming = false;  // results are written by streaming stores

  // Of a chunk; of a long segment, once they are merged, in the place of its first chunk.
  SegmentState* state(SegmentState* states, int64_t chunk, int64_t tile) const {
    return states + (chunk * tiles + tile) * width;
  }
};

// `longest`: items of the longest segment.
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
