// warmup.cpp: which kernels calls with contiguous tensors may need, and functions that compile or load kernels ahead of
// time. Plain C functions for ctypes, as in plan.cpp.
#include <algorithm>
#include <deque>
#include <set>
#include <string_view>
#include <type_traits>
#include <unordered_set>

#include "../core/problem.h"
#include "../plan/columns.h"
#include "../plan/validate.h"
#include "c_api.h"
#include "walks.h"
#include "../cuda/host/cuda_driver.h"
#include "../cuda/host/launch.h"

namespace {

using namespace onepass;

// Sample views for the plans of columns. The plan of any call over other dims of contiguous tensors is the plan of one
// of these views, except for launch numbers.

// The lengths of columns to walk: all short lengths; longer ones in steps of 1%, since a thread has up to 32 vectors,
// alternately odd and a multiple of the widest vector; in larger steps if columns are shared over the chip, or if the
// chip does not hold them; and lengths around the limits of the tables.
std::vector<int64_t> column_lengths(const Tables& tables) {
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

// Numbers of tiles, one for each number of the chip's blocks that a tile may get. If nothing is merged, it only matters
// whether a tile gets more than one block: each of 4 * chip tiles gets one.
std::vector<int64_t> numbers_of_tiles(int64_t chip, bool merges) {
  if (!merges) return {1, 4 * chip};
  std::vector<int64_t> numbers = {1};
  for (int64_t tiles = 2; tiles <= chip; ++tiles) {
    if (chip / tiles != chip / (tiles - 1)) numbers.push_back(tiles);
  }
  return numbers;
}

// Whether two lists of plans need the same kernels, and divide the chip alike.
bool alike(const std::vector<CudaPlan>& some, const std::vector<CudaPlan>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const CudaPlan& a, const CudaPlan& b) {
    return a.tier == b.tier && a.max_threads() == b.max_threads() && a.items_per_thread == b.items_per_thread &&
           a.blocks_per_tile() == b.blocks_per_tile() && a.smem_vecs == b.smem_vecs;
  });
}

// Visits the plans of columns of n elements. `planner` makes a planner from a view. Tensors may begin at any element.
template <class MakePlanner, class Visit>
void walk_columns(int64_t n, const MakePlanner& planner, const Visit& visit) {
  ColumnView view;
  view.served = true;
  view.tiles.n = n, view.tiles.inner = 1;
  view.full = 16 / planner(view).bytes;
  const bool merges = planner(view).merges;
  const std::vector<int64_t> numbers = numbers_of_tiles(planner(view).gpu.sm_count, merges);
  // Visits and returns the plan of a single tile and, if tiles share the chip, the plans of several tiles.
  const auto look = [&] {
    view.tiles.outer.count = 0;
    std::vector<CudaPlan> plans;
    plans.reserve(numbers.size() + 1), plans.push_back(planner(view).plan_in_place());
    if (plans[0].tier != Tier::columns) {
      view.tiles.outer.count = 1;
      for (const int64_t tiles : numbers)
        view.tiles.outer.sizes[0] = tiles, plans.push_back(planner(view).plan_in_place());
    }
    for (const CudaPlan& plan : plans) visit(plan);
    return plans;
  };
  // Tiles, with each number of vectors side by side, up to the most that a block takes.
  for (int vector = 1; vector <= view.full; vector *= 2) {
    view.tile = vector;
    int64_t across = 0;
    do view.tiles.inner = ++across * vector;
    while (look()[0].threads_x() == across);
  }
  view.tiles.inner = int64_t(kAlone) * view.full * planner(view).gpu.sm_count;  // each tile has one to itself
  look();
  if (planner(view).narrows()) {  // and wide tiles, which are only used if there are many
    view.tiles.outer.count = 1, view.tiles.outer.sizes[0] = kFew * planner(view).gpu.sm_count;
    for (int vector = 1; vector <= view.full; vector *= 2) {
      view.tile = vector;
      for (int across = 1; across <= kWide * view.full / vector; ++across) {
        view.tiles.inner = int64_t(across) * vector;
        visit(planner(view).plan_in_place());
      }
    }
  }
  // Slabs that begin with a vector or within one, and may end with one. Each thread of a turn has `common` columns.
  // (Slabs of longer turns are served as tiles.) Among turns that fit equally often into 512 threads, plans differ only
  // by the room in shared memory, which is the most for the first turn and the least for the last. If these two plans
  // are alike, all are.
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
        if (begins && common == view.slab) continue;  // these are served as tiles
        view.tile = begins ? common : 1;
        view.slab_begins = begins, view.slab_whole = begins && n * common % view.slab == 0;
        slabs(common);
      }
    }
  }
  // Tiles that may be the fastest, with each number of vectors side by side; shifted tiles, whose lines begin alike
  // after 1, 2 or 4 lines; and shifted tiles over the chip.
  view.slab = 0, view.slab_begins = view.slab_whole = false;
  const bool searches = merges && planner(view).bytes < 8;
  constexpr int64_t kMostAcross = 512;  // more than any tile has side by side
  view.tiles.outer.count = 0;
  for (int vector = 1; vector <= view.full && searches; vector *= 2) {
    for (int64_t across = 1; across <= kMostAcross; across += 1 + across / 64) {
      view.tiles.inner = across * vector;
      planner(view).for_each_tile(vector, VecAccess::aligned, visit);
    }
  }
  view.tile = 1;
  for (int vector = 2; vector <= 4 && vector <= view.full && searches; vector *= 2) {
    view.shift = vector;
    for (view.lead_step = 1; view.lead_step < vector; view.lead_step *= 2) {
      for (int64_t across = 2; across <= kMostAcross; across += 1 + across / 64) {
        view.tiles.inner = across * vector;
        planner(view).for_each_tile(vector, VecAccess::shifted, visit);
        view.tiles.outer.count = 1;
        for (const int64_t tiles : numbers) {
          view.tiles.outer.sizes[0] = tiles;
          if (const auto shifted = planner(view).plan_shifted_over_chip()) visit(*shifted);
        }
        view.tiles.outer.count = 0;
      }
    }
  }
  // The tier columns_smem: slabs, and tiles whose lines begin anywhere, with few and many columns.
  if (searches) {
    view.shift_in = view.full;
    for (const bool in_place : {false, true}) {  // if not, results need room of their own
      view.shift = view.slab = in_place ? view.full : view.full / 2;
      for (view.operand_step = 1; view.operand_step <= view.full; view.operand_step *= 2) {
        view.tile = view.operand_step < view.full ? 1 : view.full;
        for (int64_t inner = 1; inner < 1 << 10; inner += inner / 16 + 1) {
          view.tiles.inner = inner;
          planner(view).for_each_smem_tile(visit);
        }
      }
    }
    view.slab = view.shift = 0, view.tile = 1;
  }
  // The tier columns_staged: few and many slices, with few and many columns. Kernels differ by the number of threads.
  view.shift = 0, view.slices_follow = true, view.narrowest = 2, view.tiles.outer.count = 1;
  for (const int64_t slices : {int64_t(1), int64_t(1) << 24}) {
    view.tiles.outer.sizes[0] = slices;
    for (int64_t inner = 1; inner < 1 << 16; inner += inner / 16 + 1) {
      view.tiles.inner = inner;
      if (const auto plan = planner(view).plan_staged()) visit(*plan);
    }
  }
  view.slices_follow = false;
  // Strided columns, element by element: up to 32 lanes side by side, or one if the elements of a column lie closer
  // together.
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

template <class Visit>
void forward_plans(const cuda::KernelKind& kind, const Gpu& gpu, int64_t rows, int64_t n, const Visit& visit) {
  const DType x = kind.in, y = kind.out;
  Problem problem = Problem::forward(contiguous_layout(rows, n, is_reduction(kind.function)), kind.function, x, y);
  for (const int first : kFirsts) {
    problem.tensors[kX].data = reinterpret_cast<void*>(uintptr_t(first * size_of(x)));
    problem.tensors[kY].data = nullptr;
    visit(plan_rows(problem, gpu, false));
    problem.tensors[kY].data = reinterpret_cast<void*>(uintptr_t(first * size_of(y)));
    if (first) visit(plan_rows(problem, gpu, false));  // the same, in place
  }
}

// The gradient that is computed is always a new tensor, and so is the result that the forward saved. Only the result's
// gradient, or the input of logsumexp, may begin within a vector. Rows of one element are columns side by side, or all
// have the same element of the result's gradient.
template <class Visit>
void backward_plans(const cuda::KernelKind& kind, const Gpu& gpu, int64_t rows, int64_t n, const Visit& visit) {
  const bool grad_is_broadcast = kind.pass == cuda::Pass::backward_broadcast, reduced = is_reduction(kind.function);
  const int64_t sizes[] = {rows, n}, all[] = {n, 1}, lse[] = {1, 0};
  const bool reduce[] = {false, true};
  for (const int64_t each : {grad_is_broadcast || reduced ? int64_t(1) : n, int64_t(0)}) {  // of that gradient in a row
    if (!each && n > 1) break;
    const int64_t grad[] = {each, grad_is_broadcast ? 0 : 1};
    const int64_t* const strides[] = {all, all, grad, lse};
    Problem call =
        Problem::backward(make_backward_layout(2, sizes, strides, reduce, reduced), kind.function, kind.in, kind.out);
    if (call.grad_is_broadcast() != grad_is_broadcast) return;
    for (const int first : kFirsts) {
      call.tensors[reduced ? kSaved : kGrad].data =
          reinterpret_cast<void*>(uintptr_t(first * size_of(call.type(kSaved))));
      visit(plan_cuda(call, gpu));
    }
  }
}

// The plans of calls over other dims of contiguous tensors.
template <class Visit>
void column_plans(const cuda::KernelKind& kind, const Gpu& gpu, int64_t n, const Visit& visit) {
  const bool grad_is_broadcast = kind.pass == cuda::Pass::backward_broadcast;
  if (grad_is_broadcast && is_reduction(kind.function)) return;
  Layout layout;
  layout.reduced.insert({2, {1, 1, grad_is_broadcast ? 0 : 1, 0}});
  const Problem call = kind.pass == cuda::Pass::forward ? Problem::forward(layout, kind.function, kind.in, kind.out)
                                                        : Problem::backward(layout, kind.function, kind.in, kind.out);
  walk_columns(n, [&](const ColumnView& view) { return column_planner(view, gpu, call); }, visit);
}

// A plan as bytes, which are fast to compare: millions of plans are visited.
static_assert(std::has_unique_object_representations_v<CudaPlan>);
std::string_view bytes_of(const CudaPlan& plan) { return {reinterpret_cast<const char*>(&plan), sizeof plan}; }

// The kernels that calls with contiguous tensors need, as JSON: a name, by source file and defines, and one plan of
// each. They are kernels of rows and, with `dims`, of columns too. `lengths`: of the rows or columns; if there are
// none, any length.
std::string kernels_of(const cuda::KernelKind& kind, const Gpu& gpu, const std::vector<int64_t>& lengths, bool dims) {
  std::deque<CudaPlan> plans;
  std::unordered_set<std::string_view> seen;  // of `plans`
  std::unordered_set<std::string> names;
  std::string json;
  const auto visit = [&](const CudaPlan& plan) {
    if (seen.count(bytes_of(plan))) return;
    seen.insert(bytes_of(plans.emplace_back(plan)));
    const std::string name = cuda::kernel_name(kind, plan);
    if (names.insert(name).second) json += (json.empty() ? "{\"" : ", \"") + name + "\": " + numbers(plan);
  };
  const bool any = lengths.empty();
  for (const int64_t n : any ? lengths_to_walk(tables_of(gpu.name)) : lengths) {
    for (const int64_t rows : rows_to_walk(gpu)) {
      if (kind.pass == cuda::Pass::forward) {
        forward_plans(kind, gpu, rows, n, visit);
      } else {
        backward_plans(kind, gpu, rows, n, visit);
      }
    }
  }
  if (dims) {
    for (const int64_t n : any ? column_lengths(tables_of(gpu.name)) : lengths) column_plans(kind, gpu, n, visit);
  }
  return json.empty() ? "{}" : json + "}";
}

// `numbers`: the numbers of a plan, and five that distinguish the kernels of losses, of segments and of scores.
cuda::KernelKind kind_of(int function, int pass, int x_type, int y_type, const int64_t* numbers) {
  cuda::KernelKind kind = {Function(function), cuda::Pass(pass), DType(x_type), DType(y_type)};
  kind.loss_parts = unsigned(numbers[8]), kind.loss_step = cuda::LossStep(numbers[9]);
  kind.segment_parts = unsigned(numbers[10]), kind.bias = DType(numbers[11]);
  kind.score_parts = unsigned(numbers[12]);
  return kind;
}

// Planners make plans that no caller may give, so only the numbers that choose a source file and its macros are
// checked.
CudaPlan plan_of(const int64_t* numbers) {
  const CudaPlan plan = make_plan({numbers, numbers + 8});
  if (plan.tier < Tier::warp || plan.tier > Tier::pipelined)
    throw std::runtime_error("onepass: tier is 0 to 11, got " + std::to_string(int(plan.tier)));
  if (!is_power_of_two(plan.vec_size, 8))
    throw std::runtime_error("onepass: vec_size is a power of two up to 8, got " + std::to_string(plan.vec_size));
  return plan;
}

}  // namespace

// The kernels that calls over contiguous rows may need and, with `dims`, calls over other dims too, as JSON: {name:
// plan}. `lengths`: `count` lengths of rows; none: any length. The GPU is `device` or, if that is negative, a full GPU
// of `arch`. `pass` is numbered as in launch.h.
ONEPASS_API int onepass_kernels_to_warm(int function, int pass, int x_type, int y_type, int device, int arch,
                                        const int64_t* lengths, int64_t count, bool dims, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Gpu gpu = device < 0 ? typical(arch) : cuda::device_info(device);
    const std::string json = kernels_of({Function(function), cuda::Pass(pass), DType(x_type), DType(y_type)}, gpu,
                                        std::vector<int64_t>(lengths, lengths + count), dims);
    if (int64_t(json.size()) >= size) throw std::runtime_error("onepass: too many kernels");
    return json;
  });
}

// Compiles the kernel of a plan for sm_<arch> into the file `path` or, if that is empty, into the disk cache. `plan`:
// the numbers in the order of CudaPlan, and the five more that kind_of takes.
ONEPASS_API int onepass_compile(int function, int pass, int x_type, int y_type, const int64_t* plan, int arch,
                                const char* path, char* text, int64_t size) {
  return return_text(text, size, [&]() -> std::string {
    const cuda::KernelKind kind = kind_of(function, pass, x_type, y_type, plan);
    const CudaPlan made = plan_of(plan);
    std::string why;
    const std::string directory = *path ? "" : cuda::cache_directory(&why);
    if (!*path && directory.empty()) throw std::runtime_error("onepass: no cache to compile into: " + why);
    bool is_cached = false;
    const std::string code =
        cuda::cubin(cuda::source_of(kind, made.tier), cuda::defines_of(kind, made), arch, &is_cached);
    if (*path) return write_file(code, path);
    if (!is_cached) throw std::runtime_error("onepass: cannot write into " + directory);
    return "";
  });
}

// Compiles the same kernel into a package of kernels that is made in `folder`.
ONEPASS_API int onepass_package(int function, int pass, int x_type, int y_type, const int64_t* plan, int arch,
                                const char* folder, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const cuda::KernelKind kind = kind_of(function, pass, x_type, y_type, plan);
    const CudaPlan made = plan_of(plan);
    if (!cuda::package(cuda::source_of(kind, made.tier), cuda::defines_of(kind, made), arch, folder))
      throw std::runtime_error(std::string("onepass: cannot write into ") + folder);
    return "";
  });
}

// Whether the package of kernels or the disk cache has the kernel: "yes" or "no".
ONEPASS_API int onepass_is_cached(int function, int pass, int x_type, int y_type, const int64_t* plan, int arch,
                                  char* text, int64_t size) {
  return return_text(text, size, [&] {
    const cuda::KernelKind kind = kind_of(function, pass, x_type, y_type, plan);
    const CudaPlan made = plan_of(plan);
    return cuda::is_cached(cuda::source_of(kind, made.tier), cuda::defines_of(kind, made), arch) ? "yes" : "no";
  });
}

// Loads the kernel on `device`.
ONEPASS_API int onepass_load(int function, int pass, int x_type, int y_type, const int64_t* plan, int device,
                             char* text, int64_t size) {
  return return_text(text, size, [&] {
    cuda::load_kernel(kind_of(function, pass, x_type, y_type, plan), plan_of(plan), device);
    return "";
  });
}
