// plan.h: which kernel serves a call, and with which launch numbers. Pure: no torch, no CUDA; tested without a GPU.
#pragma once

#include <cstdint>

#include "layout.h"

namespace onepass {

enum class Function { softmax, log_softmax, softmin, logsumexp };
constexpr const char* kFunctionNames[] = {"softmax", "log_softmax", "softmin", "logsumexp"};

enum class DType { float32, float64, float16, bfloat16 };
constexpr const char* kDTypeNames[] = {"float32", "float64", "float16", "bfloat16"};

inline int size_of(DType type) { return type == DType::float64 ? 8 : type == DType::float32 ? 4 : 2; }

// Where a row waits while its state (m, l) is merged.
enum class Tier {
  warp,    // in the registers of up to 32 lanes, several rows a warp when they are short; merged by shuffles
  block,   // in the registers of a block; merged by shuffles, then through shared memory
  stream,  // nowhere: the row is read twice
};
constexpr const char* kTierNames[] = {"warp", "block", "stream"};

struct CudaPlan {
  Tier tier;
  int lanes;           // threads a row
  int rows_per_block;  // rows a block holds at a time
  int values;          // elements of a row a thread keeps in registers (stream: has in flight)
  int vector;          // elements a load or store moves: 16 bytes of the wider type where alignment allows

  int threads() const { return lanes * rows_per_block; }
  int64_t grid(int64_t rows) const {
    const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
    return blocks < kMaxGrid ? blocks : kMaxGrid;  // beyond it a block takes several groups of rows
  }
  static constexpr int64_t kMaxGrid = 0x7fffffff;
};

// How rows of up to `limit` elements are served. A row in registers has ceil(n / lanes) values a thread; a streamed one
// has `values` in flight.
struct Entry {
  int64_t limit;
  Tier tier;
  int lanes;
  int values;
};

constexpr int64_t kAnyLength = INT64_MAX;

// By the size of the wider of the two types: 4 bytes or more, and 2. H200, 2026-11-21: the fastest plans of a sweep
// over inputs of 256 MiB (benchmarks/results/sweep-rows-h200-2026-11-21.json); where several were within 2 percent, the
// one with more threads, which does better on few rows.
constexpr Entry kRows32[] = {
    {4, Tier::warp, 1, 0},
    {8, Tier::warp, 2, 0},
    {32, Tier::warp, 4, 0},
    {64, Tier::warp, 8, 0},
    {128, Tier::warp, 16, 0},
    {1024, Tier::warp, 32, 0},
    {2048, Tier::block, 128, 0},
    {8192, Tier::block, 256, 0},
    {16384, Tier::block, 512, 0},
    {32768, Tier::block, 1024, 0},
    {kAnyLength, Tier::stream, 1024, 16},
};
constexpr Entry kRows16[] = {
    {8, Tier::warp, 1, 0},          {16, Tier::warp, 2, 0},          {32, Tier::warp, 4, 0},
    {64, Tier::warp, 8, 0},         {128, Tier::warp, 16, 0},        {256, Tier::warp, 32, 0},
    {512, Tier::warp, 16, 0},       {1024, Tier::warp, 32, 0},       {2048, Tier::block, 64, 0},
    {4096, Tier::block, 128, 0},    {8192, Tier::stream, 256, 16},   {16384, Tier::stream, 512, 16},
    {32768, Tier::stream, 512, 32}, {65536, Tier::stream, 1024, 16}, {kAnyLength, Tier::stream, 512, 8},
};
constexpr int kThreads = 128;   // threads a block at least
constexpr int kMaxValues = 32;  // registers a thread gives to its row: 32 floats, or 16 doubles

template <int Count>
constexpr const Entry& look_up(const Entry (&table)[Count], int64_t n) {
  int at = 0;
  while (n > table[at].limit) ++at;
  return table[at];
}

inline int ceil_pow2(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Elements a vector access can move: at most 16 bytes of the wider type, every row of both tensors aligned to it.
inline int vector_width(DType x, DType y, uint64_t x_address, uint64_t y_address, const Layout& layout,
                        bool reduced_output) {
  const int widest = size_of(x) > size_of(y) ? size_of(x) : size_of(y);
  int vector = 16 / widest;
  const auto fits = [&](int width) {
    if (x_address % (width * size_of(x)) || layout.row_x_stride() % width) return false;
    return reduced_output || (y_address % (width * size_of(y)) == 0 && layout.row_y_stride() % width == 0);
  };
  while (vector > 1 && (vector > layout.n || !fits(vector))) vector /= 2;
  return vector;
}

inline CudaPlan plan_cuda(const Layout& layout, DType x, DType y, int vector) {
  const int64_t n = layout.n;
  const bool half = size_of(x) == 2 && size_of(y) == 2;
  const int most = x == DType::float64 || y == DType::float64 ? kMaxValues / 2 : kMaxValues;
  const Entry& entry = half ? look_up(kRows16, n) : look_up(kRows32, n);
  CudaPlan plan = {entry.tier, entry.lanes, 1, entry.values, vector};
  if (plan.tier != Tier::stream) {
    while (plan.lanes < 1024 && (n + plan.lanes - 1) / plan.lanes > most) plan.lanes *= 2;
    plan.values = ceil_pow2((n + plan.lanes - 1) / plan.lanes);
    if (plan.values < vector) plan.values = vector;
    plan.tier = plan.values > most ? Tier::stream : plan.lanes <= 32 ? Tier::warp : Tier::block;
  }
  if (plan.tier == Tier::stream) {
    if (plan.values == 0 || plan.values > most) plan.values = most / 2;
  } else if (plan.lanes < kThreads) {
    plan.rows_per_block = kThreads / plan.lanes;
  }
  return plan;
}

constexpr int64_t kCpuGrain = 16384;  // elements below which a second CPU thread does not pay

// The bytes a call has to move: each element read once and written once.
inline int64_t bytes_moved(const Layout& layout, DType x, DType y, bool reduced_output) {
  return layout.rows * layout.n * size_of(x) + layout.rows * (reduced_output ? 1 : layout.n) * size_of(y);
}

}  // namespace onepass
