// column_tile.cuh: tiles of columns, and which of a tile's vectors a thread has. The elements of a column are not
// adjacent in memory; columns lie side by side. A thread has vectors of V adjacent columns, at a fixed stride along the
// columns, and so computes V states. The states of the threads that share a column are reduced through shared memory,
// and then over the blocks of a cluster. There are four kinds of tiles:
//
//   tile     `threads_x` threads side by side, and `threads_y` along the columns
//   slab     a span of memory with all elements of some columns, whose lines need not be whole vectors. Threads take
//            vectors in turns, each of which is a whole number of lines, so that a thread always has the same columns
//   strided  any strides, element by element
//   shifted  a tile whose lines begin at different elements of a vector. All lines of one thread begin at the
//            same element of a vector, so that it always has the same columns. A vector at an edge also has columns of
//            the next tile
//
// With kPrefetchesTile a block copies the full vectors of its next tile to shared memory while it computes this one.
// With kUsesSmemVecs it copies vectors of this tile that do not fit into registers. With kGrid the launch is
// cooperative, and blocks with the same blockIdx.y share columns: they exchange messages through global memory.
#pragma once

#include "cluster.cuh"
#include "column_params.cuh"
#include "division.cuh"
#include "vector_access.cuh"

// How many blocks should fit on a multiprocessor if the elements of a thread take `registers` registers. Without this
// bound the compiler uses up to twice as many registers as needed.
template <class C>
__device__ constexpr int min_blocks(int registers) {
  const int fit = 65536 / (C::kBlockThreads * (registers + 34));
  return fit < 1 ? 1 : fit * C::kBlockThreads > 2048 ? 2048 / C::kBlockThreads : fit;
}

// How many blocks share columns, and this block's rank among them.
template <class C>
__device__ inline int sharing_blocks() {
  return C::kGrid ? gridDim.x : C::kClusterSize;
}
template <class C>
__device__ inline int sharing_rank() {
  return C::kGrid ? blockIdx.x : C::kClusterSize == 1 ? 0 : cluster_rank();
}

// Adds to `at` the offset of element number `index` of the dims `dims`, in each tensor.
template <int Tensors>
__device__ inline void add_offsets(const TileDims& dims, int64_t index, int64_t* at) {
#pragma unroll 1
  for (int d = dims.count - 1; d >= 0; --d) {
    const int64_t size = dims.sizes[d], next = d ? divide(index, size) : 0, here = index - next * size;
    unroll<Tensors>([&](int t) { at[t] += here * dims.steps[t][d]; });
    index = next;
  }
}

// A thread's part of a tile. The blocks that share a tile take its lines in turns; vector q of the thread is at at[t] +
// q * tiles.vec_strides[t] in tensor t.
template <class C, int Tensors>
struct ThreadTile {
  static constexpr int V = C::kVecSize;
  static constexpr bool kMayBeginBefore = (C::kSlab && !C::kAligned) || C::kShifted;
  const Tiles& tiles;
  int64_t at[Tensors];
  int col;                 // the thread's first column in the tile
  int line;                // tile, strided: the thread's number along a column
  int before;              // slab: the elements of its first vector that come before the slab
  int first, full, count;  // vectors [first, full) may be loaded whole, and none exists from `count` on
  int hidden;              // vectors before this one are skipped (kSkipsHidden)
  unsigned in_tile;        // shifted: a bit for each column of its vectors that is in the tile
  int64_t rest;            // tile: columns from the thread's first one on. slab: the position of its first element
  int64_t slice;           // tile, slab: its index of the outer dims
  int64_t first_col;       // tile, strided: the tile's first column
  int64_t origin;          // tile, slab: the offset of the columns in the second tensor

  // `misalignment`: how many elements of an aligned vector come before the first tensor.
  __device__ ThreadTile(const Tiles& tiles, int64_t tile, int rank, uint64_t misalignment)
      : tiles(tiles), at{}, before(0), first(0), full(0), count(0), hidden(0) {
    const unsigned thread = threadIdx.x, threads_x = tiles.threads_x;
    line = C::kSlab ? thread >= threads_x : divide(thread, tiles.by_line);
    const int x = thread - line * threads_x;
    const bool works = line < tiles.threads_y;
    const Quotient here = divide(tile, tiles.tiles_per_slice, tiles.by_tiles_per_slice);
    slice = here.whole;
    first_col = here.rest * tiles.tile_cols;
    add_offsets<Tensors>(tiles.outer, C::kStrided ? (first_col + x < tiles.inner ? first_col + x : 0) : slice, at);
    origin = at[1];
    if constexpr (C::kSlab) {
      before = C::kAligned ? 0 : (int)((misalignment + (uint64_t)at[0]) % V);
      const int begin = (int)thread * V - before + rank * (int)threads_x * V,
                from = (int)thread * V + V * tiles.tile_cols - before;
      col = from - divide(from, tiles.by_line) * tiles.tile_cols;
      first = begin < 0;
      rest = begin;
      if (works) full = vecs_before(begin, tiles.full), count = vecs_before(begin, tiles.existing);
      unroll<Tensors>([&](int t) { at[t] += begin; });
    } else if constexpr (C::kShifted) {
      // Vectors at the edges may be in the tile only in part. The last threads get them, so that few warps diverge.
      const int inside = threads_x - 2, edge = (int)thread - inside * tiles.threads_y;
      const int at_edge = edge >= 0;
      if (at_edge) line = edge / 2;
      const int x = at_edge ? (edge % 2 ? inside + 1 : 0) : (int)thread - line * inside + 1;
      const bool works = line < tiles.threads_y;
      const int row = line + rank * tiles.threads_y;
      const int64_t left = tiles.inner - first_col, here = first_col + row * tiles.steps[C::kFirstTensor];
      col = x * V - (int)((misalignment + (uint64_t)(at[C::kFirstTensor] + here)) % V);
      rest = (left < tiles.tile_cols ? left : tiles.tile_cols) - col;
      if (works && rest > 0) count = full = vecs_before(row, tiles.existing);
      in_tile = 0;
      unroll<V>([&](int v) { in_tile |= (unsigned)(v >= -col && v < rest) << v; });
      unroll<Tensors>([&](int t) {
        at[t] += first_col + col + row * tiles.steps[t];
        if (t < C::kFirstTensor || t >= C::kFirstTensor + C::kOperands) return;
        if (at[t] < 0) first = 1;
        if (at[t] + (count - 1) * tiles.vec_strides[t] + V > tiles.extents[t]) full = count - 1;
      });
    } else {
      col = x * V;
      rest = tiles.inner - first_col - col;
      const int row = line + rank * tiles.threads_y;
      if (works && rest > 0) count = vecs_before(row, tiles.existing);
      full = rest >= V ? count : 0;
      if constexpr (!C::kStrided) {
        unroll<Tensors>([&](int t) { at[t] += first_col + col + row * tiles.steps[t]; });
      }
    }
  }
  // Drops the vectors outside of [begin, end).
  __device__ void keep(int begin, int end) { hidden = begin, full = min(full, end), count = min(count, end); }
  // Whether vectors can be loaded whole.
  __device__ bool is_full(int q) const { return are_full(q, 1); }
  __device__ bool are_full(int q, int count) const {
    return q + count <= full && (!kMayBeginBefore || q >= first) && (!C::kSkipsHidden || q >= hidden);
  }
  // Whether a vector is stored whole.
  __device__ bool is_stored_whole(int q) const {
    return C::kShifted ? in_tile == (1u << V) - 1 && q < count : is_full(q);
  }
  // Whether element v of vector q exists. Only used for a vector that is not full.
  __device__ bool has_element(int q, int v) const {
    if (q >= count || (C::kSkipsHidden && q < hidden)) return false;
    if constexpr (C::kSlab) {
      const int64_t p = rest + q * tiles.vec_strides[0] + v;
      return p >= 0 && p < tiles.n * tiles.inner;
    } else {
      return C::kShifted ? in_tile >> v & 1 : v < rest;
    }
  }
  __device__ int64_t offset(int tensor, int q) const {
    if constexpr (C::kStrided) {
      int64_t offsets[Tensors];
      unroll<Tensors>([&](int t) { offsets[t] = at[t]; });
      const int64_t row = line + ((int64_t)q * sharing_blocks<C>() + sharing_rank<C>()) * tiles.threads_y;
      add_offsets<Tensors>(tiles.reduced, row, offsets);
      return offsets[tensor];
    } else {
      return at[tensor] + q * tiles.vec_strides[tensor];
    }
  }
  __device__ bool has_column(int column) const {
    return first_col + column < tiles.inner && (!C::kShifted || is_inside(column, tiles.tile_cols));
  }
  // The thread's first column in its slice, 0 if the thread has none. For shifted it may be in another tile.
  __device__ int64_t slice_column() const {
    const int64_t column = first_col + col;
    return C::kShifted || column < tiles.inner ? column : 0;
  }
  // The number of columns, in all slices, before this slice; or before a column of the tile.
  __device__ int64_t columns_before() const { return C::kStrided ? 0 : slice * tiles.inner; }
  __device__ int64_t columns_before(int column) const { return columns_before() + first_col + column; }
  // Whether all columns of the thread's vectors exist; whether column v does.
  __device__ bool is_whole() const {
    return C::kShifted ? in_tile == (1u << V) - 1 : C::kAligned || C::kStrided || rest >= V;
  }
  __device__ bool has_own(int v) const { return C::kShifted ? in_tile >> v & 1 : is_whole() || v < rest; }
  // The offset of one of the tile's columns in a result with one element per column.
  __device__ int64_t column_offset(int column) const {
    int64_t at[2] = {0, origin + (first_col + column) * tiles.steps[1]};
    if constexpr (C::kStrided) at[1] = 0, add_offsets<2>(tiles.outer, first_col + column, at);
    return at[1];
  }
  __device__ int next_col(int col) const { return !C::kSlab || col + 1 < tiles.tile_cols ? col + 1 : 0; }

 private:
  // A slab may begin within a vector. Then the thread's first vector begins before the slab.
  __device__ int vecs_before(int begin, VecCount end) const {
    int all = end.all + (begin < end.rest);
    if constexpr (C::kSlab && !C::kAligned) all += begin + tiles.vec_strides[0] < end.rest;
    return all;
  }
};
