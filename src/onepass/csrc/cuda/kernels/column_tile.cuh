// column_tile.cuh: tiles of columns, softmaxes whose neighbouring elements are apart in memory and whose neighbours lie
// side by side. A thread has vectors of V columns, each as far from the last as the next, so that it makes V states;
// those of the threads that share a column are merged through shared memory, then over the blocks of a cluster.
//
//   tile     `across` threads side by side, `down` of them down the columns
//   slab     a piece of memory that holds all of some columns, whose number need not be one of whole vectors: threads
//            take vectors one after another, in turns of a whole number of lines of the slab, so that a thread's
//            columns are always the same
//   strided  any strides, element by element
//
// AHEAD 1: a block takes one tile after another, and of the next one whole vectors are fetched into shared memory while
// it is busy with this one. SHELVED 1: of this one, those that registers do not hold. GRID 1: the blocks of one y share
// columns, by messages through memory, in a cooperative launch.
#pragma once

#include "cluster.cuh"
#include "column_params.cuh"
#include "vector_access.cuh"

constexpr bool kSlab = EDGES == 3 || EDGES == 4, kStrided = EDGES == 5;
constexpr bool kFull = EDGES == 2 || EDGES == 4;  // a vector is there as a whole or not at all
constexpr int V = VECTOR;

// How many blocks should fit a multiprocessor, of threads that hold so many registers. Left to itself the compiler
// takes up to twice as many as they need.
__device__ constexpr int blocks_of(int held) {
  const int fit = 65536 / (THREADS * (held + 34));
  return fit < 1 ? 1 : fit * THREADS > 2048 ? 2048 / THREADS : fit;
}

// Blocks that share columns, and which of them this is.
__device__ inline int sharing() { return GRID ? gridDim.x : CLUSTER; }
__device__ inline int sharing_rank() { return GRID ? blockIdx.x : CLUSTER == 1 ? 0 : cluster_rank(); }

// 64-bit divisions take a hundred instructions, of 32 bits twenty.
__device__ inline int64_t divided(int64_t a, int64_t b) {
  if (((uint64_t)a | (uint64_t)b) >> 32 == 0) return (uint32_t)a / (uint32_t)b;
  return a / b;
}

struct Quotient {
  int64_t whole, rest;
};
__device__ inline Quotient divided(int64_t a, int64_t b, const Divider& by) {
  if ((uint64_t)a >> 31) return {a / b, a % b};
  const uint32_t low = (uint32_t)a, whole = (uint32_t)((uint64_t)low * by.multiplier >> by.shift);
  return {whole, low - whole * (uint32_t)b};
}
__device__ inline int quotient(unsigned a, const Divider& by) { return (int)((uint64_t)a * by.multiplier >> by.shift); }

// Where element `index` of some dims lies, in each of so many tensors: added to `at`.
template <int Tensors>
__device__ inline void locate(const TileDims& dims, int64_t index, int64_t* at) {
#pragma unroll 1
  for (int d = dims.count - 1; d >= 0; --d) {
    const int64_t size = dims.sizes[d], next = d ? divided(index, size) : 0, here = index - next * size;
#pragma unroll
    for (int t = 0; t < Tensors; ++t) at[t] += here * dims.steps[t][d];
    index = next;
  }
}

// A thread's part of a tile: vectors number 0, 1, ... of those that `blocks` blocks share in turns, at `at`,
// `at + tiles.jump`, ... in each tensor.
template <int Tensors>
struct Place {
  const Tiles& tiles;
  int64_t at[Tensors];
  int own;                  // the place among the columns of the tile of the thread's first
  int line;                 // tile, strided: which of the `down`
  int phase;                // slab: the element of a vector that it begins with
  int first, whole, count;  // those of [first, whole) are whole vectors, and none is there beyond `count`
  int64_t rest;             // tile: columns from the thread's first on. slab: the place of its first element
  int64_t outer;            // tile, slab: which of those that lie apart
  int64_t column;           // tile, strided: the first of the tile
  int64_t origin;           // tile, slab: where the columns begin in the second tensor

  // `begins`: the element of a vector that the tensor begins with.
  __device__ Place(const Tiles& tiles, int64_t tile, int rank, uint64_t begins)
      : tiles(tiles), at{}, phase(0), first(0), whole(0), count(0) {
    const unsigned thread = threadIdx.x, across = tiles.across;
    line = kSlab ? thread >= across : quotient(thread, tiles.by_line);
    const int x = thread - line * across;
    const bool works = line < tiles.down;
    const Quotient here = divided(tile, tiles.side, tiles.by_side);
    outer = here.whole;
    column = here.rest * tiles.pitch;
    locate<Tensors>(tiles.outer, kStrided ? (column + x < tiles.inner ? column + x : 0) : outer, at);
    origin = at[1];
    if constexpr (kSlab) {
      phase = kFull ? 0 : (int)((begins + (uint64_t)at[0]) % V);
      const int begin = (int)thread * V - phase + rank * (int)across * V,
                from = (int)thread * V + V * tiles.pitch - phase;
      own = from - quotient(from, tiles.by_line) * tiles.pitch;
      first = begin < 0;
      rest = begin;
      if (works) whole = counted(begin, tiles.whole), count = counted(begin, tiles.there);
#pragma unroll
      for (int t = 0; t < Tensors; ++t) at[t] += begin;
    } else {
      own = x * V;
      rest = tiles.inner - column - own;
      const int row = line + rank * tiles.down;
      if (works && rest > 0) count = counted(row, tiles.there);
      whole = rest >= V ? count : 0;
      if constexpr (!kStrided) {
#pragma unroll
        for (int t = 0; t < Tensors; ++t) at[t] += column + own + row * tiles.steps[t];
      }
    }
  }
  __device__ bool is_whole(int q) const { return q < whole && (!kSlab || kFull || q >= first); }
  __device__ bool all_whole(int q, int count) const { return q + count <= whole && (!kSlab || kFull || q >= first); }
  // Is element v of the vector q there? (Of one that is not whole.)
  __device__ bool has(int q, int v) const {
    if (q >= count) return false;
    if constexpr (kSlab) {
      const int64_t p = rest + q * tiles.jump[0] + v;
      return p >= 0 && p < tiles.n * tiles.inner;
    } else {
      return v < rest;
    }
  }
  __device__ int64_t element(int tensor, int q) const {
    if constexpr (kStrided) {
      int64_t there[Tensors];
#pragma unroll
      for (int t = 0; t < Tensors; ++t) there[t] = at[t];
      const int64_t row = line + ((int64_t)q * sharing() + sharing_rank()) * tiles.down;
      locate<Tensors>(tiles.reduced, row, there);
      return there[tensor];
    } else {
      return at[tensor] + q * tiles.jump[tensor];
    }
  }
  __device__ int after(int column) const { return !kSlab || column + 1 < tiles.pitch ? column + 1 : 0; }

 private:
  // A slab may begin within a vector, which begins before it then.
  __device__ int counted(int begin, Counted end) const {
    int all = end.all + (begin < end.rest);
    if constexpr (kSlab && !kFull) all += begin + tiles.jump[0] < end.rest;
    return all;
  }
};
