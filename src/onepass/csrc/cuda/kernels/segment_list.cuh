// segment_list.cuh: the list of the rows that fit no tile. The kernel of tiles makes it, that of longer rows reads it.
// Each range of items that blocks of tiles take has a section of the list, so that nobody has to count together.
#pragma once

#include "segments.cuh"

// The section of a block of tiles. Of blocks that take the same range for other heads the first one writes it.
struct LongRowList {
  const SegmentMap& map;
  const int64_t section;
  LongRow* const to;
  int rows = 0, pieces = 0;

  __device__ explicit LongRowList(const SegmentMap& map)
      : map(map),
        section(blockIdx.x / map.chunk_blocks),
        to(map.long_rows && blockIdx.x % map.chunk_blocks == 0
               ? (LongRow*)map.long_rows + section * (map.section_rows + 1)
               : nullptr) {}
  __device__ void add(int64_t segment) {
    const int64_t begin = offset_of(map, segment), end = offset_of(map, segment + 1), count = end - begin;
    if (!to || begin < 0 || end > map.items || count <= map.short_items) return;
    const int64_t more = divide(count + map.piece_items - 1, map.piece_items);
    // Where offsets are wrong there may be more rows than there is room for.
    if (rows == map.section_rows || pieces + more > map.most_pieces) return;
    if (threadIdx.x == 0) to[rows] = {segment, begin, count, pieces};
    ++rows, pieces += (int)more;
  }
  // When all rows are there: a row of nothing behind them has the number of their pieces.
  __device__ void close() const {
    if (!to || threadIdx.x) return;
    to[rows].before = pieces;
    ((LongSection*)map.section_counts)[section] = {rows, pieces};
  }
};
