// column_params.cuh: how columns are cut into tiles, as the host tells the kernels. Both sides include it, so it has
// no CUDA and includes nothing.
#pragma once

// The most dims of a call that do not merge with others; a call with more is gathered.
constexpr int kTileDims = 6;
constexpr int kTileTensors = 4;

struct TileDims {
  int count;
  long long sizes[kTileDims];  // the slowest first
  long long steps[kTileTensors][kTileDims];
};

// Division of numbers below 2^31 by a constant: a product and a shift.
struct FastDivisor {
  unsigned multiplier, shift;
};

// How many vectors a thread has before an end: `all`, and one more if its first vector begins before `rest`.
struct VecCount {
  int all, rest;
};

// How the lines and slices of a tensor lie in memory, in elements, and in shared memory, where each slice is followed
// by `gap` bytes.
struct StagedTensor {
  int line, slice, gap;
  FastDivisor by_slice;
};
enum StagedOperand { kStagedFirst, kStagedSecond, kStagedResult, kStagedTensors };

struct Tiles {
  long long n, inner;  // elements of a column, and columns that lie side by side
  // For each tensor, from one element of a column to the next. For a tensor with one element per column, from one
  // column to the next.
  long long steps[kTileTensors];
  TileDims outer, reduced;                // reduced: where elements of a column have no single step (strided access)
  long long tiles_per_slice, slices;      // tiles side by side; a slice is one index of the outer dims
  long long vec_strides[kTileTensors];    // from a thread's vector to its next
  void* messages;                         // of the blocks that share columns, for each column
  long long plane_stride;                 // elements between the two planes of a state
  int threads_x, threads_y;               // threads of a block side by side, and along a column
  int tile_cols;                          // columns of a tile
  int partials;                           // partial states of a column that the threads of a block compute
  int partial_stride;                     // elements of shared memory from one of them to the next
  int merge_threads, merge_threads_log2;  // threads that reduce the partial states of a column
  int is_narrow;                          // lines of a tile are shorter than two cache lines, beside other tiles' lines
  int smem_vecs;                          // vectors of a thread in shared memory
  int smem_vecs_bytes;                    // shared memory of those of a block
  int vecs_per_thread_max;                // vectors of a column, or of a slab, that a thread gets
  FastDivisor by_tiles_per_slice, by_line;  // by_line: by threads_x, of a slab by tile_cols
  VecCount existing, full;                  // vectors that exist at least in part, and as a whole
  long long extents[kTileTensors];          // elements from a tensor's first one to its last one
  // Of the tier columns-staged, where `slices` counts groups of slices, and `tiles_per_slice` the tiles of a group:
  long long all_slices;
  int slice_cols, slice_vecs;  // columns of a slice, and a thread's vectors of those, the last maybe in part
  int group_slices;            // slices of a group
  int stages;                  // groups that there is room for in shared memory
  int span_bytes;              // of an operand of a group in shared memory
  int result_at;               // where the results are in shared memory, 0: in the places of the first operand
  // Where results have gaps, in which they go element by element from shared memory, where there are none: from line
  // to line and from slice to slice in memory, and the divisors by the columns and lines of a slice. 0: no gaps.
  int result_line, result_slice;
  FastDivisor by_slice_cols, by_slice_lines;
  int is_bulk;  // whether groups are copied as a whole, where the GPU can
  StagedTensor staged[kStagedTensors];
  FastDivisor by_slice_vecs;
  // Of the tier columns-smem, whose tiles are `span_bytes` and `result_at` in shared memory too, and `staged[].line`
  // the elements from piece to piece there:
  int pieces_per_block;
  int chunks, chunk_pieces, chunk_vecs;  // parts that come apart, their pieces, and a thread's vectors of those
  FastDivisor by_threads_y;
  int results_are_elements;  // whether results are stored to shared memory one by one: lines begin elsewhere in vectors
  int copy_lanes, copy_rows;  // threads that copy a piece, and pieces that a block copies at a time
  FastDivisor by_copy_lanes;
};
