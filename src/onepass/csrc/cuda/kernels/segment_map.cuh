// segment_map.cuh: where the rows of a problem of segments lie, and how they are cut into tiles, as the host tells the
// kernel. core/segment_problem.h has the definitions. Both sides include it, so it has no CUDA.
#pragma once

#include "column_params.cuh"

// What a kernel of segments is compiled for.
enum SegmentPart : unsigned {
  kSegments = 1,  // always
  kSegmentOrder = 2,
  kSegmentBias = 4,
  kSegmentSingle = 8,      // there are no inner dims, and items are one behind the other in all tensors
  kSegmentInvariant = 16,  // a warp takes a row, whose bits depend on it alone
  kSegmentLong = 32,       // the kernel of the rows that fit no tile
  kSegmentOffsets = 64,    // the kernel that finds offsets
  kSegmentMoves = 128,     // the kernel that moves items
};

constexpr int kSegmentDims = 6;  // inner dims that do not merge

// The kernel of longer rows, by sweeps (H200, 2026-11-29): blocks of a multiprocessor, threads of a block, and the
// bytes that a block has of an item's heads, at most. With heads large pieces pay, as each has a message for each head.
constexpr int long_blocks(bool has_heads) { return has_heads ? 2 : 4; }
constexpr int kSegmentLongThreads = 256, kSegmentHeadBytes = 64;

// A row that is longer than those of tiles, and its pieces' place among those of the rows of its section of the list.
struct LongRow {
  long long segment, begin, count;  // items
  int before, unused;
};
struct LongSection {
  int rows, pieces;
};

// How the elements of a tile lie in a tensor.
enum SegmentAccess : int {
  kSegmentElements,  // one by one
  kSegmentVectors,   // those of an item are vectors of 16 bytes
  kSegmentFlat,      // all are one behind the other
};

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

  // The inner dims have `columns` places, which are cut into chunks. Of a chunk a warp has 1 << head_lanes_log2 lanes
  // beside each other, and a lane has a vector of places. All other lanes have neighbouring items.
  long long columns;
  int chunks, head_lanes_log2;
  // Of a tile `group_warps` warps have the same heads.
  int group_warps;
  // A tile of rows has `pitch` places of each item, and lies in two buffers of shared memory, each with the second
  // tensor behind the first. `chunk_blocks` blocks take the chunks of the rows that begin in `range_items` items.
  int pitch, chunk_blocks, access[kSegmentTensors], buffer_bytes, first_bytes;
  int padded_log2;  // of the elements between which memory is left free
  FastDivisor by_pitch;
  long long range_items;
  // Rows of up to `short_items` items are in tiles of rows. The blocks of a range list the others in a section of
  // `long_rows`, with room for `section_rows` and one behind them, and say in `section_counts` how many there are. Both
  // are null where there can be none.
  int short_items, sections, section_rows;
  void *section_counts, *long_rows;
  // Those are cut into pieces of up to `piece_items` items; there are no more than `most_pieces`. A piece lies in some
  // of the `turns` of vectors of all threads that a ring in shared memory has. The blocks of a row that has up to
  // `most_waiting` pieces wait for each other's states, which are in `messages`; all others are finished when all
  // states are there. `steps_run`: 1 to compute, 2 to finish, 3 for both.
  long long piece_items;
  int most_pieces, turns, most_waiting, steps_run;
  void* messages;
  double factor;
  float factor_f32;
};

// A sorted index, which has the segment of each item, and the offsets that are found from it.
struct SortedIndex {
  const void* index;
  void* offsets;
  long long items, segments;
  int has_wide_index, has_wide_offsets;
};

// A pass of items from memory to an order, or back. In shared memory item i of a chunk, in the order in which they lie
// in buckets, is item local[i] of the chunk as it lies in memory; it is the item `places[i]` of all buckets. From
// buckets to the order items keep to their bucket: there are no places.
constexpr int kMoveChunk = 24576, kMoveThreads = 1024;
struct MoveMap {
  const void* from;
  void* to;
  const void *local, *places;
  long long items;
  int is_into_order;
};
