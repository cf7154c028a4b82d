// segment_map.cuh: SegmentMap, which tells kernels where the rows of a problem of segments are, and how they are cut
// into tiles. The host fills it in. Both sides include this file, so it has no CUDA.
//
// A segment is a row of unequal length: a run of items, or, with an order, of items that a permutation points to. An
// item has one element for each place of the inner dims; kernels call these places heads. core/segment_problem.h has
// the definitions.
#pragma once

#include "column_params.cuh"

// The parts of a problem. A kernel of segments is compiled for a set of them.
enum SegmentPart : unsigned {
  kSegments = 1,  // always set
  kSegmentOrder = 2,
  kSegmentBias = 4,
  kSegmentSingle = 8,      // there are no inner dims, and items are contiguous in all tensors
  kSegmentInvariant = 16,  // a warp computes a row, whose bits depend on that row alone
  kSegmentLong = 32,       // the kernel of the rows that do not fit into a tile
  kSegmentOffsets = 64,    // the kernel that finds offsets
  kSegmentMoves = 128,     // the kernel that moves items
};

constexpr int kSegmentDims = 6;  // inner dims that cannot be merged

// The kernel of longer rows, tuned by sweeps (H200, 2026-11-29): blocks per multiprocessor, threads of a block, and the
// most bytes that a block has of the heads of an item. With heads, large pieces are faster, because each piece sends a
// message for each head.
constexpr int long_blocks(bool has_heads) { return has_heads ? 2 : 4; }
constexpr int kSegmentLongThreads = 256, kSegmentHeadBytes = 64;

// A row that does not fit into a tile. `before`: how many pieces the rows before it in its section of the list have.
struct LongRow {
  long long segment, begin, count;  // items
  int before, unused;
};
struct LongSection {
  int rows, pieces;
};

// How the elements of a tile lie in the memory of a tensor.
enum SegmentAccess : int {
  kSegmentElements,  // elements are copied one by one
  kSegmentVectors,   // the elements of an item are vectors of 16 bytes
  kSegmentFlat,      // all elements are contiguous
};

// The tensors. The first three have a number for each item: x, bias and y in the forward; y, grad and dx in the
// backward; x, bias and dx in the backward of logsumexp. The other two have a number for each row: the result of a
// reduction in the forward; y and grad in the backward of logsumexp.
enum SegmentTensor { kItemFirst, kItemSecond, kItemResult, kRowFirst, kRowSecond, kSegmentTensors };

struct SegmentMap {
  const void* data[kSegmentTensors];
  long long steps[kSegmentTensors];  // from item to item, or from segment to segment
  int dims;                          // the inner dims, the last one fastest
  long long sizes[kSegmentDims], strides[kSegmentTensors][kSegmentDims];
  long long plane;  // from one plane of a state to the other

  long long items, segments;
  const void *offsets, *order;
  int has_wide_indices;

  // The inner dims have `columns` places (heads), which are cut into chunks. In a warp, 1 << head_lanes_log2
  // neighbouring lanes take a chunk's places, a vector of places each. The other lanes of the warp take neighbouring
  // items.
  long long columns;
  int chunks, head_lanes_log2;
  // `group_warps` warps of a tile have the same heads.
  int group_warps;
  // A tile of rows has `pitch` places of each item. Shared memory has two buffers for tiles; in each, the second tensor
  // follows the first. `chunk_blocks` blocks share the chunks of the rows that begin within `range_items` items.
  int pitch, chunk_blocks, access[kSegmentTensors], buffer_bytes, first_bytes;
  int padded_log2;  // the log2 of the number of elements after which padding follows
  FastDivisor by_pitch;
  long long range_items;
  // Rows of up to `short_items` items are in tiles of rows. The blocks of a range write the longer rows to a section of
  // the list `long_rows`. A section has room for `section_rows` rows and one more entry. `section_counts` has the
  // number of rows in each section. Both pointers are null if no row can be longer.
  int short_items, sections, section_rows;
  void *section_counts, *long_rows;
  // The longer rows are cut into pieces of up to `piece_items` items, at most `most_pieces` pieces in all. Shared
  // memory has a ring of `turns`; a turn is one vector of each thread, and a piece takes some turns. If a row has up to
  // `most_waiting` pieces, its blocks wait for each other's states, which are in `messages`. Rows of more pieces are
  // finished in a second step, when all states exist. `steps_run`: 1 to compute, 2 to finish, 3 for both.
  long long piece_items;
  int most_pieces, turns, most_waiting, steps_run;
  void* messages;
  double factor;
  float factor_f32;
};

// A sorted index, which has the segment of each item, and the offsets of the segments, which are computed from it.
struct SortedIndex {
  const void* index;
  void* offsets;
  long long items, segments;
  int has_wide_index, has_wide_offsets;
};

// One of two passes that move items from memory into an order, or back. Between the passes items lie in buckets, one
// for each chunk of the order. A pass holds a chunk of memory, or a bucket, in shared memory. Of memory's chunk, the
// item number i in the order of buckets is item local[i] in memory; its place among the items of all buckets is
// places[i]. Between buckets and the order, items stay within their bucket, so `places` is null.
constexpr int kMoveChunk = 24576, kMoveThreads = 1024;
struct MoveMap {
  const void* from;
  void* to;
  const void *local, *places;
  long long items;
  int is_into_order;
};
