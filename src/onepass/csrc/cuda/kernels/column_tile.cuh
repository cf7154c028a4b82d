// column_tile.cuh: tiles of columns. The elements of a column are apart in memory, and columns lie side by side. A
// thread has vectors of V columns, at a fixed distance from each other, so that it computes V states. The states of the
// threads that share a column are reduced through shared memory, then over the blocks of a cluster.
//
//   tile     `threads_x` threads side by side, `threads_y` of them along the columns
//   slab     a span of memory that holds all of some columns, whose number need not be one of whole vectors. Threads
//            take vectors one after another, in turns of a whole number of lines of the slab, so that a thread's
//            columns are always the same
//   strided  any strides, element by element
//   shifted  a tile whose lines begin at different elements of a vector. All lines of a thread begin at the same one,
//   so
//            that its columns are always the same. A vector at the edge has columns of the neighbouring tile too
//
// With kPrefetchesTile a block copies the full vectors of its next tile to shared memory while it works on this one.
// With kUsesSmemVecs it copies those of this tile that registers do not hold. With kGrid the blocks with one blockIdx.y
// share columns, by messages through global memory, in a cooperative launch.
#pragma once

#include "cluster.cuh"
#include "column_params.cuh"
#include "division.cuh"
#include "vector_access.cuh"

// How many blocks should fit a multiprocessor, if a thread needs so many registers for its elements. Without this bound
// the compiler takes up to twice as many registers as they need.
template <class C>
__device__ constexpr int min_blocks(int registers) {
  const int fit = 65536 / (C::kBlockThreads * (registers + 34));
  return fit < 1 ? 1 : fit * C::kBlockThreads > 2048 ? 2048 / C::kBlockThreads : fit;
}

// How many blocks share columns, and the rank of this one.
template <class C>
__device__ inline int sharing_blocks() {
  return C::kGrid ? gridDim.x : C::kClusterSize;
}
template <class C>
__device__ inline int sharing_rank() {
  return C::kGrid ? blockIdx.x : C::kClusterSize == 1 ? 0 : cluster_rank();
}

// Adds to `at` where element `index` of some dims lies in each of the tensors.
template <int Tensors>
__device__ inline void add_offsets(const TileDims& dims, int64_t index, int64_t* at) {
#pragma unroll 1
  for (int d = dims.count - 1; d >= 0; --d) {
    const int64_t size = dims.sizes[d], next = d ? divide(index, size) : 0, here = index - next * size;
    unroll<Tensors>([&](int t) { at[t] += here * dims.steps[t][d]; });
    index = next;
  }
}

// A thread's part of a tile: vectors number 0, 1, ... of those that the sharing blocks take in turns. They are at
// `at`, `at + tiles.vec_strides`, ... in each tensor.
template <class C, int Tensors>
struct ThreadTile {
  static constexpr int V = C::kVecSize;
  static constexpr bool kMayBeginBefore = (C::kSlab && !C::kAligned) || C::kShifted;
  const Tiles& tiles;
  int64_t at[Tensors];
  int col;                 // the thread's first column in the tile
  int line;                // tile, strided: the thread's number along a column
  int before;              // slab: the elements of its first vector that come before it
  int first, full, count;  // vectors [first, full) may be loaded whole, and none exists from `count` on
  int hidden;              // vectors before this one are not looked at (kSkipsHidden)
  unsigned in_tile;        // shifted: a bit for each column of its vectors, whether it is in the tile
  int64_t rest;            // tile: columns from the thread's first on. slab: the position of its first element
  int64_t slice;           // tile, slab: its index of the outer dims
  int64_t first_col;       // tile, strided: the tile's first column
  int64_t origin;          // tile, slab: where the columns begin in the second tensor

  // `misalignment`: the elements of a vector that come before the first tensor.
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
      // The vectors at the edges, which may be in the tile in part, are the last threads', so that few warps have any.
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
  // Forgets the vectors outside of [begin, end).
  __device__ void keep(int begin, int end) { hidden = begin, full = min(full, end), count = min(count, end); }
  // Whether vectors may be loaded whole.
  __device__ bool is_full(int q) const { return are_full(q, 1); }
  __device__ bool are_full(int q, int count) const {
    return q + count <= full && (!kMayBeginBefore || q >= first) && (!C::kSkipsHidden || q >= hidden);
  }
  // Whether a vector is stored whole.
  __device__ bool is_stored_whole(int q) const {
    return C::kShifted ? in_tile == (1u << V) - 1 && q < count : is_full(q);
  }
  // Whether element v of vector q exists. (For a vector that is not full.)
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
  // The thread's first column in its slice, which may be another tile's (shifted). It is 0 where there is none.
  __device__ int64_t slice_column() const {
    const int64_t column = first_col + col;
    return C::kShifted || column < tiles.inner ? column : 0;
  }
  // How many columns, of all slices, come before the slice; before a column of the tile.
  __device__ int64_t columns_before() const { return C::kStrided ? 0 : slice * tiles.inner; }
  __device__ int64_t columns_before(int column) const { return columns_before() + first_col + column; }
  // Whether all columns of the thread's vectors exist; whether one does.
  __device__ bool is_whole() const {
    return C::kShifted ? in_tile == (1u << V) - 1 : C::kAligned || C::kStrided || rest >= V;
  }
  __device__ bool has_own(int v) const { return C::kShifted ? in_tile >> v & 1 : is_whole() || v < rest; }
  // Where the result of one of the tile's columns is, which has one element.
  __device__ int64_t column_offset(int column) const {
    int64_t at[2] = {0, origin + (first_col + column) * tiles.steps[1]};
    if constexpr (C::kStrided) at[1] = 0, add_offsets<2>(tiles.outer, first_col + column, at);
    return at[1];
  }
  __device__ int next_col(int col) const { return !C::kSlab || col + 1 < tiles.tile_cols ? col + 1 : 0; }

 private:
  // A slab may begin within a vector, which then begins before it.
  __device__ int vecs_before(int begin, VecCount end) const {
    int all = end.all + (begin < end.rest);
    if constexpr (C::kSlab && !C::kAligned) all += begin + tiles.vec_strides[0] < end.rest;
    return all;
  }
};
