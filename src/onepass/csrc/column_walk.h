// column_walk.h: views such that the plan of any call over other dims of contiguous tensors is, but for launch numbers,
// the plan of one of these. Pure: no torch, no CUDA.
#pragma once

#include <set>
#include <vector>

#include "column_plan.h"

namespace onepass {

// Lengths of columns: all short ones; in steps of 1% up to where columns go over the chip, since a thread keeps up to
// 32 vectors, then in larger ones; and those around the limits of the tables.
inline std::vector<int64_t> column_lengths(const Tables& tables) {
  constexpr int64_t kEvery = 64, kOverTheChip = 40000, kLongest = int64_t(1) << 33;
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= kEvery; ++n) lengths.insert(n);
  for (double n = kEvery; n < double(kLongest); n *= n < kOverTheChip ? 1.01 : 1.1) lengths.insert(int64_t(n));
  for (const NamedTable& named : kTables) {
    for (const Entry& entry : tables.*named.table) {
      if (entry.limit < kLongest) lengths.insert({entry.limit, entry.limit + 1});
    }
  }
  return {lengths.begin(), lengths.end()};
}

// Visits the plans of columns of n elements: `planner` makes one of a view. Tensors may begin at any element.
template <class MakePlanner, class Visit>
void walk_columns(int64_t n, const MakePlanner& planner, const Visit& visit) {
  constexpr int64_t kTall[] = {1, 2, 4, 8, 16, 33, 66, 132};  // tiles, where the chip shares them
  ColumnView view;
  view.served = true;
  view.tiles.n = n, view.tiles.inner = 1;
  view.full = 16 / planner(view).bytes;
  // Gives the threads side by side.
  const auto look = [&] {
    view.tiles.outer.count = 0;
    const CudaPlan alone = planner(view).plan();
    visit(alone);
    if (alone.tier != Tier::columns) {
      view.tiles.outer.count = 1;
      for (const int64_t tall : kTall) view.tiles.outer.sizes[0] = tall, visit(planner(view).plan());
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
      for (const bool begins : {false, true}) {
        view.tile = begins && inner % 2 == 0 ? 2 : 1;
        view.slab_begins = begins, view.slab_whole = begins && n * inner % view.slab == 0;
        look();
      }
    }
  };
  for (int64_t inner = 1; inner <= 40; ++inner) slabs(inner);
  for (int64_t inner = 48; inner <= 8 * kMaxTurn; inner += inner / 32 * 8) {
    for (const int64_t more : {0, 1, 2, 4}) slabs(inner + more);
  }
  // Strides: element by element, up to a warp's lanes side by side.
  view.strided = true, view.tile = view.slab = 0;
  view.slab_begins = view.slab_whole = false;
  view.tiles.outer.count = view.tiles.reduced.count = 1;
  view.tiles.outer.steps[0][0] = 1, view.tiles.reduced.steps[0][0] = 2;
  for (int64_t inner = 1; inner <= 32; ++inner) view.tiles.inner = inner, visit(planner(view).plan());
  for (const int64_t tall : kTall) view.tiles.inner = 32 * tall, visit(planner(view).plan());
}

}  // namespace onepass
