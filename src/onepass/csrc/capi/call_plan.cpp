// call_plan.cpp: the launches of a call of a loss, of segments or with scores, as JSON for `explain`. A plain C
// function for ctypes, as in plan.cpp.
#include <vector>

#include "../cpu/isa_dispatch.h"
#include "../cuda/host/launch.h"
#include "c_api.h"
#include "calls.h"

namespace {

using namespace onepass;

std::string field(const char* key, int64_t value) { return std::string(", \"") + key + "\": " + std::to_string(value); }
std::string field(const char* key, const char* value) { return std::string(", \"") + key + "\": \"" + value + "\""; }

// The shape of a call. All tensors have the layout of x, except a result with one number per segment.
struct Shape {
  int ndim, dim;
  const int64_t *sizes, *x_strides, *y_strides;
  int64_t segments;
  const void* x;

  LossProblem of(LossProblem problem) const {
    problem.x = x;
    for (int d = 0; d < ndim; ++d) {
      if (d != dim) problem.add_dim(sizes[d], x_strides[d], x_strides[d]);
    }
    problem.n = sizes[dim], problem.x_step = problem.dx_step = x_strides[dim];
    if (problem.is_backward()) problem.dx = address_of(problem.type);
    return problem;
  }
  DivergenceProblem of(DivergenceProblem problem) const {
    problem.x = problem.y = x;
    const bool backward = problem.is_backward();
    if (backward) problem.dx = problem.dy = address_of(problem.type);
    for (int d = 0; d < ndim; ++d) {
      const int64_t own = x_strides[d], made = backward ? own : 0;
      if (d != dim) problem.add_dim(sizes[d], {own, own, made, made});
    }
    problem.n = sizes[dim];
    std::fill_n(problem.steps, backward ? problem.kTensors : 2, x_strides[dim]);
    return problem;
  }
  SegmentProblem of(SegmentProblem problem) const {
    using P = SegmentProblem;
    problem.data[problem.has(P::kOfX) ? P::kOfX : P::kOfGrad] = x;
    const auto stride = [&](int tensor, int d) {
      const bool is_result = tensor == P::kOfY || tensor == P::kOfGrad;
      return !problem.has(tensor) ? 0 : is_result ? y_strides[d] : x_strides[d];
    };
    for (int t = 0; t < P::kTensors; ++t) problem.steps[t] = stride(t, dim);
    for (int d = 0; d < ndim; ++d) {
      if (d == dim) continue;
      DimOf<P::kTensors> each = {sizes[d], {}};
      for (int t = 0; t < P::kTensors; ++t) each.strides[t] = stride(t, d);
      problem.inner.insert(each);
      problem.columns *= sizes[d];
    }
    problem.inner.merge();
    problem.items = sizes[dim], problem.segments = segments;
    return problem;
  }
  // Tensors with an element per score have the layout of x. Tensors with one number per row are contiguous.
  ScoredProblem of(ScoredProblem problem) const {
    problem.data[kInput] = const_cast<void*>(x);
    bool reduce[kMaxDims] = {};
    int64_t of_rows[kMaxDims] = {}, step = 1;
    reduce[dim] = true;
    for (int d = ndim - 1; d >= 0; --d) {
      if (d != dim) of_rows[d] = step, step *= sizes[d];
    }
    const int64_t* strides[kDistance];
    for (int t = 0; t < kDistance; ++t) {
      const bool is_of_rows = t == kScale || t == kSink || t == kAlibi || t == kRowLse;
      strides[t] = is_of_rows ? of_rows : t == kResult ? y_strides : x_strides;
    }
    if (is_reduction(problem.function) && problem.is_backward()) strides[kGradOf] = of_rows;
    problem.lay_out(ndim, sizes, strides, reduce, {});
    return problem;
  }
};

// Describes the launch of the call's main kernel, and names the sources of the kernels after it.
std::string describe(const cuda::DryRun& run, const char* tier, const std::string& more) {
  const auto source = [&](size_t i) {
    const auto& [kind, plan] = run.kernels[run.launches[i].kernel];
    return cuda::source_of(kind, plan.tier);
  };
  const CudaPlan& plan = run.kernels[run.launches[0].kernel].plan;
  std::string then, names;
  for (size_t i = 1; i < run.launches.size(); ++i) then += (then.empty() ? "" : ", ") + std::string(source(i));
  for (const auto& [kind, each] : run.kernels) {
    names += (names.empty() ? ", \"kernels\": [\"" : ", \"") + cuda::kernel_name(kind, each) + "\"";
  }
  return field("tier", tier) + field("source", source(0)) + field("grid", run.launches[0].blocks) +
         field("threads", run.launches[0].threads) + more + field("items_per_thread", plan.items_per_thread) +
         field("vec_size", plan.vec_size) + field("access", kVecAccessNames[int(plan.access)]) +
         (then.empty() ? "" : field("then", then.c_str())) + names + "]";
}

// Adds how the threads of a block share rows: threads_x side by side and threads_y along a column, or threads_per_row.
std::string describe_loss(const cuda::DryRun& run, const cuda::LossLaunch& launch) {
  const auto& [kind, plan] = run.kernels[0];
  const bool columns = kind.loss_parts & kLossColumns, staged = kind.loss_parts & kLossStaged;
  const bool is_divergence = kind.loss_parts & (kLossShares | kLossKl);
  const int x = launch.map.threads_x, of_row = is_divergence ? launch.threads / x : plan.threads_per_row;
  const std::string shared = columns ? field("threads_x", x) + field("threads_y", launch.threads / x)
                                     : field("threads_per_row", staged ? 1 : of_row);
  const std::string parts = launch.map.parts > 1 ? field("parts_per_row", launch.map.parts) : "";
  return describe(run, columns ? "columns" : staged ? "staged" : "rows", shared + parts);
}

std::string on_gpu(const Call& call, const Shape& shape, const Gpu& gpu) {
  cuda::DryRun run(gpu);
  if (call.is_of_segments()) {
    const SegmentProblem problem = shape.of(segment_problem(call));
    if (!cuda::can_launch_segments(problem)) return "";
    const cuda::SegmentLaunch launch = cuda::make_segment_launch(problem, 0);
    run.start(launch.rows);
    if (launch.blocks) run.start(launch);  // of long segments
    return describe(run, "segments", "");
  }
  if (call.is_scored()) {
    const ScoredProblem problem = shape.of(scored_problem(call));
    if (!cuda::can_launch_scored(problem)) return "";
    run.start(cuda::make_scored_launch(problem, 0, nullptr, true));
    return describe(run, kTierNames[int(run.kernels[0].plan.tier)], "");
  }
  if (call.is_divergence()) {
    const DivergenceProblem problem = shape.of(divergence_problem(call));
    if (!cuda::can_launch_divergence(problem)) return "";
    const cuda::LossLaunch launch = cuda::make_divergence_launch(problem, 0);
    cuda::start_loss(launch, nullptr, nullptr, nullptr);
    return describe_loss(run, launch);
  }
  const LossProblem problem = shape.of(loss_problem(call));
  if (!cuda::can_launch_loss(problem)) return "";
  const cuda::LossLaunch launch = cuda::make_loss_launch(problem, 0);
  cuda::start_loss(launch, nullptr, nullptr, nullptr);
  if (problem.is_cross && !problem.is_backward()) cuda::start_loss_total(problem, {}, 0, nullptr);
  return describe_loss(run, launch);
}

std::string on_cpu(const Call& call, const Shape& shape) {
  const CpuEngine& engine = cpu_engine();
  const auto fields = [&](const char* tier, const auto& plan) {
    return field("tier", tier) + field("isa", engine.isa) + field("work_items", plan.work_items) +
           field("grain_size", plan.grain_size);
  };
  if (call.is_of_segments()) return fields("segments", engine.plan_segments(shape.of(segment_problem(call)), 0));
  if (call.is_scored()) {
    ScoredProblem problem = shape.of(scored_problem(call));
    const char* const tier = problem.has_rows() ? "rows" : "columns";
    return fields(tier, engine.plan_scored(problem));
  }
  const auto of_rows = [&](const auto& plan) { return fields(plan.in_columns ? "columns" : "rows", plan); };
  if (call.is_divergence()) return of_rows(engine.plan_divergence(shape.of(divergence_problem(call))));
  LossProblem problem = shape.of(loss_problem(call));
  problem.picks = 0;  // no classes are read
  return of_rows(engine.plan_loss(problem));
}

}  // namespace

// The launches of the call that `words` describe (calls.h), as JSON; {} if no kernel takes it. "kernels" has the names
// of the kernels. `dim`: the dim of the classes, or the one that is cut into `segments`. `strides`: of x, then of the
// result of segments, without the planes of a state. `arch`: 90 for sm_90, 0 for the CPU engine.
ONEPASS_API int onepass_call_plan(const char* words, bool backward, int x_type, int y_type, int arch, int sm_count,
                                  const char* name, int ndim, const int64_t* sizes, const int64_t* strides, int dim,
                                  int64_t segments, uint64_t address, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Call call(words, backward, x_type, y_type);
    const Shape shape = {ndim, dim, sizes, strides, strides + ndim, segments, reinterpret_cast<void*>(4096 + address)};
    const std::string json = arch ? on_gpu(call, shape, typical(arch, sm_count, name)) : on_cpu(call, shape);
    return json.empty() ? "{}" : "{" + json.substr(2) + "}";
  });
}
