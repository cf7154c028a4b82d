// columns.cpp: the plans of columns over random layouts, addresses, types and GPUs, forward and backward. What a plan
// promises holds, and on small tensors every element comes to one thread once, by vectors that are aligned. Prints how
// many plans were looked at; exits with 1 at the first that is wrong. With an argument: the kernels that were asked
// for.
#include <cstdio>
#include <string>
#include <vector>

#include "columns_draw.h"
#include "plan/validate.h"

namespace {

// Elements and bytes of what goes by vectors, and how a tensor lies.
struct Lying {
  uint64_t address;
  int size;
  bool vectors;
};

bool wrong(const char* what) { return std::printf("%s\n", what), false; }

bool is_sound(const Problem& problem, const ColumnView& view, const CudaPlan& plan, const Gpu& gpu,
              const ColumnPlanner& planner, int scalar) {
  if (const Fault fault = validate(plan, problem, gpu)) return wrong(fault->c_str());
  const auto power = [](int v) { return v > 0 && (v & (v - 1)) == 0; };
  const int fewest = planner.operands > 1 ? 16 : 24;  // vectors that no thread keeps more of
  if (!power(plan.vec_size) || plan.vec_size > view.full || plan.items_per_thread % plan.vec_size)
    return wrong("vector");
  if (plan.vecs_per_thread() < 1 || plan.vecs_per_thread() > fewest ||
      (plan.vecs_per_thread() > 16 && plan.vecs_per_thread() % 2))
    return wrong("vectors per thread");
  if (plan.threads_x() < 1 || plan.threads_y() < 1 || plan.threads() > 1024) return wrong("threads");
  if (plan.tier == Tier::columns ? !power(plan.blocks_per_tile()) : plan.blocks_per_tile() < 1)
    return wrong("blocks per tile");
  if (plan.in_grid() && !gpu.cooperative) return wrong("a cooperative launch where there is none");
  if (plan.smem_vecs > 64 || (plan.smem_vecs % 4 && plan.smem_vecs != kPrefetch))
    return wrong("vectors in shared memory");
  if (plan.smem_vecs && plan.vec_size * planner.read < 4) return wrong("vectors that shared memory does not take");
  if (plan.keeps_vecs_in_smem() && plan.access != VecAccess::aligned && plan.access != VecAccess::slab_aligned)
    return wrong("parts of vectors in shared memory");
  if (plan.smem_vecs && plan.tier == Tier::columns_twopass) return wrong("vectors in shared memory of what streams");
  Tiles tiles = tiles_of(view, plan);
  tiles.smem_vecs_bytes = int(count_smem_vecs_bytes(plan, plan.vec_size * planner.read * planner.operands));
  if (count_column_bytes(tiles, plan, scalar, planner.gradient, planner.half_result) > gpu.shared - kColumnStatic)
    return wrong("shared memory");
  const bool slab = plan.access == VecAccess::slab || plan.access == VecAccess::slab_aligned;
  if (slab ? tiles.partial_stride != tiles.tile_cols
           : tiles.partial_stride < tiles.tile_cols ||
                 (tiles.partials > 1 && tiles.partial_stride % (plan.vec_size < 4 ? plan.vec_size : 4)))
    return wrong("stride");
  if (tiles.merge_threads != 1 << tiles.merge_threads_log2 || tiles.merge_threads > 32 ||
      (tiles.merge_threads > 1 && tiles.merge_threads * tiles.tile_cols > plan.threads()))
    return wrong("group");
  if (plan.tier != Tier::columns_twopass &&
      tiles.vecs_per_thread_max > plan.vecs_per_thread() + (plan.prefetches() ? 0 : plan.smem_vecs))
    return wrong("more vectors than a thread has room for");
  return true;
}

int64_t place(const TileDims& dims, int tensor, int64_t index) {
  int64_t at = 0;
  for (int d = dims.count - 1; d >= 0; --d) at += index % dims.sizes[d] * dims.steps[tensor][d], index /= dims.sizes[d];
  return at;
}

// As column_tile.cuh divides and counts.
int64_t divided(int64_t a, const FastDivisor& by) { return int64_t(uint64_t(a) * by.multiplier >> by.shift); }
int counted_there(int64_t begin, const VecCount& end, int64_t turn, bool slab) {
  return end.all + (begin < end.rest) + (slab && begin + turn < end.rest);
}

// The threads of a launch, one after another, as columns.cuh has them.
bool covers(const ColumnView& view, const CudaPlan& plan, const std::vector<Lying>& tensors, int64_t rows) {
  const Tiles tiles = tiles_of(view, plan);
  const bool slab = plan.access == VecAccess::slab || plan.access == VecAccess::slab_aligned;
  const bool full = plan.access == VecAccess::aligned || plan.access == VecAccess::slab_aligned;
  const int V = plan.vec_size;
  std::vector<int> seen(size_t(rows * tiles.n));
  // Element `row` of the column `column` of those of `outer`; of a vector of which this is the first element.
  const auto take = [&](int64_t outer, int64_t column, int64_t row) {
    const int64_t which = (outer * tiles.inner + column) * tiles.n + row;
    if (which < 0 || which >= int64_t(seen.size())) return false;
    return ++seen[size_t(which)] == 1;
  };
  const auto aligned = [&](int64_t outer, int64_t column, int64_t row) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (!tensors[t].vectors) continue;
      const int64_t at = view.strided ? place(tiles.outer, int(t), column) + place(tiles.reduced, int(t), row)
                                      : place(tiles.outer, int(t), outer) + column + row * tiles.steps[t];
      if ((tensors[t].address + uint64_t(at) * uint64_t(tensors[t].size)) % uint64_t(V * tensors[t].size)) return false;
    }
    return true;
  };
  for (int64_t tile = 0; tile < tiles.tiles_per_slice * tiles.slices; ++tile) {
    const int64_t outer = tile / tiles.tiles_per_slice, column = tile % tiles.tiles_per_slice * tiles.tile_cols;
    if (divided(tile, tiles.by_tiles_per_slice) != outer) return wrong("division by side");
    for (int rank = 0; rank < plan.blocks_per_tile(); ++rank) {
      for (int thread = 0; thread < tiles.threads_x * tiles.threads_y; ++thread) {
        const int x = thread % tiles.threads_x, y = thread / tiles.threads_x;
        if (!slab && divided(thread, tiles.by_line) != y) return wrong("division by across");
        int there = 0, counts = 0;
        for (int q = 0; q < tiles.vecs_per_thread_max; ++q) {
          if (slab) {
            const int64_t size = tiles.n * tiles.inner, first = place(tiles.outer, 0, outer);
            const int64_t alignment =
                int64_t((tensors[0].address / uint64_t(tensors[0].size) + uint64_t(first)) % uint64_t(V));
            const int64_t begin =
                thread * V - alignment + (int64_t(q) * plan.blocks_per_tile() + rank) * tiles.threads_x * V;
            const bool whole = begin >= 0 && begin + V <= size;
            counts += whole || (begin < 0 && begin + V <= size);
            there += begin < size;
            if (begin + V <= 0 || begin >= size) continue;
            if (full && !whole) return wrong("a part of a vector of a whole slab");
            if (whole && !aligned(outer, begin % tiles.inner, begin / tiles.inner)) return wrong("alignment");
            // A thread's columns are the same every turn.
            if (((begin - (thread * V - alignment)) % tiles.tile_cols + tiles.tile_cols) % tiles.tile_cols)
              return wrong("columns");
            const int64_t own = thread * V + V * tiles.tile_cols - alignment;
            if (divided(own, tiles.by_line) != own / tiles.tile_cols) return wrong("division by pitch");
            for (int64_t p = begin < 0 ? 0 : begin; p < begin + V && p < size; ++p)
              if (!take(outer, p % tiles.inner, p / tiles.inner)) return wrong("an element twice");
          } else {
            const int64_t row = y + (int64_t(q) * plan.blocks_per_tile() + rank) * tiles.threads_y,
                          from = column + x * V;
            there += row < tiles.n;
            if (row >= tiles.n || from >= tiles.inner) continue;
            if (full && from + V > tiles.inner) return wrong("a part of a vector");
            if (from + V <= tiles.inner && !aligned(outer, from, row)) return wrong("alignment");
            for (int64_t c = from; c < from + V && c < tiles.inner; ++c)
              if (!take(outer, c, row)) return wrong("an element twice");
          }
        }
        // The same from what kernels are told.
        const int64_t turn = int64_t(plan.blocks_per_tile()) * (slab ? tiles.threads_x * V : tiles.threads_y);
        int64_t first = y + int64_t(rank) * tiles.threads_y;
        if (slab) {
          const int64_t lies = int64_t(tensors[0].address / uint64_t(tensors[0].size)) + place(tiles.outer, 0, outer);
          first = thread * V - lies % V + int64_t(rank) * tiles.threads_x * V;
          if (counted_there(first, tiles.full, turn, true) != counts) return wrong("whole vectors");
        }
        if (counted_there(first, tiles.existing, turn, slab) != there) return wrong("vectors");
      }
    }
  }
  for (const int count : seen) {
    if (count != 1) return wrong("an element that no thread has");
  }
  return true;
}

struct Looked {
  int plans = 0, simulated = 0;
};

bool forward(const Gpu& gpu, bool small, Looked* looked) {
  Problem problem;
  if (!draw_forward(small, &problem)) return true;
  const ColumnView view = column_view(problem);
  if (!view.served) return wrong("not served");
  const ColumnPlanner planner = column_planner(view, gpu, problem);
  const CudaPlan plan = planner.plan();
  const int scalar = problem.type(kY) == DType::float64 ? 8 : 4;
  ++looked->plans;
  if (!is_sound(problem, view, plan, gpu, planner, scalar)) return false;
  if (!small || problem.layout.rows * problem.layout.n > 20000) return true;
  ++looked->simulated;
  return covers(view, plan,
                {{problem.address(kX), size_of(problem.type(kX)), true},
                 {problem.address(kY), size_of(problem.type(kY)), !problem.is_reduction()}},
                problem.layout.rows);
}

bool backward(const Gpu& gpu, bool small, Looked* looked) {
  Problem problem;
  if (!draw_backward(small, &problem)) return true;
  const ColumnView view = column_view(problem);
  if (!view.served) return wrong("not served");
  const ColumnPlanner planner = column_planner(view, gpu, problem);
  const CudaPlan plan = planner.plan();
  const int scalar = problem.type(kGrad) == DType::float64 ? 8 : 4;
  ++looked->plans;
  if (!is_sound(problem, view, plan, gpu, planner, scalar)) return false;
  if (!small || problem.layout.rows * problem.layout.n > 20000) return true;
  ++looked->simulated;
  const bool alike = !problem.is_reduction() && !grad_is_broadcast_in_tile(problem);
  return covers(view, plan,
                {{problem.address(kDx), size_of(problem.type(kDx)), true},
                 {problem.address(kSaved), size_of(problem.type(kSaved)), true},
                 {problem.address(kGrad), size_of(problem.type(kGrad)), alike},
                 {problem.address(kLse), size_of(problem.type(kLse)), false}},
                problem.layout.rows);
}

}  // namespace

int main() {
  const Gpu gpus[] = {typical(80, 108), typical(90, 132), typical(90, 60), typical(100, 148), typical(120, 170)};
  constexpr int kCalls = 200000;
  Looked looked;
  for (int i = 0; i < kCalls; ++i) {
    draw.seed(unsigned(i));
    Gpu gpu = gpus[i % 5];
    gpu.cooperative = i % 7 > 0;
    if (!(i % 2 ? forward : backward)(gpu, i % 4 < 2, &looked)) return std::printf("call %d\n", i), 1;
  }
  std::printf("%d %d", looked.simulated, looked.plans);
}
