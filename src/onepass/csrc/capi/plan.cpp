// plan.cpp: plain C functions, by which Python uses the native core through ctypes (no CPython API), besides the
// operators: the plan of a call as JSON, the tables that planners look up, compiling and launching kernels, and what
// works on this machine. Each function returns 0, or 1 with the error message in `text`.
#include <iterator>
#include <sstream>

#include "../core/problem.h"
#include "../plan/columns.h"
#include "../cpu/engine.h"
#include "../cpu/isa_dispatch.h"
#include "../cuda/host/cuda_driver.h"
#include "../cuda/host/launch.h"
#include "c_api.h"
#include "../core/batch_invariant.h"
#include "../core/memory_overlap.h"

namespace {

using namespace onepass;

std::string field(const char* key, int64_t value) { return std::string("\"") + key + "\": " + std::to_string(value); }
std::string field(const char* key, const char* value) { return std::string("\"") + key + "\": \"" + value + "\""; }

std::string launch_fields(const CudaPlan& plan, int64_t blocks) {
  const bool columns = plan.of_columns();
  return field("tier", kTierNames[int(plan.tier)]) + ", " +
         field(columns ? "threads_x" : "threads_per_row", plan.threads_per_row) + ", " +
         field(columns ? "threads_y" : "rows_per_block", plan.rows_per_block) + ", " +
         field("items_per_thread", plan.items_per_thread) + ", " + field("vec_size", plan.vec_size) + ", " +
         field(plan.is_staged() ? "stages"
               : columns        ? "blocks_per_tile"
                                : "blocks_per_row",
               plan.blocks_per_row) +
         ", " +
         field(plan.tier == Tier::staged ? "rows_per_thread"
               : plan.is_staged()        ? "slices_per_group"
                                         : "smem_vecs",
               plan.smem_vecs) +
         ", " + field("access", kVecAccessNames[int(plan.access)]) + ", " + field("threads", plan.threads()) + ", " +
         field("grid", blocks) + ", \"plan\": " + numbers(plan);
}

// The bytes that a call has to move: each element is read once and written once.
int64_t bytes_moved(const Layout& layout, DType x, DType y, bool reduced_output) {
  return layout.rows * layout.n * size_of(x) + layout.rows * (reduced_output ? 1 : layout.n) * size_of(y);
}

// The number of blocks of a launch. If blocks of columns wait for each other, or for what they prefetch, a launch has
// as many as fit on the GPU at once, which only the driver knows. Here it is at least one per multiprocessor.
int64_t count_blocks(const CudaPlan& plan, const Problem& problem, const Gpu& gpu) {
  const int64_t rows = problem.layout.rows;
  if (plan.tier == Tier::pipelined)
    return gpu.sm_count / plan.rows_at_once(rows, gpu.sm_count) * plan.rows_at_once(rows, gpu.sm_count);
  if (!plan.of_columns()) return plan.grid(rows, plan.tier == Tier::grid ? gpu.sm_count : CudaPlan::kMaxGrid);
  const Tiles tiles = tiles_of(column_view(problem, plan), plan);
  const int64_t all = tiles.slices * (plan.is_staged() ? 1 : tiles.tiles_per_slice), blocks = plan.blocks_per_tile();
  const int64_t most =
      (plan.in_grid() || plan.prefetches() || plan.is_staged() ? gpu.sm_count : CudaPlan::kMaxGrid) / blocks;
  return (all < most ? all : most > 0 ? most : 1) * blocks;
}

std::string plan_json(Problem problem, Copied copied, const Gpu& gpu) {
  const Layout& layout = problem.layout;
  const DType x = problem.type(kX), y = problem.type(kY);
  const bool reduced = problem.is_reduction();
  const int64_t second = problem.function == Function::state ? layout.rows * size_of(y) : 0;  // the plane of sums
  std::string json = "{" + field("view", name(layout.view)) + ", " + field("rows", layout.rows) + ", " +
                     field("n", layout.n) + ", " + field("bytes", bytes_moved(layout, x, y, reduced) + second);
  if (layout.rows == 0 || layout.n == 0) return json + "}";
  const bool invariant = batch_invariant();
  // Gathered: contiguous rows at aligned addresses.
  if (!problem.has_rows() && (invariant || (gpu.arch && !fits_tiles(layout)))) {
    problem.layout = contiguous_layout(layout.rows, layout.n, reduced);
    problem.tensors[kX].data = problem.tensors[kY].data = nullptr;
    copied = Copied::both;
  }
  if (!gpu.arch) {
    const CpuPlan plan = cpu_engine().plan(problem);
    return json + ", " + field("isa", cpu_engine().isa) + ", " + field("fused", cpu_fuses(problem.function, x, y)) +
           ", " + field("copied", kCopiedNames[int(copied)]) + ", " + field("route", kCpuRouteNames[int(plan.route)]) +
           ", " + field("work_items", plan.work_items) + ", " + field("grain_size", plan.grain_size) + "}";
  }
  const CudaPlan plan = plan_cuda(problem, gpu, invariant);
  const int64_t read_again = plan.tier == Tier::grid ? RowChunks(plan, layout.n, 1).unkept : 0;
  return json + ", " + launch_fields(plan, count_blocks(plan, problem, gpu)) + ", " + field("read_again", read_again) +
         ", " + field("source", cuda::source_of(cuda::kind_of(problem), plan.tier)) + "}";
}

constexpr int kNumbers = 6;  // of an entry

std::string to_json(const std::vector<Entry>& table) {
  std::string text = "[";
  for (const Entry& e : table) {
    text += (text.size() > 1 ? ", [" : "[") + std::to_string(e.limit);
    for (const int number : {e.tier, e.threads, e.items_per_thread, e.blocks_per_row, e.smem_vecs})
      text += ", " + std::to_string(number);
    text += "]";
  }
  return text + "]";
}

std::vector<std::string> split(const char* options) {
  std::istringstream in(options);
  return {std::istream_iterator<std::string>(in), {}};
}

}  // namespace

// The plan of a call or, with `backward`, of its gradient, which only a GPU has. Functions and types are numbered as in
// types.h. `reduce` marks the reduced dims. `strides`, one tensor after another, and `addresses` are in the order of
// ForwardTensor or BackwardTensor; only the alignment of an address matters. `arch`: 90 for sm_90, 0 for the CPU
// engine. `name`: the GPU whose tables are used.
ONEPASS_API int onepass_plan(int function, bool backward, int arch, int sm_count, const char* name, int ndim,
                             const int64_t* sizes, const int64_t* strides, const bool* reduce, int x_type, int y_type,
                             const uint64_t* addresses, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Function of = Function(function);
    const bool reduced = is_reduction(of), invariant = batch_invariant();
    const auto of_tensor = [&](int tensor) { return strides + tensor * ndim; };
    const auto at = [&](int tensor) { return reinterpret_cast<void*>(addresses[tensor]); };
    const Gpu gpu = typical(arch, sm_count, name);
    if (backward) {
      const int64_t* const each[] = {of_tensor(kDx), of_tensor(kSaved), of_tensor(kGrad), of_tensor(kLse)};
      const Problem problem =
          Problem::backward(make_backward_layout(ndim, sizes, each, reduce, reduced), of, DType(x_type), DType(y_type),
                            at(kDx), at(kSaved), at(kGrad), reduced ? at(kLse) : nullptr);
      if (invariant && (problem.layout.outer.count > 1 || (problem.layout.n > 1 && problem.layout.view != View::rows)))
        throw std::runtime_error("onepass: a batch-invariant gradient over other dims is gathered: ask for its rows");
      const CudaPlan plan = invariant ? plan_rows(problem, gpu, true) : plan_cuda(problem, gpu);
      return "{" + launch_fields(plan, count_blocks(plan, problem, gpu)) + "}";
    }
    const auto layout_of = [&](int x, int y) {
      return make_forward_layout(ndim, sizes, of_tensor(x), of_tensor(y), reduce, reduced);
    };
    Layout layout = layout_of(kX, kY);
    Copied what = Copied::nothing;
    if (!reduced && !arch && !invariant) {
      const Layout of_x = layout_of(kX, kX), of_y = layout_of(kY, kY);
      what = copied(layout, of_x, of_y);
      if (what != Copied::nothing) layout = what == Copied::input ? of_y : of_x;
    }
    return plan_json(Problem::forward(layout, of, DType(x_type), DType(y_type), at(kX), at(kY)), what, gpu);
  });
}

// The plan that a table entry alone gives, in the type `type`, for contiguous tensors (sizes[0], sizes[1], sizes[2])
// over the middle dim; empty if the entry cannot hold rows, or columns, of this length. `entry`: its numbers in the
// order of Entry, without the limit. `pass` is numbered as in launch.h. `shared`: the most bytes of shared memory of a
// block. `reduces`: a forward is logsumexp instead of softmax.
ONEPASS_API int onepass_plan_from_entry(int pass, int type, const int64_t* entry, const int64_t* sizes, int arch,
                                        int sm_count, int shared, bool cooperative, bool reduces, char* text,
                                        int64_t size) {
  return return_text(text, size, [&]() -> std::string {
    const Entry by = {kAnyLength, int(entry[0]), int(entry[1]), int(entry[2]), int(entry[3]), int(entry[4])};
    const Gpu gpu = {arch, sm_count, shared, cooperative};
    const int64_t strides[] = {sizes[1] * sizes[2], sizes[2], 1}, none[] = {0, 0, 0};
    const bool reduce[] = {false, true, false};
    const int64_t* const each[] = {strides, strides, strides, none};
    const bool backward = cuda::Pass(pass) != cuda::Pass::forward;
    const Function function = reduces ? Function::logsumexp : Function::softmax;
    const Problem problem =
        backward
            ? Problem::backward(make_backward_layout(3, sizes, each, reduce, false), function, DType(type), DType(type))
            : Problem::forward(make_forward_layout(3, sizes, strides, reduces ? none : strides, reduce, reduces),
                               function, DType(type), DType(type));
    const auto plan_columns = [&] {
      const ColumnView view = column_view(problem);
      return column_planner(view, gpu, problem).plan_by(by);
    };
    const std::optional<CudaPlan> plan =
        !backward && problem.has_rows() ? RowPlanner(problem, gpu, false).plan_by(by) : plan_columns();
    return plan ? numbers(*plan) : "";
  });
}

// The tables in use for the GPUs of this name: a line with their origin, then JSON.
ONEPASS_API int onepass_tables(const char* gpu, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Tables& tables = tables_of(gpu);
    std::string all;
    for (const auto& [name, table] : kTables)
      all += std::string(all.empty() ? "{\"" : ", \"") + name + "\": " + to_json(tables.*table);
    return tables.origin + "\n" + all + "}";
  });
}

// Sets these tables. `counts`: the number of entries of each table, in the order of kTables. `numbers`: all entries,
// one after another.
ONEPASS_API int onepass_set_tables(const char* gpu, const char* origin, const int64_t* counts, const int64_t* numbers,
                                   char* text, int64_t size) {
  return return_text(text, size, [&] {
    Tables made;
    made.origin = origin;
    for (const auto& [name, table] : kTables) {
      for (int64_t left = *counts++; left > 0; --left, numbers += kNumbers) {
        for (int k = 1; k < kNumbers; ++k) {
          if (numbers[k] < -1 || numbers[k] > 4096) {
            throw std::runtime_error(std::string("onepass: table ") + name + " with the number " +
                                     std::to_string(numbers[k]));
          }
        }
        (made.*table)
            .push_back(
                {numbers[0], int(numbers[1]), int(numbers[2]), int(numbers[3]), int(numbers[4]), int(numbers[5])});
      }
    }
    set_tables(gpu, std::move(made));
    return std::string();
  });
}

// Sets the batch-invariant switch of the process or, with `scoped`, of this thread (-1: the switch of the process
// counts). Returns the value before. If `value` is 2, it only returns the value.
ONEPASS_API int onepass_set_invariant(bool scoped, int value, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const int before = scoped ? thread_invariant : process_invariant.load();
    if (value == 2) return std::to_string(before);
    if (scoped)
      thread_invariant = value;
    else
      process_invariant = value != 0;
    return std::to_string(before);
  });
}

// The functions in the order of their numbers, as JSON: {name: is_reduction}.
ONEPASS_API int onepass_functions(char* text, int64_t size) {
  return return_text(text, size, [&] {
    std::string all;
    for (const FunctionTraits& function : kFunctions) {
      all += std::string(all.empty() ? "{\"" : ", \"") + function.name +
             "\": " + (function.is_reduction ? "true" : "false");
    }
    return all + "}";
  });
}

// Compiles `source`, a file of the gallery or a path, with `options` (one a line), and stores the loaded function
// `name` in `kernel`. Launches of it may have all the shared memory that a block may have.
ONEPASS_API int onepass_kernel_load(const char* source, const char* name, const char* options, int device,
                                    void** kernel, char* text, int64_t size) {
  return return_text(text, size, [&] {
    cuda::enter_context(device);
    const Gpu& gpu = cuda::device_info(device);
    const std::string code = cuda::cubin(source, split(options), gpu.arch);
    cuda::Handle module, function;
    cuda::check(cuda::driver().module_load(&module, code.data()), "cuModuleLoadData");
    cuda::check(cuda::driver().module_function(&function, module, name), "cuModuleGetFunction");
    int declared;
    cuda::check(cuda::driver().function_get(&declared, cuda::kSharedStatic, function), "cuFuncGetAttribute");
    cuda::check(cuda::driver().function_set(function, cuda::kSharedDynamic, gpu.shared - declared),
                "cuFuncSetAttribute");
    *kernel = function;
    return std::string();
  });
}

// Launches `kernel` on `stream` with the arguments that `arguments` points to. `numbers`: blocks, threads of a block,
// blocks of a cluster or 0, bytes of shared memory, and whether the blocks must all be resident together.
ONEPASS_API int onepass_kernel_launch(void* kernel, const int* numbers, void* stream, void** arguments, char* text,
                                      int64_t size) {
  return return_text(text, size, [&] {
    cuda::LaunchConfig config = {};
    config.grid_x = unsigned(numbers[0]), config.block_x = unsigned(numbers[1]);
    config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
    config.shared_bytes = unsigned(numbers[3]);
    config.stream = static_cast<cuda::Handle>(stream);
    cuda::LaunchAttribute attribute = {};
    config.attributes = &attribute, config.attribute_count = numbers[2] || numbers[4];
    attribute.id = numbers[2] ? cuda::kClusterDimension : cuda::kCooperative;
    if (numbers[2]) {
      attribute.cluster[0] = unsigned(numbers[2]), attribute.cluster[1] = attribute.cluster[2] = 1;
    } else {
      attribute.cooperative = 1;
    }
    cuda::check(cuda::driver().launch(&config, static_cast<cuda::Handle>(kernel), arguments, nullptr),
                "cuLaunchKernelEx");
    return std::string();
  });
}

// Compiles `source` with `options` for sm_<arch> into the file `path`.
ONEPASS_API int onepass_kernel_compile(const char* source, const char* options, int arch, const char* path, char* text,
                                       int64_t size) {
  return return_text(text, size, [&] { return write_file(cuda::cubin(source, split(options), arch), path); });
}

// What works here. `what`: "driver", "nvrtc" (its version), "compiler" (NVRTC's file, which is not opened for this),
// "cache" (its directory), "isa" (the CPU engine's instruction set) or "counts" (kernels compiled, kernels read from
// the cache).
ONEPASS_API int onepass_status(const char* what, char* text, int64_t size) {
  return return_text(text, size, [&]() -> std::string {
    const std::string asked = what;
    if (asked == "driver") return cuda::driver(), "ready";
    if (asked == "nvrtc") return cuda::nvrtc_version();
    if (asked == "compiler") return cuda::nvrtc_file();
    if (asked == "isa") return cpu_engine().isa;
    if (asked == "counts") {
      const cuda::Counts now = cuda::counts();
      return std::to_string(now.compiled) + " " + std::to_string(now.from_disk);
    }
    if (asked == "cache") {
      std::string why;
      const std::string directory = cuda::cache_directory(&why);
      if (directory.empty()) throw std::runtime_error(why);
      return directory;
    }
    throw std::runtime_error("onepass: no such status: " + asked);
  });
}

// How two tensors overlap in memory (0 not at all, 1 they are the same, 2 in part), and whether the elements of one
// tensor overlap. `size`: bytes of an element.
ONEPASS_API int onepass_overlap(uint64_t a, int a_size, int a_rank, const int64_t* a_sizes, const int64_t* a_strides,
                                uint64_t b, int b_size, int b_rank, const int64_t* b_sizes, const int64_t* b_strides) {
  return int(overlap({a, a_size, a_rank, a_sizes, a_strides}, {b, b_size, b_rank, b_sizes, b_strides}));
}
ONEPASS_API int onepass_self_overlap(uint64_t a, int size, int rank, const int64_t* sizes, const int64_t* strides) {
  return self_overlap({a, size, rank, sizes, strides});
}
