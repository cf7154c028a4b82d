// columns.h: ColumnPlanner chooses the launch that serves columns where they are in memory, without a copy. It takes
// the plan of the tables, unless another plan is expected to be faster (column_speed.h). column_params.cuh explains
// lines and slices, column_tile.cuh tiles, slabs and shifted tiles. Pure: no torch, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <utility>

#include "column_speed.h"

namespace onepass {

constexpr int kSlabThreads = 128, kLongestTurn = 512;  // threads of a slab: about, and at most
// A tile that has a multiprocessor to itself: its vectors side by side, and the most elements of a column.
constexpr int kAlone = 4, kAloneMost = 4096;
constexpr int kFew = 3, kWide = 16;  // fewer tiles per multiprocessor are too few; vectors side by side of a wide tile

struct ColumnPlanner : ColumnSpeed {
  const int most = 16 / operands;  // the most vectors that a thread keeps in registers if blocks share columns

  // Long columns of float32: wide tiles are faster if there are many. If there are few, narrow tiles are, which fewer
  // blocks share. (Wide and narrow, as fractions of a copy's speed: 8 x 4096 x 4096 .905 and .889, 4096 x 4096 .777 and
  // .828; H200, 2026-11-23.)
  bool narrows() const { return operands == 1 && bytes == 4 && n > 2048 && n <= 4096; }

  // The plan of tiles that a table entry alone gives; none if the entry has the tier columns and no cluster holds the
  // columns.
  std::optional<CudaPlan> plan_by(const Entry& entry) const { return plan_tiles(entry, false); }

  // The plan that `expected` rates as the fastest.
  CudaPlan plan() const {
    CudaPlan best = plan_in_place();
    if (!merges || view.strided || n == 1 || are_as_measured()) return best;
    double speed = 0;
    for_each_candidate([&](const CudaPlan& other) {
      const double of_other = expected(other);
      if (of_other > speed) best = other, speed = of_other;
    });
    return best;
  }
  // Calls f for the plans that are compared.
  template <class F>
  void for_each_candidate(F f) const {
    f(plan_in_place());
    if (const auto staged = plan_staged()) f(*staged);
    if (bytes == 8) return;  // exponentials take most of the time
    for_each_tile(f);
    for_each_smem_tile(f);
    if (const auto shifted = plan_shifted_over_chip()) f(*shifted);
  }

  // The same for columns with scores. Scores pass through registers even if they are kept in shared memory, which takes
  // time (H100, 2026-11-26). `of_staged`: the fraction of its expected speed that the tier columns_staged reaches.
  CudaPlan plan_of_scores(double of_staged) const {
    constexpr int kAcross = 128, kMostWords = 48;
    if (view.strided && n * on_chip / 4 <= kMostWords)  // one thread has a whole column
      return {Tier::columns, kAcross, 1, compiled_vecs(n), 1, 1, 0, VecAccess::strided};
    if (view.strided) return plan_in_place();
    CudaPlan best = {};
    double speed = 0;
    const auto try_it = [&](const CudaPlan& other, double factor) {
      const double of_other = expected(other) * factor;
      if (of_other > speed) best = other, speed = of_other;
    };
    if (const auto staged = plan_staged()) try_it(*staged, of_staged);
    for_each_tile([&](const CudaPlan& other) { try_it(other, !gradient && other.keeps_vecs_in_smem() ? 0.75 : 1); });
    return best;
  }

  // Whether columns are like those for which the table's entry was measured to be the fastest: whole vectors side by
  // side, and at least about as many as the entry says, so that few threads are idle.
  bool are_as_measured() const {
    if (view.tile < view.full || inner % view.full) return false;
    const int64_t vectors = inner / view.full, side = entry().tile_vecs(), across = fitting(side, vectors);
    return 4 * vectors >= 3 * side && 20 * vectors >= 17 * across * ceil_div(vectors, across);
  }
  // Calls f for candidate plans of tiles with each width of vectors. One of them is about the fastest.
  template <class F>
  void for_each_tile(F f) const {
    for (int vector = view.tile; vector >= 1 && 4 * vector >= view.tile; vector /= 2)
      for_each_tile(vector, access_of(vector), f);
    for (const int vector : {2, 4}) {
      if (vector <= view.shift && view.shift > view.tile && inner >= 2 * vector && view.lead_step % vector)
        for_each_tile(vector, VecAccess::shifted, f);
    }
  }
  // For half types whose lines may begin anywhere: shifted tiles shared by blocks of the whole chip, if it holds them.
  std::optional<CudaPlan> plan_shifted_over_chip() const {
    if (bytes > 2 || view.shift <= view.tile || inner < 2 * view.shift) return {};
    const int vector = std::min(view.shift, 4);
    const int64_t side = 256 / (vector * bytes), vectors = ceil_div(inner, int64_t(vector));
    const CudaPlan made = plan_grid(int(std::max<int64_t>(std::min(side, vectors + 1), 3)), vector, VecAccess::shifted);
    return made.tier == Tier::columns_twopass ? std::nullopt : std::optional(made);
  }
  // Tries lines of several lengths in bytes, and blocks of several sizes. A thread has as many vectors as its columns
  // need. If registers hold all vectors, as few blocks as possible share a tile; if some are in shared memory, any
  // number of blocks.
  template <class F>
  void for_each_tile(int vector, VecAccess access, F f) const {
    constexpr int kLines[] = {64, 128, 256, 512, 1024}, kMostVecs = 32, kMostSmemVecs = 40;
    const bool shift = access == VecAccess::shifted;
    const int period = shift ? view.period(vector) : 1, vec_words = operands * std::max(1, vector * on_chip / 4);
    // A gradient has no registers left for vectors in shared memory if 64 words are elements, nor if tiles of wider
    // types than half types are shifted: it spills.
    const bool two = operands > 1;
    const bool takes_smem = vector * read >= 4 && vector * on_chip <= 16 && access != VecAccess::predicated &&
                            !(two && shift && on_chip > 2);
    const int most_vecs = std::min(kMostVecs, (two && takes_smem ? 48 : 64) / vec_words);
    const int64_t vectors = ceil_div(inner, int64_t(vector));
    // Calls f for a plan with at most `most_vecs` vectors of a thread in registers. Returns whether these are all its
    // vectors.
    const auto try_it = [&](int across, int most_down, int blocks, int most_vecs) {
      int64_t each = ceil_div(n, int64_t(most_down) * blocks);
      const int down = int(std::min<int64_t>(up_to(ceil_div(n, each * blocks), period), most_down));
      each = ceil_div(n, int64_t(down) * blocks);
      if (blocks > 1 && each * vector < 8 / operands) return true;
      const int vecs = compiled_items(std::min<int64_t>(each, most_vecs));
      const int smem_vecs = each > vecs ? int(up_to(each - vecs, 4)) : 0;
      const CudaPlan made = {Tier::columns, across, down, vecs * vector, vector, blocks, smem_vecs, access};
      if (smem_vecs <= (takes_smem ? kMostSmemVecs : 0) &&
          count_smem_vecs_bytes(made, vector * on_chip * operands) <= smem_room(made, across * vector))
        f(made);
      return !smem_vecs;
    };
    int64_t before = 0;
    for (const int line : kLines) {
      const int64_t side = std::max(1, line / (vector * bytes));
      int64_t across = 2 * vectors <= 3 * side ? vectors : ceil_div(vectors, ceil_div(vectors, side));
      if (across == before) continue;
      before = across;
      if (shift) across = std::max<int64_t>(across + 1, 3);
      for (const int threads : {64, 128, 256, 512}) {
        const int down = int(threads / across) / period * period;
        // Blocks that take half of a multiprocessor are only for long columns.
        if (!down || (threads > 256 && n <= int64_t(down / 2) * most_cluster(gpu) * most_vecs)) continue;
        for (int blocks = 1; blocks <= most_cluster(gpu); blocks *= 2) {
          const bool fits = try_it(int(across), down, blocks, most_vecs);
          try_it(int(across), down, blocks, most_vecs / 2);  // fewer registers, more blocks of a multiprocessor
          if (fits) break;
        }
        // Tiles that are read twice, by one block each, or by as many blocks as fill the chip.
        if (threads == 512 && n > 4 * down) {
          const int vecs = std::min(16, 256 / (vector * on_chip)) / operands;
          CudaPlan twice = {Tier::columns_twopass, int(across), down, vecs * vector, vector, 1, 0, access};
          const int64_t cols = across * vector - (shift ? vector - 1 : 0),
                        tiles = view.slices() * ceil_div(inner, cols);
          f(twice);
          twice.blocks_per_row = int(std::max<int64_t>(gpu.sm_count / tiles, 1));
          if (gpu.cooperative && twice.blocks_per_row > 1) f(twice);
        }
      }
    }
  }
  // Calls f for plans of the tier columns_smem: slabs, and shifted tiles with lines of several lengths in bytes.
  template <class F>
  void for_each_smem_tile(F f) const {
    constexpr int kVecBytes = 8, kLeast = 16;  // the fewest elements of a thread
    const auto try_it = [&](int across, int down, int vector, VecAccess access) {
      const int64_t cols = access == VecAccess::slab ? inner : int64_t(across) * vector;
      const int most = across * down > 128 ? most_cluster(gpu) : 2;  // at most two small blocks share a tile
      for (int blocks = 1; blocks <= std::min(most, most_cluster(gpu)); blocks *= 2) {
        const CudaPlan made = {Tier::columns_smem, across, down, kStageVecs * vector, vector, blocks, 0, access};
        if (vecs_in_smem(made) * vector < kLeast) break;
        if (smem_bytes(made) <= smem_room(made, cols)) f(made);
      }
    };
    for (int vector = kVecBytes / bytes; vector <= 4; vector *= 2) {
      for (const int threads : {128, 256, 512}) {
        const int64_t turn = view.turn(vector);
        if (view.slab >= vector && turn <= threads) try_it(int(threads / turn * turn), 1, vector, VecAccess::slab);
        if (view.shift_in < vector) continue;
        const int period = view.operand_period(vector), more = view.tile >= vector ? 0 : vector - 1;
        for (const int line : {128, 256, 512}) {
          const int64_t across = ceil_div(std::min<int64_t>(line / bytes, inner) + more, int64_t(vector)),
                        down = threads / across / period * period;
          if (down && (line == 128 || inner * bytes > line / 2))
            try_it(int(across), int(down), vector, VecAccess::shifted);
        }
      }
    }
  }
  VecAccess access_of(int vector) const { return inner % vector == 0 ? VecAccess::aligned : VecAccess::predicated; }

  // The plan without a comparison: tiles if all lines begin with a vector (or nearly so), otherwise slabs.
  CudaPlan plan_in_place() const {
    if (!merges) return plan_pointwise();
    if (view.strided) {
      return share(strided_across(), most_down(strided_across(), 256), 1, 8 / operands, 0, VecAccess::strided);
    }
    const int64_t turn = view.turn(view.slab > 0 ? view.slab : 1);
    if (const int threads = half_slab_threads(turn)) {
      const int vecs = early ? 6 : threads > 256 ? 8 : 4;
      return share(threads, 1, view.slab, vecs, 2 * most - vecs, VecAccess::slab_aligned);
    }
    if (operands > 1 && bytes == 2 && view.slab_whole && view.slab == view.full && view.tile < view.full &&
        turn <= kSlabThreads) {
      if (const auto found = plan_half_gradient(turn)) return *found;
    }
    if (view.tile && (2 * view.tile >= view.full || view.slab <= view.tile || turn > kLongestTurn)) {
      return *plan_tiles(entry(), true);
    }
    const int vector = view.slab;
    const VecAccess access = view.slab_whole ? VecAccess::slab_aligned : VecAccess::slab;
    const int64_t useful = ceil_div(n * inner, turn * vector);  // turns that a whole slab takes
    const int64_t turns =
        threads_of(turn, bytes == 4 && operands == 1 && !view.slab_whole ? 2 * kSlabThreads : kSlabThreads) / turn;
    const int across = int(turn * (turns < useful ? turns : useful));
    const bool ahead = access == VecAccess::slab_aligned && vector * read >= 4 && bytes == 2;
    return share(across, 1, vector, most, ahead ? kPrefetch : 0, access);
  }

  // Rounds up to the numbers of vectors per thread that kernels of tiles are compiled for.
  static int compiled_items(int64_t items) {
    return int(items <= 4 ? items : items <= 16 ? up_to(items, 2) : up_to(items, 4));
  }

  // The tier columns_staged: groups of whole slices pass through shared memory. None if a slice is too large.
  std::optional<CudaPlan> plan_staged() const {
    constexpr int64_t kThreads = 512, kGroupsPerSm = 4, kMostTurns = 16, kMostBytes = 48 * 1024;
    if (!view.slices_follow || view.strided || (gradient && operands < 2)) return {};
    const int vector = staged_vector();
    // The longest column that one thread takes alone, which needs no merge. (H200, 2026-11-26)
    const int64_t alone = bytes == 8     ? 16
                          : operands > 1 ? 32
                                         : 64,
                  down = n <= alone ? 1 : ceil_div(n, std::min<int64_t>(alone, 48));
    if (down > kThreads / 2) return {};
    const int64_t step = slice_step(), slice = step * read * operands, slice_vecs = ceil_div(inner, int64_t(vector)),
                  fair = std::max<int64_t>(ceil_div(view.slices(), kGroupsPerSm * gpu.sm_count), 1),
                  least = std::min(ceil_div(16, n * inner * view.narrowest), view.slices());
    CudaPlan best = {};
    double best_value = 0;
    for (int64_t group = 1; group <= fair || group <= least; group += group < 16 ? 1 : 8) {
      if (group < least) continue;
      if (best_value > 0 && group * slice > kMostBytes) break;
      const int64_t vecs = group * slice_vecs;
      for (int64_t turns = ceil_div(vecs, kThreads / down); turns <= vecs; ++turns) {
        const int64_t across = ceil_div(vecs, turns), threads = across * down;
        // If threads merge their states, tiles of whole slices are better.
        const double value = value_of_groups(vecs * down, turns, threads, turns * ceil_div(n, down) * vector,
                                             double(group * slice) / 1024) *
                             (down > 1 && across % slice_vecs ? 0.85 : 1);
        if (value > best_value) {
          best_value = value;
          best = {
              Tier::columns_staged, int(across),       int(down), compiled_vecs(ceil_div(n, down)) * vector, vector, 2,
              int(group),           VecAccess::aligned};
        }
        if (turns > kMostTurns) break;
      }
    }
    // Results replace the operand in shared memory if both are contiguous, have elements of one size and begin at the
    // same byte of a vector. Otherwise they need memory of their own.
    const bool in_place = view.slab == view.full && step == n * inner && read == bytes && view.narrowest == bytes;
    const int64_t group = best.slices_per_group(), span = operands * count_span_bytes(group, step, read, kSliceGap),
                  own = in_place ? 0 : count_span_bytes(group, n * inner, bytes, kSliceGap),
                  room = smem_room(best, best.threads_x() * vector) - own;
    if (span > room) return {};
    if (2 * span > room) best.blocks_per_row = 1;
    return best;
  }

 private:
  // The adjacent columns that a thread takes. If columns are short, more of them share the work that a thread does
  // once. Pairs of half elements that are not aligned to 4 bytes cost more, the fewer lie side by side. (H200,
  // 2026-11-26)
  int staged_vector() const {
    if (bytes == 8 || (bytes == 4 && operands > 1)) return 1;
    if (bytes == 4) return n <= 32 ? 2 : 1;
    if (n < 8 && inner >= 32) return 4;
    return inner % 2 ? 1 : 2;
  }
  // Rates groups of slices from 0 to 1. `useful`: threads with work, over all turns; `items`: elements of a thread;
  // `size`: in KB. With too few elements, the work that is done once per group dominates. With too many threads or
  // bytes, fewer groups fit on a multiprocessor.
  static double value_of_groups(int64_t useful, int64_t turns, int64_t threads, int64_t items, double size) {
    const auto within = [](double value, double low, double high, double power) {
      return std::pow(value < low ? value / low : value > high ? high / value : 1, power);
    };
    return double(useful) / double(turns * up_to(threads, 32)) * within(double(items), 24, 64, 0.15) *
           within(double(threads), 96, 384, 0.15) * within(size, 10, 32, 0.15);
  }
  static int64_t threads_of(int64_t turn, int64_t threads) { return turn < threads ? threads / turn * turn : turn; }

  // The threads for slabs of a half type that one or two blocks can keep; 0 if they cannot. Each block loads all of its
  // elements at once. Threads compute exponentials while later vectors are in flight, most of which stay in shared
  // memory. (256 x 1000 x 7 x 7 bfloat16, as fractions of a copy's speed: 6 vectors in registers .85, 10 .81, 18 .82;
  // through a ring, with 4 .79, 12 .80; H200, 2026-11-23.)
  int half_slab_threads(int64_t turn) const {
    if (bytes != 2 || operands != 1 || !view.slab_whole || view.slab != view.full || view.tile == view.full) return 0;
    for (const int64_t threads : {256, 512}) {
      const int64_t across = threads_of(turn, threads), blocks = threads / 256;
      if (across <= threads && ceil_div(n * inner, across * view.slab * blocks) <= 2 * most) return int(across);
    }
    return 0;
  }
  // The plan of a gradient of a half type in long slabs that are whole vectors although their lines are not. A thread
  // has few vectors, or as many as registers hold. (As fractions of an add's speed: 256 x 1000 x 7 x 7 bfloat16 .84
  // with 4 vectors and 196 threads, .78 with 16 and 98; 64 x 1000 x 14 x 14 .73 with 16 vectors, .69 in tiles of
  // narrower vectors; H200, 2026-11-23.)
  std::optional<CudaPlan> plan_half_gradient(int64_t turn) const {
    for (const auto& [threads, vecs] : {std::pair(224, 4), {128, 8}, {128, 16}}) {
      const int64_t across = threads_of(turn, threads), vectors = n * inner / view.slab;
      if (vectors >= 16 * across && ceil_div(vectors, across * most_cluster(gpu)) <= vecs)
        return share(int(across), 1, view.slab, vecs, 0, VecAccess::slab_aligned);
    }
    return {};
  }
  static bool is_slab(VecAccess access) { return access == VecAccess::slab || access == VecAccess::slab_aligned; }

  // The number of vectors per thread that a kernel is compiled for, from the number that a thread needs.
  static int compiled_vecs(int64_t vecs) {
    return int(vecs <= 16 ? vecs : vecs <= 32 ? up_to(vecs, 2) : up_to(vecs, 4));
  }

  // The most threads along a column such that each has at least two vectors.
  int most_down(int across, int threads) const {
    const int64_t useful = ceil_div(n, int64_t(2)), down = threads / across;
    return int(down < 1 ? 1 : down < useful ? down : useful);
  }

  // Threads side by side. The lanes of a warp go along the dim of the smallest stride, in the tensor that dims are
  // sorted by. (In the result of a reduction, columns lie closer together than in its input.)
  int strided_across() const {
    const auto step = [](const TileDims& dims) {
      return dims.count ? std::llabs(dims.steps[0][dims.count - 1]) : INT64_MAX;
    };
    return step(view.tiles.outer) < step(view.tiles.reduced) ? int(inner < 32 ? inner : 32) : 1;
  }

  // The gradient of logsumexp, which merges nothing: as many blocks as fill the chip. Each takes its vectors in turns.
  CudaPlan plan_pointwise() const {
    const bool slab = !view.strided && view.slab > view.tile && view.turn(view.slab) <= kMaxTurn;
    const int vector = view.strided ? 1 : slab ? view.slab : view.tile;
    const int64_t vectors = ceil_div(inner, int64_t(vector)), turn = slab ? view.turn(vector) : 1;
    const int across = view.strided ? strided_across()
                       : slab       ? int(turn * (turn < kSlabThreads ? kSlabThreads / turn : 1))
                                    : fitting(16, vectors);
    const int down = slab ? 1 : most_down(across, 256);
    const VecAccess access = view.strided          ? VecAccess::strided
                             : slab                ? view.slab_whole ? VecAccess::slab_aligned : VecAccess::slab
                             : inner % vector == 0 ? VecAccess::aligned
                                                   : VecAccess::predicated;
    const int64_t pitch = slab ? inner : int64_t(across) * vector, all = ceil_div(inner, pitch) * outer_tiles();
    const int64_t fill = ceil_div(int64_t(4) * gpu.sm_count, all),
                  useful = ceil_div(need(across, down, vector, access), int64_t(8));
    const int64_t blocks = fill < useful ? fill : useful;
    const int most = gpu.cooperative ? gpu.sm_count : 1;
    return {Tier::columns_twopass, across, down, 8 * vector, vector, int(blocks < most ? blocks : most), 0, access};
  }

  int64_t outer_tiles() const {
    int64_t tiles = 1;
    for (int d = 0; d < view.tiles.outer.count && !view.strided; ++d) tiles *= view.tiles.outer.sizes[d];
    return tiles;
  }

  const Entry& entry() const { return look_up(tables_of(gpu.name).of_columns(operands > 1, bytes == 2), n); }

  // The plan of tiles by a table entry. If the entry has the tier columns and no cluster holds the columns, blocks of
  // the whole chip share them (`over_chip`), or there is no plan.
  std::optional<CudaPlan> plan_tiles(const Entry& entry, bool over_chip) const {
    const int vector = view.tile;
    const VecAccess access = inner % vector == 0 ? VecAccess::aligned : VecAccess::predicated;
    const int64_t vectors = ceil_div(inner, int64_t(vector));
    int64_t side = int64_t(entry.tile_vecs()) * 16 / (vector * bytes);
    if (Tier(entry.tier) == Tier::columns_grid) return plan_grid(fitting(side, vectors), vector, access);
    const int64_t wide = ceil_div(vectors, side) * outer_tiles();
    if (narrows() && entry.tile_vecs() >= kWide && wide < kFew * gpu.sm_count) side /= 2;
    const int across = fitting(side < entry.threads ? side : entry.threads, vectors);
    const bool takes_smem = vector * read >= 4 && (access == VecAccess::aligned || entry.smem_vecs == kPrefetch);
    // Columns of a half type that all fit on the chip at once, with one tile per multiprocessor.
    const int64_t tiles = ceil_div(vectors, int64_t(kAlone)) * outer_tiles();
    if (bytes == 2 && operands == 1 && vector == view.full && access == VecAccess::aligned && n > 1024 &&
        n <= kAloneMost && tiles <= gpu.sm_count && 4 * tiles > 3 * gpu.sm_count)
      return share(kAlone, 512 / kAlone, vector, 12, 20, access, over_chip);
    int vecs = entry.vecs_per_thread(), smem_vecs = entry.smem_vecs;
    if (!takes_smem) {  // All vectors are in registers; for a half type, as many as fit there.
      if (bytes == 2 && vecs < most) vecs = vecs + smem_vecs < most ? vecs + smem_vecs : most;
      smem_vecs = 0;
    }
    return share(across, most_down(across, entry.threads), vector, vecs, smem_vecs, access, over_chip);
  }

  // The threads side by side: `side`, or up to a quarter fewer if then none is idle at the end of a line.
  static int fitting(int64_t side, int64_t vectors) {
    if (vectors <= side) return int(vectors);
    for (int64_t across = side; 4 * across >= 3 * side; --across) {
      if (vectors % across == 0) return int(across);
    }
    return int(side);
  }

  // The vectors of a thread if one block had a whole column or slab.
  int64_t need(int across, int down, int vector, VecAccess access) const {
    if (!is_slab(access)) return ceil_div(n, int64_t(down));
    return ceil_div(n * inner + (view.slab_begins ? 0 : vector - 1), int64_t(across) * vector);
  }

  // Bytes of shared memory of a block for its tile (columns_smem). Its lines begin and end within vectors.
  int64_t smem_bytes(const CudaPlan& plan) const {
    const bool in_place =
        read == bytes && half_result == (bytes == 2) && (plan.is_shifted() ? view.shift : view.slab) == view.full;
    const int64_t pieces = vecs_in_smem(plan) * plan.threads_y(), width = int64_t(plan.threads_x()) * plan.vec_size;
    const auto span = [&](int size) { return pieces * (width * size + (plan.is_shifted() ? 64 : 0)) + 160; };
    return operands * span(read) + (in_place ? 0 : span(bytes));
  }
  // Bytes of shared memory that a block has for vectors: all but the most that the reduction of columns needs.
  int64_t smem_room(const CudaPlan& plan, int64_t cols) const {
    const int64_t parts = int64_t(plan.max_threads()) * plan.vec_size / cols;
    return gpu.shared - kColumnStatic -
           count_reduce_bytes(cols, parts * (cols + (plan.takes_slabs() ? 0 : 8)), cluster_peers(plan),
                              bytes == 8 ? 8 : 4, gradient, numbers_per_partial(plan, half_result, gradient));
  }

  // Columns in as few blocks as hold them. If these are too many for a cluster, blocks of the whole chip share the
  // columns (`over_chip`), or there is no plan. A thread has up to `vecs` vectors in registers and `smem_vecs` in
  // shared memory.
  std::optional<CudaPlan> share(int across, int down, int vector, int vecs, int smem_vecs, VecAccess access,
                                bool over_chip) const {
    const bool prefetches = smem_vecs == kPrefetch;
    const int64_t all = need(across, down, vector, access), holds = vecs + (prefetches ? 0 : smem_vecs);
    const int64_t cols = is_slab(access) ? inner : int64_t(across) * vector;
    for (int blocks = 1; blocks <= most_cluster(gpu); blocks *= 2) {
      const int64_t each = ceil_div(all, blocks);
      if (each > holds) continue;
      const int in_registers = compiled_vecs(each < vecs ? each : vecs);
      const int in_smem = prefetches ? kPrefetch : each > in_registers ? int(up_to(each - in_registers, 4)) : 0;
      const CudaPlan made = {Tier::columns, across, down, in_registers * vector, vector, blocks, in_smem, access};
      if (count_smem_vecs_bytes(made, vector * on_chip * operands) <= smem_room(made, cols)) return made;
    }
    return over_chip ? std::optional(plan_grid(across, vector, access)) : std::nullopt;
  }
  CudaPlan share(int across, int down, int vector, int vecs, int smem_vecs, VecAccess access) const {
    return *share(across, down, vector, vecs, smem_vecs, access, true);
  }

  // Columns over the chip: multiprocessors are divided evenly among tiles, and the blocks of a tile merge through
  // memory.
  CudaPlan plan_grid(int across, int vector, VecAccess access) const {
    const bool slab = is_slab(access), takes_smem = access != VecAccess::predicated && access != VecAccess::slab &&
                                                    access != VecAccess::strided && vector * read >= 4;
    const int64_t turn = slab ? view.turn(vector) : 0, cols = slab ? inner : int64_t(across) * vector;
    const int64_t tiles = ceil_div(inner, cols) * outer_tiles();
    const int chip = gpu.sm_count, vecs = kGridVecs / operands;
    const int period = access == VecAccess::shifted ? view.period(vector) : 1;
    int down = 1;
    const auto shape = [&](int threads) {
      if (slab)
        across = int(turn * (turn < threads ? threads / turn : 1));
      else
        down =
            access == VecAccess::shifted ? std::max(threads / across / period, 1) * period : most_down(across, threads);
    };
    // The first two attempts keep few vectors in shared memory, so that columns have many threads, which work on what
    // has arrived while more is in flight.
    for (const int attempt : {0, 1, 2, 3}) {
      const int64_t most_places = attempt < 2 ? (operands > 1 ? kFewSmemVecs : kGridVecs) : kMaxSmemVecs;
      const int threads = attempt % 2 == (access == VecAccess::strided) ? 512 : 256;
      shape(threads);
      if (!gpu.cooperative) continue;
      CudaPlan made = {Tier::columns_grid, across, down, vecs * vector, vector, 1, 0, access};
      const int64_t room = smem_room(made, cols);
      const int64_t places =
          takes_smem ? room / (int64_t(made.max_threads()) * vector * on_chip * operands) / 4 * 4 : 0;
      const int64_t holds = vecs + (places < most_places ? places : most_places);
      const int64_t all = need(across, down, vector, access), fewest = ceil_div(all, holds);
      if (fewest > chip) continue;
      const int64_t together = tiles < chip / fewest ? tiles : chip / fewest, useful = ceil_div(all, 1024 / threads);
      int64_t blocks = chip / together;
      if (blocks > useful) blocks = useful > fewest ? useful : fewest;
      const int64_t each = ceil_div(all, blocks);
      int64_t in_registers = each <= kGridVecs ? each : vecs;
      int64_t in_smem = each > in_registers ? up_to(each - in_registers, 4) : 0;
      if (operands == 1 && in_smem && in_smem < kRing) {
        in_smem = kRing < places ? kRing : places, in_registers = up_to(each - in_smem, 4);
      }
      made.items_per_thread = int(in_registers) * vector;
      made.blocks_per_row = int(blocks), made.smem_vecs = int(in_smem);
      if (blocks == 1) made.tier = Tier::columns;  // without clusters: one block holds the columns alone
      return made;
    }
    shape(512);
    const int blocks = gpu.cooperative ? int(chip / (tiles < chip ? tiles : chip)) : 1;
    return {Tier::columns_twopass, across, down, 8 / operands * vector, vector, blocks, 0, access};
  }

  // For columns over the chip: the vectors of a thread in registers, and the most in shared memory.
  static constexpr int kGridVecs = 8;
  static constexpr int64_t kMaxSmemVecs = 48, kFewSmemVecs = 12;
  // The fewest vectors of a thread in shared memory, if there are any. All vectors pass through shared memory
  // (column_online.cuh), so this is also how many are in flight.
  static constexpr int64_t kRing = 8;
};

inline ColumnPlanner column_planner(const ColumnView& view, const Gpu& gpu, const Problem& problem,
                                    bool is_scored = false) {
  const bool gradient = problem.is_backward(), reduction = problem.is_reduction(), merges = !gradient || !reduction;
  const int read = size_of(problem.type(gradient ? int(kSaved) : int(kX))), written = size_of(problem.out_type());
  const int operands = gradient && merges && !grad_is_broadcast_in_tile(problem) ? 2 : 1;
  const bool half_result = written == 2;
  const bool early = !gradient && half_result && !reduction && problem.function != Function::log_softmax && !is_scored;
  // Scores are kept on the chip in the type in which they are computed.
  const int on_chip = !is_scored || gradient ? read : problem.out_type() == DType::float64 ? 8 : 4;
  return {{view, gpu, operands, reduction || read > written ? read : written, read, merges, gradient, half_result,
           early, on_chip}};
}

// The plan of a problem, for the kernels of rows or of columns. It has no more dims than kernels take (fits_tiles).
inline CudaPlan plan_cuda(const Problem& problem, const Gpu& gpu, bool invariant = false) {
  if (problem.has_rows()) return plan_rows(problem, gpu, invariant);
  ColumnView view = column_view(problem);
  if (view.is_scattered) view = column_view(problem, true);
  return column_planner(view, gpu, problem).plan();
}

}  // namespace onepass
