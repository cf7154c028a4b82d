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

struct Entry {
  int64_t limit;  // applies to row lengths up to this
  int value;
};

template <int Count>
constexpr int look_up(const Entry (&table)[Count], int64_t n) {
  for (const Entry& entry : table) {
    if (n <= entry.limit) return entry.value;
  }
  return table[Count - 1].value;
}

// Lanes a row. H200, 2026-11-21: `tests` in benchmarks/results hold the sweep.
constexpr Entry kLanes32[] = {{16, 4},     {32, 8},     {64, 16},     {1024, 32},
                              {2048, 128}, {8192, 256}, {16384, 512}, {32768, 1024}};
constexpr Entry kLanes16[] = {{16, 2},     {32, 4},     {64, 8},      {128, 16},    {1024, 32},
                              {2048, 128}, {8192, 256}, {16384, 512}, {32768, 1024}};
constexpr int kThreads = 128;            // threads a block at least
constexpr int kMaxValues = 32;           // registers a thread gives to its row: 32 floats
constexpr int64_t kRegisterRow = 32768;  // 1024 threads x 32 values: longer rows stream
constexpr int kStreamThreads = 1024;
constexpr int kStreamValues = 16;

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

inline CudaPlan plan_stream(int vector) { return {Tier::stream, kStreamThreads, 1, kStreamValues, vector}; }

// The plan for rows kept in registers with `lanes` threads a row.
inline CudaPlan plan_registers(int64_t n, int lanes, int vector) {
  CudaPlan plan;
  plan.lanes = lanes;
  plan.tier = lanes <= 32 ? Tier::warp : Tier::block;
  plan.rows_per_block = lanes < kThreads ? kThreads / lanes : 1;
  plan.values = ceil_pow2((n + lanes - 1) / lanes);
  if (plan.values < vector) plan.values = vector;
  plan.vector = vector;
  return plan;
}

inline CudaPlan plan_cuda(const Layout& layout, DType x, DType y, int vector) {
  const int64_t n = layout.n;
  const bool half = size_of(x) == 2 && size_of(y) == 2;
  const bool wide = x == DType::float64;  // a double takes two registers
  if (n > (wide ? kRegisterRow / 2 : kRegisterRow)) return plan_stream(vector);
  int lanes = half ? look_up(kLanes16, n) : look_up(kLanes32, n);
  while (lanes < 1024 && (n + lanes - 1) / lanes > (wide ? kMaxValues / 2 : kMaxValues)) lanes *= 2;
  return plan_registers(n, lanes, vector);
}

constexpr int64_t kCpuGrain = 16384;  // elements below which a second CPU thread does not pay

// The bytes a call has to move: each element read once and written once.
inline int64_t bytes_moved(const Layout& layout, DType x, DType y, bool reduced_output) {
  return layout.rows * layout.n * size_of(x) + layout.rows * (reduced_output ? 1 : layout.n) * size_of(y);
}

}  // namespace onepass
