// column_params.cuh: Tiles, which tells kernels how columns are cut into tiles. The host fills it in. Both sides
// include this file, so it has no CUDA and includes nothing.
//
// A column is a reduced row whose neighbouring elements are not adjacent in memory; columns lie side by side. A line is
// one element of each of these columns. A slice is one index of the outer dims: `inner` columns of `n` elements.
#pragma once

// The most dims of a call that cannot be merged with others. A call with more is gathered.
constexpr int kTileDims = 6;
constexpr int kTileTensors = 4;

struct TileDims {
  int count;
  long long sizes[kTileDims];  // the slowest first
  long long steps[kTileTensors][kTileDims];
};

// Division of numbers below 2^31 by a constant, as a multiplication and a shift.
struct FastDivisor {
  unsigned multiplier, shift;
};

// How many vectors a thread has before some end: `all`, and one more if its first vector begins before `rest`.
struct VecCount {
  int all, rest;
};

// How the lines and slices of a tensor lie in memory, in elements. In shared memory each slice is followed by `gap`
// bytes.
struct StagedTensor {
  int line, slice, gap;
  FastDivisor by_slice;
};
enum StagedOperand { kStagedFirst, kStagedSecond, kStagedResult, kStagedTensors };

struct Tiles {
  long long n, inner;  // elements of a column, and columns that lie side by side
  // For each tensor, the stride from one element of a column to the next. If a tensor has one element per column, the
  // stride from one column to the next.
  long long steps[kTileTensors];
  TileDims outer, reduced;                // reduced: for columns without a single step (strided access)
  long long tiles_per_slice, slices;      // tiles side by side; a slice is one index of the outer dims
  long long vec_strides[kTileTensors];    // from one of a thread's vectors to its next
  void* messages;                         // of the blocks that share columns, one for each column
  long long plane_stride;                 // elements between the two planes of a state
  int threads_x, threads_y;               // threads of a block side by side, and along a column
  int tile_cols;                          // columns of a tile
  int partials;                           // partial states that the threads of a block compute for a column
  int partial_stride;                     // from one of them to the next, in elements of shared memory
  int merge_threads, merge_threads_log2;  // threads that reduce the partial states of a column
  int is_narrow;                          // lines of a tile are shorter than two cache lines, beside other tiles' lines
  int smem_vecs;                          // vectors of a thread in shared memory
  int smem_vecs_bytes;                    // bytes of shared memory for the smem_vecs of a block
  int vecs_per_thread_max;                // vectors of a column, or of a slab, that a thread gets
  FastDivisor by_tiles_per_slice, by_line;  // by_line: by threads_x; of a slab by tile_cols
  VecCount existing, full;                  // vectors that exist at least in part, and as a whole
  long long extents[kTileTensors];          // elements from a tensor's first one to its last one
  // For the tier columns-staged, where `slices` counts groups of slices, and `tiles_per_slice` the tiles of a group:
  long long all_slices;
  int slice_cols, slice_vecs;  // columns of a slice, and a thread's vectors of them, the last maybe in part
  int group_slices;            // slices of a group
  int stages;                  // groups that fit into shared memory
  int span_bytes;              // bytes of an operand of a group in shared memory
  int result_at;               // where the results are in shared memory; 0: in place of the first operand
  // If results have gaps between lines or slices that the results in shared memory do not have, they are stored element
  // by element. These are the strides from line to line and from slice to slice in memory, 0 if there are no gaps, and
  // the divisors by the columns and lines of a slice.
  int result_line, result_slice;
  FastDivisor by_slice_cols, by_slice_lines;
  int is_bulk;  // whether groups are copied by bulk copies, if the GPU has them
  StagedTensor staged[kStagedTensors];
  FastDivisor by_slice_vecs;
  // For the tier columns-smem. Its tiles use `span_bytes` and `result_at` too, and `staged[].line` is the number of
  // elements from piece to piece in shared memory:
  int pieces_per_block;
  int chunks, chunk_pieces, chunk_vecs;  // parts that arrive separately, their pieces, and a thread's vectors of them
  FastDivisor by_threads_y;
  int results_are_elements;   // results go to shared memory one by one: their lines begin at other elements of a vector
  int copy_lanes, copy_rows;  // threads that copy one piece, and pieces that a block copies at a time
  FastDivisor by_copy_lanes;
};
