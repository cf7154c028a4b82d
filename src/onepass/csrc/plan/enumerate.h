// enumerate.h: views such that the plan of any call over other dims of contiguous tensors is, but for launch numbers,
// the plan of one of these. Pure: no torch, no CUDA.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "columns.h"

namespace onepass {

// Lengths of columns to look at: all short ones; longer ones in steps of 1%, since a thread has up to 32 vectors, in
// turn odd and a multiple of the widest vector; in larger steps where columns go over the chip, and where it does not
// hold them; and those around the limits of the tables.
inline std::vector<int64_t> column_lengths(const Tables& tables) {
  constexpr int64_t kEvery = 64, kOverTheChip = 1 << 18, kOnChip = int64_t(1) << 23, kLongest = int64_t(1) << 33;
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= kEvery; ++n) lengths.insert(n);
  bool odd = false;
  for (double n = kEvery; n < double(kLongest); n *= n < kOverTheChip ? 1.01 : n < kOnChip ? 1.03 : 2) {
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
// matters whether a tile gets more than one block: each of 4 * chip tiles gets one.
inline std::vector<int64_t> numbers_of_tiles(int64_t chip, bool merges) {
  if (!merges) return {1, 4 * chip};
  std::vector<int64_t> numbers = {1};
  for (int64_t tiles = 2; tiles <= chip; ++tiles) {
    if (chip / tiles != chip / (tiles - 1)) numbers.push_back(tiles);
  }
  return numbers;
}

// Whether plans ask for the same kernels, and share the chip alike.
inline bool alike(const std::vector<CudaPlan>& some, const std::vector<CudaPlan>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const CudaPlan& a, const CudaPlan& b) {
    return a.tier == b.tier && a.max_threads() == b.max_threads() && a.items_per_thread == b.items_per_thread &&
           a.blocks_per_tile() == b.blocks_per_tile() && a.smem_vecs == b.smem_vecs;
  });
}

// Visits the plans of columns of n elements: `planner` makes one of a view. Tensors may begin at any element.
template <class MakePlanner, class Visit>
void walk_columns(int64_t n, const MakePlanner& planner, const Visit& visit) {
  ColumnView view;
  view.served = true;
  view.tiles.n = n, view.tiles.inner = 1;
  view.full = 16 / planner(view).bytes;
  const bool merges = planner(view).merges;
  const std::vector<int64_t> numbers = numbers_of_tiles(planner(view).gpu.sm_count, merges);
  // Gives the plan of a tile that is alone, and of several where they share the chip.
  const auto look = [&] {
    view.tiles.outer.count = 0;
    std::vector<CudaPlan> plans;
    plans.reserve(numbers.size() + 1), plans.push_back(planner(view).plan());
    if (plans[0].tier != Tier::columns) {
      view.tiles.outer.count = 1;
      for (const int64_t tiles : numbers) view.tiles.outer.sizes[0] = tiles, plans.push_back(planner(view).plan());
    }
    for (const CudaPlan& plan : plans) visit(plan);
    return plans;
  };
  // Tiles: so many vectors side by side, up to as many as a block takes.
  for (int vector = 1; vector <= view.full; vector *= 2) {
    view.tile = vector;
    int64_t across = 0;
    do view.tiles.inner = ++across * vector;
    while (look()[0].threads_x() == across);
  }
  view.tiles.inner = int64_t(kAlone) * view.full * planner(view).gpu.sm_count;  // each has one to itself
  look();
  if (planner(view).narrows()) {  // wide ones too, of which there have to be many
    view.tiles.outer.count = 1, view.tiles.outer.sizes[0] = kFew * planner(view).gpu.sm_count;
    for (int vector = 1; vector <= view.full; vector *= 2) {
      view.tile = vector;
      for (int across = 1; across <= kWide * view.full / vector; ++across) {
        view.tiles.inner = int64_t(across) * vector;
        visit(planner(view).plan());
      }
    }
  }
  // Slabs, which begin with a vector or within one, and may end with one, of `common` columns for each thread of a
  // turn; those of longer turns go as tiles. Plans of turns that fit as often into 512 threads follow from the room in
  // shared memory alone, which is the most at the first and the least at the last: where these are alike, all are.
  const auto slabs = [&](int64_t common) {
    const int64_t longest = merges ? kLongestTurn : kMaxTurn, step = common < view.slab ? 2 : 1;
    const auto look_at = [&](int64_t turn) { return view.tiles.inner = common * turn, look(); };
    const auto between = [&](const auto& again, int64_t first, const auto& ones, int64_t last, const auto& others) {
      const int64_t middle = first + (last - first) / 2 / step * step;
      if (middle == first || alike(ones, others)) return;
      const auto found = look_at(middle);
      again(again, first, ones, middle, found), again(again, middle, found, last, others);
    };
    for (int64_t first = 1, last; first <= longest; first = last + step) {
      const int64_t fit = 512 / first, most = fit ? 512 / fit : longest;
      last = most - (most - first) % step;
      const auto ones = look_at(first);
      if (last > first) between(between, first, ones, last, look_at(last));
    }
  };
  for (view.slab = 2; view.slab <= view.full; view.slab *= 2) {
    for (int common = 1; common <= view.slab; common *= 2) {
      for (const bool begins : {false, true}) {
        if (begins && common == view.slab) continue;  // they go as tiles
        view.tile = begins ? common : 1;
        view.slab_begins = begins, view.slab_whole = begins && n * common % view.slab == 0;
        slabs(common);
      }
    }
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
