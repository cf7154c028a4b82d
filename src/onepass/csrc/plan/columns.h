// columns.h: which launch serves columns in place. Pure: no torch, no CUDA.
#pragma once

#include <cstdlib>
#include <optional>
#include <utility>

#include "column_view.h"
#include "narrow_ways.h"
#include "rows.h"

namespace onepass {

constexpr int kSlabThreads = 128, kLongestTurn = 512;  // threads that take a slab: about, and at most
// A tile that has a multiprocessor to itself: its vectors side by side, and the elements of a column at most.
constexpr int kAlone = 4, kAloneMost = 4096;
constexpr int64_t kLargeSlice = 48 * 1024;  // bytes of a slice of which a multiprocessor has one at a time
constexpr int kFew = 3, kWide = 16;         // too few tiles per multiprocessor; the vectors side by side of a wide tile

struct ColumnPlanner {
  const ColumnView& view;
  const Gpu& gpu;
  const int operands;  // tensors that wait on the chip
  const int bytes;     // of an element of the widest type that goes by vectors
  const int read;      // bytes of an element that is read
  const bool merges;   // threads merge partial states: not in the gradient of logsumexp
  const bool gradient, half_result;
  const bool early;  // columns are reduced from the first vectors on (kProvisionalMax, cuda/kernels/column_softmax.cuh)

  const int64_t n = view.n(), inner = view.inner();
  const int most = 16 / operands;  // vectors that a thread keeps in registers where blocks share columns

  // Long columns of float32: wide tiles are faster where there are many, narrow ones, of fewer blocks, where there are
  // few (8 x 4096 x 4096 .905 of a copy for .889, 4096 x 4096 .777 for .828; H200, 2026-11-23).
  bool narrows() const { return operands == 1 && bytes == 4 && n > 2048 && n <= 4096; }

  // The plan of tiles by a table entry alone; none where no cluster holds what an entry of the tier columns is for.
  std::optional<CudaPlan> plan_by(const Entry& entry) const { return plan_tiles(entry, false); }

  // The plan that `expected` says is the fastest of those that there are.
  CudaPlan plan() const {
    CudaPlan best = plan_in_place();
    if (!merges || view.strided || n == 1) return best;
    double speed = expected(best);
    const auto try_it = [&](const std::optional<CudaPlan>& other) {
      if (!other || expected(*other) <= speed) return;
      best = *other, speed = expected(best);
    };
    try_it(plan_staged());
    if (view.tile == view.full || bytes == 8) return best;  // of doubles exponentials take the time
    const int shift = shifted_vector();
    if (view.tile * bytes >= 4 && !(bytes == 4 && shift && !gradient))
      try_it(plan_narrow(view.tile, access_of(view.tile)));
    if (shift) try_it(plan_narrow(shift, VecAccess::shifted));
    return best;
  }
  VecAccess access_of(int vector) const { return inner % vector == 0 ? VecAccess::aligned : VecAccess::predicated; }

  // About which part of the speed of memory a plan reaches, as 5,000 plans of random shapes of 64 to 400 MB have it
  // (H100, 2026-11-25).
  double expected(const CudaPlan& plan) const {
    const int64_t cols = plan.takes_slabs() ? inner : int64_t(plan.threads_x()) * plan.vec_size;
    const int64_t blocks = plan.is_staged() ? ceil_div(view.slices(), int64_t(plan.slices_per_group()))
                                            : view.slices() * ceil_div(inner, cols) * plan.blocks_per_tile();
    const double busy = blocks < gpu.sm_count ? double(blocks) / gpu.sm_count : 1;
    return busy * expected_of_full_chip(plan);
  }
  double expected_of_full_chip(const CudaPlan& plan) const {
    const bool half = bytes == 2, gradient = operands > 1;
    const int blocks = plan.blocks_per_tile();
    const int64_t slice = n * inner * read * operands;
    // Blocks that share columns wait for each other.
    const double shared = plan.tier == Tier::columns_grid      ? 0.55
                          : plan.tier == Tier::columns_twopass ? 0.5
                          : blocks > 8                         ? 0.78
                          : blocks > 4                         ? 0.88
                          : blocks > 2                         ? 0.95
                                                               : 1;
    if (plan.is_staged()) {
      if (!half) return plan.stages() == 1 ? 0.8 : 0.9;
      return 0.86 * (plan.stages() == 1 ? 0.68 : slice > kLargeSlice ? 0.83 : 1) * (n < 4 && !gradient ? 0.65 : 1);
    }
    const int vec_bytes = plan.vec_size * bytes;
    if (plan.takes_slabs()) {
      const double small = slice < 2048 ? 0.4 : slice < 8192 ? 0.7 : 1;
      if (plan.access == VecAccess::slab_aligned && (!half || gradient || plan.smem_vecs))
        return 0.93 * (blocks > 16 ? shared : blocks > 8 ? 0.95 : 1) * small;
      if (half || gradient) return (half ? 0.7 : 0.78) * shared * small;
      return 0.88 * (blocks > 16 ? shared : plan.threads_x() < 3 * inner ? 0.82 : 1) * small;
    }
    const int64_t side = int64_t(plan.threads_x()) * plan.vec_size, line = (side < inner ? side : inner) * bytes;
    const double most = !plan.is_shifted()         ? vec_bytes >= 8   ? 0.95
                                                     : vec_bytes >= 4 ? 0.92
                                                                      : 0.52
                        : half && !gradient        ? blocks > 4 ? 0.66 : 0.76
                        : !half && gradient        ? 0.72
                        : line < 200 || blocks > 4 ? 0.72
                                                   : 0.86;
    const int64_t each = ceil_div(n, int64_t(plan.threads_y()) * blocks);  // vectors of a thread
    const int64_t items = each * plan.vec_size, tile = n * line * operands;
    return most * shared *
           (vec_bytes < 16 && items < 8                 ? 0.6
            : vec_bytes < 16 && items < 12 && !gradient ? 0.9
                                                        : 1) *
           (half && !gradient && each > 2 && each < 6 ? 0.9 : 1) *
           (line < 64 && vec_bytes < 16 && !gradient ? 0.75
            : line < 100 && side < inner             ? 0.9
                                                     : 1) *
           (tile < 1024   ? 0.4
            : tile < 2048 ? 0.7
            : tile < 4096 ? 0.8
                          : 1);
  }

  // Slabs, or tiles of vectors that all lines begin with.
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
      if (view.tile == view.full || bytes == 8) return *plan_tiles(entry(), true);
      return *plan_narrow(view.tile, access_of(view.tile));
    }
    const int vector = view.slab;
    const VecAccess access = view.slab_whole ? VecAccess::slab_aligned : VecAccess::slab;
    const int64_t useful = ceil_div(n * inner, turn * vector);  // as many turns are in all
    const int64_t turns =
        threads_of(turn, bytes == 4 && operands == 1 && !view.slab_whole ? 2 * kSlabThreads : kSlabThreads) / turn;
    const int across = int(turn * (turns < useful ? turns : useful));
    const bool ahead = access == VecAccess::slab_aligned && vector * read >= 4 && bytes == 2;
    return share(across, 1, vector, most, ahead ? kPrefetch : 0, access);
  }

  // Elements per thread that kernels are compiled for.
  static int compiled_items(int64_t items) {
    return int(items <= 4 ? items : items <= 16 ? up_to(items, 2) : up_to(items, 4));
  }

  // Whole slices through shared memory, in groups of as many as one turn of a block's threads has columns for, of up to
  // kGroupBytes; fewer where there would be too few groups for all multiprocessors. None where a slice is too large.
  std::optional<CudaPlan> plan_staged() const {
    constexpr int64_t kGroupBytes = 24 * 1024, kLeastBytes = 16 * 1024, kThreads = 512, kGroupsPerSm = 4, kVecs = 32;
    if (!view.slices_follow || view.strided || (gradient && operands < 2)) return {};
    // A thread takes two columns, but not of a gradient, nor of a half type whose pairs are no words and columns not
    // short (H100, 2026-11-25: two were 4 to 8% slower).
    const int vector = operands > 1 || bytes == 8 || (bytes == 2 && inner % 2 && n > 8) ? 1 : 2;
    const int64_t slice = n * inner * read * operands, down = ceil_div(n, bytes == 8 ? kVecs / 2 : kVecs),
                  slice_vecs = ceil_div(inner, int64_t(vector));
    if (down > kThreads / 2) return {};
    const int64_t fair = ceil_div(view.slices(), kGroupsPerSm * gpu.sm_count);
    int64_t group = kThreads / (down * slice_vecs), least = (operands > 1 ? kGroupBytes : kLeastBytes) / slice,
            most = (operands > 1 || bytes > 2 ? 2 : 1) * kGroupBytes / slice;
    group = group < least ? least : group > most ? most : group;
    group = group < fair ? group : fair;
    group = group < 1 ? 1 : group < 16 ? group : group / 8 * 8;
    while (group < view.slices() && group * n * inner * view.narrowest < 16) ++group;
    const int64_t vecs = group * slice_vecs, across = ceil_div(vecs, ceil_div(vecs, kThreads / down));
    CudaPlan made = {
        Tier::columns_staged, int(across),       int(down), compiled_items(ceil_div(n, down)) * vector, vector, 2,
        int(group),           VecAccess::aligned};
    // Results need a place of their own if they do not begin at the same byte of a vector.
    const bool in_place = view.slab == view.full && read == bytes && view.narrowest == bytes;
    const int64_t span = operands * count_span_bytes(group, n * inner, read, kSliceGap),
                  own = in_place ? 0 : count_span_bytes(group, n * inner, bytes, kSliceGap),
                  room = smem_room(made, across * vector) - own;
    if (span > room) return {};
    if (2 * span > room) made.blocks_per_row = 1;
    return made;
  }

  // The elements of a vector of shifted tiles, 0 where others are faster or there are none.
  int shifted_vector() const {
    constexpr int64_t kFewFloats = 200, kManyHalves = 512;  // columns side by side
    if (view.shift <= view.tile || inner < 2 * view.shift) return 0;
    if (bytes == 4 && !gradient && inner >= kFewFloats && n >= 16) return 0;
    const int vector = bytes == 2 && !gradient && inner < kManyHalves ? 2 : 4;
    return vector < view.shift ? vector : view.shift;
  }

  // Tiles of lines that are no whole vectors of 16 bytes, by the first way whose blocks hold the columns. Where no way
  // does, columns go over the chip.
  std::optional<CudaPlan> plan_narrow(int vector, VecAccess access) const {
    const bool shift = access == VecAccess::shifted, two = operands > 1;
    const bool in_smem = vector * read >= 4 && vector > 1 && access != VecAccess::predicated;
    const int vec_bytes = vector * bytes, period = shift ? view.period(vector) : 1;
    const NarrowWays& ways = narrow_ways(vec_bytes, bytes, in_smem, shift, two);
    const int64_t vectors = ceil_div(inner, int64_t(vector));
    int across = 1;
    for (const NarrowWay& way : ways.all) {
      if (!way.threads) break;
      const int64_t side = way.line_bytes / vec_bytes - shift;
      across = int(2 * vectors <= 3 * side ? vectors : ceil_div(vectors, ceil_div(vectors, side))) + shift;
      if (shift && across < 3) across = 3;
      const int vecs = in_smem || vec_bytes < 8 ? way.vecs : way.vecs / 2;  // which take two registers
      const auto made =
          share(across, lines_down(across, way.threads, period, vector), vector, vecs, way.smem_vecs, access, false);
      if (made && made->blocks_per_tile() <= way.blocks) return made;
    }
    return plan_grid(across, vector, access);
  }

 private:
  static int64_t threads_of(int64_t turn, int64_t threads) { return turn < threads ? threads / turn * turn : turn; }

  // The threads that take slabs of a half type which at most two blocks keep, each all of its elements at once. They
  // compute exponentials while later vectors are on their way, most of which stay in shared memory (256 x 1000 x 7 x 7
  // bfloat16: 6 vectors in registers .85 of a copy, 10 .81, 18 .82, through a ring with 4 .79, 12 .80; H200,
  // 2026-11-23). 0 where blocks cannot keep them.
  int half_slab_threads(int64_t turn) const {
    if (bytes != 2 || operands != 1 || !view.slab_whole || view.slab != view.full || view.tile == view.full) return 0;
    for (const int64_t threads : {256, 512}) {
      const int64_t across = threads_of(turn, threads), blocks = threads / 256;
      if (across <= threads && ceil_div(n * inner, across * view.slab * blocks) <= 2 * most) return int(across);
    }
    return 0;
  }
  // The plan of gradients of a half type in long slabs that are whole vectors although their lines are not: few vectors
  // per thread, or as many as registers hold (256 x 1000 x 7 x 7 bfloat16 .84 of an add by 4 of 196 threads, .78 by 16
  // of 98; 64 x 1000 x 14 x 14 .73 by 16, tiles of narrower vectors .69; H200, 2026-11-23).
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
  static int compiled_vecs(int64_t vecs) { return int(vecs <= 16 ? vecs : up_to(vecs, 2)); }

  // The most threads down a column so that each has two vectors at least.
  int most_down(int across, int threads) const {
    const int64_t useful = ceil_div(n, int64_t(2)), down = threads / across;
    return int(down < 1 ? 1 : down < useful ? down : useful);
  }

  // Lanes of a warp go along the dim whose elements lie closest together in the tensor that dims are sorted by. (In
  // the result of a reduction columns lie closer than in its input.)
  int strided_across() const {
    const auto step = [](const TileDims& dims) {
      return dims.count ? std::llabs(dims.steps[0][dims.count - 1]) : INT64_MAX;
    };
    return step(view.tiles.outer) < step(view.tiles.reduced) ? int(inner < 32 ? inner : 32) : 1;
  }

  // The gradient of logsumexp, which merges nothing: as many blocks as fill the chip, each of which takes its vectors
  // one turn after another.
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

  // The threads down a column of a narrow tile: each has 16 elements at least, of each of two operands 8. They are a
  // multiple of the lines after which one begins at the same element of a vector.
  int lines_down(int across, int threads, int period, int vector) const {
    const int64_t useful = ceil_div(n * vector, int64_t(16 / operands)), most = threads / across;
    const int down = int(most < useful ? most : useful) / period * period;
    return down ? down : period;
  }

  // Tiles by a table entry; where no cluster holds what an entry of the tier columns is for, over the chip, or none.
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
    // A half type that the chip holds as a whole, one tile per multiprocessor.
    const int64_t tiles = ceil_div(vectors, int64_t(kAlone)) * outer_tiles();
    if (bytes == 2 && operands == 1 && vector == view.full && access == VecAccess::aligned && n > 1024 &&
        n <= kAloneMost && tiles <= gpu.sm_count && 4 * tiles > 3 * gpu.sm_count)
      return share(kAlone, 512 / kAlone, vector, 12, 20, access, over_chip);
    int vecs = entry.vecs_per_thread(), smem_vecs = entry.smem_vecs;
    if (!takes_smem) {  // All vectors are in registers, of a half type as many as registers hold.
      if (bytes == 2 && vecs < most) vecs = vecs + smem_vecs < most ? vecs + smem_vecs : most;
      smem_vecs = 0;
    }
    return share(across, most_down(across, entry.threads), vector, vecs, smem_vecs, access, over_chip);
  }

  // Up to so many threads side by side: fewer where that leaves none idle at the end of a line.
  static int fitting(int64_t side, int64_t vectors) {
    if (vectors <= side) return int(vectors);
    for (int64_t across = side; 4 * across >= 3 * side; --across) {
      if (vectors % across == 0) return int(across);
    }
    return int(side);
  }

  // The vectors of a thread, if one block had all.
  int64_t need(int across, int down, int vector, VecAccess access) const {
    if (!is_slab(access)) return ceil_div(n, int64_t(down));
    return ceil_div(n * inner + (view.slab_begins ? 0 : vector - 1), int64_t(across) * vector);
  }

  // The shared memory of a block for vectors, without what it reduces columns in at most.
  int64_t smem_room(const CudaPlan& plan, int64_t cols) const {
    const int64_t parts = int64_t(plan.max_threads()) * plan.vec_size / cols;
    return gpu.shared - kColumnStatic -
           count_reduce_bytes(cols, parts * (cols + (plan.takes_slabs() ? 0 : 8)), cluster_peers(plan),
                              bytes == 8 ? 8 : 4, gradient, numbers_per_partial(plan, half_result, gradient));
  }

  // Columns in as few blocks as hold them; where those are too many for a cluster, over the chip, or none. A thread has
  // up to `vecs` vectors in registers and `smem_vecs` in shared memory.
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
      if (count_smem_vecs_bytes(made, vector * read * operands) <= smem_room(made, cols)) return made;
    }
    return over_chip ? std::optional(plan_grid(across, vector, access)) : std::nullopt;
  }
  CudaPlan share(int across, int down, int vector, int vecs, int smem_vecs, VecAccess access) const {
    return *share(across, down, vector, vecs, smem_vecs, access, true);
  }

  // Columns over the chip: as many blocks per tile as multiprocessors are left, which merge through memory.
  CudaPlan plan_grid(int across, int vector, VecAccess access) const {
    const bool slab = is_slab(access), takes_smem = access != VecAccess::predicated && access != VecAccess::slab &&
                                                    access != VecAccess::strided && vector * read >= 4;
    const int64_t turn = slab ? view.turn(vector) : 0, cols = slab ? inner : int64_t(across) * vector;
    const int64_t tiles = ceil_div(inner, cols) * outer_tiles();
    const int chip = gpu.sm_count, vecs = kGridVecs / operands;
    int down = 1;
    const auto shape = [&](int threads) {
      if (slab)
        across = int(turn * (turn < threads ? threads / turn : 1));
      else
        down = access == VecAccess::shifted ? lines_down(across, threads, view.period(vector), 8)
                                            : most_down(across, threads);
    };
    // The first attempts have many threads, which work on what has come while more is on its way, and no more vectors
    // in shared memory than in registers.
    for (const int attempt : {0, 1, 2, 3}) {
      const int64_t most_places = attempt < 2 ? (operands > 1 ? kFewSmemVecs : kGridVecs) : kMaxSmemVecs;
      const int threads = attempt % 2 == (access == VecAccess::strided) ? 512 : 256;
      shape(threads);
      if (!gpu.cooperative) continue;
      CudaPlan made = {Tier::columns_grid, across, down, vecs * vector, vector, 1, 0, access};
      const int64_t room = smem_room(made, cols);
      const int64_t places = takes_smem ? room / (int64_t(made.max_threads()) * vector * read * operands) / 4 * 4 : 0;
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
      if (blocks == 1) made.tier = Tier::columns;  // without clusters: a block that holds them needs no other
      return made;
    }
    shape(512);
    const int blocks = gpu.cooperative ? int(chip / (tiles < chip ? tiles : chip)) : 1;
    return {Tier::columns_twopass, across, down, 8 / operands * vector, vector, blocks, 0, access};
  }

  // Of columns that go over the chip: the vectors of a thread in registers, and at most in shared memory.
  static constexpr int kGridVecs = 8;
  static constexpr int64_t kMaxSmemVecs = 48, kFewSmemVecs = 12;
  // The vectors of a thread that shared memory has at least, as all come through it (column_online.cuh): as many are on
  // their way.
  static constexpr int64_t kRing = 8;
};

inline ColumnPlanner column_planner(const ColumnView& view, const Gpu& gpu, const Problem& problem) {
  const bool gradient = problem.is_backward(), reduction = problem.is_reduction(), merges = !gradient || !reduction;
  const int read = size_of(problem.type(gradient ? int(kSaved) : int(kX))), written = size_of(problem.out_type());
  const int operands = gradient && merges && !grad_is_broadcast_in_tile(problem) ? 2 : 1;
  const bool half_result = written == 2;
  const bool early = !gradient && half_result && !reduction && problem.function != Function::log_softmax;
  return {view,     gpu,         operands, reduction || read > written ? read : written, read, merges,
          gradient, half_result, early};
}

// The plan of a problem of no more dims than kernels take, of rows or of columns in place.
inline CudaPlan plan_cuda(const Problem& problem, const Gpu& gpu, bool invariant = false) {
  if (problem.has_rows()) return plan_rows(problem, gpu, invariant);
  const ColumnView view = column_view(problem);
  return column_planner(view, gpu, problem).plan();
}

}  // namespace onepass
