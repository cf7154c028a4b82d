// segment_map.cuh: where the rows of a problem of segments lie, and how they are cut into tiles, as the host tells the
// kernel. core/segment_problem.h has the definitions. Both sides include it, so it has no CUDA.
#pragma once

#include "column_params.cuh"

// What a kernel of segments is compiled for.
enum SegmentPart : unsigned {
  kSegments = 1,     // always
  kSegmentFlat = 2,  // tiles are one piece of memory in all tensors
  kSegmentBias = 4,
  kSegmentSingle = 8,      // there are no inner dims
  kSegmentInvariant = 16,  // a warp takes a row, whose bits depend on it alone
};

constexpr int kSegmentDims = 6;     // inner dims that do not merge
constexpr int kSegmentHeads = 128;  // places of the inner dims that a tile has, at most

// The tensors. The first three have a number for each item: forward x, bias and y; backward y, grad and dx, of
// logsumexp x, bias and dx. The others have one for each row: forward the result of a reduction, backward y and grad of
// logsumexp.
enum SegmentTensor { kItemFirst, kItemSecond, kItemResult, kRowFirst, kRowSecond, kSegmentTensors };

struct SegmentMap {
  const void* data[kSegmentTensors];
  long long steps[kSegmentTensors];  // from item to item, or from segment to segment
  int dims;                          // the inner ones, the last one fastest
  long long sizes[kSegmentDims], strides[kSegmentTensors][kSegmentDims];
  long long plane;  // of a state

  long long items, segments;
  const void *offsets, *order;
  int has_wide_indices;

  // A tile has `tile_items` items at `heads` of the `columns` places of the inner dims.
  long long columns, tiles;
  int tile_items, heads, chunks;
  FastDivisor by_heads;
  int head_lanes_log2;  // lanes of a warp that have neighbouring places
  // Rows that are in up to `most_tiles` tiles wait for each other's states, which are in `messages`; all others are
  // finished when all states are there. `steps_run`: 1 to compute tiles, 2 to finish rows, 3 for both.
  int most_tiles, steps_run;
  void* messages;
  double factor;
  float factor_f32;
};
