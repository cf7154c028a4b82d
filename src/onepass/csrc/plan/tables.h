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
  flat,     // the same, and the rows come and go through shared memory, many in one piece
  block,    // in the registers and shared memory of a block; merged by shuffles, then through shared memory
  cluster,  // of several blocks, which merge through each other's shared memory (compute 9.0)
  grid,     // of many blocks, launched cooperatively, which merge through memory
  stream,   // nowhere: the row is read twice
  // Of rows that are not one piece of memory each, with tables of their own:
  columns,         // in the registers of a block, or of the blocks of a cluster, with its neighbours
  columns_grid,    // of many blocks, launched cooperatively, which merge through memory
  columns_stream,  // nowhere; one block, or many as above
};
constexpr const char* kTierNames[] = {"warp",   "flat",    "block",        "cluster",       "grid",
                                      "stream", "columns", "columns-grid", "columns-stream"};
constexpr int kTiers = 6;  // that a table of rows may have

constexpr int64_t kAnyLength = INT64_MAX;
constexpr int kAsRows = -1;  // the tier of an entry of the odd and few tables that leaves its rows to the other tables

// How rows of up to `limit` elements are served.
//   warp, flat      lanes: threads a row
//   block, cluster  values in registers and shelf vectors in shared memory that a thread keeps at most, and the blocks
//                   that split a row. lanes: threads a block, more where a row needs them; 0: as few as a row needs
//   grid, stream    lanes: threads a block; values: that a thread keeps, or has in flight
//   columns         split: vectors of 16 bytes side by side; lanes: threads a block; values, shelf: vectors that a
//                   thread keeps in registers and in shared memory at most (shelf 1: there those of the next tile). As
//                   many blocks share columns as it takes
//   columns_grid    split: vectors of 16 bytes side by side
struct Entry {
  int64_t limit;
  int tier;
  int lanes, values, split, shelf;
};

// By the size of the wider of the two types: 4 bytes (8: as a row of twice the length with half the values), and half
// types to half types. The rows tables are of the functions that write a row for a row, the reduce tables of those that
// only read it. The odd tables are of both, and of rows that lie one after another and are no whole number of 16-byte
// vectors. The few tables are of functions that write rows, for up to kFewRows that are whole vectors: there the last
// blocks of a launch count. Those of columns are of calls over other dims, and of gradients that keep two operands; no
// other gradient has tables here.
struct Tables {
  std::string origin;
  std::vector<Entry> rows32, rows16, reduce32, reduce16, odd32, odd16, few32, few16;
  std::vector<Entry> columns32, columns16, column_gradients32, column_gradients16;

  const std::vector<Entry>& of(bool reduces, bool half) const {
    return reduces ? half ? reduce16 : reduce32 : half ? rows16 : rows32;
  }
  const std::vector<Entry>& of_columns(bool gradient, bool half) const {
    return gradient ? half ? column_gradients16 : column_gradients32 : half ? columns16 : columns32;
  }
};

struct NamedTable {
  const char* name;
  std::vector<Entry> Tables::* table;
};
constexpr NamedTable kTables[] = {{"rows32", &Tables::rows32},
                                  {"rows16", &Tables::rows16},
                                  {"reduce32", &Tables::reduce32},
                                  {"reduce16", &Tables::reduce16},
                                  {"odd32", &Tables::odd32},
                                  {"odd16", &Tables::odd16},
                                  {"few32", &Tables::few32},
                                  {"few16", &Tables::few16},
                                  {"columns32", &Tables::columns32},
                                  {"columns16", &Tables::columns16},
                                  {"column_gradients32", &Tables::column_gradients32},
                                  {"column_gradients16", &Tables::column_gradients16}};

// The entry for rows of n elements.
inline const Entry& look_up(const std::vector<Entry>& table, int64_t n) {
  size_t at = 0;
  while (n > table[at].limit) ++at;
  return table[at];
}

// Those of the GPU that has this name, else the built-in ones.
const Tables& tables_of(const char* gpu);

// Raised whenever tables are set: what was planned under another number may be planned otherwise now.
inline std::atomic<uint64_t> tables_version{0};

// Takes `tables` for the GPUs of this name from now on; throws std::runtime_error where they are not sound.
void set_tables(const char* gpu, Tables tables);

}  // namespace onepass
