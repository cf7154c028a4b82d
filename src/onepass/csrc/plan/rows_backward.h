// rows_backward.h: which kernel makes a gradient of rows, and with which launch numbers: plan.h for two operands that
// wait on the chip instead of one. Pure: no torch, no CUDA.
#pragma once

#include "../core/problem.h"
#include "rows.h"

namespace onepass {

// With which element of a vector the rows of each tensor begin.
struct BackwardAlignment {
  int full;             // elements of a vector of 16 bytes of the wider type
  int widest;           // the most elements of a vector so that each row has one alignment in all tensors
  bool within[4] = {};  // by the logarithm of a width: whether any row begins within a vector of so many elements

  explicit BackwardAlignment(const BackwardProblem& call, bool grad_is_broadcast) {
    const int size = size_of(call.type(kSaved)), dx_size = size_of(call.type(kDx));
    const BackwardDim outer = call.layout.outer.innermost();
    const bool many = call.layout.rows > 1;
    const uint64_t firsts[] = {call.address(kDx) / uint64_t(dx_size), call.address(kSaved) / uint64_t(size),
                               call.address(kGrad) / uint64_t(size_of(call.type(kGrad)))};
    const int64_t steps[] = {many ? outer.strides[kDx] : 0, many ? outer.strides[kSaved] : 0,
                             many ? outer.strides[kGrad] : 0};
    const int tensors =
        grad_is_broadcast || call.function == Function::logsumexp ? 2 : 3;  // whose elements go by vectors
    full = 16 / (dx_size > size ? dx_size : size);
    const auto differ = [&](int t, int width) {
      return (firsts[t] - firsts[0]) % uint64_t(width) || (steps[t] - steps[0]) % width;
    };
    widest = full;
    while (widest > 1 && (widest > call.layout.n || differ(1, widest) || (tensors > 2 && differ(2, widest))))
      widest /= 2;
    for (int power = 0; power < 4; ++power) {
      for (int t = 0; t < tensors; ++t) within[power] |= firsts[t] % (uint64_t(1) << power) || steps[t] % (1 << power);
    }
  }
  bool begins_within(int width) const { return within[width == 8 ? 3 : width / 2]; }
};

// As the tables of plan.h; values: of each operand that a thread keeps.
// Measured on NVIDIA H200, 2026-11-22 (benchmarks/results/sweep-backward-h200-2026-11-22.json).
inline const std::vector<Entry>& backward_table(bool half) {
  constexpr int kWarp = int(Tier::warp), kBlock = int(Tier::block), kCluster = int(Tier::cluster),
                kGrid = int(Tier::grid);
  // clang-format off
  static const std::vector<Entry> of32 = {
      {23, kWarp, 2, 0, 1, 0},
      {47, kWarp, 4, 0, 1, 0},
      {56, kWarp, 8, 0, 1, 0},
      {114, kWarp, 16, 0, 1, 0},
      {320, kWarp, 32, 0, 1, 0},
      {448, kBlock, 0, 8, 1, 0},
      {700, kBlock, 0, 12, 1, 0},
      {1800, kBlock, 0, 8, 1, 0},
      {2500, kBlock, 0, 16, 1, 0},
      {3500, kBlock, 0, 12, 1, 0},
      {7000, kBlock, 0, 16, 1, 0},
      {10000, kCluster, 0, 16, 4, 0},
      {14000, kCluster, 0, 20, 4, 0},
      {40000, kCluster, 0, 20, 8, 0},
      {147000, kCluster, 0, 20, 16, 0},
      {196608, kCluster, 0, 24, 16, 0},
      {kAnyLength, kGrid, 0, 0, 1, 0},
  };
  static const std::vector<Entry> of16 = {
      {11, kWarp, 1, 0, 1, 0},
      {23, kWarp, 2, 0, 1, 0},
      {47, kWarp, 4, 0, 1, 0},
      {140, kWarp, 8, 0, 1, 0},
      {330, kWarp, 16, 0, 1, 0},
      {900, kWarp, 32, 0, 1, 0},
      {1024, kBlock, 0, 16, 1, 0},
      {1250, kBlock, 0, 24, 1, 0},
      {7000, kBlock, 0, 16, 1, 0},
      {10000, kCluster, 0, 24, 2, 0},
      {22500, kCluster, 0, 24, 4, 0},
      {40000, kCluster, 0, 32, 8, 0},
      {110000, kCluster, 0, 40, 8, 0},
      {327680, kCluster, 0, 40, 16, 0},
      {kAnyLength, kGrid, 0, 0, 1, 0},
  };
  // clang-format on
  return half ? of16 : of32;
}

// How the tier grid cuts a row: vectors of each operand that a thread takes at a time, chunks of these that a block
// takes of a row, and vectors of a chunk, so many that each begins at a multiple of 16 bytes.
struct GridCut {
  int chunk;
  int64_t most, wide;

  GridCut(const CudaPlan& plan, int64_t n) : chunk(plan.vec_size == 2 ? 1 : 2) {
    const int64_t vectors = n / plan.vec_size,
                  each = ceil_div(ceil_div(vectors, plan.blocks_per_row), int64_t(chunk) * plan.threads_per_row);
    most = each > 0 ? each : 1;
    wide = vectors ? up_to(ceil_div(vectors, plan.blocks_per_row * most), 4) : 4;
  }
};

// Elements of a row, of 4 bytes or halves, from which on up to kFewWhole rows go over the whole chip.
constexpr int64_t kBackwardWhole = 98304, kBackwardWholeHalves = 196608;
constexpr int kBackwardVectors = 224;  // of each operand that a block of the tier grid is worth being there for

constexpr int kWeighed = 512;  // elements of a row of logsumexp up to which lanes of a warp take it

struct BackwardPlanner {
  const BackwardProblem& call;
  const BackwardAlignment& alignment;
  const Gpu& gpu;
  const bool invariant;

  const int64_t n = call.layout.n, rows = call.layout.rows;
  const int wide = 16 / alignment.full;
  const bool half = wide == 2;
  const int part = wide == 8 ? 2 : 1;  // doubles: half the elements a thread
  const int64_t length = half || n > kAnyLength / 2 ? n : n * wide / 4;
  int vector = invariant ? alignment.full : alignment.widest;
  // The same elements have to go to the same threads wherever a row lies: see plan.h. What is loose does not.
  bool apart = invariant && (alignment.begins_within(alignment.full) || n % alignment.full);
  int64_t vectors = ceil_div(!apart && alignment.begins_within(vector) ? n + vector - 1 : n, vector);

  BackwardPlanner(const BackwardProblem& call, const BackwardAlignment& alignment, const Gpu& gpu, bool invariant)
      : call(call), alignment(alignment), gpu(gpu), invariant(invariant) {}

  VecAccess access() const {
    return apart                                                                             ? VecAccess::scalar
           : vector == alignment.full && n % vector == 0 && !alignment.begins_within(vector) ? VecAccess::aligned
                                                                                             : VecAccess::predicated;
  }

  CudaPlan warp(int lanes) const {
    const int values = int(up_to(ceil_div(vectors, lanes) * vector, vector > 4 ? vector : 4));
    return {Tier::warp, lanes, kThreads / lanes, values, vector, 1, 0, access()};
  }

  bool share(int split, int lanes, int values, CudaPlan* plan) const {
    int64_t slots = (wide == 8 && values > 12 ? 12 : values) / part / vector;
    if (slots < 1) slots = 1;
    int64_t threads = up_to(ceil_div(vectors, slots * split), 32);
    if (threads < lanes) threads = lanes;
    if (split > most_cluster(gpu) || threads > most_threads(gpu.arch, split)) return false;
    const int64_t few_kinds = alignment.full / vector;  // narrow vectors come in no more numbers than wide ones
    const int64_t each = up_to(ceil_div(vectors, threads * split), few_kinds);
    if (each < slots) slots = each;
    *plan = {split > 1 ? Tier::cluster : Tier::block, int(threads), 1, int(slots) * vector, vector, split, 0, access()};
    return true;
  }

  // The chip, or so much of it as pays, on a few rows at a time: as many as it holds together.
  bool grid(CudaPlan* plan) {
    if (!gpu.cooperative) return false;
    if (vector != alignment.full) vector = alignment.full, apart = true, vectors = ceil_div(n, vector);
    const int chunk = wide == 8 ? 1 : 2,
              most_slots = (gpu.arch == 90 ? 4 : 2) * chunk;  // elsewhere more would spill
    const auto places = [&](int threads) {
      return int((gpu.shared - kStaticShared) / (2 * threads * vector * size_of(call.type(kGrad))) / chunk * chunk);
    };
    int threads = 480, slots = most_slots;
    const int64_t chip = gpu.sm_count, holds = threads * int64_t(slots + places(threads));
    const int64_t alone = ceil_div(vectors, holds);  // blocks that hold a row between them
    int64_t split = alone < chip ? alone : chip;
    if (!invariant && alone < chip) {
      const int64_t together = rows < chip / alone ? rows : chip / alone;
      const int64_t useful = ceil_div(vectors, kBackwardVectors);  // blocks with something to do
      split = chip / together;
      if (split > useful) split = useful > alone ? useful : alone;
    }
    const int64_t each = ceil_div(vectors, split);
    for (const int kept : {2, 4, 8}) {  // fewer threads where they have less to keep
      if (kept * chunk / 2 <= most_slots && each <= 256 * kept * chunk / 2 && threads == 480)
        threads = 256, slots = kept * chunk / 2;
    }
    const int64_t rest = ceil_div(each, threads) - slots, shelf = rest > 0 ? up_to(rest, chunk) : 0;
    const int most = places(threads);
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

  // Does a plan of the tier grid keep its rows whole?
  bool holds(const CudaPlan& plan) const {
    const GridCut cut(plan, n);
    return cut.most * cut.chunk <= plan.vecs_per_thread() + plan.smem_vecs;
  }

  CudaPlan stream(int threads, int values) const {
    const int kept = values / part < vector ? vector : values / part / vector * vector;
    return {Tier::twopass, threads / part, 1, kept, vector, 1, 0, apart ? VecAccess::scalar : VecAccess::predicated};
  }

  // Pieces of rows, which nothing is merged of.
  CudaPlan weighed() const {
    if (length <= kWeighed) {
      int lanes = 1;
      while (lanes < 32 && lanes * vector * 4 < n) lanes *= 2;
      return warp(lanes);
    }
    CudaPlan plan = stream(256 * part, 16);
    plan.access = access();
    return plan;
  }

  CudaPlan plan() {
    if (call.function == Function::logsumexp) return weighed();
    const Entry& entry = look_up(backward_table(half), length);
    const Tier tier = Tier(entry.tier);
    if (tier == Tier::warp) return warp(entry.threads);
    CudaPlan made;
    if (!invariant && length >= kLongRow) {
      // Few long rows: over the whole chip, or over so many blocks a row that they fill it.
      const bool few = length >= (half ? kBackwardWholeHalves : kBackwardWhole) && rows <= kFewWhole;
      const bool pairs = !half && length >= kBackwardWhole && rows <= gpu.sm_count / 4;
      if ((few || pairs) && vector == alignment.full && grid(&made) && (few || holds(made))) return made;
      for (int split = 16; split >= entry.blocks_per_row && split > 1; split /= 2) {
        if (rows * split > 4 * gpu.sm_count) continue;
        for (const int values : {16, 8}) {
          if (share(split, 0, half ? 2 * values : values, &made) && made.threads_per_row >= kThreads) return made;
        }
      }
    }
    if (tier == Tier::block || tier == Tier::cluster) {
      if (share(entry.blocks_per_row, entry.threads, entry.items_per_thread, &made)) return made;
      // A GPU that takes no clusters as large, or narrow vectors, of which a thread keeps fewer elements.
      for (int split = 1; split <= most_cluster(gpu); split *= 2) {
        if (share(split, 0, half ? 32 : 16, &made)) return made;
      }
    }
    return grid(&made) ? made : stream(512, 16);
  }
};

}  // namespace onepass
