// isa_dispatch.h: the instruction set of the CPU engine, chosen once a process: the best this CPU has, or what
// ONEPASS_CPU_CAPABILITY names ("baseline", "avx2", "avx512").
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "engine.h"

namespace onepass {

struct CpuEngine {
  const char* isa;
  bool (*works)();
  Units (*units)(const ForwardProblem&);
  void (*run)(const ForwardProblem&, int64_t, int64_t);
  void (*states)(const ForwardProblem&, Piece*, int64_t, int64_t);
  void (*merge)(const ForwardProblem&, Piece*);
  void (*finish)(const ForwardProblem&, const Piece*, int64_t, int64_t);
  Units (*backward_units)(const BackwardProblem&);
  void (*backward)(const BackwardProblem&, BackwardStep, double*, int64_t, int64_t);
};

#define ONEPASS_ENGINE(isa, works) \
  {#isa, works, isa::units, isa::run, isa::states, isa::merge, isa::finish, isa::backward_units, isa::backward}
inline const CpuEngine kCpuEngines[] = {
// the best first
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

// Units below which a second thread does not pay.
inline int64_t cpu_grain(const Units& units) {
  const int64_t elements = units.elements > 0 ? units.elements : 1;
  return elements < kCpuGrain ? kCpuGrain / elements : 1;
}

}  // namespace onepass
