// column_walk.h: views such that the plan of any call over other dims of contiguous tensors is, but for launch numbers,
// the plan of one of these. Pure: no torch, no CUDA.
#pragma once

#include <numeric>
#include <set>
#include <vector>

#include "column_plan.h"

namespace onepass {

// Lengths of columns: all short ones; in steps of 1%, since a thread keeps up to 32 vectors, multiples of the widest
// vector and odd ones in turn; in larger ones where columns go over the chip, and from where it does not hold them; and
// those around the limits of the tables.
inline std::vector<int64_t> column_lengths(const Tables& tables) {
  constexpr int64_t kEvery = 64, kOverTheChip = 40000, kHeld = int64_t(1) << 23, kLongest = int64_t(1) << 33;
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= kEvery; ++n) lengths.insert(n);
  bool odd = false;
  for (double n = kEvery; n < double(kLongest); n *= n < kOverTheChip ? 1.01 : n < kHeld ? 1.02 : 2) {
    lengths.insert(odd ? int64_t(n) | 1 : int64_t(n) & ~7);
    odd = !odd;
  }
  for (const NamedTable& named : kTables) {
    for (const Entry& entry : tables.*named.table) {
      if (entry.limit < kLongest) lengths.insert({entry.limit, entry.limit + 1});
    }
  }
  return {lengths.begin(), lengths.end()};
}

// Numbers of tiles, one for each number of blocks that a tile may get of the chip. Where nothing is merged it only
// counts whether it gets more than one: each of so many gets one.
inline std::vector<int64_t> numbers_of_tiles(int64_t chip, bool merges) {
  if (!merges) return {1, 4 * chip};
  std::vector<int64_t> numbers = {1};
  for (int64_t tiles = 2; tiles <= chip; ++tiles) {
    if (chip / tiles != chip / (tiles - 1)) numbers.push_back(tiles);
  }
  return numbers;
}

// Visits the plans of columns of n elements: `planner` makes one of a view. Tensors may begin at any element. `every`:
// all numbers of columns of a slab, else some: where all lengths are walked, others of them ask for the same kernels.
template <class MakePlanner, class Visit>
void walk_columns(int64_t n, bool every, const MakePlanner& planner, const Visit& visit) {
  ColumnView view;
  view.served = true;
  view.tiles.n = n, view.tiles.inner = 1;
  view.full = 16 / planner(view).bytes;
  const bool merges = planner(view).merges;
  const int64_t longest = merges ? 2 * kSlabThreads : kMaxTurn;  // turns; what has longer ones goes as tiles
  const std::vector<int64_t> numbers = numbers_of_tiles(planner(view).gpu.multiprocessors, merges);
  // Gives the threads side by side.
  const auto look = [&] {
    view.tiles.outer.count = 0;
    const CudaPlan alone = planner(view).plan();
    visit(alone);
    if (alone.tier != Tier::columns) {
      view.tiles.outer.count = 1;
      for (const int64_t tiles : numbers) view.tiles.outer.sizes[0] = tiles, visit(planner(view).plan());
    }
    return alone.lanes;
  };
  // Tiles: so many vectors side by side, up to as many as a block takes.
  for (int vector = 1; vector <= view.full; vector *= 2) {
    view.tile = vector;
    int64_t across = 0;
    do view.tiles.inner = ++across * vector;
    while (look() == across);
  }
  // Slabs of so many columns, which begin with a vector or within one, and may end with one.
  const auto slabs = [&](int64_t inner) {
    view.tiles.inner = inner;
    for (view.slab = 2; view.slab <= view.full; view.slab *= 2) {
      if (view.turn(view.slab) > longest) continue;
      for (const bool begins : {false, true}) {
        view.tile = begins ? int(std::gcd(inner, int64_t(view.slab))) : 1;
        view.slab_begins = begins, view.slab_whole = begins && n * inner % view.slab == 0;
        look();
      }
    }
  };
  const int64_t widest = int64_t(view.full) * longest, one_by_one = every ? widest : 40;
  for (int64_t inner = 1; inner <= one_by_one; ++inner) slabs(inner);
  for (int64_t inner = one_by_one + 8; inner <= widest; inner += inner / 32 * 8) {
    for (const int64_t more : {0, 1, 2, 4}) slabs(inner + more);
  }
  // Strides: element by element, up to a warp's lanes side by side, or one where a column's elements lie closer.
  view.strided = true, view.tile = view.slab = 0;
  view.slab_begins = view.slab_whole = false;
  view.tiles.outer.count = view.tiles.reduced.count = 1;
  view.tiles.reduced.steps[0][0] = 2;
  for (const int64_t step : {1, 3}) {
    view.tiles.outer.steps[0][0] = step;
    const int64_t most = step == 1 ? 32 : 1;
    for (int64_t inner = 1; inner < most; ++inner) view.tiles.inner = inner, visit(planner(view).plan());
    for (const int64_t tiles : numbers) view.tiles.inner = most * tiles, visit(planner(view).plan());
  }
}

}  // namespace onepass
