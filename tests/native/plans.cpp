// plans.cpp: layouts and the plans of columns, over random problems (as many as its argument says), addresses, types
// and GPUs. The layout of contiguous rows is the one that is made for any tensor. What a plan promises holds, and on
// small tensors every element comes to one thread once, by vectors that are aligned. Prints how many layouts and plans
// were looked at and how many plans were followed to the elements; exits with 1 at the first that is wrong.
#include "draw.h"
#include "plan/validate.h"

namespace {

// Layouts
// ------------------------------------------------------------------------------------------------------------

bool same(const DimGroup& a, const DimGroup& b) {
  return a.count == b.count && std::equal(a.dims, a.dims + a.count, b.dims, [](const Dim& p, const Dim& q) {
           return p.size == q.size && std::equal(p.strides, p.strides + kMaxTensors, q.strides);
         });
}

// Contiguous rows with sizes by `code`. A dim of size 1 may have any stride, which `odd` gives it.
bool has_contiguous_layout(int rank, int code, bool odd, bool reduced) {
  int64_t sizes[5] = {}, x[5], y[5], x_step = 1, y_step = 1, rows = 1;
  bool reduce[5] = {};
  reduce[rank - 1] = true;
  for (int i = rank - 1; i >= 0; --i) {
    sizes[i] = (const int64_t[]){1, 2, 3, 7}[code >> (2 * i) & 3];
    const bool gone = reduced && i == rank - 1;
    x[i] = odd && sizes[i] == 1 ? 5 + 3 * i : x_step;
    y[i] = gone ? 0 : odd && sizes[i] == 1 ? 2 * i : y_step;
    x_step *= sizes[i], y_step *= gone ? 1 : sizes[i], rows *= i < rank - 1 ? sizes[i] : 1;
  }
  const Layout want = make_forward_layout(rank, sizes, x, y, reduce, reduced);
  const Layout got = contiguous_layout(rows, sizes[rank - 1], reduced);
  return same(want.outer, got.outer) && same(want.reduced, got.reduced) && want.rows == got.rows && want.n == got.n &&
         want.view == got.view;
}

int check_layouts() {
  int checked = 0;
  for (int rank = 1; rank <= 5; ++rank) {
    for (int code = 0; code < 4 << 2 * rank; ++code, ++checked) {
      if (!has_contiguous_layout(rank, code >> 2, code & 1, code & 2))
        return complain("layout of rank " + std::to_string(rank) + ", code " + std::to_string(code));
    }
  }
  return checked;
}

// Plans of columns
// ---------------------------------------------------------------------------------------------------

const char* find_fault(const Problem& problem, const ColumnView& view, const CudaPlan& plan, const Gpu& gpu,
                       const ColumnPlanner& planner) {
  static thread_local std::string words;
  if (const Fault fault = validate(plan, problem, gpu)) return (words = *fault).c_str();
  const int vecs = plan.vecs_per_thread();
  if (plan.is_staged()) {
    Tiles tiles = tiles_of(view, plan);
    set_staged_bytes(tiles, view, problem, planner.operands);
    const DType result = problem.is_backward() ? problem.in_type() : problem.out_type();
    if (count_column_bytes(tiles, plan, result == DType::float64 ? 8 : 4, planner.gradient, planner.half_result) >
        gpu.shared - kColumnStatic)
      return "shared memory";
    if (plan.threads() > 1024 || vecs > 64) return "threads or elements per thread";
    if (tiles.vecs_per_thread_max > vecs) return "more elements than a thread has room for";
    if (tiles.merge_threads > 1 && tiles.merge_threads * tiles.tile_cols > plan.threads()) return "group";
    return nullptr;
  }
  if (!is_power_of_two(plan.vec_size, view.full) || plan.items_per_thread % plan.vec_size) return "vector";
  const int registers = vecs * planner.operands * std::max(1, plan.vec_size * planner.read / 4);
  if (vecs < 1 || vecs > 32 || (vecs > 16 && (vecs % 2 || registers > 96))) return "vectors per thread";
  if (plan.threads_x() < 1 || plan.threads_y() < 1 || plan.threads() > 1024) return "threads";
  if (plan.tier == Tier::columns || plan.is_in_smem() ? !is_power_of_two(plan.blocks_per_tile(), 16)
                                                      : plan.blocks_per_tile() < 1)
    return "blocks per tile";
  if (plan.smem_vecs > 64 || (plan.smem_vecs % 4 && plan.smem_vecs != kPrefetch)) return "vectors in shared memory";
  if (plan.keeps_vecs_in_smem() && plan.access != VecAccess::aligned && plan.access != VecAccess::slab_aligned &&
      !plan.is_shifted())
    return "parts of vectors in shared memory";
  if (plan.smem_vecs && plan.tier == Tier::columns_twopass) return "vectors in shared memory of what streams";
  if (plan.in_grid() && !gpu.cooperative) return "a cooperative launch where there is none";
  if (plan.smem_vecs && plan.vec_size * planner.read < 4) return "vectors that shared memory does not take";
  Tiles tiles = tiles_of(view, plan);
  if (plan.is_in_smem())
    set_smem_bytes(tiles, view, problem, plan, planner.operands);
  else
    tiles.smem_vecs_bytes = int(count_smem_vecs_bytes(plan, plan.vec_size * planner.read * planner.operands));
  const DType result = problem.is_backward() ? problem.in_type() : problem.out_type();
  const int scalar = result == DType::float64 ? 8 : 4;
  if (count_column_bytes(tiles, plan, scalar, planner.gradient, planner.half_result) > gpu.shared - kColumnStatic)
    return "shared memory";
  if (plan.takes_slabs() ? tiles.partial_stride != tiles.tile_cols
                         : tiles.partial_stride < tiles.tile_cols ||
                               (tiles.partials > 1 && tiles.partial_stride % std::min(plan.vec_size, 4)))
    return "stride";
  if (tiles.merge_threads != 1 << tiles.merge_threads_log2 || tiles.merge_threads > 32 ||
      (tiles.merge_threads > 1 && tiles.merge_threads * tiles.tile_cols > plan.threads()))
    return "group";
  if (plan.is_in_smem() && tiles.chunks > kChunks) return "chunks";
  if (plan.tier != Tier::columns_twopass && !plan.is_in_smem() &&
      tiles.vecs_per_thread_max > vecs + (plan.prefetches() ? 0 : plan.smem_vecs))
    return "more vectors than a thread has room for";
  return nullptr;
}

int64_t offset(const TileDims& dims, int tensor, int64_t index) {
  int64_t at = 0;
  for (int d = dims.count - 1; d >= 0; --d) at += index % dims.sizes[d] * dims.steps[tensor][d], index /= dims.sizes[d];
  return at;
}

// Follows the elements of all threads of a launch of the tier columns_staged.
const char* find_fault_of_groups(const Problem& problem, const ColumnView& view, const CudaPlan& plan) {
  const Tiles tiles = tiles_of(view, plan);
  std::vector<int> seen(size_t(problem.layout.rows * problem.layout.n));
  for (int64_t group = 0; group < tiles.slices; ++group) {
    const int64_t first = group * tiles.group_slices,
                  vecs = std::min<int64_t>(tiles.group_slices, tiles.all_slices - first) * tiles.slice_vecs;
    for (int64_t vec = 0; vec < std::min<int64_t>(vecs, tiles.tiles_per_slice * tiles.threads_x); ++vec) {
      const int64_t slice = first + vec / tiles.slice_vecs, column = vec % tiles.slice_vecs * plan.vec_size;
      for (int64_t row = 0; row < std::min<int64_t>(tiles.n, int64_t(tiles.threads_y) * tiles.vecs_per_thread_max);
           ++row) {
        for (int64_t c = column; c < std::min<int64_t>(column + plan.vec_size, tiles.slice_cols); ++c)
          ++seen[size_t((slice * tiles.slice_cols + c) * tiles.n + row)];
      }
    }
  }
  for (const int count : seen) {
    if (count != 1) return "an element that no thread has, or two";
  }
  return nullptr;
}

// Follows the vectors of all threads of a launch, one after another. The emulator runs the kernels themselves.
const char* find_fault_of_elements(const Problem& problem, const ColumnView& view, const CudaPlan& plan) {
  if (plan.is_staged()) return find_fault_of_groups(problem, view, plan);
  const Tiles tiles = tiles_of(view, plan);
  const bool slab = plan.takes_slabs();
  const bool whole = plan.access == VecAccess::aligned || plan.access == VecAccess::slab_aligned;
  const int V = plan.vec_size;
  const int64_t inner = tiles.inner, slab_size = tiles.n * inner;
  std::vector<int> seen(size_t(problem.layout.rows * problem.layout.n));
  // The tensor whose lines say where vectors begin. Results may be stored element by element.
  const int lead = plan.is_in_smem() && problem.is_backward() ? int(kSaved) : 0,
            result = problem.is_backward() ? int(kDx) : int(kY);
  const bool in_elements = plan.is_in_smem() && plan.is_shifted() && view.shift < V;
  const auto is_aligned = [&](int64_t outer, int64_t column, int64_t row) {
    for (int t = 0; t < problem.count_tensors(); ++t) {
      if (t == result && in_elements) continue;
      if (problem.is_one_per_row(t) || (t == kGrad && grad_is_broadcast_in_tile(problem))) continue;
      const int64_t at = view.strided ? offset(tiles.outer, t, column) + offset(tiles.reduced, t, row)
                                      : offset(tiles.outer, t, outer) + column + row * tiles.steps[t];
      const int size = size_of(problem.type(t));
      if ((problem.address(t) + uint64_t(at * size)) % uint64_t(V * size)) return false;
    }
    return true;
  };
  for (int64_t tile = 0; tile < tiles.tiles_per_slice * tiles.slices; ++tile) {
    const int64_t outer = tile / tiles.tiles_per_slice, column = tile % tiles.tiles_per_slice * tiles.tile_cols;
    const uint64_t first = problem.address(lead) / uint64_t(size_of(problem.type(lead))) +
                           uint64_t(view.strided ? 0 : offset(tiles.outer, lead, outer));
    const int64_t before = slab ? int64_t(first % uint64_t(V)) : 0;  // elements of a vector before the slab
    for (int64_t i = 0; i < int64_t(tiles.vecs_per_thread_max) * plan.blocks_per_tile() * tiles.threads_x *
                                (slab ? 1 : tiles.threads_y);
         ++i) {
      // Of a slab the elements [from, from + V); else columns [from, from + V) of a row.
      const int64_t row = slab ? 0 : i / tiles.threads_x;
      // Lines of a shifted tile begin within a vector.
      const int64_t shift = plan.is_shifted() ? int64_t((first + uint64_t(column + row * tiles.steps[lead])) % V) : 0;
      const int64_t from = slab ? i * V - before : column + i % tiles.threads_x * V - shift;
      const int64_t begin = plan.is_shifted() ? column : 0;
      const int64_t end = slab                ? slab_size
                          : plan.is_shifted() ? std::min<int64_t>(inner, column + tiles.tile_cols)
                                              : inner;
      if (row >= tiles.n || from >= end) continue;
      const bool is_full = from >= begin && from + V <= end;
      if (whole && !is_full) return "a part of a vector";
      if (is_full && !is_aligned(outer, slab ? from % inner : from, slab ? from / inner : row)) return "alignment";
      for (int64_t at = std::max(from, begin); at < std::min(from + V, end); ++at) {
        const int64_t own = slab ? at % inner * tiles.n + at / inner : at * tiles.n + row;
        ++seen[size_t(outer * slab_size + own)];
      }
    }
  }
  for (const int count : seen) {
    if (count != 1) return "an element that no thread has, or two";
  }
  return nullptr;
}

// Shared memory has room for all tiles that the planner lists, of any two types and lines of any length.
bool has_room(const Gpu& gpu) {
  const auto length = [](double most) { return int64_t(std::exp(std::log(most) * double(below(1000)) / 1000)) + 1; };
  const int64_t sizes[] = {length(300), 2 + length(20000), 1 + length(6000)}, none[] = {0, 0, 0};
  const int64_t pitch[] = {sizes[2] + below(3) * below(9), sizes[2] + below(3) * below(9)};
  const int64_t x[] = {sizes[1] * pitch[0], pitch[0], 1}, y[] = {sizes[1] * pitch[1], pitch[1], 1};
  const int64_t* const each[] = {y, x, x, none};
  const bool reduce[] = {false, true, false};
  const DType types[] = {DType::float32, DType::bfloat16}, in = types[below(2)], out = types[below(2)];
  const Problem problem =
      below(3) ? Problem::forward(make_forward_layout(3, sizes, x, y, reduce, false), Function::softmax, in, out)
               : Problem::backward(make_backward_layout(3, sizes, each, reduce, false), Function::softmax, in, out);
  const ColumnView view = column_view(problem);
  const ColumnPlanner planner = column_planner(view, gpu, problem);
  bool fits = true;
  if (view.served && !view.strided) {
    planner.for_each_smem_tile([&](const CudaPlan& plan) {
      Tiles tiles = tiles_of(view, plan);
      set_smem_bytes(tiles, view, problem, plan, planner.operands);
      fits &= count_column_bytes(tiles, plan, 4, planner.gradient, planner.half_result) <= gpu.shared - kColumnStatic;
    });
  }
  return fits;
}

// The multiplier and the shift of a divisor give the quotients of all numbers below 2^31.
bool divides() {
  const int64_t b = one_of({1, 2, 3, 1 + below(1000), 1 + below((int64_t(1) << 31) - 1)});
  const FastDivisor by = divider_of(b);
  for (const int64_t a : {below(int64_t(1) << 31), below(10000), (int64_t(1) << 31) - 1, b - 1, b}) {
    if (int64_t(uint64_t(a) * by.multiplier >> by.shift) != a / b) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  const int layouts = check_layouts();
  if (!layouts) return 1;
  const Gpu gpus[] = {typical(80, 108), typical(90, 132), typical(90, 60), typical(100, 148), typical(120, 170)};
  int plans = 0, followed = 0;
  for (int i = 0; i < std::atoi(arguments[1]); ++i) {
    draw.seed(unsigned(i));
    if (!divides()) return complain("a division"), 1;
    if (i % 50 == 0 && !has_room(gpus[i / 50 % 5])) return complain("more shared memory than there is"), 1;
    draw.seed(unsigned(i));
    Gpu gpu = gpus[i % 5];
    gpu.cooperative = i % 7 > 0;
    const bool small = i % 4 < 2;
    const Problem problem = draw_problem(small);
    if (problem.has_rows()) continue;
    ColumnView view = column_view(problem);
    if (view.is_scattered) view = column_view(problem, true);
    const ColumnPlanner planner = column_planner(view, gpu, problem);
    const CudaPlan plan = planner.plan();
    const bool follows = small && problem.layout.rows * problem.layout.n <= 20000;
    const char* fault = view.served ? find_fault(problem, view, plan, gpu, planner) : "not served";
    if (!fault && follows) fault = find_fault_of_elements(problem, view, plan);
    if (fault) return std::printf("problem %d: %s\n", i, fault), 1;
    ++plans, followed += follows;
  }
  std::printf("%d %d %d", layouts, plans, followed);
}
