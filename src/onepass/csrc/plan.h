// plan.h: which kernel serves a call, and with which launch numbers. Pure: no torch, no CUDA; tested without a GPU.
#pragma once

#include <cstdint>

#include "layout.h"

namespace onepass {

enum class Function { softmax, log_softmax, softmin, logsumexp, state };
constexpr const char* kFunctionNames[] = {"softmax", "log_softmax", "softmin", "logsumexp", "state"};

enum class DType { float32, float64, float16, bfloat16 };
constexpr const char* kDTypeNames[] = {"float32", "float64", "float16", "bfloat16"};

inline int size_of(DType type) { return type == DType::float64 ? 8 : type == DType::float32 ? 4 : 2; }

// Where a row waits while its state (m, l) is merged.
enum class Tier {
  warp,     // in the registers of up to 32 lanes, several rows a warp when they are short; merged by shuffles
  flat,     // the same, and the rows come and go through shared memory, many in one piece
  block,    // in the registers of a block; merged by shuffles, then through shared memory
  cluster,  // in the registers of several blocks, which merge through each other's shared memory (compute 9.0)
  grid,     // in the registers and shared memory of many blocks, launched cooperatively, which merge through memory
  stream,   // nowhere: the row is read twice
};
constexpr const char* kTierNames[] = {"warp", "flat", "block", "cluster", "grid", "stream"};

struct CudaPlan {
  Tier tier;
  int lanes;           // threads of a block that share a row
  int rows_per_block;  // rows a block holds at a time (block, cluster: serves in turn)
  int values;          // elements of a row a thread keeps in registers (stream: has in flight)
  int vector;          // elements a load or store moves: 16 bytes of the wider type where both tensors have one phase
  int split;           // blocks that share a row
  int shelf;   // flat: rows a thread serves in turn; block, cluster: vectors of the next row that it has in shared
               // memory (none, or all); grid: vectors of this row that it has there
  bool apart;  // elements go to threads by their place in the row alone, and come one by one where that is in no phase

  int threads() const { return tier == Tier::warp || tier == Tier::flat ? lanes * rows_per_block : lanes; }
  int slots() const { return values / vector; }
  bool ahead() const { return (tier == Tier::block || tier == Tier::cluster) && shelf; }
  // Rows that one block, or the blocks that share rows, take at a time.
  int64_t group() const { return tier == Tier::flat ? rows_per_block * shelf : rows_per_block; }
  // Blocks of a launch, where at most `resident` of them are to be started; beyond it a block takes several groups.
  int64_t grid(int64_t rows, int64_t resident = kMaxGrid) const {
    const int64_t groups = (rows + group() - 1) / group(), most = resident / split;
    return (groups < most ? groups : most > 0 ? most : 1) * split;
  }
  static constexpr int64_t kMaxGrid = 0x7fffffff;
};

// How rows of up to `limit` elements are served: with so many lanes a row (warp, flat; grid, stream: threads), or with
// so many values a thread (block, cluster; stream: in flight), where the number of threads follows from the row.
struct Entry {
  int64_t limit;
  Tier tier;
  int lanes;
  int values;
  int split;
  int shelf;  // as in CudaPlan; block and cluster: 1 for the whole of the next row
};

constexpr int64_t kAnyLength = INT64_MAX;

// By the size of the wider of the two types: 4 bytes (8: as a row of twice the length with half the values), and 2.
// H200, 2026-11-21: the fastest plans of a sweep over inputs of 256 MiB
// (benchmarks/results/sweep-rows-h200-2026-11-21.json).
constexpr Entry kRows32[] = {
    {4, Tier::warp, 1, 0, 1, 0},
    {16, Tier::warp, 2, 0, 1, 0},
    {36, Tier::warp, 4, 0, 1, 0},
    {112, Tier::warp, 8, 0, 1, 0},
    {224, Tier::warp, 16, 0, 1, 0},
    {1088, Tier::warp, 32, 0, 1, 0},
    {32768, Tier::block, 0, 32, 1, 0},
    {40960, Tier::stream, 1024, 16, 1, 0},
    {57344, Tier::cluster, 0, 32, 4, 0},
    {65536, Tier::cluster, 0, 32, 8, 0},
    {kAnyLength, Tier::stream, 1024, 16, 1, 0},
};
constexpr Entry kRows16[] = {
    {8, Tier::warp, 1, 0, 1, 0},
    {16, Tier::warp, 2, 0, 1, 0},
    {32, Tier::warp, 4, 0, 1, 0},
    {48, Tier::warp, 8, 0, 1, 0},
    {64, Tier::warp, 4, 0, 1, 0},
    {224, Tier::warp, 8, 0, 1, 0},
    {256, Tier::warp, 16, 0, 1, 0},
    {1088, Tier::warp, 32, 0, 1, 0},
    {2048, Tier::block, 0, 32, 1, 0},
    {18432, Tier::block, 0, 48, 1, 0},
    {65536, Tier::cluster, 0, 64, 2, 0},
    {131072, Tier::cluster, 0, 64, 4, 0},
    {262144, Tier::cluster, 0, 64, 8, 0},
    {524288, Tier::cluster, 0, 64, 16, 0},
    {kAnyLength, Tier::stream, 512, 16, 1, 0},
};
constexpr int kTuned = 132;      // multiprocessors of the GPU that these tables are of
constexpr int kThreads = 128;    // threads a block at least, in the warp tier
constexpr int kLongRow = 16384;  // elements from which a row may be spread where there are few
constexpr int kFewBlocks = 2 * kTuned;
constexpr int kShortRow = 128;  // elements of two bytes

template <int Count>
constexpr const Entry& look_up(const Entry (&table)[Count], int64_t n) {
  int at = 0;
  while (n > table[at].limit) ++at;
  return table[at];
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With which element of a vector the rows of a call begin.
struct Phase {
  int widest;  // the most elements of a vector: 16 bytes of the wider type, and so that each row has one phase in both
               // tensors
  uint64_t first;
  int64_t step;

  Phase(DType x, DType y, uint64_t x_address, uint64_t y_address, const Layout& layout, bool reduced_output) {
    const uint64_t y_first = y_address / uint64_t(size_of(y));
    const int64_t y_step = layout.rows > 1 ? layout.row_y_stride() : 0;
    first = x_address / uint64_t(size_of(x));
    step = layout.rows > 1 ? layout.row_x_stride() : 0;
    widest = 16 / (size_of(x) > size_of(y) ? size_of(x) : size_of(y));
    const auto differ = [&](int width) { return (first - y_first) % uint64_t(width) || (step - y_step) % width; };
    while (widest > 1 && (widest > layout.n || (!reduced_output && differ(widest)))) widest /= 2;
  }
  // Does any row begin within a vector of `width` elements?
  bool begins_within(int width) const { return first % uint64_t(width) || step % width; }
};

struct Gpu {
  int compute;  // 90 for sm_90
  int multiprocessors;
  int shared;       // bytes of shared memory that a block may have
  int cooperative;  // whether it takes cooperative launches
};

// A GPU of which only the architecture is known: as its largest is built.
constexpr Gpu typical(int compute) {
  const int kilobytes = compute == 80 ? 163 : compute == 90 || compute / 10 == 10 ? 227 : 99;
  return {compute, kTuned, kilobytes * 1024, 1};
}

// The most threads of a block that shares a row, as rows.cu has it, and the most blocks of a cluster.
constexpr int most_threads(int compute, int cluster) { return compute == 90 ? 1024 : cluster > 1 ? 768 : 896; }
// Sixteen, more than every GPU takes, are offered on the chip with all its 132 multiprocessors alone: on a part of it
// no sixteen may lie together.
constexpr int most_cluster(const Gpu& gpu) {
  return gpu.compute < 90 ? 1 : gpu.compute == 90 && gpu.multiprocessors >= kTuned ? 16 : 8;
}

constexpr int kStaticShared = 2048;  // bytes of shared memory that a kernel declares at most

// Do rows lie one after another, so that a tile of them is one piece of memory?
inline bool lies_flat(const Layout& layout, bool reduced_output) {
  return layout.rows == 1 ||
         (layout.row_x_stride() == layout.n && (reduced_output || layout.row_y_stride() == layout.n));
}

inline CudaPlan plan_cuda(const Layout& layout, DType x, DType y, const Phase& phase, const Gpu& gpu) {
  const int64_t n = layout.n;
  const int widest = size_of(x) > size_of(y) ? size_of(x) : size_of(y);
  const bool half = size_of(x) == 2 && size_of(y) == 2;
  const int64_t length = half ? n : n > kAnyLength / 2 ? n : n * widest / 4;
  int vector = phase.widest;
  // In a row of few vectors the two that are not whole cost more than narrow ones: 100 bfloat16 0.78 of a copy in
  // vectors of 4, 0.70 in vectors of 8. (For 33 floats it is the other way round.)
  while (half && n < kShortRow && phase.begins_within(vector)) vector /= 2;
  const bool phased = phase.begins_within(vector);
  const Entry& entry = half ? look_up(kRows16, length) : look_up(kRows32, length);
  const int values = widest == 8 ? entry.values / 2 : entry.values;
  const int64_t vectors = ceil_div(phased ? n + vector - 1 : n, vector);  // of a row's window at worst
  CudaPlan plan = {entry.tier, entry.lanes, 1, values, vector, entry.split, 0, false};
  if (plan.tier == Tier::warp) {
    plan.values = int(ceil_div(vectors, plan.lanes)) * vector;
    plan.rows_per_block = plan.lanes < kThreads ? kThreads / plan.lanes : 1;
    return plan;
  }
  // Blocks of `cluster` that share a row in registers, if they can.
  const auto share = [&](int cluster, int of) {
    const int64_t threads = ceil_div(ceil_div(vectors, of / vector * cluster), 32) * 32;
    if (cluster > most_cluster(gpu) || threads > most_threads(gpu.compute, cluster)) return false;
    plan = {cluster > 1 ? Tier::cluster : Tier::block, int(threads), 1, of, vector, cluster, 0, false};
    return true;
  };
  // Few long rows: so many blocks a row that they fill the GPU.
  const int many = widest == 8 ? 16 : half ? 64 : 32;
  for (int cluster = 16; cluster > entry.split && length >= kLongRow; cluster /= 2) {
    if (layout.rows <= kFewBlocks / cluster && (share(cluster, many / 2) || share(cluster, many))) return plan;
  }
  if (entry.tier != Tier::stream && (share(entry.split, values) || share(1, values))) return plan;
  const int64_t longest = entry.tier == Tier::stream ? length : kAnyLength;
  const Entry& last = half ? look_up(kRows16, longest) : look_up(kRows32, longest);
  const int part = widest == 8 ? 2 : 1;
  return {Tier::stream, last.lanes / part, 1, last.values / part, vector, 1, 0, false};
}

constexpr int64_t kCpuGrain = 16384;  // elements below which a second CPU thread does not pay

// The bytes a call has to move: each element read once and written once.
inline int64_t bytes_moved(const Layout& layout, DType x, DType y, bool reduced_output) {
  return layout.rows * layout.n * size_of(x) + layout.rows * (reduced_output ? 1 : layout.n) * size_of(y);
}

}  // namespace onepass
