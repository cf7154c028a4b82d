// segment_list.cuh: the list of the rows that do not fit into a tile. The kernel of tiles writes it, and the kernel of
// longer rows reads it. Each range of items, which certain blocks of tiles take, has its own section of the list, so
// that blocks need no common counter.
#pragma once

#include "segments.cuh"

// The section of a block of tiles. If several blocks take the same range for different heads, the first one writes it.
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
    // If offsets are wrong, there may be more rows than the section has room for.
    if (rows == map.section_rows || pieces + more > map.most_pieces) return;
    if (threadIdx.x == 0) to[rows] = {segment, begin, count, pieces};
    ++rows, pieces += (int)more;
  }
  // Called after the last row. The entry behind the rows has the total number of their pieces.
  __device__ void close() const {
    if (!to || threadIdx.x) return;
    to[rows].before = pieces;
    ((LongSection*)map.section_counts)[section] = {rows, pieces};
  }
};
