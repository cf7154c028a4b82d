// plan.h: the properties of a GPU that plans depend on, how rows lie relative to vectors, and CudaPlan: the launch
// numbers of a kernel. Pure: no torch, no CUDA.
#pragma once

#include "../core/problem.h"
#include "tables.h"

namespace onepass {

constexpr int kTuned = 132;  // multiprocessors of an H200, on which the built-in tables were measured

struct Gpu {
  int arch;  // 90 for sm_90
  int sm_count;
  int shared;             // the most bytes of shared memory of a block
  int cooperative;        // whether it takes cooperative launches
  const char* name = "";  // its tables are found by it
};

// A GPU of which only these properties are known. It is given the most shared memory of its architecture.
constexpr Gpu typical(int arch, int sm_count = kTuned, const char* name = "") {
  const int kilobytes = arch == 80 ? 163 : arch == 90 || arch / 10 == 10 ? 227 : 99;
  return {arch, sm_count, kilobytes * 1024, 1, name};
}

// The most threads of a block that shares a row (as in rows_onchip.cu), and the most blocks of a cluster.
constexpr int most_threads(int arch, int cluster) { return cluster > 1 ? 512 : arch == 90 ? 1024 : 896; }
// Clusters of sixteen blocks, more than every GPU supports, are only used on a chip with all of its 132
// multiprocessors: a part of the chip may have no sixteen that can form a cluster.
constexpr int most_cluster(const Gpu& gpu) {
  return gpu.arch < 90 ? 1 : gpu.arch == 90 && gpu.sm_count >= kTuned ? 16 : 8;
}

// How a kernel loads and stores vectors. The kernels use the same numbers (vector_access.cuh, column_tile.cuh).
enum class VecAccess : int {
  predicated,  // A row, or a tile of columns, may begin or end within a vector.
  scalar,      // A thread's elements depend only on their index in the row. They are loaded one by one if the row
               // does not begin with a vector.
  aligned,     // Rows, or tiles, are whole vectors. (Rows in shared memory do not use it: it was 1% slower there.)
  // In the tiers of columns only:
  slab,          // All columns of a contiguous piece of memory, which may begin or end within a vector.
  slab_aligned,  // The same, if the piece is a whole number of vectors.
  strided,       // Element by element.
  shifted,       // Tiles whose lines begin at different elements of a vector, but at the same one in all tensors.
};
constexpr const char* kVecAccessNames[] = {"predicated",   "scalar",  "aligned", "slab",
                                           "slab-aligned", "strided", "shifted"};

// How the rows of a problem are aligned to vectors, over all tensors that are accessed by vectors. The result of a
// reduction and a broadcast gradient are not.
struct Alignment {
  int full = 0;    // elements of a vector of 16 bytes of the widest type
  int widest = 0;  // elements of the widest vector such that a row begins at the same element of it in all tensors

  explicit Alignment(const Problem& problem) {
    for (int t = 0; t < problem.count_tensors(); ++t) {
      if (problem.is_one_per_row(t)) continue;
      const int size = size_of(problem.type(t));
      full = full && full < 16 / size ? full : 16 / size;
      first_[count_] = problem.address(t) / uint64_t(size), row_stride_[count_++] = problem.layout.row_stride(t);
    }
    widest = full;
    while (widest > 1 && (widest > problem.layout.n || differ(widest))) widest /= 2;
  }

  // Whether any row begins within a vector of `width` elements.
  bool begins_within(int width) const {
    for (int i = 0; i < count_; ++i) {
      if (first_[i] % uint64_t(width) || row_stride_[i] % width) return true;
    }
    return false;
  }
  // Whether rows of n elements are whole vectors of `width` elements.
  bool whole(int64_t n, int width) const { return n % width == 0 && !begins_within(width); }

 private:
  bool differ(int width) const {
    for (int i = 1; i < count_; ++i) {
      if ((first_[i] - first_[0]) % uint64_t(width) || (row_stride_[i] - row_stride_[0]) % width) return true;
    }
    return false;
  }

  int count_ = 0;
  uint64_t first_[3];  // the index of the first element in memory, in elements
  int64_t row_stride_[3];
};

constexpr int kPipelinedMessages = 8;  // of a block in the tier pipelined (kMessages in pipelined_rows.cuh)
constexpr int kPrefetch = 1;  // `smem_vecs` of a plan of columns that prefetches the next tile into shared memory
constexpr bool is_of_columns(Tier tier) { return tier >= Tier::columns && tier <= Tier::columns_smem; }

// The launch numbers of a call, in the form that the private operators take. In the tiers of columns, and in the tier
// staged, some numbers have another meaning: see threads_x, threads_y, blocks_per_tile and rows_per_thread.
struct CudaPlan {
  Tier tier;
  int threads_per_row;   // threads of a block that share a row
  int rows_per_block;    // rows that a block computes at a time
  int items_per_thread;  // elements of a row, or of each column, that a thread keeps in registers (twopass: in flight)
  int vec_size;          // elements of a load or store: 16 bytes of the wider type if all tensors are aligned alike
  int blocks_per_row;    // blocks that share a row
  int smem_vecs;         // vectors that a thread keeps in shared memory (block, cluster, grid, pipelined, columns)
  VecAccess access;

  bool of_columns() const { return is_of_columns(tier); }
  int threads_x() const { return threads_per_row; }                         // columns: threads side by side
  int threads_y() const { return rows_per_block; }                          // columns: threads down a column
  int blocks_per_tile() const { return is_staged() ? 1 : blocks_per_row; }  // columns: blocks that share a tile
  int rows_per_thread() const { return smem_vecs; }   // staged: rows that a thread computes one after another
  int slices_per_group() const { return smem_vecs; }  // columns_staged: slices that are copied together
  int stages() const { return blocks_per_row; }       // columns_staged: groups in shared memory at a time
  bool is_shifted() const { return access == VecAccess::shifted; }
  bool is_staged() const { return tier == Tier::columns_staged; }
  bool is_in_smem() const { return tier == Tier::columns_smem; }
  // Whether the blocks of a row exchange messages.
  bool sends_messages() const { return tier == Tier::grid || tier == Tier::pipelined; }
  // Threads of a block: the threads that share rows and, in the tiers grid and pipelined, one or two warps for
  // messages.
  int threads() const {
    if (of_columns()) return int(up_to(threads_x() * threads_y(), 32));
    if (tier == Tier::warp || tier == Tier::staged) return threads_per_row * rows_per_block;
    return threads_per_row + (tier == Tier::grid ? 32 : tier == Tier::pipelined ? 64 : 0);
  }
  // The most threads of a block that a kernel of columns is compiled for.
  int max_threads() const {
    int most = 128;
    while (most < threads()) most *= 2;
    return most;
  }
  bool takes_slabs() const { return access == VecAccess::slab || access == VecAccess::slab_aligned; }
  bool prefetches() const { return of_columns() && !is_staged() && smem_vecs == kPrefetch; }
  bool in_grid() const {
    return tier == Tier::columns_grid || (tier == Tier::columns_twopass && blocks_per_tile() > 1);
  }
  int vecs_per_thread() const { return items_per_thread / vec_size; }
  bool keeps_vecs_in_smem() const {
    return smem_vecs &&
           (tier == Tier::block || tier == Tier::cluster || (of_columns() && !is_staged() && smem_vecs != kPrefetch));
  }
  // Rows that a block, or the blocks that share rows, compute at a time.
  int64_t group() const { return tier == Tier::staged ? rows_per_block * rows_per_thread() : rows_per_block; }
  // Blocks of a launch, at most `resident`. If there are more groups of rows, a block computes several.
  int64_t grid(int64_t rows, int64_t resident = kMaxGrid) const {
    const int64_t groups = ceil_div(rows, group()), most = resident / blocks_per_row;
    return (groups < most ? groups : most > 0 ? most : 1) * blocks_per_row;
  }
  // Rows that a launch of the tiers grid and pipelined computes at a time.
  int64_t rows_at_once(int64_t rows, int multiprocessors) const { return grid(rows, multiprocessors) / blocks_per_row; }
  static constexpr int64_t kMaxGrid = 0x7fffffff;
};

// How the tiers grid and pipelined cut a row of n elements into chunks. The blocks that share the row take them in
// turn.
struct RowChunks {
  int thread_vecs;     // vectors of a chunk that a thread takes, for each operand
  int64_t count;       // chunks of a row that a block takes
  int64_t chunk_vecs;  // vectors of a chunk: a multiple of 4, so that each chunk begins at a multiple of 16 bytes
  int64_t unkept = 0;  // elements of a row that do not stay on the chip

  // `operands`: 2 for a gradient, else 1.
  RowChunks(const CudaPlan& plan, int64_t n, int operands) {
    const bool doubles = plan.vec_size == 2;
    thread_vecs = plan.tier == Tier::pipelined ? plan.vecs_per_thread()
                  : operands > 1               ? (doubles ? 1 : 2)
                  : doubles                    ? 2
                  : plan.vecs_per_thread()     ? 4
                                               : 8;
    const int64_t vecs = n / plan.vec_size;
    count = ceil_div(ceil_div(vecs, plan.blocks_per_row), int64_t(thread_vecs) * plan.threads_per_row);
    chunk_vecs = count ? up_to(ceil_div(vecs, plan.blocks_per_row * count), 4) : 4;
    if (plan.tier == Tier::pipelined) return;
    const int64_t chunks_kept = plan.vecs_per_thread() / thread_vecs + plan.smem_vecs / thread_vecs;
    if (count > chunks_kept) unkept = (count - chunks_kept) * chunk_vecs * plan.blocks_per_row * plan.vec_size;
  }
};

}  // namespace onepass
