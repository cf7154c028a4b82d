// isa_dispatch.h: chooses the instruction set of the CPU engine, once per process, and executes plans on threads. The
// instruction set is the best one that this CPU has, or the one that ONEPASS_CPU_CAPABILITY names ("baseline", "avx2",
// "avx512").
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "broadcast_sum.h"
#include "divergence.h"
#include "engine.h"
#include "loss.h"
#include "scored.h"
#include "segments.h"

namespace onepass {

struct CpuEngine {
  const char* isa;
  bool (*works)();
  CpuPlan (*plan)(const Problem&);
  void (*run)(const Problem&, const CpuPlan&, CpuPhase, ChunkState*, int64_t begin, int64_t end);
  ScoredPlan (*plan_scored)(ScoredProblem&);
  void (*run_scored)(const ScoredProblem&, const ScoredPlan&, CpuPhase, ScoredState*, int64_t begin, int64_t end);
  LossPlan (*plan_loss)(const LossProblem&);
  void (*run_loss)(const LossProblem&, const LossPlan&, int64_t begin, int64_t end);
  DivergencePlan (*plan_divergence)(const DivergenceProblem&);
  void (*run_divergence)(const DivergenceProblem&, const DivergencePlan&, int64_t begin, int64_t end);
  SegmentPlan (*plan_segments)(const SegmentProblem&, int64_t longest);
  void (*run_segments)(const SegmentProblem&, const SegmentPlan&, CpuPhase, SegmentState*, int64_t begin, int64_t end);
  SumPlan (*plan_sum)(const SumProblem&);
  void (*run_sum)(const SumProblem&, const SumPlan&, double* parts, int64_t begin, int64_t end);
  void (*merge_sums)(const SumProblem&, const SumPlan&, const double* parts, int64_t begin, int64_t end);

  // Executes a call. `parallel_for(count, grain_size, work)` calls work(begin, end) for parts of [0, count).
  template <class ParallelFor>
  void execute(const Problem& call, ParallelFor&& parallel_for) const {
    const CpuPlan plan = this->plan(call);
    std::vector<ChunkState> states(plan.reduces ? size_t(plan.work_items + plan.work_items / plan.chunks) : 0);
    const auto run_parallel = [&](CpuPhase phase) {
      parallel_for(plan.work_items, plan.grain_size,
                   [&](int64_t begin, int64_t end) { run(call, plan, phase, states.data(), begin, end); });
    };
    if (!plan.reduces) return run_parallel(CpuPhase::whole);
    run_parallel(CpuPhase::states);
    run(call, plan, CpuPhase::merge, states.data(), 0, 0);
    if (plan.stores) run_parallel(CpuPhase::finish);
  }
};

#define ONEPASS_ENGINE(isa, works) \
  {#isa,                           \
   works,                          \
   isa::plan,                      \
   isa::run,                       \
   isa::plan_scored,               \
   isa::run_scored,                \
   isa::plan_loss,                 \
   isa::run_loss,                  \
   isa::plan_divergence,           \
   isa::run_divergence,            \
   isa::plan_segments,             \
   isa::run_segments,              \
   isa::plan_sum,                  \
   isa::run_sum,                   \
   isa::merge_sums}
inline const CpuEngine kCpuEngines[] = {
// best first
#ifdef ONEPASS_AVX512
    ONEPASS_ENGINE(avx512,
                   [] {
                     return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
                   }),
#endif
#ifdef ONEPASS_AVX2
    ONEPASS_ENGINE(avx2,
                   [] {
                     return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                            __builtin_cpu_supports("f16c");
                   }),
#endif
    ONEPASS_ENGINE(baseline, [] { return true; }),
};
#undef ONEPASS_ENGINE

inline const CpuEngine& cpu_engine() {
  static const CpuEngine& chosen = []() -> const CpuEngine& {
    const char* named = std::getenv("ONEPASS_CPU_CAPABILITY");
    for (const CpuEngine& engine : kCpuEngines) {
      if (named && *named && engine.isa != std::string(named)) continue;
      if (engine.works()) return engine;
      if (named && *named) break;
    }
    if (!named || !*named) throw std::runtime_error("onepass: no instruction set of the CPU engine works here");
    std::string words = "onepass: ONEPASS_CPU_CAPABILITY is an instruction set that works here (";
    for (const CpuEngine& engine : kCpuEngines) {
      if (engine.works()) words += std::string(words.back() == '(' ? "" : ", ") + engine.isa;
    }
    throw std::runtime_error(words + "), got " + named);
  }();
  return chosen;
}

}  // namespace onepass
