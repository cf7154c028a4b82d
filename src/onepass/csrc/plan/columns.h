// columns.h: which launch serves columns in place. Pure: no torch, no CUDA.
#pragma once

#include <cstdlib>
#include <optional>
#include <utility>

#include "rows.h"
#include "column_view.h"

namespace onepass {

constexpr int kSlabThreads = 128, kLongestTurn = 512;  // about, and at most
constexpr int kAlone = 4, kAloneMost = 4096;  // vectors of a tile that has a multiprocessor to itself, and elements
constexpr int kFew = 3, kWide = 16;           // tiles of a multiprocessor that are too few, and wide ones' vectors

struct ColumnPlanner {
  const ColumnView& view;
  const Gpu& gpu;
  const int operands;         // tensors that are kept
  const int bytes;            // of an element of the widest that goes by vectors
  const int read;             // of one of those that are read
  const bool merges;          // not the gradient of logsumexp, of which nothing is
  const bool gradient, half;  // half: of results
  const bool early;           // worked on from the first vectors on (kEarly, cuda/column_state.cuh)

  const int64_t n = view.n(), inner = view.inner();
  const int most = 16 / operands;  // vectors that a thread keeps in registers of columns that are split

  // Long columns of floats: wide tiles are faster where there are many, narrow ones, of fewer blocks, where there are
  // few (8 x 4096 x 4096 .905 of a copy for .889, 4096 x 4096 .777 for .828; H200, 2026-11-23).
  bool narrows() const { return operands == 1 && bytes == 4 && n > 2048 && n <= 4096; }

  // The plan of tiles by a table entry alone; none where no cluster holds what an entry of the tier columns is for.
  std::optional<CudaPlan> plan_by(const Entry& entry) const { return tiled(entry, false); }

  CudaPlan plan() const {
    if (!merges) return weighed();
    if (view.strided) {
      return split(strided_across(), most_down(strided_across(), 256), 1, 8 / operands, 0, VecAccess::strided);
    }
    const int64_t turn = view.turn(view.slab > 0 ? view.slab : 1);
    if (const int lanes = resident(turn)) {
      const int kept = early ? 6 : lanes > 256 ? 8 : 4;
      return split(lanes, 1, view.slab, kept, 2 * most - kept, VecAccess::slab_aligned);
    }
    if (operands > 1 && bytes == 2 && view.slab_whole && view.slab == view.full && view.tile < view.full &&
        turn <= kSlabThreads) {
      if (const CudaPlan found = halved(turn); found.blocks_per_tile()) return found;
    }
    if (view.tile && (2 * view.tile >= view.full || view.slab <= view.tile || turn > kLongestTurn))
      return *tiled(entry(), true);
    const int vector = view.slab;
    const VecAccess access = view.slab_whole ? VecAccess::slab_aligned : VecAccess::slab;
    const int64_t useful = ceil_div(n * inner, turn * vector);  // as many turns are in all
    const int64_t turns = threads_of(turn, kSlabThreads) / turn;
    const int across = int(turn * (turns < useful ? turns : useful));
    const bool ahead = access == VecAccess::slab_aligned && vector * read >= 4 && bytes == 2;
    return split(across, 1, vector, most, ahead ? kPrefetch : 0, access);
  }

 private:
  static int64_t threads_of(int64_t turn, int64_t threads) { return turn < threads ? threads / turn * turn : turn; }

  // Threads that take slabs of halves whose elements no more than two blocks keep, each of them all it has at once:
  // their exponentials are made while later vectors are on their way, which are for the most part to stay on the shelf
  // (256 x 1000 x 7 x 7 bfloat16: 6 vectors in registers .85 of a copy, 10 .81, 18 .82, through a ring with 4 .79, 12
  // .80; H200, 2026-11-23). 0: there are none.
  int resident(int64_t turn) const {
    if (bytes != 2 || operands != 1 || !view.slab_whole || view.slab != view.full || view.tile == view.full) return 0;
    for (const int64_t threads : {256, 512}) {
      const int64_t lanes = threads_of(turn, threads), blocks = threads / 256;
      if (lanes <= threads && ceil_div(n * inner, lanes * view.slab * blocks) <= 2 * most) return int(lanes);
    }
    return 0;
  }
  // Gradients of halves in long slabs that are whole vectors where their lines are not: few vectors a thread, or as
  // many as registers hold (256 x 1000 x 7 x 7 bfloat16 .84 of an add by 4 of 196 threads, .78 by 16 of 98; 64 x 1000 x
  // 14 x 14 .73 by 16, tiles of half vectors .69; H200, 2026-11-23). No split: there is none.
  CudaPlan halved(int64_t turn) const {
    for (const auto& [threads, slots] : {std::pair(224, 4), {128, 8}, {128, 16}}) {
      const int64_t lanes = threads_of(turn, threads), vectors = n * inner / view.slab;
      if (vectors >= 16 * lanes && ceil_div(vectors, lanes * most_cluster(gpu)) <= slots)
        return split(int(lanes), 1, view.slab, slots, 0, VecAccess::slab_aligned);
    }
    return {};
  }
  static bool is_slab(VecAccess access) { return access == VecAccess::slab || access == VecAccess::slab_aligned; }

  // Numbers of vectors that kernels are compiled for.
  static int kind(int64_t slots) { return int(slots <= 16 ? slots : up_to(slots, 2)); }

  // Threads down a column, of which each keeps two vectors at least.
  int most_down(int across, int threads) const {
    const int64_t useful = ceil_div(n, int64_t(2)), down = threads / across;
    return int(down < 1 ? 1 : down < useful ? down : useful);
  }

  // Lanes of a warp go along the dim whose elements lie closest together, in the tensor that dims are sorted by. (In
  // the result of a reduction columns lie closer than in its input.)
  int strided_across() const {
    const auto step = [](const TileDims& dims) {
      return dims.count ? std::llabs(dims.steps[0][dims.count - 1]) : INT64_MAX;
    };
    return step(view.tiles.outer) < step(view.tiles.reduced) ? int(inner < 32 ? inner : 32) : 1;
  }

  // As many blocks as fill the chip: each takes its vectors one turn after another.
  CudaPlan weighed() const {
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

  // Tiles by a table entry; where no cluster holds what an entry of the tier columns is for, over the chip, or none.
  std::optional<CudaPlan> tiled(const Entry& entry, bool over_chip) const {
    const int vector = view.tile;
    const VecAccess access = inner % vector == 0 ? VecAccess::aligned : VecAccess::predicated;
    const int64_t vectors = ceil_div(inner, int64_t(vector));
    int64_t side = int64_t(entry.tile_vecs()) * 16 / (vector * bytes);
    if (Tier(entry.tier) == Tier::columns_grid) return grid(fitting(side, vectors), vector, access);
    const int64_t wide = ceil_div(vectors, side) * outer_tiles();
    if (narrows() && entry.tile_vecs() >= kWide && wide < kFew * gpu.sm_count) side /= 2;
    const int across = fitting(side < entry.threads ? side : entry.threads, vectors);
    const bool waits = vector * read >= 4 && (access == VecAccess::aligned || entry.smem_vecs == kPrefetch);
    // Halves that the chip holds as a whole, one tile a multiprocessor.
    const int64_t tiles = ceil_div(vectors, int64_t(kAlone)) * outer_tiles();
    if (bytes == 2 && operands == 1 && vector == view.full && access == VecAccess::aligned && n > 1024 &&
        n <= kAloneMost && tiles <= gpu.sm_count && 4 * tiles > 3 * gpu.sm_count)
      return split(kAlone, 512 / kAlone, vector, 12, 20, access, over_chip);
    int kept = entry.vecs_per_thread(), shelf = entry.smem_vecs;
    if (!waits) {  // all are kept, of halves as many as registers hold
      if (bytes == 2 && kept < most) kept = kept + shelf < most ? kept + shelf : most;
      shelf = 0;
    }
    return split(across, most_down(across, entry.threads), vector, kept, shelf, access, over_chip);
  }

  // Up to so many side by side: fewer where that leaves none idle at the end of a line.
  static int fitting(int64_t side, int64_t vectors) {
    if (vectors <= side) return int(vectors);
    for (int64_t across = side; 4 * across >= 3 * side; --across) {
      if (vectors % across == 0) return int(across);
    }
    return int(side);
  }

  // Vectors that come to a thread, if one block had all.
  int64_t need(int across, int down, int vector, VecAccess access) const {
    if (!is_slab(access)) return ceil_div(n, int64_t(down));
    return ceil_div(n * inner + (view.slab_begins ? 0 : vector - 1), int64_t(across) * vector);
  }

  // Bytes of shared memory beside the shelf, at most.
  int64_t meeting(const CudaPlan& plan, int64_t pitch) const {
    const int64_t parts = int64_t(plan.max_threads()) * plan.vec_size / pitch;
    const int boxes = plan.tier == Tier::columns && plan.blocks_per_tile() > 1 ? plan.blocks_per_tile() : 0;
    return meeting_bytes(pitch, parts * (pitch + (is_slab(plan.access) ? 0 : 8)), boxes, bytes == 8 ? 8 : 4, gradient,
                         numbers_told(plan, half, gradient));
  }

  // Over as few blocks as it takes; where that is too many for a cluster, over the chip, or none.
  std::optional<CudaPlan> split(int across, int down, int vector, int slots, int shelf, VecAccess access,
                                bool over_chip) const {
    const int64_t all = need(across, down, vector, access), holds = slots + (shelf == kPrefetch ? 0 : shelf);
    const int64_t pitch = is_slab(access) ? inner : int64_t(across) * vector;
    for (int split = 1; split <= most_cluster(gpu); split *= 2) {
      const int64_t each = ceil_div(all, split);
      if (each > holds) continue;
      const int kept = kind(each < slots ? each : slots);
      const int waits = shelf == kPrefetch ? kPrefetch : each > kept ? int(up_to(each - kept, 4)) : 0;
      const CudaPlan made = {Tier::columns, across, down, kept * vector, vector, split, waits, access};
      const int64_t room = gpu.shared - kColumnStatic - meeting(made, pitch);
      if (waiting_bytes(made, vector * read * operands) <= room) return made;
    }
    return over_chip ? std::optional(grid(across, vector, access)) : std::nullopt;
  }
  CudaPlan split(int across, int down, int vector, int slots, int shelf, VecAccess access) const {
    return *split(across, down, vector, slots, shelf, access, true);
  }

  CudaPlan grid(int across, int vector, VecAccess access) const {
    const bool slab = is_slab(access),
               shelved = (access == VecAccess::aligned || access == VecAccess::slab_aligned) && vector * read >= 4;
    const int64_t turn = slab ? view.turn(vector) : 0, pitch = slab ? inner : int64_t(across) * vector;
    const int64_t tiles = ceil_div(inner, pitch) * outer_tiles();
    const int chip = gpu.sm_count, slots = kSlots / operands;
    int down = 1;
    const auto shape = [&](int threads) {
      if (slab)
        across = int(turn * (turn < threads ? threads / turn : 1));
      else
        down = most_down(across, threads);
    };
    // Many threads first, which work on what has come while more is on its way, and a shelf no larger than registers.
    for (const int attempt : {0, 1, 2, 3}) {
      const int64_t most_places = attempt < 2 ? (operands > 1 ? kFewPlaces : kSlots) : kMostPlaces;
      const int threads = attempt % 2 == (access == VecAccess::strided) ? 512 : 256;
      shape(threads);
      if (!gpu.cooperative) continue;
      CudaPlan made = {Tier::columns_grid, across, down, slots * vector, vector, 1, 0, access};
      const int64_t room = gpu.shared - kColumnStatic - meeting(made, pitch);
      const int64_t places = shelved ? room / (int64_t(made.max_threads()) * vector * read * operands) / 4 * 4 : 0;
      const int64_t holds = slots + (places < most_places ? places : most_places);
      const int64_t all = need(across, down, vector, access), alone = ceil_div(all, holds);
      if (alone > chip) continue;
      const int64_t together = tiles < chip / alone ? tiles : chip / alone, useful = ceil_div(all, 1024 / threads);
      int64_t blocks = chip / together;
      if (blocks > useful) blocks = useful > alone ? useful : alone;
      const int64_t each = ceil_div(all, blocks);
      int64_t kept = each <= kSlots ? each : slots, waits = each > kept ? up_to(each - kept, 4) : 0;
      if (operands == 1 && waits && waits < kRing) {
        waits = kRing < places ? kRing : places, kept = up_to(each - waits, 4);
      }
      made.items_per_thread = int(kept) * vector, made.blocks_per_row = int(blocks), made.smem_vecs = int(waits);
      if (blocks == 1) made.tier = Tier::columns;  // without clusters: a block that holds them needs no other
      return made;
    }
    shape(512);
    const int blocks = gpu.cooperative ? int(chip / (tiles < chip ? tiles : chip)) : 1;
    return {Tier::columns_twopass, across, down, 8 / operands * vector, vector, blocks, 0, access};
  }

  static constexpr int64_t kMostPlaces = 48, kFewPlaces = 12;
  static constexpr int kSlots = 8;  // vectors that a thread keeps of columns that go over the chip
  // Vectors of a thread that a shelf has at least, as all come through it (column_online.cuh): as many are on their
  // way.
  static constexpr int64_t kRing = 8;
};

// Of a forward call, and of a gradient.
inline ColumnPlanner column_planner(const ColumnView& view, const Gpu& gpu, DType x, DType y, Function function) {
  const int size = size_of(x), wide = reduces(function) || size > size_of(y) ? size : size_of(y);
  const bool half = size_of(y) == 2, early = half && !reduces(function) && function != Function::log_softmax;
  return {view, gpu, 1, wide, size, true, false, half, early};
}
inline ColumnPlanner column_planner(const ColumnView& view, const Gpu& gpu, const ForwardProblem& call) {
  return column_planner(view, gpu, call.type(kX), call.type(kY), call.function);
}
inline ColumnPlanner column_planner(const ColumnView& view, const Gpu& gpu, const BackwardProblem& call) {
  const int size = size_of(call.type(kSaved)), wide = size > size_of(call.type(kDx)) ? size : size_of(call.type(kDx));
  const bool merges = call.function != Function::logsumexp;
  return {view,
          gpu,
          merges && !grad_is_broadcast_in_tile(call) ? 2 : 1,
          wide,
          size,
          merges,
          true,
          size_of(call.type(kDx)) == 2,
          false};
}

// The plan of a problem of no more dims than kernels take, of rows or of columns in place.
template <class AnyProblem>
CudaPlan plan_cuda(const AnyProblem& problem, const Gpu& gpu, bool invariant = false) {
  if (problem.has_rows()) return plan_rows(problem, gpu, invariant);
  const ColumnView view = column_view(problem);
  return column_planner(view, gpu, problem).plan();
}

}  // namespace onepass
