// tables.h: which tier serves rows of which length, as data: measured on one GPU, on a date. Pure: no torch, no CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace onepass {

// Where a row waits while its state (m, l) is merged.
enum class Tier {
  warp,     // in the registers of up to 32 lanes, several rows a warp when they are short; merged by shuffles
  staged,   // the same, and the rows come and go through shared memory, many in one piece
  block,    // in the registers and shared memory of a block; merged by shuffles, then through shared memory
  cluster,  // of several blocks, which merge through each other's shared memory (compute 9.0)
  grid,     // of many blocks, launched cooperatively, which merge through memory
  twopass,  // nowhere: the row is read twice
  // Of rows that are not one piece of memory each, with tables of their own:
  columns,          // in the registers of a block, or of the blocks of a cluster, with its neighbours
  columns_grid,     // of many blocks, launched cooperatively, which merge through memory
  columns_twopass,  // nowhere; one block, or many as above
  columns_staged,   // in the registers of a block, and whole slices come and go through shared memory, in one piece
  columns_smem,     // in the shared memory of a block, or of the blocks of a cluster
  // Of rows again, without entries in the tables:
  pipelined,  // in the shared memory of several blocks, launched cooperatively, while the next row arrives there
};
constexpr const char* kTierNames[] = {"warp",         "staged",   "block",        "cluster",         "grid",
                                      "twopass",      "columns",  "columns-grid", "columns-twopass", "columns-staged",
                                      "columns-smem", "pipelined"};
constexpr int kTiers = 6;  // that a table of rows may have

constexpr int64_t kAnyLength = INT64_MAX;
constexpr int kUseWriteTable = -1;  // the tier of an entry of unaligned or few_rows that leaves its rows to the others

// How rows, or columns, of up to `limit` elements are served.
//   warp, staged    threads: per row
//   block, cluster  items_per_thread and smem_vecs: elements in registers and vectors in shared memory that a thread
//                   keeps at most. blocks_per_row. threads: per block, more where a row needs them; 0: as few as it
//                   needs
//   grid, twopass   threads: per block; items_per_thread: that a thread keeps, or has in flight
//   columns         tile_vecs: vectors of 16 bytes side by side; threads: per block; vecs_per_thread, smem_vecs: those
//                   that a thread keeps in registers and in shared memory at most (smem_vecs kPrefetch: those of the
//                   next tile). As many blocks share a tile as it takes
//   columns_grid    tile_vecs: vectors of 16 bytes side by side
struct Entry {
  int64_t limit;
  int tier;
  int threads, items_per_thread, blocks_per_row, smem_vecs;

  int tile_vecs() const { return blocks_per_row; }
  int vecs_per_thread() const { return items_per_thread; }
};

// The tables are named by what a function does and by the size of the wider of its two types: 4 bytes (8: as a row of
// twice the length with half the elements per thread), or 2.
//   write             functions that write a row for each row
//   reduce            functions that only read rows
//   unaligned         both, for rows that lie one after another and are no whole number of 16-byte vectors
//   few_rows          functions that write rows, for up to kFewRows rows of whole vectors: there the last blocks of a
//                     launch count
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

// The tables of the GPU that has this name, else the built-in ones.
const Tables& tables_of(const char* gpu);

// The table of gradients of rows, which keep two operands. It is built in for all GPUs.
const std::vector<Entry>& rows_backward_table(bool half);
// The table of rows that lie one after another and are no whole vectors; the other table serves longer ones.
const std::vector<Entry>& unaligned_rows_backward_table(bool half);

// Increases whenever tables are set: plans that were made under another version may differ now.
inline std::atomic<uint64_t> tables_version{0};

// Takes `tables` for the GPUs of this name from now on; throws std::runtime_error where they are not sound.
void set_tables(const char* gpu, Tables tables);

}  // namespace onepass
