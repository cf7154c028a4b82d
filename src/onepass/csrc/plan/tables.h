// tables.h: Tier, the kinds of kernels, and the tables, which say which tier serves rows of which length. The tables
// are data: measured on one GPU, on a date. Pure: no torch, no CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace onepass {

// Tiers differ in where a row is kept while its state (m, l) is merged.
enum class Tier {
  warp,     // in the registers of up to 32 lanes, several rows per warp if they are short; merged by shuffles
  staged,   // the same, and tiles of many rows pass through shared memory, each as one span
  block,    // in the registers and shared memory of a block; merged by shuffles, then through shared memory
  cluster,  // the same of several blocks, which merge through each other's shared memory (compute 9.0)
  grid,     // the same of many blocks, launched cooperatively, which merge through memory
  twopass,  // not kept: the row is read twice
  // For columns (problems that the tiers above do not take), with tables of their own:
  columns,          // a tile of columns, in the registers of a block, or of the blocks of a cluster
  columns_grid,     // the same of many blocks, launched cooperatively, which merge through memory
  columns_twopass,  // not kept: the tile is read twice, by one block, or by many as above
  columns_staged,   // in the registers of a block; groups of whole slices pass through shared memory as one span each
  columns_smem,     // in the shared memory of a block, or of the blocks of a cluster
  // For rows again, without entries in the tables:
  pipelined,  // in the shared memory of several blocks, launched cooperatively, while the next row arrives there
};
constexpr const char* kTierNames[] = {"warp",         "staged",   "block",        "cluster",         "grid",
                                      "twopass",      "columns",  "columns-grid", "columns-twopass", "columns-staged",
                                      "columns-smem", "pipelined"};
constexpr int kTiers = 6;  // the tiers that a table of rows may have

constexpr int64_t kAnyLength = INT64_MAX;
constexpr int kUseWriteTable = -1;  // the tier of entries of unaligned or few_rows whose rows write or reduce serves

// How rows, or columns, of up to `limit` elements are served.
//   warp, staged    threads: per row
//   block, cluster  items_per_thread, smem_vecs: the most elements in registers, and vectors in shared memory, of a
//                   thread. blocks_per_row. threads: per block, more if a row needs more; 0: as few as it needs
//   grid, twopass   threads: per block; items_per_thread: elements that a thread keeps, or has in flight
//   columns         tile_vecs: vectors of 16 bytes side by side; threads: per block; vecs_per_thread, smem_vecs: the
//                   most vectors that a thread keeps in registers, and in shared memory (kPrefetch: the vectors of the
//                   next tile). As many blocks share a tile as it needs
//   columns_grid    tile_vecs: vectors of 16 bytes side by side
struct Entry {
  int64_t limit;
  int tier;
  int threads, items_per_thread, blocks_per_row, smem_vecs;

  int tile_vecs() const { return blocks_per_row; }
  int vecs_per_thread() const { return items_per_thread; }
};

// The name of a table says what the functions do, and the size of the wider of their two types: f32 (4 bytes) or f16 (2
// bytes). A type of 8 bytes uses f32, as a row of twice the length with half the elements per thread.
//   write             functions that write a row for each row
//   reduce            functions that only read rows
//   unaligned         both, for rows that lie one after another and are not whole 16-byte vectors
//   few_rows          functions that write rows, for up to kFewRows rows of whole vectors: with so few rows, the last
//                     blocks of a launch matter
//   columns           calls over other dims
//   columns_backward  gradients over other dims that keep two operands; no other gradient has tables here
#define ONEPASS_TABLES(F) \
  F(write)                \
  F(reduce)               \
  F(unaligned)            \
  F(few_rows)             \
  F(columns)              \
  F(columns_backward)

struct Tables {
  std::string origin;
#define ONEPASS_MEMBER(name) std::vector<Entry> name##_f32, name##_f16;
  ONEPASS_TABLES(ONEPASS_MEMBER)
#undef ONEPASS_MEMBER

  const std::vector<Entry>& of(bool reduces, bool half) const {
    return reduces ? half ? reduce_f16 : reduce_f32 : half ? write_f16 : write_f32;
  }
  const std::vector<Entry>& of_columns(bool gradient, bool half) const {
    return gradient ? half ? columns_backward_f16 : columns_backward_f32 : half ? columns_f16 : columns_f32;
  }
};

struct NamedTable {
  const char* name;
  std::vector<Entry> Tables::* table;
};
#define ONEPASS_NAMED(name) {#name "_f32", &Tables::name##_f32}, {#name "_f16", &Tables::name##_f16},
constexpr NamedTable kTables[] = {ONEPASS_TABLES(ONEPASS_NAMED)};
#undef ONEPASS_NAMED

// The entry for rows of n elements.
inline const Entry& look_up(const std::vector<Entry>& table, int64_t n) {
  size_t at = 0;
  while (n > table[at].limit) ++at;
  return table[at];
}

// The tables of the GPU of this name, or else the built-in ones.
const Tables& tables_of(const char* gpu);

// The table for gradients of rows, which keep two operands. It is built in, for all GPUs.
const std::vector<Entry>& rows_backward_table(bool half);
// The table for gradients of rows that lie one after another and are not whole vectors. rows_backward_table serves
// longer rows.
const std::vector<Entry>& unaligned_rows_backward_table(bool half);

// Increases whenever tables are set: plans made under an earlier version may be outdated.
inline std::atomic<uint64_t> tables_version{0};

// Sets the tables for the GPUs of this name. Throws std::runtime_error if they are not valid.
void set_tables(const char* gpu, Tables tables);

}  // namespace onepass
