// rows.h: which kernel serves a call, and with which launch numbers. Pure: no torch, no CUDA; tested without a GPU.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "../core/layout.h"
#include "../core/alignment.h"
#include "tables.h"
#include "../core/types.h"

namespace onepass {

constexpr int kPrefetch = 1;  // `smem_vecs` of a plan of columns that loads the next tile into shared memory ahead
constexpr bool is_of_columns(Tier tier) {
  return tier == Tier::columns || tier == Tier::columns_grid || tier == Tier::columns_twopass;
}

// The launch numbers of a call, as the private operators take them. The tiers of columns read them through the
// accessors threads_x, threads_y and blocks_per_tile, the tier staged reads smem_vecs through rows_per_thread.
struct CudaPlan {
  Tier tier;
  int threads_per_row;   // threads of a block that share a row
  int rows_per_block;    // rows that a block holds at a time
  int items_per_thread;  // elements of a row, or of each column, that a thread keeps in registers (twopass: in flight)
  int vec_size;          // elements of a load or store: 16 bytes of the wider type where all tensors are aligned alike
  int blocks_per_row;    // blocks that share a row
  int smem_vecs;         // vectors of a row that a thread keeps in shared memory (block, cluster, grid, columns)
  VecAccess access;

  bool of_columns() const { return is_of_columns(tier); }
  int threads_x() const { return threads_per_row; }       // columns: threads side by side
  int threads_y() const { return rows_per_block; }        // columns: threads down a column
  int blocks_per_tile() const { return blocks_per_row; }  // columns: blocks that share a tile
  int rows_per_thread() const { return smem_vecs; }       // staged: rows that a thread serves one after another
  // Threads of a block. In the tier grid one warp more than share the row.
  int threads() const {
    if (of_columns()) return int(up_to(threads_x() * threads_y(), 32));
    if (tier == Tier::warp || tier == Tier::staged) return threads_per_row * rows_per_block;
    return tier == Tier::grid ? threads_per_row + 32 : threads_per_row;
  }
  // The most threads of a block that a kernel of columns is compiled for.
  int max_threads() const {
    int most = 128;
    while (most < threads()) most *= 2;
    return most;
  }
  bool prefetches() const { return of_columns() && smem_vecs == kPrefetch; }
  bool in_grid() const {
    return tier == Tier::columns_grid || (tier == Tier::columns_twopass && blocks_per_tile() > 1);
  }
  int vecs_per_thread() const { return items_per_thread / vec_size; }
  // The tier grid: vectors that a thread takes at a time (of doubles fewer; more where nothing is kept in registers),
  // chunks of these that a block takes of a row, and vectors of a chunk, so many that each begins at a multiple of 16
  // bytes.
  int chunk() const { return vec_size == 2 ? 2 : vecs_per_thread() ? 4 : 8; }
  int64_t chunks(int64_t n) const {
    return ceil_div(ceil_div(n / vec_size, blocks_per_row), chunk() * threads_per_row);
  }
  int64_t wide(int64_t n) const {
    const int64_t count = chunks(n);
    return count ? up_to(ceil_div(n / vec_size, blocks_per_row * count), 4) : 4;
  }
  // Elements of a row that are not kept on the chip.
  int64_t read_again(int64_t n) const {
    const int kept = vecs_per_thread() / chunk() + smem_vecs / chunk();
    return tier == Tier::grid && chunks(n) > kept ? (chunks(n) - kept) * wide(n) * blocks_per_row * vec_size : 0;
  }
  bool keeps_vecs_in_smem() const {
    return smem_vecs && (tier == Tier::block || tier == Tier::cluster || (of_columns() && smem_vecs != kPrefetch));
  }
  // Rows that one block, or the blocks that share rows, take at a time.
  int64_t group() const { return tier == Tier::staged ? rows_per_block * rows_per_thread() : rows_per_block; }
  // Blocks of a launch, where at most `resident` of them are to be started; beyond it a block takes several groups.
  int64_t grid(int64_t rows, int64_t resident = kMaxGrid) const {
    const int64_t groups = ceil_div(rows, group()), most = resident / blocks_per_row;
    return (groups < most ? groups : most > 0 ? most : 1) * blocks_per_row;
  }
  static constexpr int64_t kMaxGrid = 0x7fffffff;
};

constexpr int kThreads = 128;   // threads a block, in the warp and flat tiers
constexpr int kShortRow = 128;  // elements of two bytes
// Lengths of rows that go by narrower vectors if they have no more bytes in all.
constexpr int kShortest = 16, kLongest = 512;
constexpr int64_t kFewBytes = int64_t(1) << 25;
// Elements of a row that is only read, up to which the flat tier pays: of halves longer ones too, but for those that
// come in aligned vectors of four.
constexpr int kFlatReduced = 40, kFlatReducedHalves = 256;
constexpr bool flat_pays_reduced(int64_t n, bool half) {
  return n <= kFlatReduced || (half && n <= kFlatReducedHalves && n % 4);
}
constexpr int kTile = 16384;          // bytes of a tile of the flat tier
constexpr int kStaticShared = 16384;  // bytes of shared memory that a kernel declares at most
// In elements of 4 bytes, or of halves. From kLongRow on rows may be spread where there are few; from kWholeChip on up
// to kFewWhole of them over the whole chip.
constexpr int64_t kLongRow = 16384, kWholeChip = 196608, kWholeChipHalves = 393216;
constexpr int kFewWhole = 8;
constexpr int64_t kFewRows = 8192;   // up to here the tables of few rows serve
constexpr int64_t kPaired = 131072;  // and from here on more, up to one for two multiprocessors
constexpr int kStreaming = 1024;     // threads a multiprocessor that stream rows, so many at least

constexpr int kWindowHalves = 40;  // that a thread keeps of a row that is no whole number of vectors: more would spill
constexpr int kGridVectors = 448;  // of a row that a block of the tier grid is worth being there for
// Rows longer than so many times what the chip holds: registers keep nothing of them, and shared memory little, so that
// the L1 cache has room for what is on its way (1x256M floats: 810 us with all of it, 754 so).
constexpr int kMuchLonger = 4, kLittle = 16;

// One call while its plan is made. With `invariant` the plan follows from the types and the length of a row alone, and
// so does which elements a thread adds up: a row's bits are then the same among any number of rows, wherever it lies.
struct Planner {
  const Layout& layout;
  const DType x, y;
  const Alignment& alignment;
  const Gpu& gpu;
  const bool invariant;

  const int64_t n = layout.n;
  const int x_size = size_of(x), y_size = size_of(y), wide = x_size > y_size ? x_size : y_size;
  const bool half = wide == 2;
  const int part = wide == 8 ? 2 : 1;  // doubles: half the elements a thread
  // Of a row in elements of 4 bytes, or in halves, as it waits on the chip: the elements of a reduction do so in the
  // type that it is computed in, which is the wider one.
  const int64_t length = half || n > kAnyLength / 2 ? n : n * wide / 4;
  int vector = alignment.widest;
  bool apart = false;
  int64_t vectors = 0;  // of a row's window at worst

  Planner(const Layout& layout, DType x, DType y, const Alignment& alignment, const Gpu& gpu, bool invariant)
      : layout(layout), x(x), y(y), alignment(alignment), gpu(gpu), invariant(invariant) {
    if (invariant) {
      vector = alignment.full;
      apart = alignment.begins_within(vector) || alignment.writes_within(vector);
    }
    count();
  }
  // Narrower vectors, which are few, have no kernels of their own for whole ones.
  VecAccess access() const {
    return apart                                                    ? VecAccess::scalar
           : vector == alignment.full && alignment.whole(n, vector) ? VecAccess::aligned
                                                                    : VecAccess::predicated;
  }
  void count() { vectors = ceil_div(!apart && alignment.begins_within(vector) ? n + vector - 1 : n, vector); }

  CudaPlan warp(const Entry& entry) const {
    return {Tier::warp,
            entry.threads,
            entry.threads < kThreads ? kThreads / entry.threads : 1,
            int(up_to(ceil_div(vectors, entry.threads) * vector, vector > 4 ? vector : 4)),
            vector,
            1,
            0,
            access()};
  }

  // Tiles of whole vectors where the rows allow it. The warp tier, element by element, where they do not lie flat: with
  // the same bits.
  CudaPlan flat(const Entry& entry) const {
    const int rows = kThreads / entry.threads, values = int(up_to(ceil_div(n, entry.threads), 2));
    if (!lies_flat(layout, !alignment.writes_rows))
      return {Tier::warp, entry.threads, rows, values, 1, 1, 0, VecAccess::predicated};
    int turns = int(ceil_div(kTile * 7 / 8, n * x_size * rows));
    while (turns * rows % (16 / x_size)) ++turns;
    return {Tier::staged, entry.threads, rows, values, 1, 1, turns, VecAccess::predicated};
  }

  // Few rows that are no whole vectors of 16 bytes, in whole narrower ones: they are too few tiles for the chip (5120
  // rows of 196 bfloat16 take 5.3 us for 7.2, measured on an H200, 2026-11-22).
  bool narrow(CudaPlan* plan) {
    if (invariant || !alignment.writes_rows || n < kShortest || n > kLongest) return false;
    if (layout.rows > kFewBytes / (n * x_size)) return false;
    int width = half ? 4 : 2;
    while (width > 1 && !alignment.whole(n, width)) width /= 2;
    const int lanes = n < kShortRow / 2 ? 8 : n <= 2 * kShortRow || width == 4 ? 16 : 32;
    const int values = int(up_to(ceil_div(n, int64_t(width) * lanes) * width, 4));
    *plan = {Tier::warp, lanes, kThreads / lanes, values, width, 1, 0, VecAccess::aligned};
    return true;
  }

  // Blocks of `lanes` threads or more that share a row in registers and shared memory, if they can.
  bool share(int split, int lanes, int values, int shelf, CudaPlan* plan) const {
    int64_t slots = (wide == 8 && values > 24 ? 24 : values) / part / vector;
    if (slots < 1) slots = 1;
    if (vector * x_size < 8) shelf = 0;
    int64_t threads = up_to(ceil_div(vectors, (slots + shelf) * split), 32);
    if (threads < lanes) threads = lanes;
    if (split > most_cluster(gpu) || threads > most_threads(gpu.arch, split)) return false;
    const int64_t each = ceil_div(vectors, threads * split);
    const int64_t few_kinds = alignment.full / vector;  // narrow vectors come in no more numbers than wide ones
    if (each <= slots) slots = up_to(each, few_kinds);
    shelf = each > slots ? int(up_to(each - slots, 2)) : 0;
    if (shelf * threads * vector * x_size > gpu.shared - kStaticShared) return false;
    const Tier tier = split > 1 ? Tier::cluster : Tier::block;
    *plan = {tier,   int(threads), 1,     int(slots) * vector,
             vector, split,        shelf, shelf && !apart ? VecAccess::predicated : access()};
    return true;
  }

  // The chip, or so much of it as pays, on a few rows at a time: as many as it holds together.
  bool grid(CudaPlan* plan) {
    if (!gpu.cooperative) return false;
    if (vector != alignment.full) vector = alignment.full, apart = true, count();
    const auto places = [&](int threads) {
      return int((gpu.shared - kStaticShared) / (threads * alignment.full * x_size) / 4 * 4);
    };
    const int most_slots = (gpu.arch == 90 ? 16 : 12) / part / 4 * 4;  // elsewhere more would spill
    int threads = 480, slots = most_slots;
    const int64_t chip = gpu.sm_count, holds = threads * int64_t(slots + places(threads));
    const int64_t alone = ceil_div(vectors, holds);  // blocks that hold a row between them
    int64_t split = alone < chip ? alone : chip;
    if (!invariant && alone < chip) {
      const int64_t together = layout.rows < chip / alone ? layout.rows : chip / alone;
      const int64_t useful = ceil_div(vectors, kGridVectors);  // blocks with something to do
      split = chip / together;
      if (split > useful) split = useful > alone ? useful : alone;
    }
    // Fewer threads where they have less to keep. What has arrived in registers is worked on soonest.
    const int64_t each = ceil_div(vectors, split);
    const auto takes = [&](int few, int kept, int shelf) {
      kept = kept < most_slots ? kept : most_slots;
      if (each > int64_t(few) * (kept + shelf)) return false;
      threads = few, slots = kept;
      return true;
    };
    if (wide < 8 && each > kMuchLonger * holds) slots = 0;
    const auto little = [&](int threads) { return places(threads) < kLittle ? places(threads) : kLittle; };
    (void)(takes(256, 4, 0) || takes(256, 8, 0) || takes(256, 12, 0) || takes(256, 16, 0) ||
           takes(352, 8, little(352)));
    const int most = slots ? places(threads) : little(threads);
    const int64_t rest = ceil_div(each, threads) - slots, shelf = rest > 0 ? up_to(rest, 4) : 0;
    *plan = {Tier::grid,
             threads,
             1,
             slots * vector,
             vector,
             int(split),
             int(shelf < most ? shelf : most),
             apart ? VecAccess::scalar : VecAccess::predicated};
    return true;
  }

  CudaPlan stream(int threads, int values) const {
    const int kept = values / part < vector ? vector : values / part / vector * vector;
    return {Tier::twopass,
            int(up_to(threads / part, 32)),
            1,
            kept,
            vector,
            1,
            0,
            apart ? VecAccess::scalar : VecAccess::predicated};
  }

  // The entry of a function that writes a row for a row.
  const Entry& as_written(const Tables& tables) const {
    if (!invariant && layout.rows <= kFewRows && n % alignment.full == 0) {
      const Entry& few = look_up(half ? tables.few_rows_f16 : tables.few_rows_f32, length);
      if (few.tier != kUseWriteTable) return few;
    }
    return look_up(tables.of(false, half), length);
  }

  CudaPlan plan(const Tables& tables) {
    if (wide < 8 && n % (16 / x_size) && (alignment.writes_rows || flat_pays_reduced(n, half))) {
      const Entry& odd = look_up(half ? tables.unaligned_f16 : tables.unaligned_f32, n);
      if (odd.tier != kUseWriteTable && (invariant || lies_flat(layout, !alignment.writes_rows))) {
        CudaPlan made;
        return narrow(&made) ? made : flat(odd);
      }
    }
    const bool reduces = !alignment.writes_rows;
    const Entry* of_length = reduces ? &look_up(tables.of(true, half), length) : &as_written(tables);
    // A row that streams has one block. Where those are too few for the chip, a reduction is served as softmax is.
    if (reduces && !invariant && Tier(of_length->tier) == Tier::twopass &&
        layout.rows < int64_t(gpu.sm_count) * kStreaming / of_length->threads)
      of_length = &as_written(tables);
    const Entry& entry = *of_length;
    const Tier tier = Tier(entry.tier);
    if (tier == Tier::staged) return flat(entry);
    if (tier == Tier::warp) {
      // In a row of few vectors the two that are not whole cost more than narrow ones: 100 bfloat16 0.78 of a copy in
      // vectors of 4, 0.70 in vectors of 8. (For 33 floats it is the other way round.)
      while (!invariant && half && n < kShortRow && alignment.begins_within(vector)) vector /= 2;
      count();
      return warp(entry);
    }
    CudaPlan made;
    if (!invariant && length >= kLongRow) {
      // Few long rows: over the whole chip, or over so many blocks a row that they fill it.
      const int64_t whole = half ? kWholeChipHalves : kWholeChip;
      const bool few = length >= whole && layout.rows <= kFewWhole;
      const bool pairs = length >= kPaired && layout.rows > 32 && layout.rows <= gpu.sm_count / 2;
      if ((few || pairs) && vector == alignment.full && grid(&made) && (few || !made.read_again(n))) return made;
      for (int split = 16; split >= entry.blocks_per_row && split > 1; split /= 2) {
        if (layout.rows * split > 4 * gpu.sm_count) continue;
        // Where there are several blocks a multiprocessor, smaller ones of more elements a thread.
        const bool several = half && vector == alignment.full && layout.rows * split > 2 * gpu.sm_count;
        for (const int values : {several ? 48 : 32, 16, 8}) {
          if (share(split, 0, values, 0, &made) && made.threads_per_row >= kThreads && made.threads_per_row <= 1024 / 2)
            return made;
        }
      }
    }
    if (tier == Tier::block || tier == Tier::cluster) {
      const bool within = invariant ? n % vector != 0 : access() != VecAccess::aligned;
      const bool fewer = half && within && !entry.smem_vecs && entry.items_per_thread > kWindowHalves;
      if (share(entry.blocks_per_row, entry.threads, fewer ? kWindowHalves : entry.items_per_thread, entry.smem_vecs,
                &made))
        return made;
      const int clusters = most_cluster(gpu);  // of a GPU that takes no clusters as large as the table's
      for (const int split : {1, clusters}) {
        for (const int shelf : {0, 8, 16, 24}) {
          if (entry.blocks_per_row >= split && share(split, 0, half ? 40 : 32, shelf, &made)) return made;
        }
      }
    }
    if (tier != Tier::twopass && grid(&made)) return made;
    return tier == Tier::twopass ? stream(entry.threads, entry.items_per_thread) : stream(half ? 512 : 1024, 16);
  }
};

inline CudaPlan plan_cuda(const Layout& layout, DType x, DType y, const Alignment& alignment, const Gpu& gpu,
                          bool invariant = false) {
  return Planner(layout, x, y, alignment, gpu, invariant).plan(tables_of(gpu.name));
}

}  // namespace onepass
